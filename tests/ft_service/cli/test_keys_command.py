from __future__ import annotations

import json
import re
import sys
from contextlib import closing
from pathlib import Path

import pytest

from ft_service.host.running_servers import announced
from ft_service.store.records import NewKey, Scope
from ft_service.store.sql import open_store
from ft_service.store.tenants.people import SignOn
from tests.support.command_line import Ft


def test_a_new_key_opens_the_service_until_it_is_revoked(ft: Ft, home: Path) -> None:
    created = json.loads(ft("keys", "create", "--scope", "admin", "--name", "mine", "--json").out)
    store = open_store(f"sqlite:///{home / 'ft.db'}")
    try:
        principal = store.keys.authenticate(created["key"])
        assert principal is not None
        assert (principal.scope, principal.project_id) == ("admin", "default")
        assert ft("keys", "revoke", created["id"]).out == f"{created['id']} (mine) is revoked.\n"
        assert store.keys.authenticate(created["key"]) is None
    finally:
        store.close()


def test_what_a_person_has_is_revoked_in_every_project(ft: Ft, home: Path) -> None:
    ft("keys", "list")
    with closing(open_store(f"sqlite:///{home / 'ft.db'}")) as store:
        grants: dict[str, Scope] = {"default": "admin"}
        ada = SignOn(identity="https://login.example 7", name="ada", grants=grants, state="one")
        holder = store.sessions.session_holder(store.people.sign_in(ada, 60) or "")
        key, _ = store.keys.create_key(
            NewKey(project_id="default", name="laptop", scope="read"), made_by=holder
        )
    ended = ft("keys", "revoke", "--person", "ada")
    assert [line.split()[1] for line in ended.out.splitlines()] == ["(ada)", "(laptop)"]
    assert "take those away too" in ended.err
    listed = {one["id"]: one for one in json.loads(ft("keys", "list", "--json").out)}
    assert {one["state"] for one in listed.values()} == {"revoked"}
    assert holder is not None
    assert listed[key.id]["ends_with"] == holder.key_id


def test_a_key_is_for_a_user_unless_said_otherwise_and_is_shown_once(ft: Ft) -> None:
    secret = ft("keys", "create").out.strip()
    listed = ft("keys", "list")
    [key] = json.loads(ft("keys", "list", "--json").out)
    assert (key["scope"], key["state"]) == ("submit", "active")
    assert secret.startswith(key["prefix"])
    assert secret not in listed.out


def test_creating_a_key_says_what_it_opens(ft: Ft, home: Path) -> None:
    created = ft("keys", "create")
    assert created.out.count("\n") == 1
    assert (
        created.err
        == f"It opens the service that keeps its state in {home} (FT_HOME), which does not run "
        "now.\n"
    )


def test_without_a_home_the_key_is_for_the_server_that_runs(
    ft: Ft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FT_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "source/.ft").mkdir(parents=True)
    (tmp_path / "source/docs").mkdir()
    monkeypatch.chdir(tmp_path / "source/docs")
    with announced(tmp_path / "source/.ft", "http://127.0.0.1:9"):
        err = ft("keys", "create").err
    assert (
        f"in {tmp_path / 'source/.ft'} (FT_HOME is not set), which runs at http://127.0.0.1:9."
        in err
    )
    assert (tmp_path / "source/.ft/ft.db").exists()
    assert not (tmp_path / ".ft").exists()


def test_an_expired_key_is_listed_as_such(ft: Ft) -> None:
    ft("keys", "create", "--expires-days", "0")
    [key] = json.loads(ft("keys", "list", "--json").out)
    assert key["state"] == "expired"


def test_no_keys(ft: Ft) -> None:
    assert ft("keys", "list").out == "No keys yet. Create one: ft keys create\n"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["create", "--scope", "root"], 64, "'root' is not one of"),
        (["revoke", "key_x"], 1, "key_x"),
        (["revoke"], 64, "either the ID of a key, or --person"),
        (["revoke", "key_x", "--person", "ada"], 64, "either the ID of a key, or --person"),
        (["revoke", "--person", "ada"], 1, "Nobody called 'ada'"),
        ([], 64, "Missing command"),
        *(
            (["create", "--expires-days", value], 64, f"at most 3650, not {value}")
            for value in ("inf", "3651.0")
        ),
        (["create", "--expires-days", "nan"], 64, "at most 3650, not nan"),
        (["create", "--expires-days", "-1"], 64, "at least 0, not -1"),
        (["rotate", "key_x", "--keep-hours", "inf"], 64, "at most 8784, not inf"),
    ],
)
def test_mistakes_are_one_line(ft: Ft, arguments: list[str], code: int, message: str) -> None:
    ended = ft("keys", *arguments)
    assert (ended.code, ended.err.count("\n")) == (code, 1)
    assert message in ended.err


