"""`ft mcp`: a coding agent gets the address of the server's tools, and a skill.

The agent's file names where the key is found, and never holds the key.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ft_service.cli.output import Json, load_settings, print_json, print_text
from ft_service.client.connection import find_connection
from ft_service.errors import ConflictError, SpecError
from ft_service.installation import SKILL

NAME = "ft-service"
"""The server's name in the agents' files."""
DEFAULT_VARIABLE = "FT_API_KEY"

mcp = typer.Typer(help="Let a coding agent use the server's tools (Model Context Protocol).")


class Agent(StrEnum):
    CLAUDE_CODE = "claude-code"
    CODEX = "codex"
    CURSOR = "cursor"
    VSCODE = "vscode"


def register(app: typer.Typer) -> None:
    app.add_typer(mcp, name="mcp")


@mcp.command()
def add(
    agent: Annotated[
        Agent, typer.Argument(metavar="AGENT", help="claude-code, codex, cursor or vscode.")
    ],
    variable: Annotated[
        str,
        typer.Option(metavar="NAME", help="Environment variable that holds the key."),
    ] = DEFAULT_VARIABLE,
    show: Annotated[
        bool, typer.Option("--show", help="Print what the file would hold, and write nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write the server's address into a coding agent's settings.

    Those of this folder, but Codex has one file for all. The key is not written: the file names the
    variable that holds it, and VS Code asks for the key. A server that is named ft-service there
    already is replaced; nothing else in the file changes.
    """
    if not variable.isidentifier():
        raise SpecError(
            f"{variable!r} is no name of an environment variable; FT_API_KEY is one.",
            param="--variable",
        )
    # Nothing is asked of the server, so that a key is not needed.
    server = find_connection(os.environ, load_settings().home, api_key="unused")
    url = f"{server.base_url.removesuffix('/v1')}/mcp"
    path = settings_file(agent, Path.cwd(), Path.home())
    text = with_server(agent, _read(path), url, variable)
    if not show:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    if as_json:
        print_json({"path": str(path), "url": url, "variable": variable, "written": not show})
    elif show:
        print_text(text)
    else:
        print_text(f"Written: {path}")
        print_text(_next(agent, variable))


@mcp.command()
def skill(as_json: Json = False) -> None:
    """Print a skill for coding agents: which method fits which data, how results are read."""
    text = SKILL.read_text(encoding="utf-8")
    if as_json:
        print_json({"skill": text})
    else:
        print_text(text.rstrip())


def _next(agent: Agent, variable: str) -> str:
    if agent is Agent.VSCODE:
        return (
            "VS Code asks for the key when it starts the server (ft keys create shows a new one)."
        )
    return (
        f"Set {variable} to a key before you start the agent. `ft keys create --scope submit` makes "
        "one that submits jobs, `--scope read` one that only looks."
    )


def settings_file(agent: Agent, folder: Path, home: Path) -> Path:
    """Return an agent's settings file: in the project's `folder`, or for Codex in the `home`
    directory.
    """
    return {
        Agent.CLAUDE_CODE: folder / ".mcp.json",
        Agent.CODEX: home / ".codex" / "config.toml",
        Agent.CURSOR: folder / ".cursor" / "mcp.json",
        Agent.VSCODE: folder / ".vscode" / "mcp.json",
    }[agent]


def with_server(agent: Agent, text: str, url: str, variable: str) -> str:
    """Return an agent's settings with this server in them; the rest stays as it is.

    Args:
        agent: Whose settings they are.
        text: The file as it is; empty: it does not exist.
        url: Address of the tools.
        variable: Environment variable that holds the key.

    Raises:
        ConflictError: The file cannot be read as what it should be.
    """
    if agent is Agent.CODEX:
        return _toml_with_server(text, url, variable)
    document = _object(text, agent)
    key = "servers" if agent is Agent.VSCODE else "mcpServers"
    servers = document.setdefault(key, {})
    if not isinstance(servers, dict):
        raise ConflictError(f"`{key}` of {agent}'s settings is no object; mend the file first.")
    servers[NAME] = _server(agent, url, variable)
    if agent is Agent.VSCODE:
        _ask_for_key(document)
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _server(agent: Agent, url: str, variable: str) -> Mapping[str, Any]:
    where = {
        Agent.CLAUDE_CODE: f"${{{variable}}}",
        Agent.CURSOR: f"${{env:{variable}}}",
        Agent.VSCODE: f"${{input:{NAME}-key}}",
    }[agent]
    kind = {} if agent is Agent.CURSOR else {"type": "http"}
    return {**kind, "url": url, "headers": {"Authorization": f"Bearer {where}"}}


def _ask_for_key(document: dict[str, Any]) -> None:
    """Let VS Code ask for the key, which it keeps in its own secret storage."""
    inputs = document.setdefault("inputs", [])
    if not isinstance(inputs, list):
        raise ConflictError("`inputs` of VS Code's settings is no list; mend the file first.")
    asked = {
        "id": f"{NAME}-key",
        "type": "promptString",
        "description": "API key of ft-service",
        "password": True,
    }
    others = [it for it in inputs if not (isinstance(it, dict) and it.get("id") == asked["id"])]
    document["inputs"] = [*others, asked]


def _toml_with_server(text: str, url: str, variable: str) -> str:
    try:
        known = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConflictError(
            f"Codex's settings are no TOML: {error}. Mend the file first."
        ) from None
    wanted = {"url": url, "bearer_token_env_var": variable}
    table = known.get("mcp_servers", {}).get(NAME)
    if table == wanted:
        return text
    if table is not None:
        # A TOML file is written by people, with comments: none of its lines is changed for them.
        raise ConflictError(
            f"Codex's settings have another [mcp_servers.{NAME}] already. Remove that table, or "
            f'write into it: url = "{url}", bearer_token_env_var = "{variable}".'
        )
    begin = f"{text.rstrip()}\n\n" if text.strip() else ""
    lines = [f"[mcp_servers.{NAME}]", *(f"{key} = {json.dumps(it)}" for key, it in wanted.items())]
    return begin + "\n".join(lines) + "\n"


def _object(text: str, agent: Agent) -> dict[str, Any]:
    try:
        document = json.loads(text) if text.strip() else {}
    except ValueError as error:
        raise ConflictError(
            f"{agent}'s settings are no JSON ({error}), perhaps for a comment in them. Add the "
            f"server by hand: ft mcp add {agent} --show in an empty folder prints it."
        ) from None
    if not isinstance(document, dict):
        raise ConflictError(f"{agent}'s settings are no JSON object; mend the file first.")
    return document


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""
