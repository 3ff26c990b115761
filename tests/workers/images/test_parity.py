"""Samples with pictures on our model with stored features, next to the published class with its
towers and plain PEFT.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.ranks import often_and_slow
from tests.support.training.checks import BOUND
from tests.support.training.pictured_steps import off, our_model, our_step
from tests.support.training.pictures import (
    PICTURED,
    published_step,
    save_pictured,
)

COMPLEX = ("llama4",)
"""Types that cannot be computed in fp64: their turns are complex numbers of fp32."""
SLOW = ("qwen2_vl", "qwen3_vl_moe", "smolvlm", "gemma4", "llama4", "pixtral")
"""Types that are computed as others are, but for what text passes too."""


@pytest.mark.parametrize("kind", often_and_slow([*PICTURED], SLOW))
def test_pictures_train_as_in_the_published_class_with_plain_peft(
    kind: str, tmp_path: Path
) -> None:
    made = save_pictured(kind, tmp_path / "base")
    built = our_model(kind, made, tmp_path / "features")
    theirs = published_step(made, built)
    truth, bound = theirs, BOUND
    if kind not in COMPLEX:  # the class rounds too, and sums in an order of its own
        truth = published_step(made, built, torch.float64)
        bound = 3 * off(theirs, truth)
        assert 1e-7 < bound < 5 * BOUND
    for packed in (False, True):
        alone = our_step(made, built, [[0], [1], [2], [3]], packed=packed)
        together = our_step(made, built, [[2, 0, 1], [3]], packed=packed)
        for step in (alone, together):
            assert off(step, truth) < bound, (packed, off(step, truth))
