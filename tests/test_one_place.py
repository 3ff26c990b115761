"""What only one place of the source may spell, seen in its syntax trees.

Docstrings and comments may say anything.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("ft_service", "api", "workers")
ATTEMPT = "ft_service/rundir/attempt.py"
CHECKPOINTS = "ft_service/rundir/checkpoints.py"
COMMAND_LINE = "ft_service/supervisor/command_line.py"


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@dataclass(frozen=True)
class Spelled:
    """What one source spells, each with its line."""

    texts: list[tuple[int, str]]
    folder_names: list[int]
    """`.root.name`."""
    without_encoding: list[int]


@cache
def seen_in(path: Path) -> Spelled:
    """One look at a source for all tests: to take all sources apart takes a second."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return Spelled(list(texts(nodes)), list(folder_names(nodes)), list(without_encoding(nodes)))


def texts(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and text of every string, parts of f-strings among them, but for those that stand alone
    (docstrings).
    """
    alone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.lineno, node.value


def spelled(pattern: str, but: str) -> list[str]:
    found = []
    for path in sources():
        name = path.relative_to(ROOT).as_posix()
        if name != but:
            found += [
                f"{name}:{line}: {text!r}"
                for line, text in seen_in(path).texts
                if re.search(pattern, text)
            ]
    return found


def test_strings_are_seen_and_docstrings_are_not() -> None:
    source = (
        '"""attempts/1"""\nkey = f"attempts/{n}/logs" + path("checkpoints/a/COMPLETE")  # '
        "attempts/2\n"
    )
    assert {text for _, text in texts(list(ast.walk(ast.parse(source))))} == {
        "checkpoints/a/COMPLETE",
        "attempts/",
        "/logs",
    }


@pytest.mark.parametrize(
    ("pattern", "place"),
    [
        pytest.param(r"(^|/)attempts/", ATTEMPT, id="keys of an attempt"),
        pytest.param(
            r"(^|/)(start|control|stop|outcome|exit|launched|supervisor)\.(json|lock)$",
            ATTEMPT,
            id="documents",
        ),
        pytest.param(r"^checkpoints/", CHECKPOINTS, id="keys of a checkpoint"),
        pytest.param(r"\b(COMPLETE|DAMAGED)\b", CHECKPOINTS, id="marks of a checkpoint"),
        pytest.param(r"^ft_service\.supervisor$", COMMAND_LINE, id="the supervisor's name"),
        pytest.param(
            r"^--(lock-fd|node-rank|mirror)$", COMMAND_LINE, id="the supervisor's options"
        ),
    ],
)
def test_only_one_place_spells(pattern: str, place: str) -> None:
    assert spelled(pattern, but=place) == []


def folder_names(nodes: Sequence[ast.AST]) -> Iterator[int]:
    """Lines that take the name of a run directory."""
    for node in nodes:
        if (
            isinstance(node, ast.Attribute)
            and node.attr == "name"
            and isinstance(node.value, ast.Attribute)
            and node.value.attr == "root"
        ):
            yield node.lineno


def test_no_job_id_is_taken_from_a_folders_name() -> None:
    assert list(folder_names(list(ast.walk(ast.parse("a.root\nrun.root.name"))))) == [2]
    assert [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sources()
        for line in seen_in(path).folder_names
    ] == []


def without_encoding(nodes: Sequence[ast.AST]) -> Iterator[int]:
    """Lines that read or write a text as the locale says, which under German's ISO-8859-1 is
    another text.
    """
    for node in nodes:
        if isinstance(node, ast.Call) and not any(
            keyword.arg == "encoding" for keyword in node.keywords
        ):
            name = (
                node.func.attr
                if isinstance(node.func, ast.Attribute)
                else getattr(node.func, "id", "")
            )
            modes = [
                one.value
                for one in node.args
                if isinstance(one, ast.Constant) and isinstance(one.value, str)
            ]
            if name in ("read_text", "write_text") or (
                name == "open" and any(mode in ("r", "w", "x", "a") for mode in modes)
            ):
                yield node.lineno


def test_texts_are_utf_8_whatever_the_locale() -> None:
    spelled_out = 'a.read_text(encoding="utf-8"); a.open("rb"); open("r", encoding="utf-8")'
    tree = ast.parse(f'a.read_text(); a.write_text(b)\n{spelled_out}\na.open("w")')
    assert list(without_encoding(list(ast.walk(tree)))) == [1, 1, 3]
    assert [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sources()
        for line in seen_in(path).without_encoding
    ] == []
