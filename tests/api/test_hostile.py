"""Hostile values in every place of every route of the description: a 4xx that says what is wrong,
and never more than that.
"""

from __future__ import annotations

import json
from typing import Any

from tests.support.rest.described import OPEN, filled, tenant
from tests.support.rest.service import Service

WRONG: tuple[Any, ...] = ([], {}, [{"type": []}], "\0", -1)
"""In place of each member of a body."""
QUERIED = ("", "\0", "\U0001f600" * 99, "../../etc/passwd", "%00", "[]")
"""In place of each parameter of a query."""
NEEDED = {
    "model": "tiny",
    "training_file": "file-none",
    "messages": [{"role": "user", "content": "Hi"}],
}


def test_no_value_of_a_body_is_more_than_refused(service: Service) -> None:
    values = tenant(service, "default", service.key)
    document = service.http("GET", "/openapi.json").json()
    tried = 0
    for path, operation in posts(document):
        properties = described(document, operation)
        for name in properties:
            for wrong in WRONG:
                body = {known: value for known, value in NEEDED.items() if known in properties} | {
                    name: wrong
                }
                answer = service.http("POST", filled(path, values), content=json.dumps(body))
                assert answer.status_code < 500 or answer.status_code == 503, (
                    path,
                    name,
                    wrong,
                    answer.text,
                )
                tried += answer.status_code >= 400
        for wrong in ([], "x", None, 1):
            answer = service.http("POST", filled(path, values), content=json.dumps(wrong))
            assert answer.status_code < 500, (path, wrong, answer.text)
    assert tried > 200


def test_no_parameter_of_a_query_is_more_than_refused(service: Service) -> None:
    values = tenant(service, "default", service.key)
    document = service.http("GET", "/openapi.json").json()
    tried = 0
    for path, methods in document["paths"].items():
        for parameter in methods.get("get", {}).get("parameters", ()) if path not in OPEN else ():
            if parameter["in"] == "query" and not path.endswith(("samples", "statistics")) | (
                parameter["name"] == "stream"
            ):
                for wrong in QUERIED:
                    answer = service.http(
                        "GET", filled(path, values), params={parameter["name"]: wrong}
                    )
                    assert answer.status_code < 500, (path, parameter["name"], wrong, answer.text)
                    tried += answer.status_code >= 400
    assert tried > 100


def posts(document: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Path and description of each POST; of those that create jobs, the one that stores nothing."""
    left_out = ("/v1/fine_tuning/jobs", "/v1/fine_tuning/sweeps")
    return [
        (path, methods["post"])
        for path, methods in document["paths"].items()
        if "post" in methods and path not in left_out
    ]


def described(document: dict[str, Any], operation: dict[str, Any]) -> list[str]:
    """Members of an operation's JSON body."""
    schema = (
        operation.get("requestBody", {})
        .get("content", {})
        .get("application/json", {})
        .get("schema", {})
    )
    named = document["components"]["schemas"].get(schema.get("$ref", "").rpartition("/")[2], {})
    return list(named.get("properties", NEEDED if schema else {}))
