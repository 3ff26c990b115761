"""A JSON schema in words, for the pages that are made from schemas."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

NOTE = "Not in OpenAI's API."


def values_text(schema: Mapping[str, Any], named: Callable[[str], str]) -> str:
    """What a value may be: "whole number, 1 to 512", "`true` or `auto`".

    `named`: how a reference to a schema is written.
    """
    if "$ref" in schema:
        return named(referred(schema["$ref"]))
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " or ".join(
                dict.fromkeys(values_text(member, named) for member in schema[several])
            )
    if "enum" in schema or "const" in schema:
        return " or ".join(
            f"`{_plain(value)}`" for value in schema.get("enum", [schema.get("const")])
        )
    kind = schema.get("type")
    if kind == "array":
        items = values_text(schema["items"], named) if schema.get("items") else ""
        return f"list of {_grouped(items)}" if items else "list"
    if kind == "object":
        inner = schema.get("additionalProperties")
        return (
            f"mapping to {_grouped(values_text(inner, named))}"
            if isinstance(inner, Mapping) and inner
            else "mapping"
        )
    if kind == "null":
        return "none"
    words = {
        "integer": "whole number",
        "number": "number",
        "string": "text",
        "boolean": "`true` or `false`",
    }
    return words.get(str(kind), "any value") + _limits(schema)


def default_text(schema: Mapping[str, Any], required: bool) -> str:
    """The default: "**required**", "`16`", "none" or, where the schema has none, nothing."""
    if required:
        return "**required**"
    if "default" not in schema:
        return ""
    return "none" if schema["default"] is None else f"`{_plain(schema['default'])}`"


def description_text(schema: Mapping[str, Any]) -> str:
    """The description in one line, without the note that OpenAI's API does not have it."""
    return " ".join(schema.get("description", "").replace(NOTE, "").split())


def referred(reference: str) -> str:
    return reference.rpartition("/")[2]


def references(schema: Any) -> list[str]:
    """The names of the schemas that a schema refers to itself, in their order."""
    if isinstance(schema, list):
        return [name for member in schema for name in references(member)]
    if not isinstance(schema, Mapping):
        return []
    own = [referred(schema["$ref"])] if isinstance(schema.get("$ref"), str) else []
    members = (member for key, member in schema.items() if key not in ("default", "description"))
    return own + [name for member in members for name in references(member)]


def row(*cells: str) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _limits(schema: Mapping[str, Any]) -> str:
    least = schema.get("minimum")
    most = schema.get("maximum")
    above = schema.get("exclusiveMinimum")
    below = schema.get("exclusiveMaximum")
    if least is not None and most is not None:
        return f", {_figure(least)} to {_figure(most)}"
    low = (
        f"at least {_figure(least)}"
        if least is not None
        else f"above {_figure(above)}"
        if above is not None
        else ""
    )
    high = (
        f"at most {_figure(most)}"
        if most is not None
        else f"below {_figure(below)}"
        if below is not None
        else ""
    )
    if schema.get("maxLength"):
        high = f"at most {_figure(schema['maxLength'])} characters"
    return ", ".join(["", *(part for part in (low, high) if part)])


def _figure(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _grouped(text: str) -> str:
    return f"({text})" if " or " in text else text
