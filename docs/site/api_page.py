"""The page docs/api.md: every operation of the REST API and every object in it, from the OpenAPI
document.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from docs.site.document import openapi_document
from docs.site.schema_text import (
    NOTE,
    default_text,
    description_text,
    references,
    referred,
    row,
    values_text,
)

_HEAD = """\
# REST API

<!-- made by docs.site.generated -->

The API of `ft serve`, in OpenAI's wire format: `openai.OpenAI(base_url="…/v1", api_key="…")` works unchanged. What OpenAI's API
does not have is marked *(ours)*. A running server has this as a page with forms at `/docs`, and as an OpenAPI document at
`/openapi.json`. Requests carry `Authorization: Bearer KEY`, unless it says otherwise. Answers of 400 and above have the body
[ErrorView](#errorview). What differs from OpenAI is told in [Coming from OpenAI's fine-tuning](from-openai.md), the
options of a job in [Every option](options.md).
"""
_MARK = "x-beyond-openai"


def page() -> str:
    """The page, as Markdown."""
    document = openapi_document()
    schemas = document["components"]["schemas"]
    by_tag: dict[str, list[str]] = {}
    shown: list[str] = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            by_tag.setdefault(operation["tags"][0], []).append(
                "\n".join(_operation(method, path, operation))
            )
            shown += references(operation)
    parts = [_HEAD]
    for tag, texts in by_tag.items():
        parts += [f"## {tag.capitalize()}\n", *texts]
    parts.append("## Objects\n")
    for name in sorted(_with_their_own(shown, schemas), key=str.lower):
        parts += _object(name, schemas[name])
    return "\n".join(parts)


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    description = operation.get("description", "")
    yield f"### {method.upper()} {path}\n"
    ours = "*(ours)* " if operation.get(_MARK) else ""
    keyless = "" if operation.get("security") else " Needs no key."
    text = f"{ours}{description_text({'description': description.removeprefix(NOTE)})}{keyless}".strip()
    if text:
        yield f"{text}\n"
    parameters = [
        parameter for parameter in operation.get("parameters", ()) if not _only_named(parameter)
    ]
    if parameters:
        yield "| parameter | in | values | default | |"
        yield "| --- | --- | --- | --- | --- |"
        for parameter in parameters:
            schema = parameter["schema"]
            required = parameter.get("required", False) and parameter["in"] != "path"
            default = (
                default_text(schema, required)
                if required or schema.get("default") is not None
                else ""
            )
            said = _ours(parameter) + description_text(parameter)
            yield row(
                f"`{parameter['name']}`", parameter["in"], values_text(schema, _link), default, said
            )
        yield ""
    if "requestBody" in operation:
        yield f"Body: {', '.join(_content(operation['requestBody']['content']))}\n"
    answers = operation["responses"].get("200", {}).get("content", {})
    if answers:
        yield f"Answer: {', '.join(_content(answers))}\n"


def _only_named(parameter: Mapping[str, Any]) -> bool:
    """Whether there is no more to say of a parameter than the path does."""
    return (
        parameter["in"] == "path"
        and not parameter.get("description")
        and values_text(parameter["schema"], _link) == "text"
    )


def _content(content: Mapping[str, Any]) -> Iterator[str]:
    """What is sent, in each of its media types."""
    for media, value in content.items():
        schema = value.get("schema", {})
        if schema.get("properties"):
            fields = ", ".join(f"`{name}`" for name in schema["properties"])
            yield f"`{media}` with the fields {fields}"
        elif references(schema):
            yield values_text(schema, _link)
        else:
            yield f"`{media}`"


def _object(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    yield f"### {name}\n"
    if schema.get("description"):
        yield f"{description_text(schema)}\n"
    if "properties" not in schema:
        yield f"{values_text(schema, _link)}\n"
        return
    yield "| field | values | default | |"
    yield "| --- | --- | --- | --- |"
    asked = schema.get("additionalProperties") is False  # of a body, whose fields may be left out
    for field, value in schema["properties"].items():
        default = default_text(value, field in schema.get("required", ())) if asked else ""
        default = "" if isinstance(value.get("default"), Mapping) else default
        yield row(
            f"`{field}`", values_text(value, _link), default, _ours(value) + description_text(value)
        )
    yield ""


def _ours(part: Mapping[str, Any]) -> str:
    return "*(ours)* " if part.get(_MARK) else ""


def _link(name: str) -> str:
    return f"[{name}](#{name.lower()})"


def _with_their_own(names: list[str], schemas: Mapping[str, Any]) -> set[str]:
    """These schemas and all that they refer to."""
    found: set[str] = set()
    waiting = [referred(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += references(schemas[name])
    return found
