"""What docs/troubleshooting.md explains is what the code says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/troubleshooting.md"


def messages() -> list[str]:
    """The messages in the first column of the page's tables; a cell may hold several."""
    rows = [
        line.split(" | ")[0].removeprefix("| ")
        for line in PAGE.read_text().splitlines()
        if line.startswith("| `")
    ]
    return [message for cell in rows for message in re.split(r"(?<=`), (?=`)", cell)]


def said_by_the_code() -> str:
    """All texts of the code, the changing parts of each as `…`."""
    texts = []
    for package in ("ft_service", "api", "workers"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    texts.append(
                        "".join(
                            str(part.value) if isinstance(part, ast.Constant) else "…"
                            for part in node.values
                        )
                    )
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
    return "\n".join(texts)


def test_every_message_that_is_explained_is_said() -> None:
    said = said_by_the_code()
    listed = messages()
    assert len(listed) > 20
    pieces = {
        message: [part.strip() for part in message.strip("`").split("…")] for message in listed
    }
    missing = {
        message: part
        for message, parts in pieces.items()
        for part in parts
        if len(part) > 2 and part not in said
    }
    assert missing == {}
    assert all(max(len(part) for part in parts) >= 12 for parts in pieces.values()), (
        "too little of a message to know it by"
    )
