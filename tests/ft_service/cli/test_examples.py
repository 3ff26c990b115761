"""The examples at the end of each command's help are lines that the command takes."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer
import typer.core

from ft_service.cli.command_list import ENTRIES, load
from ft_service.cli.examples import EXAMPLES

WIDTH = 80 - 2
"""Columns of a terminal, without the margins of the help."""


def commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """The commands below a name, with their whole names."""
    if isinstance(command, typer.core.TyperGroup):
        for part, below in command.commands.items():
            yield from commands(f"{name} {part}", below)
    else:
        yield name, command


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_command_ends_its_help_with_two_examples_that_it_takes(entry: str) -> None:
    for name, command in commands(entry, load(entry)):
        title, *lines = (command.epilog or "").split("\n\n")
        assert (title, len(set(lines))) == ("Examples:", 2), name
        for line in lines:
            assert len(line) <= WIDTH, line
            words = shlex.split(line)
            assert words[: len(name.split()) + 1] == ["ft", *name.split()]
            # Raises for an option that there is not.
            command.make_context(name, words[len(name.split()) + 1 :])


def test_no_example_is_of_a_command_that_there_is_not() -> None:
    assert set(EXAMPLES) == {name for entry in ENTRIES for name, _ in commands(entry, load(entry))}
