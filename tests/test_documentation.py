"""The documentation tells the truth about the tree: paths, links, folders, the glossary."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("ft_service", "api", "workers")

_PATH = re.compile(
    r"(?<![\w<>*$/.{-])((?:\.\./)*(?:[\w.-]+/)*[\w.-]+\.(?:py|md|toml))\b(?![/<*({])"
)
_YAML = re.compile(
    r"(?<![\w<>*$/.{-])((?:\.\./)*(?:deploy|docs|examples|tests)/[\w./-]+\.(?:yaml|yml|jsonl))\b"
)
_MODULE = re.compile(r"`((?:ft_service|api|workers)(?:\.\w+)+)")
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
_COMMENT = re.compile(r"(?:^|  )#(.*)$", re.MULTILINE)
"""As code is formatted here. Python's own tokenizer takes ten times as long."""
_IN_NAMES = (
    ".py",
    ".md",
    ".toml",
    ".yaml",
    ".yml",
    ".jsonl",
    *(f"`{package}." for package in PACKAGES),
)
"""Of which one is in whatever the expressions above find in comments and docstrings."""
_ELSEWHERE = {"runtime/config.py", "api.wandb.ai"}
"""Files and hosts of others that ours speak of."""


def test_every_path_that_is_mentioned_exists() -> None:
    tracked = _tracked()
    names = {path.name for path in tracked}
    wrong = []
    for file in tracked:
        for text in _texts(file):
            for path in {*_PATH.findall(text), *_YAML.findall(text)} - _ELSEWHERE:
                there = (
                    path in names
                    if "/" not in path
                    else any((folder / path).exists() for folder in file.parents)
                )
                if not there:
                    wrong.append(f"{file.relative_to(ROOT)}: {path}")
    assert not wrong, "\n".join(wrong)


def test_every_module_that_is_mentioned_exists() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in _tracked()
        for text in _texts(file)
        for name in set(_MODULE.findall(text)) - _ELSEWHERE
        if not _is_module_or_in_one(name)
    ]
    assert not wrong, "\n".join(wrong)


def test_relative_links_lead_somewhere() -> None:
    wrong = []
    for file in (path for path in _tracked() if path.suffix == ".md"):
        for target, anchor in _LINK.findall(file.read_text()):
            if "://" in target:
                continue
            there = (file.parent / target) if target else file
            if not there.exists() or (anchor and anchor not in _anchors(there)):
                wrong.append(f"{file.relative_to(ROOT)}: {target}#{anchor}")
    assert not wrong, "\n".join(wrong)


def test_the_architecture_page_names_every_folder() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    folders = {folder for package in PACKAGES for folder in _folders(package)} - {
        ROOT / package for package in PACKAGES
    }
    assert not [
        str(folder.relative_to(ROOT))
        for folder in folders
        if not re.search(rf"\b{folder.name}/", page)
    ]


def test_the_glossary_gives_each_word_one_meaning() -> None:
    _, _, glossary = (ROOT / "docs/architecture.md").read_text().partition("## Glossary")
    rows = re.findall(r"^\| ([^|]+?) +\| ([^|]+?) +\|$", glossary, re.MULTILINE)
    words = Counter(word for terms, _ in rows[1:] for word in terms.split(", "))
    assert len(words) >= 20
    assert not [word for word, times in words.items() if times > 1]


@cache
def _tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    if listed.returncode:  # no checkout, such as an unpacked archive
        hidden = (".venv", ".ft", ".git")
        return [
            p
            for p in ROOT.rglob("*")
            if p.is_file() and not set(hidden) & set(p.relative_to(ROOT).parts)
        ]
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


_ABOUT_OTHERS = ("CHANGELOG.md", "converted-configs.md")
"""Documents that speak of the past, or of other tools' files."""


def _folders(package: str) -> list[Path]:
    """The folders of a package that hold modules, itself included; revisions of the schema are no
    modules to find.
    """
    return sorted(
        {path.parent for path in (ROOT / package).rglob("*.py") if path.parent.name != "versions"}
    )


@cache
def _texts(file: Path) -> list[str]:
    """What a file says to its readers: all of a document, comments and docstrings of code."""
    return list(_read(file))


def _read(file: Path) -> Iterator[str]:
    if file.suffix == ".md" and file.name not in _ABOUT_OTHERS:
        yield file.read_text()
    elif file.suffix in {".yaml", ".yml"} or "Dockerfile" in file.name or file.name == "Makefile":
        yield from (line.partition("#")[2] for line in file.read_text().splitlines())
    elif file.suffix == ".py":
        source = file.read_text()
        if not any(name in source for name in _IN_NAMES):  # to take it apart takes long
            return
        yield from _COMMENT.findall(source)
        for node in ast.walk(ast.parse(source)):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                yield node.value.value


def _is_module_or_in_one(name: str) -> bool:
    """Whether a dotted name is a package or a module, or a name that stands in one."""
    path, *rest = ROOT, *name.split(".")
    while rest and (path / rest[0]).is_dir():
        path = path / rest[0]
        rest = rest[1:]
    if not rest:
        return True
    module = path / f"{rest[0]}.py"
    if module.is_file():
        return len(rest) == 1 or re.search(rf"\b{rest[1]}\b", module.read_text()) is not None
    return False


def _anchors(document: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
