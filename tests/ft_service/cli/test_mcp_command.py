from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from ft_service.cli.mcp_command import Agent, with_server
from ft_service.errors import ConflictError
from ft_service.installation import SKILL
from tests.support.command_line import Ft

URL = "http://127.0.0.1:8000/mcp"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FT_BASE_URL", "http://127.0.0.1:8000/v1")
    monkeypatch.setenv("HOME", str(tmp_path / "person"))
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


def test_claude_code_gets_the_address_and_the_name_of_the_variable(ft: Ft, project: Path) -> None:
    (project / ".mcp.json").write_text('{"mcpServers": {"other": {"command": "x"}}, "kept": 1}')

    ended = ft("mcp", "add", "claude-code")

    assert ended.code == 0
    assert json.loads((project / ".mcp.json").read_text()) == {
        "mcpServers": {
            "other": {"command": "x"},
            "ft-service": {
                "type": "http",
                "url": URL,
                "headers": {"Authorization": "Bearer ${FT_API_KEY}"},
            },
        },
        "kept": 1,
    }


def test_codex_keeps_its_comments_and_names_the_variable(ft: Ft, project: Path) -> None:
    settings = project.parent / "person/.codex/config.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text('# mine\nmodel = "gpt-5"\n')

    for _ in range(2):  # the second time changes nothing
        ft("mcp", "add", "codex", "--variable", "MINE")

    assert settings.read_text().startswith("# mine\n")
    assert tomllib.loads(settings.read_text()) == {
        "model": "gpt-5",
        "mcp_servers": {"ft-service": {"url": URL, "bearer_token_env_var": "MINE"}},
    }


def test_vs_code_asks_for_the_key_once(ft: Ft, project: Path) -> None:
    for _ in range(2):
        ft("mcp", "add", "vscode")

    document = json.loads((project / ".vscode/mcp.json").read_text())
    assert [asked["id"] for asked in document["inputs"]] == ["ft-service-key"]
    assert document["servers"]["ft-service"]["headers"] == {
        "Authorization": "Bearer ${input:ft-service-key}"
    }


def test_cursor_reads_the_variable_its_own_way(ft: Ft, project: Path) -> None:
    ft("mcp", "add", "cursor")

    written = json.loads((project / ".cursor/mcp.json").read_text())["mcpServers"]["ft-service"]
    assert written["headers"] == {"Authorization": "Bearer ${env:FT_API_KEY}"}


def test_it_shows_the_file_without_writing_it(ft: Ft, project: Path) -> None:
    ended = ft("mcp", "add", "claude-code", "--show")

    assert URL in ended.out
    assert not (project / ".mcp.json").exists()


@pytest.mark.parametrize(
    ("agent", "text"),
    [
        (Agent.CLAUDE_CODE, "[]"),
        (Agent.CLAUDE_CODE, '{"mcpServers": []}'),
        (Agent.VSCODE, "{ // a comment\n}"),
        (Agent.VSCODE, '{"inputs": {}}'),
        (Agent.CODEX, "model = "),
        (Agent.CODEX, '[mcp_servers.ft-service]\nurl = "http://elsewhere/mcp"\n'),
    ],
)
def test_settings_that_it_cannot_change_safely_are_left(agent: Agent, text: str) -> None:
    with pytest.raises(ConflictError):
        with_server(agent, text, URL, "FT_API_KEY")


def test_a_variable_is_a_name_and_never_a_key(ft: Ft, project: Path) -> None:
    assert ft("mcp", "add", "codex", "--variable", "ft-secret").code != 0
    assert not (project.parent / "person/.codex").exists()


def test_the_skill_names_methods_and_tools_that_exist(ft: Ft) -> None:
    # No mcp package is needed to know the tools' names.
    from api.mcp.tools import TOOLS

    printed = ft("mcp", "skill").out

    assert printed.strip() == SKILL.read_text().strip()
    named = set(TOOLS)
    used = {
        "models",
        "check_data",
        "show_samples",
        "plan",
        "submit",
        "wait",
        "status",
        "evaluation",
        "metrics",
        "compare",
        "chat",
        "export",
        "explain_refusal",
    }
    assert used <= named
    assert all(f"`{name}`" in printed for name in used)
