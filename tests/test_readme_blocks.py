"""Every command in README and docs is one that there is; `tests/e2e/test_transcript.py` runs
them.
"""

from __future__ import annotations

import re
import shlex
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.core

from ft_service.cli.root_command import app
from ft_service.convert import names_page
from tests.support.blocks import PAGES, ROOT, Block, blocks

SCREENS = 4 * 50
_SPOKEN = re.compile(r"`ft ([a-z][a-z-]*)((?: [^`]*)?)`")


def ours(block: Block) -> list[list[str]]:
    """The command lines of `ft` in a block, without what the shell does with them."""
    lines = [
        shlex.split(line, comments=True)
        for line in block.commands
        if re.match(r"(\.venv/bin/)?ft ", line)
    ]
    return [
        list(takewhile(lambda word: word not in ("|", ">", "&", "&&", ";"), words))[1:]
        for words in lines
    ]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_ft_has_these_options(page: str) -> None:
    for block in blocks(page):
        for words in ours(block) if block.language == "sh" else []:
            group: Any = typer.main.get_command(app)
            command: Any
            name, command, rest = group.resolve_command(typer.Context(group), words)
            if isinstance(command, typer.core.TyperGroup):
                name, command, rest = command.resolve_command(typer.Context(command), rest)
            command.make_context(name, list(rest))  # raises for an option that there is not


def test_blocks_are_found_as_people_see_them() -> None:
    assert [block.text for block in blocks("README.md")][:2] == [
        'pip install "ft-service[all] @ git+<this repository>"\nft quickstart\n',
        "git clone <this repository> && cd ft-service\nmake quickstart\n",
    ]
    assert len(blocks("docs/kubernetes.md")) >= 3
    assert blocks("docs/guide.md")[1].commands[:2] == [
        "mkdir -p my-job",
        "cat > my-job/train.jsonl",
    ]


def test_blocks_of_commands_have_the_name_by_which_they_are_found() -> None:
    """One called bash was left out, and the next block lacked what it exports."""
    named = {
        name
        for page in PAGES
        for name in re.findall(r"^ *```(\w+)", (ROOT / page).read_text(), re.MULTILINE)
    }
    assert {"sh", "python"} <= named
    assert not named & {"bash", "shell", "console", "py"}


def test_every_command_that_is_spoken_of_exists() -> None:
    group: Any = typer.main.get_command(app)
    spoken = {
        (page, match[1]) for page in PAGES for match in _SPOKEN.finditer((ROOT / page).read_text())
    }
    assert len(spoken) > 30
    assert sorted((page, name) for page, name in spoken if name not in group.commands) == []


def test_the_readme_fits_on_four_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= SCREENS


def test_the_tables_of_other_tools_names_are_current() -> None:
    page = ROOT / "docs/from-other-tools.md"
    assert page.read_text() == names_page.page(), (
        f"python -m ft_service.convert.names_page > {page.relative_to(Path.cwd())}"
    )


def test_every_usual_option_of_another_tool_has_a_rule() -> None:
    assert "no option of that name" not in names_page.page()
