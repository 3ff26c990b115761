from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.core

from ft_service.cli.command_list import ENTRIES, NEEDED, load
from ft_service.cli.root_command import app
from ft_service.version import this_version
from tests.support.command_line import Ft
from tests.support.rest.stub_server import StubServer, job_body

COMMANDS = {
    "data",
    *("version", "serve", "run", "submit", "jobs", "get", "watch", "logs"),
    *(
        *("eval", "sweep", "engines", "quickstart"),
        "audit",
        "pull",
        "projects",
        "export",
        "chat",
        "files",
        "events",
        "checkpoints",
        "compare",
        "chat",
        "rm",
        "download",
        "cancel",
        "pause",
        "rename",
        "resume",
        "plan",
        "models",
        "keys",
        "login",
        "logout",
        "mcp",
        "rollout",
        "rollouts",
        "convert",
        "verify",
        "chat",
        "export",
        "merge",
        "prune",
        "doctor",
        "migrate",
        "open",
        "reconcile",
        "eval",
        "pull",
        "sweep",
    ),
}


def test_the_commands_are_exactly_these(ft: Ft) -> None:
    brief = ft()
    assert brief.code == 0
    assert len(brief.out.splitlines()) <= 24, "a screen"
    assert set(NEEDED) < COMMANDS
    assert all(re.search(rf"^  {name} +\w", brief.out, flags=re.MULTILINE) for name in NEEDED)
    assert "ft --help" in brief.out
    listed = ft("--help")
    assert listed.code == 0
    assert set(re.findall(r"^[│ ] *([a-z]+)  ", listed.out, flags=re.MULTILINE)) == COMMANDS


def test_version(ft: Ft) -> None:
    assert ft("version").out == f"ft-service {this_version()}\n"
    assert ft("--version") == ft("version")
    assert json.loads(ft("version", "--json").out) == {"version": this_version()}


def test_every_command_prints_json_if_asked_to() -> None:
    def walk(command: Any, name: str) -> Iterator[tuple[str, bool]]:
        if isinstance(command, typer.core.TyperGroup):
            for part, below in command.commands.items():
                yield from walk(below, f"{name} {part}")
        else:
            yield name, any("--json" in option.opts for option in command.params)

    found = dict(walk(typer.main.get_command(app), "ft"))
    assert len(found) > len(COMMANDS)
    assert [name for name, has_json in found.items() if not has_json] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fly"], "No such command 'fly'"),
        (["get"], "Missing argument 'ID'"),
        (["jobs", "--limit", "0"], "'--limit'"),
        (["jobs", "--limit", "x"], "it must be a whole number"),
        (["jobs", "--colour"], "--colour"),
        (["submit", "absent.yaml"], "absent.yaml cannot be read"),
        (["serve", "--port", "70000"], "--port = 70000: "),
    ],
)
def test_wrong_usage_is_one_line_and_64(ft: Ft, arguments: list[str], message: str) -> None:
    ended = ft(*arguments)
    assert (ended.code, ended.out) == (64, "")
    assert ended.err.startswith("ft: ")
    assert message in ended.err
    assert ended.err.count("\n") == 1


def test_a_wrong_setting_is_named_as_the_variable_that_it_is(
    ft: Ft, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FT_SLOTS", "0")
    ended = ft("jobs")
    assert ended.code == 64
    assert ended.err.startswith("ft: FT_SLOTS = '0': ")


def test_without_a_server_the_line_says_how_to_start_one(ft: Ft) -> None:
    ended = ft("jobs")
    assert ended.code == 1
    assert "ft serve" in ended.err


def test_the_module_runs_as_the_command_does(home: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "ft_service.cli", "get"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 64
    assert ended.stderr == "ft: Missing argument 'ID'. What it takes: ft get -h\n"


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["--help"], {"httpx2", "pydantic", "sqlalchemy", "yaml", "structlog", "ft_service.spec"}),
        (
            ["jobs", "-h"],
            {"sqlalchemy", "yaml", "structlog", "torch", "transformers", "fastapi", "api"},
        ),
    ],
)
def test_a_command_imports_what_it_needs_alone(
    home: Path, arguments: list[str], heavy: set[str]
) -> None:
    code = (
        f"import sys; from ft_service.cli.root_command import run; run({arguments})\n"
        f"print(sorted({heavy} & set(sys.modules)), file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Usage: ft" in ended.stdout
    assert ended.stderr == "[]\n"


@pytest.mark.parametrize("name", ENTRIES)
def test_a_commands_line_in_the_list_begins_its_own_help(name: str) -> None:
    help_text = " ".join((load(name).help or "").split())
    assert re.split(r"(?<=\.) ", help_text)[0] == ENTRIES[name].sentence


def test_help_is_in_plain_words(ft: Ft) -> None:
    def walk(command: Any) -> Iterator[str]:
        context = typer.Context(command)
        yield from command.collect_usage_pieces(context)
        yield from (str(parameter.display_type_rich(context)) for parameter in command.params)
        for below in getattr(command, "commands", {}).values():
            yield from walk(below)

    said = {piece for name in ENTRIES for piece in walk(load(name))}
    assert {"SPEC", "[MESSAGE]", "ORG/NAME[@REVISION]", "NUMBER", "TEXT", "SCOPE"} <= said
    assert sorted(piece for piece in said if re.search("[<>{}]|range", piece)) == []
    assert "Usage: ft submit [OPTIONS] SPEC|DATA " in ft("submit", "-h").out


def test_errors_are_json_where_output_is(ft: Ft, server: StubServer, tmp_path: Path) -> None:
    ended = ft("get", "nobody", "--json")
    body = json.loads(ended.err)["error"]
    assert (ended.code, ended.out, body["exit_code"], body["code"]) == (1, "", 1, "not_found")
    usage = json.loads(ft("get", "--json").err)["error"]
    assert (usage["code"], usage["exit_code"]) == ("usage", 64)
    missing = json.loads(ft("submit", tmp_path / "no.yaml", "--json").err)["error"]
    assert "cannot be read" in missing["message"]


def test_short_help_and_completion(
    ft: Ft, server: StubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "Usage: ft" in ft("jobs", "-h").out
    server.jobs["ftjob-1"] = job_body(suffix="mine")
    for name, value in {
        "_FT_COMPLETE": "complete_bash",
        "COMP_WORDS": "ft get mi",
        "COMP_CWORD": "2",
    }.items():
        monkeypatch.setitem(os.environ, name, value)
    with pytest.raises(SystemExit):
        ft("get", "mi")
    assert capsys.readouterr().out.split() == ["mine"]


def test_a_file_that_cannot_be_used_is_named_in_a_sentence(ft: Ft, tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    ended = ft("data", "convert", data, data / "out.jsonl", "--json")
    assert ended.code == 1
    assert json.loads(ended.err)["error"]["message"] == f"{data}/out.jsonl.part: Not a directory."
    assert "train.jsonl" in (ended := ft("quickstart", "--copy", data / "sample")).err
    assert (ended.code, len(ended.err.splitlines())) == (1, 1)
