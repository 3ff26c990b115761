"""Prompts of an evaluation, made of samples."""

from __future__ import annotations

import numpy as np
import pytest

from workers.training.evaluation_prompts import last_stretch


@pytest.mark.parametrize(
    ("targets", "stretch"),
    [
        ([0, 0, 1, 1], (2, 4)),
        ([0, 1, 1, 0, 0, 1, 0], (5, 6)),
        ([1, 1, 1], (1, 3)),
        ([0, 1], (1, 2)),
    ],
)
def test_the_expected_answer_is_the_last_learned_stretch(
    targets: list[int], stretch: tuple[int, int]
) -> None:
    assert last_stretch(np.array(targets, dtype=bool)) == stretch
