"""The table of docs/converted-configs.md: what `ft convert` makes of configs in the shapes of
public ones.

`python -m tests.support.public_configs` prints the page's table; a test compares the two.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ft_service.convert import Conversion, convert_file
from ft_service.convert.convert import OUTCOMES
from ft_service.convert.verdicts import Lost, ToCheck, ToDo
from ft_service.errors import SpecError

FOLDER = Path(__file__).parents[1] / "fixtures" / "configs"
_HEAD = (
    "| file | what it is | exit code | what differs in the SPEC | to check |\n| --- | --- | "
    "--- | --- | --- |\n"
)
_CLAUSE = re.compile(r"[:;,] | \(")


def names() -> list[str]:
    """The files, sorted."""
    return sorted(
        path.name for path in FOLDER.iterdir() if path.is_file() and path.name != "expected.json"
    )


def flat(body: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The options of a SPEC by dotted name, with paths from the folder of the files.

    The grader is left out: it is to be replaced.
    """
    for key, value in body.items():
        if isinstance(value, Mapping) and key != "grader":
            yield from flat(value, f"{prefix}{key}.")
        elif key != "grader":
            yield (
                f"{prefix}{key}",
                value.replace(f"{FOLDER}/", "") if isinstance(value, str) else value,
            )


def outcome(name: str) -> dict[str, Any]:
    """What becomes of a file: its tool and method, what differs, and the SPEC."""
    try:
        found = convert_file(FOLDER / name)
    except SpecError as error:
        return {"refused": error.message}
    return {
        "tool": found.tool,
        "method": str(found.body.get("method", {}).get("type", "supervised")),
        "differs": _differs(found),
        "to check": [each.option for each in found.decisions if isinstance(each.verdict, ToCheck)],
        "spec": dict(sorted(flat(found.body))),
    }


def _differs(found: Conversion) -> dict[str, str]:
    return {
        each.option: f"{OUTCOMES[type(each.verdict)]}, {_CLAUSE.split(each.text())[0]}"
        for each in found.decisions
        if isinstance(each.verdict, Lost | ToDo)
    }


def table() -> str:
    """The table, as Markdown."""
    rows = []
    for name in names():
        found = outcome(name)
        if "refused" in found:
            rows.append(f"| `{name}` | — | 64 | {found['refused']} | |")
            continue
        differs = (
            "; ".join(f"`{option}`: {text}" for option, text in found["differs"].items())
            or "nothing"
        )
        check = ", ".join(f"`{option}`" for option in found["to check"])
        rows.append(
            f"| `{name}` | {found['tool']}, {found['method']} | {int(bool(found['differs']))} | "
            f"{differs} | {check} |"
        )
    return _HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    (FOLDER / "expected.json").write_text(
        json.dumps({name: outcome(name) for name in names()}, indent=1, ensure_ascii=False) + "\n"
    )
    print(table(), end="")
