"""Graders and cases for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from ft_service.graders.grades import Case, Sample
from ft_service.spec.graders import Grader, Multi


def grader(**given: Any) -> Any:
    return TypeAdapter(Grader).validate_python({"name": "g", "type": "string_check", **given})


def multi(formula: str) -> Multi:
    check = {
        "type": "string_check",
        "name": "x",
        "input": "{{sample.output_text}}",
        "reference": "four",
        "operation": "eq",
    }
    like = {**check, "name": "y", "operation": "ilike"}
    return grader(type="multi", graders={"same": check, "near": like}, calculate_output=formula)


def case(answer: str, item: Mapping[str, Any] | None = None) -> Case:
    return Case(Sample(answer), item or {})