def test_commands_leave_the_organization_that_the_server_has_named(ft: Ft, home: Path) -> None:
    ft("keys", "list")
    with closing(open_store(f"sqlite:///{home / 'ft.db'}")) as store:
        store.projects.name_organization("default", "acme")
        ft("keys", "list")  # in a shell without the server's FT_ORGANIZATION
        team = json.loads(ft("projects", "create", "team", "--json").out)["id"]
        assert {store.projects.get_project(name).organization for name in ("default", team)} == {
            "acme"
        }


def test_a_project_is_named_as_people_call_it(ft: Ft) -> None:
    project = json.loads(ft("projects", "create", "vision", "--json").out)["id"]
    key = json.loads(ft("keys", "create", "--project", "vision", "--json").out)["id"]
    assert [
        found["id"] for found in json.loads(ft("keys", "list", "--project", project, "--json").out)
    ] == [key]
    assert (
        ft("projects", "update", "vision", "--limit", "max_slots=2").out
        == f"{project} (vision): max_slots=2\n"
    )
    assert (
        ft("keys", "list", "--project", "visio").err
        == "ft: There is no project 'visio'. There are: default, vision.\n"
    )
    assert "NAME = ' ': must have 1 to 255 characters" in ft("projects", "create", " ").err
    assert ft("projects", "update", "vision", "--name", "").code == 64
    ft("projects", "create", "vision")
    assert (
        "2 projects are called 'vision': give the id of one: "
        in ft("keys", "list", "--project", "vision").err
    )


def test_ids_are_whole_in_eighty_columns(ft: Ft, monkeypatch: pytest.MonkeyPatch) -> None:
    project = json.loads(ft("projects", "create", "vision", "--limit", "bases=a,b", "--json").out)[
        "id"
    ]
    key = json.loads(ft("keys", "create", "--project", "vision", "--name", "n" * 60, "--json").out)[
        "id"
    ]
    for module in ("output", "keys_command"):
        monkeypatch.setattr(f"ft_service.cli.{module}.is_terminal", lambda: True)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    for command, words in (
        (["audit"], (key, project, "bases=a,b", "n" * 60)),
        (["projects", "list"], (project, "bases=a,b")),
    ):
        said = ft(*command).out
        assert [word for word in words if word not in said] == []
        assert max(len(re.sub(r"\x1b\[\d*m", "", line)) for line in said.splitlines()) <= 80


def test_the_key_of_this_host_is_renewed_where_ft_reads_it(ft: Ft, home: Path) -> None:
    old = json.loads(ft("keys", "create", "--scope", "admin", "--json").out)
    (home / "credentials").write_text(json.dumps({"api_key": old["key"]}))
    other = json.loads(ft("keys", "create", "--json").out)
    ft("keys", "rotate", other["id"])
    assert json.loads((home / "credentials").read_text()) == {"api_key": old["key"]}
    renewed = ft("keys", "rotate", old["id"])
    assert json.loads((home / "credentials").read_text()) == {"api_key": renewed.out.strip()}
    assert f"it has replaced the old one in {home / 'credentials'}" in renewed.err
    [key] = [
        key["id"]
        for key in json.loads(ft("keys", "list", "--json").out)
        if key["prefix"] == renewed.out[: len(key["prefix"])]
    ]
    assert "`ft` used this key on this host." in ft("keys", "revoke", key).err


def test_a_project_is_deleted_with_all_that_it_has_and_asks_first(
    ft: Ft, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = json.loads(ft("projects", "create", "vision", "--json").out)["id"]
    secret = ft("keys", "create", "--project", "vision").out.strip()
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    assert (
        f"would remove the project {project} (vision) with all its jobs"
        in ft("projects", "delete", "vision").err
    )
    assert ft("projects", "delete", "default", "--yes").code == 64
    assert (
        ft("projects", "delete", "vision", "--yes").out
        == f"{project} (vision) is deleted. The server removes what it has.\n"
    )
    assert "There is no project 'vision'" in ft("projects", "delete", "vision", "--yes").err
    assert [one["id"] for one in json.loads(ft("projects", "list", "--json").out)] == ["default"]
    assert re.search(rf"{project}\tvision\tdeleted", ft("projects", "list", "--archived").out)
    with closing(open_store(f"sqlite:///{home / 'ft.db'}")) as store:
        assert store.keys.authenticate(secret) is None
