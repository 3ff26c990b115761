"""The file llms.txt: every page of the navigation with its first sentence, for programs that read
documentation.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "zensical.toml"


def page() -> str:
    """The file, in the form of llmstxt.org: a title, a summary, and a list of links for each part
    of the navigation.
    """
    project = tomllib.loads(CONFIG.read_text(encoding="utf-8"))["project"]
    parts = [f"# {project['site_name']}\n\n> {project['site_description']}\n"]
    for entry in project["nav"]:
        for title, pages in entry.items():
            lines = [
                f"- [{name}]({path}): {first_sentence(path)}" for name, path in _pages(pages, title)
            ]
            parts.append(f"## {title}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def pages_of_the_navigation() -> list[str]:
    """Paths of all pages, from the project's folder, in their order."""
    return [
        path
        for entry in tomllib.loads(CONFIG.read_text(encoding="utf-8"))["project"]["nav"]
        for _, path in _pages(entry, "")
    ]


def first_sentence(path: str) -> str:
    """The first sentence of a page's first paragraph, without links."""
    text = re.sub(r"<!--.*?-->", "", (ROOT / path).read_text(encoding="utf-8"), flags=re.DOTALL)
    paragraphs = [
        part.strip() for part in re.split(r"\n\s*\n", text) if re.match(r"\s*[\w`*\"\[]", part)
    ]
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraphs[0].split()))
    return re.split(r"(?<=[.:])\s(?=[A-Z`*])", plain)[0].rstrip(":")


def _pages(entry: Any, title: str) -> Iterator[tuple[str, str]]:
    """(title, path) of each page below an entry of the navigation."""
    if isinstance(entry, str):
        yield title, entry
    elif isinstance(entry, Mapping):
        for name, below in entry.items():
            yield from _pages(below, name)
    else:
        for below in entry:
            yield from _pages(below, title)
