"""Fields of records that are null.

They count as absent: Arrow gives all objects of a column the same fields, in Parquet and in the
JSON lines that are exported from it. Nulls that mean something stay. Pure.

An argument of a call stays null where the definition of the called function requires the argument
or lets it be null, and where there is no such definition. A definition's `default` or `const` stays
null where its schema lets the value be null.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_VALUES = ("default", "const")
"""Keys of a JSON schema that hold a value."""
_TOOLS = ("tools", "functions")
_TYPES = ("type", "anyOf", "oneOf", "allOf", "enum", "const", "$ref")
"""Keys of a JSON schema that say what a value may be."""

Schemas = Mapping[str, Any]
"""Name of a function → the JSON schema of its arguments."""


def without_null_fields(value: Any, schemas: Schemas) -> Any:
    """A record, or a part of it, without null fields, except `content`, for which an error says
    what it is, and arguments that stay. Definitions of tools are left as they are. `schemas`: those
    of the record's tools.
    """
    if isinstance(value, list):
        return [without_null_fields(inner, schemas) for inner in value]
    if not isinstance(value, dict):
        return value
    given = {
        key: inner if key == "arguments" or key in _TOOLS else without_null_fields(inner, schemas)
        for key, inner in value.items()
        if inner is not None or key == "content"
    }
    arguments = given.get("arguments")
    name = given.get("name")
    if isinstance(arguments, dict) and isinstance(name, str):
        given["arguments"] = _arguments(arguments, schemas.get(name))
    return given


def definition_without_null_fields(definition: Any) -> Any:
    """A tool's definition, or a part of it, without fields that are null, but for values that its
    schemas let be null.
    """
    if isinstance(definition, list):
        return [definition_without_null_fields(inner) for inner in definition]
    if not isinstance(definition, dict):
        return definition
    return {
        key: inner if key in _VALUES else definition_without_null_fields(inner)
        for key, inner in definition.items()
        if inner is not None or (key in _VALUES and _admits_null(definition))
    }


def _arguments(arguments: dict[str, Any], schema: Any) -> dict[str, Any]:
    """A call's arguments, or an object within them.

    `schema`: its JSON schema; None: it is not known.
    """
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return arguments
    required = schema.get("required")
    return {
        name: _arguments(value, properties.get(name)) if isinstance(value, dict) else value
        for name, value in arguments.items()
        if value is not None or name in (required or ()) or _admits_null(properties.get(name))
    }


def _admits_null(schema: Any) -> bool:
    """Return whether a JSON schema lets a value be null.

    None (a field without a schema): it does not.
    """
    if not isinstance(schema, dict):
        return False
    given = {key: schema[key] for key in _TYPES if schema.get(key) is not None}
    types = given.get("type", [])
    return (
        not given
        or schema.get("nullable") is True
        or "null" in (types if isinstance(types, list) else [types])
        or None in given.get("enum", ())
        or "$ref" in given
        or any(_admits_null(inner) for key in ("anyOf", "oneOf") for inner in given.get(key) or ())
    )
