"""What only one place of the source may spell, seen in its syntax trees.

Docstrings and comments may say anything.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
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


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of every string, parts of f-strings among them, but for those that stand alone
    (docstrings).
    """
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.lineno, node.value


def spelled(pattern: str, but: str) -> list[str]:
    found = []
    for path in sources():
        name = path.relative_to(ROOT).as_posix()
        if name != but:
            found += [
                f"{name}:{line}: {text!r}"
                for line, text in texts_of(path)
                if re.search(pattern, text)
            ]
    return found


@cache
def texts_of(path: Path) -> list[tuple[int, str]]:
    return list(texts(ast.parse(path.read_text())))


def test_strings_are_seen_and_docstrings_are_not() -> None:
    source = (
        '"""attempts/1"""\nkey = f"attempts/{n}/logs" + path("checkpoints/a/COMPLETE")  # '
        "attempts/2\n"
    )
    assert {text for _, text in texts(ast.parse(source))} == {
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


def test_no_job_id_is_taken_from_a_folders_name() -> None:
    found = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Attribute)
                and node.attr == "name"
                and isinstance(node.value, ast.Attribute)
            ):
                found += [f"{path}:{node.lineno}"] if node.value.attr == "root" else []
    assert found == []


def without_encoding(tree: ast.Module) -> Iterator[int]:
    """Lines that read or write a text as the locale says, which under German's ISO-8859-1 is
    another text.
    """
    for node in ast.walk(tree):
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
    assert list(
        without_encoding(ast.parse(f'a.read_text(); a.write_text(b)\n{spelled_out}\na.open("w")'))
    ) == [1, 1, 3]
    assert [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sources()
        for line in without_encoding(ast.parse(path.read_text(encoding="utf-8")))
    ] == []
