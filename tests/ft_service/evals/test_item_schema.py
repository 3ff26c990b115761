from __future__ import annotations

from typing import Any

import pytest

from ft_service.errors import SpecError
from ft_service.evals.item_schema import MOST_DEPTH, check_schema, fault_of


@pytest.mark.parametrize(
    ("schema", "good", "bad", "place"),
    [
        ({"type": "string"}, "a", 1, "item"),
        ({"type": ["string", "null"]}, None, 1, "item"),
        ({"type": "number"}, 1.5, True, "item"),
        ({"type": "integer"}, 2.0, 2.5, "item"),
        ({"type": "integer"}, 10**400, float("inf"), "item"),
        ({"type": "integer"}, 0, float("nan"), "item"),
        ({"enum": ["a", 1]}, 1, "b", "item"),
        ({"required": ["a"]}, {"a": None}, {"b": 1}, "item.a"),
        (
            {"properties": {"a": {"type": "string"}}, "additionalProperties": False},
            {},
            {"b": 1},
            "item.b",
        ),
        ({"additionalProperties": {"type": "null"}}, {"a": None}, {"a": 1}, "item.a"),
        (
            {"properties": {"a": {"items": {"type": "boolean"}}}},
            {"a": [True]},
            {"a": [True, "b"]},
            "item.a.1",
        ),
    ],
)
def test_values(schema: Any, good: Any, bad: Any, place: str) -> None:
    check_schema(schema, "item_schema")
    assert fault_of(good, schema, "item") is None
    fault = fault_of(bad, schema, "item")
    assert fault is not None
    assert fault.partition(":")[0] == place


def test_what_is_not_checked_is_refused_and_what_says_nothing_is_not() -> None:
    check_schema({"title": "a", "$schema": "b", "type": "object"}, "item_schema")
    deep: Any = {}
    for _ in range(MOST_DEPTH + 1):
        deep = {"items": deep}
    for schema, param in (
        ({"properties": {"a": {"pattern": "(a+)+$"}}}, "item_schema.properties.a.pattern"),
        ({"$ref": "#"}, "item_schema.$ref"),
        ({"type": "text"}, "item_schema.type"),
        ({"required": "a"}, "item_schema.required"),
        ({"properties": []}, "item_schema.properties"),
        ({"additionalProperties": 1}, "item_schema.additionalProperties"),
        ({"enum": "a"}, "item_schema.enum"),
    ):
        with pytest.raises(SpecError) as caught:
            check_schema(schema, "item_schema")
        assert caught.value.param == param
    with pytest.raises(SpecError, match="within each other"):
        check_schema(deep, "item_schema")
