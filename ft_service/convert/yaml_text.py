"""A SPEC as YAML with a comment behind each option, and text of several lines as a block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml


def yaml_text(body: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    """The document; `comments` by dotted name. What it reads back as equals `body`."""
    return "".join(f"{line}\n" for line in _lines(body, comments, "", ""))


def _lines(body: Mapping[str, Any], comments: Mapping[str, str], prefix: str, indent: str) -> Iterator[str]:
    for key, value in body.items():
        name = f"{prefix}{key}"
        comment = f" # {comments[name]}" if comments.get(name) else ""
        if isinstance(value, Mapping) and value and prefix.count(".") < 4:
            yield f"{indent}{_flow(key)}:{comment}"
            yield from _lines(value, comments, f"{name}.", f"{indent}  ")
        elif isinstance(value, str) and "\n" in value and (block := _block(value, indent)) is not None:
            first, *rest = block
            yield f"{indent}{_flow(key)}: {first}{comment}"
            yield from rest
        else:
            yield f"{indent}{_flow(key)}: {_flow(value)}{comment}"


def _block(text: str, indent: str) -> list[str] | None:
    """A literal block: its header, and its lines. None: the text cannot be written so, but for quotes."""
    kept = text.removesuffix("\n")
    chomp = "-" if kept == text else "+" if kept.endswith("\n") or not kept else ""
    lines = [f"|2{chomp}", *(f"{indent}  {line}" if line else "" for line in kept.split("\n"))]
    document = "\n".join(["x:", *lines]).replace("x:\n", f"{indent}x: ", 1)
    try:
        read = yaml.safe_load(document + "\n")
    except yaml.YAMLError:
        return None
    return lines if read == {"x": text} else None


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, sort_keys=False, width=1_000_000)
    return text.removesuffix("\n").removesuffix("\n...")
