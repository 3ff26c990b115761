"""What is found of a model on a row that ranks share, on a model that one can spoil."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ft_service.errors import SpecError
from tests.support.training.looked_up import CHANCES, LookedUp, sample
from workers.data.batches import make_batch
from workers.layers.segments import CURRENT
from workers.ranks.context_group import ContextGroup
from workers.training import shared_rows_trial
from workers.training.shared_rows_trial import (
    refuse_if_unlike,
    refuse_images_in_shared_rows,
)

CPU = torch.device("cpu")
NO_GROUP: Any = None
SECOND = ContextGroup(1, 2, NO_GROUP)


@pytest.mark.parametrize(
    ("context", "pictured", "refused"),
    [(None, True, False), (SECOND, False, False), (SECOND, True, True)],
)
def test_pictures_do_not_stand_in_shared_rows(
    context: ContextGroup | None, pictured: bool, refused: bool
) -> None:
    if not refused:
        refuse_images_in_shared_rows(context, pictured=pictured)
        return
    with pytest.raises(SpecError, match=r"2 ranks cannot share a sample .* images"):
        refuse_images_in_shared_rows(context, pictured=pictured)


@pytest.mark.parametrize(
    ("context", "padded", "why", "fault", "says"),
    [
        (None, "padded", "why", "fault", None),
        (SECOND, None, None, None, None),
        (SECOND, "it pads", "why", "fault", "since it pads"),
        (SECOND, None, "it looks back", "fault", "since it looks back"),
        (SECOND, None, None, "it differs", "since it differs"),
    ],
)
def test_the_first_reason_is_told(
    context: ContextGroup | None,
    padded: str | None,
    why: str | None,
    fault: str | None,
    says: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_rows_trial, "why_whole", lambda config, kind: why)
    monkeypatch.setattr(shared_rows_trial, "_fault", lambda *given: fault)
    if says is None:
        refuse_if_unlike(LookedUp(), context, padded, CPU, torch.float32)
        return
    with pytest.raises(SpecError, match=says) as refused:
        refuse_if_unlike(LookedUp(), context, padded, CPU, torch.float32)
    assert refused.value.param == "distributed.context_parallel"


class Spoiled(LookedUp):
    """Where it is given a part, logits are off by so much."""

    def __init__(self, by: float, *, packed_only: bool = False) -> None:
        super().__init__(CHANCES.repeat(3, 1))
        self.config.vocab_size = len(CHANCES)
        self.by = by
        self.packed_only = packed_only

    def forward(self, input_ids: Any, **more: Any) -> Any:
        assert not torch.is_grad_enabled()
        made = super().forward(input_ids, **more)
        if CURRENT.part is not None and (CURRENT.packed or not self.packed_only):
            if self.by < 0:
                raise NotImplementedError("its attention is whole")
            made.logits = made.logits + self.by * torch.arange(4.0) * made.logits.std()
        return made


@pytest.mark.parametrize(
    ("model", "elsewhere", "says"),
    [
        (Spoiled(0.0), 0.0, None),
        (Spoiled(0.0), 0.5, "something else of a part"),
        (Spoiled(0.5), 0.0, "something else of a part"),
        (Spoiled(0.5, packed_only=True), 0.0, "something else of a part"),
        (Spoiled(-1.0), 0.0, "its attention is whole"),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_what_any_rank_finds_in_any_form_of_rows_counts(
    model: Spoiled,
    elsewhere: float,
    says: str | None,
    training: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    freed: list[Any] = []

    def reduce(worst: torch.Tensor, op: Any) -> None:
        assert op == shared_rows_trial.dist.ReduceOp.MAX
        worst.clamp_(min=elsewhere)

    monkeypatch.setattr(shared_rows_trial.dist, "all_reduce", reduce)
    monkeypatch.setattr(shared_rows_trial, "reshard", freed.append)
    model.given.clear()
    model.train(training)
    found = shared_rows_trial._fault(model, SECOND, CPU, torch.float32)
    assert (says in (found or "")) if says else found is None
    assert (model.training, freed) == (training, [model])
    assert not any(given["training"] for given in model.given)


@pytest.mark.parametrize(
    ("rank", "packed", "place", "unlike"),
    [
        (0, False, (0, 0), True),
        (0, False, (0, 2), True),
        (0, False, (1, 1), True),
        (0, False, (1, 2), False),
        (1, False, (0, 0), True),
        (1, False, (0, 1), True),
        (1, False, (0, 2), False),
        (1, False, (1, 0), False),
        (0, True, (0, 3), True),
        (1, True, (0, 2), True),
        (1, True, (0, 3), False),
    ],
)
def test_tokens_of_a_part_are_compared_and_its_padding_is_not(
    rank: int, packed: bool, place: tuple[int, int], unlike: bool
) -> None:
    """Of samples of 5 and 2 tokens: parts of 3 tokens a row, or packed of 4."""
    batch = make_batch([sample([0] * 5, 1), sample([0] * 2, 1)], CPU, packed=packed)
    own = batch.part_of(ContextGroup(rank, 2, NO_GROUP))
    assert own.shared is not None
    first, length = own.shared.part.first, own.shared.part.length
    assert length == (4 if packed else 3)
    whole = torch.randn(*batch.ids.shape, 4, generator=torch.Generator().manual_seed(1))
    part = torch.zeros(len(whole), length, 4)
    part[:, : whole.shape[1] - first] = whole[:, first : first + length]
    assert shared_rows_trial._unlike(whole, part, own) == 0
    part[place] += torch.arange(4) * 5.0
    assert (shared_rows_trial._unlike(whole, part, own) > 0.1) is unlike


def test_a_part_of_padding_alone_is_like_the_row() -> None:
    batch = make_batch([sample([0] * 2, 1)], CPU, packed=False)
    own = batch.part_of(ContextGroup(3, 4, NO_GROUP))
    assert shared_rows_trial._unlike(torch.zeros(1, 2, 4), torch.ones(1, 1, 4), own) == 0
