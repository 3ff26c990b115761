"""The page docs/options.md: every option of a SPEC, from its schema."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from docs.site.document import openapi_document
from docs.site.schema_text import default_text, description_text, referred, row, values_text

_HEAD = """\
# Every option

<!-- made by docs.site.generated -->

The options of a SPEC file, which are also the fields of the body of `POST /v1/fine_tuning/jobs`
([API](api.md#post-v1fine_tuningjobs)). Unknown options are refused by name, and so is a value outside its limits.
[A SPEC with all of them](../deploy/examples/every-option.yaml) can be copied from. "None" is `null` in YAML and JSON. Patterns
are regular expressions in RE2's syntax.

A sweep has the same options and `sweep` ([how](jobs.md#sweeps)).
"""


def page() -> str:
    """The page, as Markdown."""
    schemas = openapi_document()["components"]["schemas"]
    sections = list(_sections("", schemas["JobRequest"], schemas))
    return "\n".join([_HEAD, *sections])


def _sections(name: str, schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    """A section for the options of a mapping, and one for each mapping in it.

    `name`: of the mapping; empty: the whole SPEC.
    """
    properties = _required_first(schema)
    places = {key: f"{name}.{key}" if name else key for key in properties}
    inner = {key: _mappings(value, schemas) for key, value in properties.items()}
    rows = [
        row(
            f"`{key}`",
            values_text(
                value,
                lambda of, key=key: _named(
                    of, _title(places[key], of, inner[key]), inner[key], schemas
                ),
            ),
            _default(value, key in schema.get("required", ()), inner[key]),
            description_text(value) or _first_sentence(inner[key], schemas),
        )
        for key, value in properties.items()
    ]
    title = f"## `{name}`" if name else "## At the top level"
    said = f"{description_text(schema)}\n\n" if name and schema.get("description") else ""
    yield "\n".join(
        [
            f"{title}\n\n{said}| option | values | default | |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )
    for key, found in inner.items():
        for of in found:
            yield from _sections(_title(places[key], of, found), schemas[of], schemas)


def _required_first(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The properties, those without a default first, else in their order."""
    required = schema.get("required", ())
    return dict(sorted(schema["properties"].items(), key=lambda item: item[0] not in required))


def _title(option: str, of: str, found: list[str]) -> str:
    """The name of a section: the option's; of an option that may be one of several mappings, with
    the mapping's.
    """
    return option if len(found) == 1 else f"{option}: {of}"


def _named(of: str, title: str, found: list[str], schemas: Mapping[str, Any]) -> str:
    """How a mapping is named in a table: by a link to its section, if it has one."""
    if of in found:
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        return f"[{'mapping' if len(found) == 1 else of}](#{anchor})"
    return of if "properties" in schemas[of] else values_text(schemas[of], lambda name: name)


def _default(value: Mapping[str, Any], required: bool, inner: list[str]) -> str:
    """A mapping's default is that of its own options."""
    return (
        "" if inner and isinstance(value.get("default"), Mapping) else default_text(value, required)
    )


def _first_sentence(inner: list[str], schemas: Mapping[str, Any]) -> str:
    """Of what a mapping's own section begins with."""
    return re.split(r"(?<=\.) ", description_text(schemas[inner[0]]))[0] if len(inner) == 1 else ""


def _mappings(schema: Any, schemas: Mapping[str, Any]) -> list[str]:
    """The names of the schemas with options of their own that a value, or a member of a list, may
    have.
    """
    if isinstance(schema, list):
        return list(dict.fromkeys(name for member in schema for name in _mappings(member, schemas)))
    if not isinstance(schema, Mapping):
        return []
    if "$ref" in schema:
        return (
            [referred(schema["$ref"])] if "properties" in schemas[referred(schema["$ref"])] else []
        )
    return _mappings([schema[key] for key in ("anyOf", "oneOf", "items") if key in schema], schemas)
