"""What is computed on tenants' texts.

Pure. A helper process carries it out for the service (text_program.py); ranks, which are a tenant's
own, call it themselves.

A task is a tuple of plain values, so that the process needs no types of requests, and starts in a
tenth of a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ft_service.graders.formula import calculated
from ft_service.graders.grades import Case, GradingError, Sample
from ft_service.graders.similarities import MOST_COMPARED, SIMILARITIES
from ft_service.graders.templates import MOST_FILLED, filled

Task = tuple[Any, ...]
NO_CASE = Case(Sample(""), {})
"""The case of tasks that need none."""
WRITE: Task = ("write",)
"""The case as JSON."""
MOST_WRITTEN = 32 * 1024**2
"""Characters of a case as JSON, at most: three times the longest line of a data file."""


def compare(given: str, reference: str, by: str) -> Task:
    """A number: two templates filled in and compared.

    `by`: an operation of a string_check, or a metric.
    """
    return "compare", given, reference, by


def fill(templates: Sequence[Sequence[str]]) -> Task:
    """Lists of templates, filled in."""
    return "fill", [list(group) for group in templates]


def calculate(formula: str, scores: Mapping[str, float]) -> Task:
    """A number: a formula of scores. It needs no case."""
    return "calculate", formula, dict(scores)


def carried_out(task: Task, case: Case) -> Any:
    """The result of a task. Raises GradingError."""
    match task:
        case ("compare", given, reference, by):
            return _compared(filled(given, case), filled(reference, case), by)
        case ("fill", groups):
            return _all_filled(groups, case)
        case ("write",):
            whole = case.as_json().decode()
            if len(whole) > MOST_WRITTEN:
                raise GradingError(
                    "other_error",
                    f"the answer and its item have more than {MOST_WRITTEN:,} characters",
                )
            return whole
        case ("calculate", formula, scores):
            try:
                return calculated(formula, scores)
            except (ArithmeticError, ValueError) as error:
                why = f"calculate_output has no value for these scores: {error}"
                raise GradingError("formula_parse_error", why) from None
    raise AssertionError(f"there is no task {task[0]!r}")


def _compared(given: str, reference: str, by: str) -> float:
    if by in SIMILARITIES:
        if max(len(given), len(reference)) > MOST_COMPARED:
            raise GradingError(
                "other_error", f"a text to compare has more than {MOST_COMPARED:,} characters"
            )
        return SIMILARITIES[by](given, reference)
    if by in ("like", "ilike"):
        return float(
            (reference.casefold() in given.casefold()) if by == "ilike" else reference in given
        )
    return float((given == reference) == (by == "eq"))


def _all_filled(groups: Sequence[Sequence[str]], case: Case) -> list[list[str]]:
    """The templates with their values, which have MOST_FILLED characters together at most."""
    left = MOST_FILLED
    texts = []
    for group in groups:
        texts.append([])
        for template in group:
            texts[-1].append(filled(template, case, left))
            left -= len(texts[-1][-1])
    return texts
