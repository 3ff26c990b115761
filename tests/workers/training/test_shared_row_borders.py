"""Packed rows whose samples cross the borders of ranks' parts at every place: parts are the whole row
cut, and train as it does; what is wrong in one way shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ft_service.data.tokens.sample import Tokens
from ft_service.spec import JobSpec
from tests.support.ranks import run_on_ranks
from tests.support.training.models import save_tiny, spec_for
from tests.support.training.parity import CPU, constructed, relative_error
from tests.support.training.shared_rows import of_lengths
from workers.base.load import adapters
from workers.data.batches import Batch, make_batch
from workers.data.row_parts import SharedRows
from workers.layers import exchange
from workers.layers.segments import CURRENT
from workers.ranks.context_group import ContextGroup
from workers.ranks.sharding import Gradients
from workers.training.step import forward_backward

BOUND = 2e-6
"""Relative: of loss and gradients. Those of a row of five tokens are rounded by 1.1 to 1.5e-6 of
them where layers have recurrences or convolutions (LFM2: of longer rows by at most 5e-7).
"""
SEEN = 1e-3
"""What is wrong differs at least by so much."""
ROW = 13
"""Tokens of a row: parts are padded on two ranks, and on four."""
CUTS = [(cut, ROW - cut) for cut in range(1, ROW)]
PACKINGS = [
    *CUTS,
    *((cut, 1, ROW - 1 - cut) for cut in range(1, ROW - 1)),
    *((1,) * cut + (ROW - cut,) for cut in range(2, ROW - 4)),
    (ROW,),
    (5,),
]
"""A border between samples at every place, with one-token samples on and beside it."""
FEW = [(3, 10), (4, 1, 8), (1, 1, 1, 4, 6), (9, 4), (5,)]


def batch_of(packing: Sequence[int]) -> Batch:
    samples: list[Tokens] = list(of_lengths(*packing))
    return make_batch(samples, CPU, [100 + number for number in range(len(packing))])


def alone(rank: int, ranks: int) -> ContextGroup:
    group: Any = None
    return ContextGroup(rank, ranks, group)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_parts_are_the_row_cut(ranks: int) -> None:
    """Tokens, their positions and keys one part behind the other; each target once, behind its own
    token; segments those of the whole row, padding apart.
    """
    for packing in PACKINGS:
        whole = batch_of(packing)
        parts = [whole.part_of(alone(rank, ranks)) for rank in range(ranks)]
        assert len({part.ids.shape for part in parts}) == 1
        length = int(parts[0].ids.shape[1])
        for name in ("ids", "positions", "keys"):
            joined = torch.cat([getattr(part, name) for part in parts], dim=1)
            assert torch.equal(joined[:, :ROW][:, : whole.row_length], getattr(whole, name)), name
        found = [
            (place + rank * length, target)
            for rank, part in enumerate(parts)
            for place, target in zip(part.places.tolist(), part.targets.tolist(), strict=True)
        ]
        assert found == list(zip(whole.places.tolist(), whole.targets.tolist(), strict=True))
        packings = [part.packing for part in parts]
        for own in packings:
            assert own is not None
            assert whole.packing is not None
            given = own.starts.tolist()
            assert given[: len(packing) + 1] == whole.packing.starts.tolist()
            assert given[-1] == ranks * length


# On ranks
# ------------------------------------------------------------------------------


def error_of(model: nn.Module, packing: Sequence[int], world: int, context: ContextGroup) -> float:
    """Of a step of one row that `context` shares, against the same row whole on every rank."""
    whole = batch_of(packing)
    targets = max(1, len(whole.targets))
    found: list[tuple[Tensor, Tensor]] = []
    for batch, groups in ((whole, world), (whole.part_of(context), world // context.ranks)):
        sums = forward_backward(
            model, [batch], groups * targets, world, gradients=Gradients(model, world)
        )
        own = dict(adapters(model))
        grads = [own[name].grad for name in sorted(own)]
        found.append(
            (sums / groups, torch.cat([grad.flatten() for grad in grads if grad is not None]))
        )
        for parameter in own.values():
            parameter.grad = None
    (expected, by_whole), (given, by_part) = found
    return max(relative_error(given, expected), relative_error(by_part, by_whole))


@contextmanager
def changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


@contextmanager
def positions_not_shifted() -> Iterator[None]:
    def from_zero(own: SharedRows, given: Tensor | None, rows: int, device: Any) -> Tensor:
        return torch.arange(own.part.length, device=device).expand(rows, -1)

    with changed(SharedRows, "positions", from_zero):
        yield


@contextmanager
def samples_that_see_each_other() -> Iterator[None]:
    use = CURRENT.use

    def as_one(starts: Tensor | None, *args: Any, **kwargs: Any) -> None:
        if starts is None or kwargs["part"] is None:
            use(starts, *args, **kwargs)
            return
        whole = starts[[0, -1]]
        use(whole, whole, int(whole[-1]), **{k: v for k, v in kwargs.items() if k != "longest"})

    with changed(CURRENT, "use", as_one):
        yield


@contextmanager
def stale_keys_in_backward() -> Iterator[None]:
    fewer = exchange.with_fewer_heads
    all_heads = exchange.with_all_heads
    held: list[Tensor] = []

    def holding(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = fewer(*args)
        held.append(key)
        return query, key, value

    def overwriting(*args: Any) -> Tensor:
        key = held.pop().data
        key.copy_(key.flip(2).clone())
        return all_heads(*args)

    with (
        changed(exchange, "with_fewer_heads", holding),
        changed(exchange, "with_all_heads", overwriting),
    ):
        yield


@contextmanager
def keys_summed_twice() -> Iterator[None]:
    fewer = exchange.with_fewer_heads

    def twice(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = fewer(*args)
        if key.requires_grad:
            key.register_hook(lambda grad: 2 * grad)
        return query, key, value

    with changed(exchange, "with_fewer_heads", twice):
        yield


@contextmanager
def targets_taken_twice() -> Iterator[None]:
    part_of = Batch.part_of

    def doubled(own: Batch, context: ContextGroup) -> Batch:
        part = part_of(own, context)
        places, targets = (torch.cat([each, each[:1]]) for each in (part.places, part.targets))
        object.__setattr__(part, "places", places)
        object.__setattr__(part, "targets", targets)
        return part

    with changed(Batch, "part_of", doubled):
        yield


BREAKS: dict[str, Callable[[], Any]] = {
    own.__name__: own
    for own in (
        positions_not_shifted,
        samples_that_see_each_other,
        stale_keys_in_backward,
        keys_summed_twice,
        targets_taken_twice,
    )
}


def errors(
    rank: int,
    world: int,
    specs: Sequence[JobSpec],
    packings: Sequence[tuple[int, ...]],
    breaks: Sequence[str],
) -> tuple[dict[str, float], dict[str, float]]:
    """The largest error of each number of ranks, and the smallest with each of these breaks."""
    contexts = {ranks: ContextGroup.made(ranks) for ranks in (2, 4) if ranks <= world}
    found: dict[str, float] = {}
    broken: dict[str, float] = {}
    for spec in specs:
        model = constructed(spec, world).peft_model
        for ranks, context in contexts.items():
            assert context is not None
            kind = Path(spec.model.path).name
            found[f"{kind} {ranks}"] = max(
                error_of(model, packing, world, context) for packing in packings
            )
            for name in breaks:
                with BREAKS[name]():
                    error = max(error_of(model, packing, world, context) for packing in FEW[:3])
                broken[name] = min(broken.get(name, np.inf), error)
    return found, broken


def specs_of(folder: Path, world: int, *families: tuple[str, dict[str, Any]]) -> list[JobSpec]:
    return [
        spec_for(
            save_tiny(family, folder / family, **config),
            ranks=world,
            precision={"default": "bf16", "compute": "fp32"},
            lora={"r": 3, "target_modules": "all-linear"},
            distributed={"replicate": -1, "activation_checkpointing": "none"},
        )
        for family, config in families
    ]


UNEVEN = {"num_attention_heads": 6, "num_key_value_heads": 2}
"""Three heads a group: even on two ranks, and with two of zeros on four."""


def test_rows_train_alike_wherever_samples_cross_and_breaks_show(tmp_path: Path) -> None:
    specs = specs_of(tmp_path, 4, ("mistral", UNEVEN))
    found, broken = run_on_ranks(errors, 4, specs, FEW, tuple(BREAKS))[0]
    assert {case: error for case, error in found.items() if not error <= BOUND} == {}
    assert set(broken) == set(BREAKS)
    assert {name: error for name, error in broken.items() if error < SEEN} == {}


FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("mistral", UNEVEN),
    ("gpt_oss", {}),
    ("gemma2", {"num_attention_heads": 3, "num_key_value_heads": 3}),
    ("llama4_text", {}),
    ("qwen3_next", {}),
    ("kimi_linear", {}),
    ("lfm2", {}),
]
"""Windows, sinks, soft caps, chunks of samples, recurrences and convolutions."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family[0])
def test_rows_do_at_every_place(family: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    specs = specs_of(tmp_path, 4, family)
    found, _ = run_on_ranks(errors, 4, specs, PACKINGS, (), timeout=1700)[0]
    assert {case: error for case, error in found.items() if not error <= BOUND} == {}
