from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.core

from ft_service import __version__
from ft_service.cli.app import app
from ft_service.cli.commands import ENTRIES, NEEDED, load
from tests.support.command_line import Ft
from tests.support.run_directories import finished_run

COMMANDS = {
    "data",
    *("version", "serve", "run", "submit", "jobs", "get", "watch", "logs"),
    *(
        *("agent", "agents", "eval", "sweep"),
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
        "resume",
        "plan",
        "models",
        "keys",
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
        "agent",
        "agents",
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
    assert ft("version").out == f"ft-service {__version__}\n"
    assert ft("--version") == ft("version")
    assert json.loads(ft("version", "--json").out) == {"version": __version__}


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


def test_a_wrong_setting_is_named_as_the_variable_that_it_is(ft: Ft, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_SLOTS", "0")
    ended = ft("jobs")
    assert ended.code == 64
    assert ended.err.startswith("ft: FT_SLOTS = '0': ")


def test_without_a_server_the_line_says_how_to_start_one(ft: Ft) -> None:
    ended = ft("jobs")
    assert ended.code == 1
    assert "ft serve" in ended.err


def test_the_module_runs_as_the_command_does(home: Path) -> None:
    ended = subprocess.run([sys.executable, "-m", "ft_service.cli", "get"], capture_output=True, text=True, check=False)
    assert ended.returncode == 64
    assert ended.stderr == "ft: Missing argument 'ID'. What it takes: ft get -h\n"


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["--help"], {"httpx2", "pydantic", "sqlalchemy", "yaml", "structlog", "ft_service.spec"}),
        (["jobs", "-h"], {"sqlalchemy", "yaml", "structlog", "torch", "transformers", "fastapi", "api"}),
    ],
)
def test_a_command_imports_what_it_needs_alone(home: Path, arguments: list[str], heavy: set[str]) -> None:
    code = (
        f"import sys; from ft_service.cli.app import run; run({arguments})\n"
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
    assert {"SPEC", "[MESSAGE]", "ORG/NAME[@REVISION]", "NUMBER", "PATH", "TEXT", "SCOPE"} <= said
    assert sorted(piece for piece in said if re.search("[<>{}]|range", piece)) == []
    assert "Usage: ft submit [OPTIONS] SPEC|DATA " in ft("submit", "-h").out


def test_without_the_web_packages_serve_says_what_to_install(ft: Ft, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "api.server", None)
    monkeypatch.setattr(sys, "meta_path", [_Hide("uvicorn"), *sys.meta_path])
    for name in [name for name in sys.modules if name.split(".")[0] in ("api", "uvicorn")]:
        monkeypatch.delitem(sys.modules, name)
    ended = ft("serve")
    assert (ended.code, ended.err) == (
        1,
        "ft: The server needs uvicorn, which is not installed: pip install 'ft-service[api]'.\n",
    )


class _Hide:
    """An import finder that knows nothing of one package, and says so first."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.split(".")[0] == self.name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_an_adapter_is_verified_by_its_job_s_name_too(ft: Ft, tmp_path: Path, home: Path) -> None:
    (home / "runs").mkdir(parents=True)
    finished_run(tmp_path).root.rename(home / "runs/ftjob-1")
    ended = ft("verify", "ftjob-1", "--json")
    assert (ended.code, json.loads(ended.out)["ok"]) == (0, True)
    assert "There is no file or folder a/b" in ft("verify", "a/b").err
