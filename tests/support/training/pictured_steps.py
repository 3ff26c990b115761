"""A training step of our model on samples with pictures, to compare with `published_step`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ft_service.bases.description import ImageFacts
from tests.support.training.models import adapter_value, spec_for
from tests.support.training.parity import set_adapters
from tests.support.training.pictures import CPU, TWO_WAY, Pictured
from workers.base.load import adapters, load
from workers.data.batches import make_batch
from workers.images.features import CURRENT_IMAGES, SampleImages, kept_in
from workers.images.placing import take_images
from workers.images.tower import positions_of
from workers.images.trained_tower import TrainedTower
from workers.model.build import BuiltModel, build
from workers.model.lora import adapted_in_towers
from workers.model.multimodal import causal_model
from workers.ranks.sharding import Gradients
from workers.training.step import Sums, forward_backward


def our_model(
    kind: str, made: Pictured, work: Path, target_modules: Any = "all-linear"
) -> BuiltModel:
    """A model whose pictures' features are in a folder."""
    early = made.save_features(work)
    spec = spec_for(
        made.folder,
        precision={"default": "bf16", "compute": "fp32"},
        lora={"r": 4, "lora_alpha": 8, "target_modules": target_modules},
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


def our_tower(made: Pictured, built: BuiltModel, target_modules: Any) -> TrainedTower:
    """The tower with adapters, in place of features."""
    lora = spec_for(
        made.folder, lora={"r": 4, "lora_alpha": 8, "target_modules": target_modules}
    ).lora
    causal = causal_model(built.peft_model)
    described: Any = SimpleNamespace(images=ImageFacts(made.token_id, 0, 0))
    processor = SimpleNamespace(inputs=lambda picture: made.inputs[picture.key])
    with patch("workers.images.trained_tower.ImageProcessor.of", return_value=processor):
        tower = TrainedTower(
            str(made.folder), described, adapted_in_towers(causal, lora), lora, 1, CPU
        )
    with torch.no_grad():
        for name, parameter in tower.parameters.items():
            parameter.copy_(adapter_value(name, parameter.shape))
    positions = positions_of(causal)
    CURRENT_IMAGES.images = SampleImages(tower.layout, made.token_id, positions, tower.later)
    return tower


def our_step(
    made: Pictured,
    built: BuiltModel,
    groups: list[list[int]],
    *,
    packed: bool,
    tower: TrainedTower | None = None,
) -> tuple[float, dict[str, Tensor]]:
    """Mean loss, and the gradients by name, of all samples in micro-batches of these."""
    model = built.peft_model
    trained = {**dict(adapters(model)), **({} if tower is None else tower.parameters)}
    batches = [make_batch([made.samples[i] for i in own], CPU, packed=packed) for own in groups]
    targets = sum(sample.target_count for sample in made.samples)
    for parameter in trained.values():
        parameter.grad = None
    gradients = Gradients(model, 1)
    gradients.add([] if tower is None else tower.parameters.values())
    sums = forward_backward(model, batches, targets, 1, gradients=gradients)
    grads = {n: p.grad.clone() for n, p in trained.items() if p.grad is not None}
    return Sums.read(sums, targets).mean_loss, grads


def off(ours: tuple[float, dict[str, Tensor]], truth: tuple[float, dict[str, Tensor]]) -> float:
    """The largest relative difference of loss and gradients."""
    assert ours[1].keys() == truth[1].keys()
    return max(
        abs(ours[0] - truth[0]) / truth[0],
        *(_apart(g, truth[1][n]) for n, g in ours[1].items()),
    )


def _apart(ours: Tensor, truth: Tensor) -> float:
    return float((ours - truth).norm() / truth.norm()) if truth.any() else float(ours.norm())
