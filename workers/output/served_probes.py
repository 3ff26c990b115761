"""The trainer's own log-probabilities of a few samples, to compare a served adapter with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from ft_service.data.tokens.sample import Tokens
from ft_service.rundir.evaluations import MOST_PROBES, MOST_TOKENS, Probe
from workers.images.features import CURRENT_IMAGES
from workers.layers.experts import FrozenExperts
from workers.layers.segments import CURRENT
from workers.model.whole_modules import original_modules
from workers.ranks.sharding import reshard


def measure(model: PeftModel, samples: Sequence[Tokens], device: torch.device) -> list[Probe]:
    """Probes on the first samples, by the model as it is.

    Called by all ranks together, who all get the same.
    """
    model.eval()
    probes = []
    with (
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),
    ):  # for a handful of short sequences
        for sample in samples[:MOST_PROBES]:
            ids = torch.as_tensor(sample.ids[:MOST_TOKENS], dtype=torch.int64, device=device)
            # A picture's tokens are none that a server could be asked about: pictured_probe.py.
            if len(ids) < 2 or any(use.begin < len(ids) for use in sample.images):
                continue
            tuned = _logprobs(model, ids)
            with without_adapter(model):
                base = _logprobs(model, ids)
            probes.append(Probe(tokens=ids.tolist(), tuned=tuned, base=base))
    reshard(model)
    return finite(probes)


def finite(probes: Sequence[Probe]) -> list[Probe]:
    """Those whose log-probabilities are numbers: others prove nothing, and JSON has none for
    them.
    """
    return [own for own in probes if all(map(math.isfinite, (*own.tuned, *own.base)))]


def _logprobs(model: PeftModel, ids: Tensor) -> list[float]:
    CURRENT.use(None)
    logs = model(input_ids=ids[None]).logits[0, :-1].float().log_softmax(dim=-1)
    return [round(value, 5) for value in logs.gather(1, ids[1:, None])[:, 0].tolist()]


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Scaled by zero, and in place: what is gathered together stays the same.

    What is trained whole has the base's values.
    """
    tower = CURRENT_IMAGES.trained
    parts = [*model.modules(), *(() if tower is None else tower.model.modules())]
    scalings = [part.scaling for part in parts if isinstance(part, LoraLayer)]
    experts = [module for module in model.modules() if isinstance(module, FrozenExperts)]
    stacks: list[Any] = [adapter for module in experts for adapter in module.adapters.values()]
    before = [dict(scaling) for scaling in scalings]
    of_stacks = [adapter.scale for adapter in stacks]
    for scaling in scalings:
        scaling.update(dict.fromkeys(scaling, 0.0))
    for adapter in stacks:
        adapter.scale = 0.0
    try:
        with original_modules(model):
            yield
    finally:
        for scaling, kept in zip(scalings, before, strict=True):
            scaling.update(kept)
        for adapter, scale in zip(stacks, of_stacks, strict=True):
            adapter.scale = scale
