"""Groups of modules by size."""

from __future__ import annotations

import torch
from torch import nn

from workers.layers.experts import GATED, FrozenExperts, adapt_experts
from workers.ranks.grouping import _choose


def test_no_group_by_size_lies_inside_what_runs_sample_by_sample() -> None:
    """Ranks run that as often as they have samples, and would gather as often."""
    attention = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    model = nn.Sequential(attention, nn.Linear(40, 40))
    assert groups(model) == ["0.0", "0.1", "1"]
    attention.by_sample = True  # pyright: ignore[reportArgumentType]
    assert groups(model) == ["0", "1"]


def groups(model: nn.Module) -> list[str]:
    chosen: set[int] = set()
    _choose(model, 1000, set(), chosen)
    return [name for name, module in model.named_modules() if id(module) in chosen]


def test_no_group_by_size_is_what_another_module_uses_without_calling_it() -> None:
    """FSDP2 gathers a group for its own forward alone: a scan would be given a convolution's
    shard.
    """
    mixer = nn.Module()
    router = nn.Module()
    router.weight = nn.Parameter(torch.empty(40, 40))
    for name, inner in {
        "conv1d": nn.Conv1d(40, 40, 4),
        "dt_proj": nn.Linear(40, 40),
        "experts": router,
    }.items():
        mixer.add_module(name, inner)
    mixer.in_proj = nn.Linear(40, 40)
    assert groups(nn.Sequential(mixer, nn.Embedding(40, 40))) == ["0", "0.in_proj", "1"]


def test_adapters_of_experts_are_in_one_group_by_size_with_them() -> None:
    stock = nn.Module()
    stock.act_fn = nn.SiLU()
    for projection, shape in zip(GATED, ((4, 80, 48), (4, 48, 40)), strict=True):
        setattr(stock, projection, nn.Parameter(torch.empty(shape, device="meta")))
    experts = FrozenExperts(stock, dict.fromkeys(GATED))
    adapt_experts(experts, dict.fromkeys(GATED, 8), dict.fromkeys(GATED, 1.0))
    assert groups(nn.Sequential(experts)) == ["0"]
