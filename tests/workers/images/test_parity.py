"""Samples with pictures on our model with stored features, next to the published class with its
towers and plain PEFT.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ft_service.bases.description import ImageFacts
from tests.support.ranks import often_and_slow
from tests.support.training.checks import BOUND
from tests.support.training.models import spec_for
from tests.support.training.parity import set_adapters
from tests.support.training.pictures import (
    CPU,
    PICTURED,
    TWO_WAY,
    Pictured,
    published_step,
    save_pictured,
)
from workers.base.load import adapters, load
from workers.data.batches import make_batch
from workers.images.features import CURRENT_IMAGES, SampleImages, kept_in
from workers.images.placing import take_images
from workers.images.tower import positions_of
from workers.model.build import BuiltModel, build
from workers.model.multimodal import causal_model
from workers.ranks.sharding import Gradients
from workers.training.step import Sums, forward_backward

NOISY = {"qwen3_5": 2e-5}
"""Types that are compared with their class in fp64, and how near they come in fp32: a recurrence
over a longer sample rounds more.
"""
SLOW = ("qwen2_vl", "qwen3_vl_moe", "smolvlm")
"""Types that are computed as qwen2_5_vl, qwen3_vl and idefics3, but for what text passes too."""


def our_model(kind: str, made: Pictured, work: Path) -> BuiltModel:
    early = made.save_features(work)
    spec = spec_for(
        made.folder,
        precision={"default": "bf16", "compute": "fp32"},
        lora={"r": 4, "lora_alpha": 8},
    )
    built = build(spec, CPU)
    load(built.peft_model, made.folder, seed=1, compute_dtype=torch.float32, device=CPU)
    with torch.no_grad():
        set_adapters(built.peft_model)
    causal = causal_model(built.peft_model)
    take_images(causal, ImageFacts(made.token_id, early, 0, TWO_WAY.get(kind, ())))
    CURRENT_IMAGES.images = SampleImages(kept_in([work]), made.token_id, positions_of(causal))
    built.peft_model.train()
    return built


def our_step(
    made: Pictured, built: BuiltModel, groups: list[list[int]], *, packed: bool
) -> tuple[float, dict[str, Tensor]]:
    model = built.peft_model
    batches = [make_batch([made.samples[i] for i in own], CPU, packed=packed) for own in groups]
    targets = sum(sample.target_count for sample in made.samples)
    for _, parameter in adapters(model):
        parameter.grad = None
    sums = forward_backward(model, batches, targets, 1, gradients=Gradients(model, 1))
    grads = {n: p.grad.clone() for n, p in adapters(model) if p.grad is not None}
    return Sums.read(sums, targets).mean_loss, grads


def off(ours: tuple[float, dict[str, Tensor]], truth: tuple[float, dict[str, Tensor]]) -> float:
    assert ours[1].keys() == truth[1].keys()
    return max(
        abs(ours[0] - truth[0]) / truth[0],
        *(float((g - truth[1][n]).norm() / truth[1][n].norm()) for n, g in ours[1].items()),
    )


@pytest.mark.parametrize("kind", often_and_slow([*PICTURED], SLOW))
def test_pictures_train_as_in_the_published_class_with_plain_peft(
    kind: str, tmp_path: Path
) -> None:
    made = save_pictured(kind, tmp_path / "base")
    built = our_model(kind, made, tmp_path / "features")
    truth = published_step(made, built, torch.float64 if kind in NOISY else torch.float32)
    for packed in (False, True):
        alone = our_step(made, built, [[0], [1], [2], [3]], packed=packed)
        together = our_step(made, built, [[2, 0, 1], [3]], packed=packed)
        for step in (alone, together):
            assert off(step, truth) < NOISY.get(kind, BOUND), (packed, off(step, truth))
