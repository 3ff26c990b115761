from __future__ import annotations

import pytest

from ft_service.rundir.evaluations import Probe
from ft_service.serving.served_verdict import is_of_base, judge

TUNED = [-0.1, -0.2, -0.1]
BASE = [-2.0, -3.0, -2.5]
PROBES = [Probe(tokens=[1, 2, 3, 4], tuned=TUNED, base=BASE)] * 4


@pytest.mark.parametrize(
    ("served", "verified", "word"),
    [
        (TUNED, True, "served, verified: 4 prompts"),
        ([-0.15, -0.25, -0.1], True, "verified"),
        (BASE, False, "answers with the base"),
        ([-1.0, -1.4, -1.0], False, "not the trained model's"),
        ([-9.0, -9.5, -9.0], False, "not the trained model's"),
    ],
)
def test_the_tuned_model_is_told_from_the_base_and_from_anything_else(
    served: list[float], verified: bool, word: str
) -> None:
    verdict = judge(PROBES, [served] * 4)
    assert verdict.verified is verified
    assert word in verdict.text


def test_an_adapter_that_changes_nothing_cannot_be_verified() -> None:
    same = [Probe(tokens=[1, 2, 3, 4], tuned=TUNED, base=[-0.1, -0.201, -0.1])]
    assert judge(same, [TUNED]).verified is None


@pytest.mark.parametrize(
    ("tuned", "served", "expected"),
    [
        (TUNED, BASE, True),
        (TUNED, [-2.3, -2.7, -2.9], True),
        (TUNED, TUNED, False),
        (TUNED, [-9.0, -9.5, -9.0], False),
        ([-1.98, -3.02, -2.52], BASE, True),
        ([-1.995, -3.005, -2.5], BASE, False),
        ([-1.98, -3.02, -2.52], [-2.2, -3.2, -2.3], False),
    ],
    ids=[
        "ignored",
        "ignored, rounded",
        "used",
        "neither",
        "learnt little",
        "learnt nothing",
        "rounded by more than it learnt",
    ],
)
def test_a_precision_alone_is_not_taken_for_the_base(
    tuned: list[float], served: list[float], expected: bool
) -> None:
    probes = [Probe(tokens=[1, 2, 3, 4], tuned=tuned, base=BASE)]
    assert is_of_base(probes, [served]) is expected
