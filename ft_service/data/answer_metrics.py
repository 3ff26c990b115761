"""How near an answer comes to the expected one: shares in [0, 1], by the field's names. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence

from ft_service.spec import AnswerMetric


def exact_match(answer: str, expected: str) -> float:
    """1 if they are the same but for blanks around them."""
    return float(answer.strip() == expected.strip())


def contains(answer: str, expected: str) -> float:
    """1 if the expected answer stands somewhere in the answer, in whatever case."""
    return float(expected.strip().casefold() in answer.casefold())


def json_valid(answer: str, expected: str) -> float:
    """1 if the answer is JSON, whatever it says."""
    try:
        json.loads(answer)
    except (ValueError, RecursionError):
        return 0.0
    return 1.0


def rouge_l(answer: str, expected: str) -> float:
    """ROUGE-L's F1: the longest common subsequence of words, in lower case, split at blanks."""
    ours, theirs = answer.lower().split(), expected.lower().split()
    common = _longest_common(ours, theirs)
    return 2 * common / (len(ours) + len(theirs)) if common else 0.0


def _longest_common(ours: Sequence[str], theirs: Sequence[str]) -> int:
    row = [0] * (len(theirs) + 1)
    for word in ours:
        before = 0
        for place, other in enumerate(theirs, 1):
            before, row[place] = row[place], before + 1 if word == other else max(row[place], row[place - 1])
    return row[-1]


METRICS: Mapping[AnswerMetric, Callable[[str, str], float]] = {
    "exact_match": exact_match,
    "contains": contains,
    "json_valid": json_valid,
    "rouge_l": rouge_l,
}


NEED_REFERENCE: Collection[AnswerMetric] = ("exact_match", "contains", "rouge_l")


def score(answer: str, reference: str | None, metrics: Sequence[AnswerMetric]) -> dict[str, float]:
    """An answer's score by each metric; those that need a reference are left out without one."""
    return {
        name: METRICS[name](answer, reference or "") for name in metrics if reference is not None or name not in NEED_REFERENCE
    }
