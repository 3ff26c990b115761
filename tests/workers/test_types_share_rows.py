"""Every type that can be tuned, tiny: rows that two and four ranks share train as whole rows do, and
what cannot be shared is refused for a reason that its class gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ft_service.errors import SpecError
from ft_service.spec import JobSpec
from tests.support.ranks import run_on_ranks
from tests.support.training.causal_types import ROWS, TYPES, save_type
from tests.support.training.checks import exact_spec
from tests.support.training.parity import CPU, constructed, relative_error
from tests.support.training.shared_rows import of_lengths, step
from tests.support.training.tested_types import TESTED
from workers.data.batches import make_batch
from workers.data.micro_batches import MicroBatchLimits
from workers.model.attention import why_whole
from workers.model.multimodal import causal_model, text_decoder
from workers.model.packed_trial import settle_attention
from workers.ranks.context_group import ContextGroup
from workers.training.objective import RankShare, Supervised
from workers.training.shared_rows_trial import refuse_if_unlike
from workers.training.step import logits_of

KINDS = sorted(TESTED & set(TYPES))
TOGETHER = 12
CHUNKS = [KINDS[first : first + TOGETHER] for first in range(0, len(KINDS), TOGETHER)]
BOUND = 1e-6
"""Relative: of each loss, and of all gradients of a model together."""
PADDED = {"minimax"}
"""Types whose samples are padded, with the attention of their class: the plan counts no mask of
length by length, and they make none.
"""
SAMPLES = of_lengths(21, 1, 13, 2, 17, 30, 5, 3)


def found_of(
    rank: int, world: int, specs: Mapping[str, JobSpec]
) -> dict[str, dict[int, float | str]]:
    """Of each type, by the number of ranks that share its rows: the largest error of loss and
    gradients, or why they cannot.
    """
    groups = {ranks: ContextGroup.made(ranks) for ranks in (2, 4)}
    found: dict[str, dict[int, float | str]] = {}
    for kind, spec in specs.items():
        model = constructed(spec, world).peft_model
        decoder = text_decoder(causal_model(model))
        padded = settle_attention(model, CPU, torch.float32)
        assert (padded is not None) == (kind in PADDED), (kind, padded)
        told = padded or why_whole(decoder.config, type(decoder))
        own: dict[int, float | str] = {}
        alone = None
        for ranks, context in groups.items():
            try:
                refuse_if_unlike(model, context, padded, CPU, torch.float32)
            except SpecError as error:
                own[ranks] = f"{'its class' if told else 'tried'}: {error}"
                continue
            share = partial(RankShare, rank, world, CPU)
            of_step = partial(step, model, Supervised(SAMPLES), random=False)
            alone = alone or of_step(share(MicroBatchLimits(64, None, packed=True), None))
            shared = of_step(share(MicroBatchLimits(64 // ranks, None, packed=True), context))
            gradients = (
                torch.cat([grads[key].flatten() for key in alone[2]])
                for grads in (shared[2], alone[2])
            )
            own[ranks] = max(
                relative_error(shared[0], alone[0]),
                relative_error(shared[1], alone[1]),
                relative_error(*gradients),
            )
        found[kind] = own
    return found


def masks_of(rank: int, world: int, specs: Mapping[str, JobSpec]) -> dict[str, list[Any]]:
    """Of each type, the masks that a forward of padded rows gives to attention."""
    found: dict[str, list[Any]] = {}
    attend = torch.nn.functional.scaled_dot_product_attention
    for kind, spec in specs.items():
        model = constructed(spec, world).peft_model
        settle_attention(model, CPU, torch.float32)
        found[kind] = []

        def seen(*args: Any, own: list[Any] = found[kind], **options: Any) -> torch.Tensor:
            own.append((options.get("attn_mask"), options.get("is_causal")))
            return attend(*args, **options)

        with patch.object(torch.nn.functional, "scaled_dot_product_attention", seen):
            logits_of(model, make_batch(SAMPLES, CPU, packed=False))
    return found


def test_types_whose_samples_are_padded_make_no_mask(tmp_path: Path) -> None:
    assert all(save_type(kind, tmp_path / kind, ROWS) for kind in PADDED)
    specs = {kind: exact_spec(tmp_path / kind, 1) for kind in PADDED}
    found = run_on_ranks(masks_of, 1, specs)[0]
    assert found.keys() == PADDED
    for kind, seen in found.items():
        assert set(seen) == {(None, True)}, kind


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kinds", CHUNKS, ids=lambda kinds: "-".join(kinds))
def test_ranks_that_share_rows_train_as_ranks_with_whole_rows(
    kinds: Sequence[str], tmp_path: Path
) -> None:
    saved = [kind for kind in kinds if save_type(kind, tmp_path / kind, ROWS)]
    specs = {kind: exact_spec(tmp_path / kind, 4) for kind in saved}
    found = run_on_ranks(found_of, 4, specs, timeout=1700)[0]
    wrong = {
        (kind, ranks): what
        for kind, own in found.items()
        for ranks, what in own.items()
        if not (what.startswith("its class") if isinstance(what, str) else what <= BOUND)
    }
    assert wrong == {}
