"""What came of items: criteria passed or failed, the status of an item, the counts of a run.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ft_service.evals.eval_request import Criterion
from ft_service.graders.grades import Grade

ItemStatus = Literal["pass", "fail", "error"]
PASSING = 1.0
"""Score with which an answer passes a string_check or a label_model."""


@dataclass(frozen=True)
class ItemOutcome:
    """An item at its end."""

    number: int
    item: Mapping[str, Any]
    sample: Mapping[str, Any]
    """The answer, as OpenAI's output items have it."""
    results: Sequence[Mapping[str, Any]] = ()
    """One for each criterion; none if there is no answer."""

    @property
    def status(self) -> ItemStatus:
        if self.sample.get("error") or any(result.get("error") for result in self.results):
            return "error"
        return "pass" if all(result["passed"] for result in self.results) else "fail"


def result_of(criterion: Criterion, grade: Grade) -> dict[str, Any]:
    """Return what a criterion says of an answer."""
    threshold = getattr(criterion, "pass_threshold", PASSING)
    kind, detail = next(iter(grade.errors.items()), (None, ""))
    return {
        "name": criterion.name,
        "type": criterion.type,
        "score": grade.reward,
        "passed": kind is None and grade.reward >= threshold,
        "sample": None,
        "error": None if kind is None else {"code": kind, "message": detail},
    }


@dataclass
class Tally:
    """The counts of a run so far."""

    passed: int = 0
    failed: int = 0
    errored: int = 0
    criteria: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """Name of a criterion → answers that passed it and that failed."""
    asked: int = 0
    """Answers of the model."""
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, outcomes: Sequence[ItemOutcome]) -> None:
        for outcome in outcomes:
            match outcome.status:
                case "pass":
                    self.passed += 1
                case "fail":
                    self.failed += 1
                case "error":
                    self.errored += 1
            for result in outcome.results:
                if not result.get("error"):
                    self.criteria.setdefault(result["name"], [0, 0])[not result["passed"]] += 1
            usage = outcome.sample.get("usage")
            if usage is not None:
                self.asked += 1
                self.prompt_tokens += usage["prompt_tokens"]
                self.completion_tokens += usage["completion_tokens"]
