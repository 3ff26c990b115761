"""The JSON schema of an eval's items: a subset without patterns and references, so that an item is
compared in time linear in its length. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ft_service.errors import SpecError

MOST_DEPTH = 16
"""Schemas within each other."""
_TYPES: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: (
        not isinstance(value, bool)
        and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))
    ),
    "boolean": lambda value: isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}
_CHECKED = ("type", "properties", "required", "additionalProperties", "items", "enum")
_SAID = ("title", "description", "default", "examples", "$schema", "$id", "$comment")
"""Words that check nothing in JSON schema either."""


def check_schema(schema: Any, place: str, depth: int = 0) -> None:
    """Raise SpecError for a schema that is none, or that has a word which is not checked here."""
    if not isinstance(schema, dict):
        raise _wrong(place, "must be an object")
    if depth > MOST_DEPTH:
        raise _wrong(place, f"more than {MOST_DEPTH} schemas are within each other")
    for word in schema:
        if word not in (*_CHECKED, *_SAID):
            known = ", ".join(_CHECKED)
            raise _wrong(f"{place}.{word[:80]}", f"is not checked here; {known} are. Leave it out")
    given = schema.get("type", [])
    for name in given if isinstance(given, list) else [given]:
        if not isinstance(name, str) or name not in _TYPES:
            raise _wrong(f"{place}.type", f"must be of {', '.join(_TYPES)}")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _wrong(f"{place}.required", "must be a list of names")
    if not isinstance(schema.get("enum", []), list):
        raise _wrong(f"{place}.enum", "must be a list of values")
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        raise _wrong(f"{place}.properties", "must be an object")
    for name, inner in properties.items():
        check_schema(inner, f"{place}.properties.{name[:80]}", depth + 1)
    if "items" in schema:
        check_schema(schema["items"], f"{place}.items", depth + 1)
    others = schema.get("additionalProperties", True)
    if not isinstance(others, bool):
        check_schema(others, f"{place}.additionalProperties", depth + 1)


def fault_of(value: Any, schema: Mapping[str, Any], place: str) -> str | None:
    """Return what is wrong with a value, with its place; None: nothing is.

    `schema`: a checked one.
    """
    types = schema.get("type", [])
    types = types if isinstance(types, list) else [types]
    if types and not any(_TYPES[name](value) for name in types):
        return f"{place}: is not of type {' or '.join(types)}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{place}: is none of the values of enum"
    if isinstance(value, dict):
        return _fault_of_object(value, schema, place)
    if isinstance(value, list) and "items" in schema:
        faults = (
            fault_of(inner, schema["items"], f"{place}.{number}")
            for number, inner in enumerate(value)
        )
        return next(filter(None, faults), None)
    return None


def _fault_of_object(value: Mapping[str, Any], schema: Mapping[str, Any], place: str) -> str | None:
    for name in schema.get("required", ()):
        if name not in value:
            return f"{place}.{name[:80]}: is missing"
    properties = schema.get("properties", {})
    others = schema.get("additionalProperties", True)
    for name, inner in value.items():
        own = properties.get(name, others)
        if own is False:
            return f"{place}.{name[:80]}: is no property of the schema"
        if isinstance(own, dict) and (fault := fault_of(inner, own, f"{place}.{name[:80]}")):
            return fault
    return None


def _wrong(place: str, why: str) -> SpecError:
    return SpecError(f"{place}: {why}.", param=place)
