"""The OpenAPI document: what FastAPI cannot derive from the routes is added, and all that OpenAI's
API lacks is marked.
"""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse

from api.http.dependencies import BODIES, SCHEMAS
from ft_service.spec import JobOptions

PAGE = "/docs"
_STATIC = "/static-offline-docs"
_SCRIPT = re.compile(rb"<script>(.*?)</script>", re.DOTALL)
_POLICY = (
    "default-src 'none'; script-src 'self' {scripts}; style-src 'self' 'unsafe-inline'; img-src "
    "'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_LIMITS = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}
MARK = "x-beyond-openai"
NOTE = "Not in OpenAI's API."
"""Begin of the docstring of each operation that OpenAI's API lacks."""

_JOBS = "/v1/fine_tuning/jobs"
_PARAMETERS = ("status", "base", "type", "stream", "last-event-id", "idempotency-key", "sha256")
_PROPERTIES = {
    "JobRequest": ("validation_split", *JobOptions.model_fields),
    "JobView": (
        "phase",
        "reason",
        "attempt",
        "progress",
        "pending_reason",
        "queue",
        "suffix",
        "name",
        "note",
        "chosen",
        "engine_id",
        "sweep",
        "forgetting",
        "suites",
        "validation_split",
        "planned_cost",
        "cost",
        "energy",
        *JobOptions.model_fields,
    ),
    "ModelView": ("root", "parent", "job_id", "base", "description"),
    "ErrorsView": ("endpoint_grader_server_error", "endpoint_grader_parse_error", "details"),
    "ProjectView": ("limits", "share"),
    "ApiKeyView": ("scope", "revoked_at", "single_sign_on", "ends_with"),
    "ProjectRequest": ("limits",),
    "ProjectUpdate": ("limits",),
}
_METADATA = {
    "name": "metadata",
    "in": "query",
    "required": False,
    "description": "`metadata[key]=value`, any number of times; or `metadata=null` alone: only "
    "jobs without metadata.",
    "style": "deepObject",
    "explode": True,
    "schema": {"type": "object", "additionalProperties": {"type": "string"}, "maxProperties": 16},
}


def add_page(app: FastAPI) -> None:
    """Serve the document as a page with a form for each operation.

    The page runs its own scripts only, and in no frame.
    """
    page = get_swagger_ui_html(
        openapi_url="/openapi.json",
        title=app.title,
        swagger_js_url=f"{_STATIC}/swagger-ui-bundle.js",
        swagger_css_url=f"{_STATIC}/swagger-ui.css",
        swagger_favicon_url=f"{_STATIC}/favicon.png",
    )
    digests = (hashlib.sha256(script).digest() for script in _SCRIPT.findall(bytes(page.body)))
    scripts = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    headers = {"content-security-policy": _POLICY.format(scripts=scripts)}

    @app.get(PAGE, include_in_schema=False)
    async def documentation() -> HTMLResponse:
        return HTMLResponse(page.body, headers=headers)


def complete_document(app: FastAPI) -> None:
    """Make the application serve the completed document at /openapi.json."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _complete(generate())
        return generate()

    app.openapi = openapi


def _complete(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for model in BODIES:
        schema = model.model_json_schema(ref_template=SCHEMAS)
        schemas |= {**schema.pop("$defs", {}), model.__name__: schema}
    _say_limits(schemas)
    document["paths"][_JOBS]["get"]["parameters"].append(_METADATA)
    for operations in document["paths"].values():
        for operation in operations.values():
            _answer_errors_in_json(operation)
    _mark(document)


def _say_limits(schema: Any) -> None:
    """Rename limits to JSON Schema's names.

    Pydantic keeps its own names for numbers that may be written in several ways.
    """
    if isinstance(schema, list):
        for member in schema:
            _say_limits(member)
    elif isinstance(schema, dict):
        if schema.get("type") == "number":
            for ours, theirs in _LIMITS.items():
                if ours in schema:
                    schema[theirs] = schema.pop(ours)
        for member in schema.values():
            _say_limits(member)


def _answer_errors_in_json(operation: dict[str, Any]) -> None:
    # FastAPI describes errors in the media type of the route's success.
    for status, answer in operation["responses"].items():
        if status in ("4XX", "5XX"):
            answer["content"] = {
                "application/json": {"schema": {"$ref": SCHEMAS.format(model="ErrorView")}}
            }


def _mark(document: dict[str, Any]) -> None:
    for operations in document["paths"].values():
        for operation in operations.values():
            if operation.get("description", "").startswith(NOTE):
                operation[MARK] = True
            for parameter in operation.get("parameters", []):
                if parameter["name"] in _PARAMETERS:
                    _note(parameter)
    for model, names in _PROPERTIES.items():
        for name in names:
            _note(document["components"]["schemas"][model]["properties"][name])


def _note(part: dict[str, Any]) -> None:
    part[MARK] = True
    text = part.get("description", "").replace(NOTE, "").strip()
    part["description"] = f"{NOTE} {text}".strip()
