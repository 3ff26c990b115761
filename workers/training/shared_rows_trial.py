"""Trial of a model on a row that ranks share, with the weights that it has: what each rank computes
of its part is what it computes of it in the whole row.

What an architecture says of itself is not enough, as for packed rows (workers/model/packed_trial):
a layer may look at its neighbours, or count tokens by itself.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ft_service.data.tokens.sample import Tokens
from ft_service.plan.context_parallel import IMAGES, not_shareable
from workers.data.batches import Batch, make_batch
from workers.model.attention import why_whole
from workers.model.multimodal import causal_model, text_decoder
from workers.model.packed_trial import SAME, difference, trial_samples, uncompiled
from workers.ranks.context_group import ContextGroup
from workers.ranks.sharding import reshard
from workers.training.step import logits_of


def refuse_images_in_shared_rows(context: ContextGroup | None, *, pictured: bool) -> None:
    """Raise SpecError for samples with pictures where ranks share rows."""
    if context is not None and pictured:
        raise not_shareable(context.ranks, IMAGES)


def refuse_if_unlike(
    model: nn.Module,
    context: ContextGroup | None,
    padded_because: str | None,
    device: torch.device,
    compute_dtype: torch.dtype,
) -> None:
    """Raise SpecError if the ranks of a group cannot share rows of the loaded model. Called by all
    ranks together, before training.

    `context`: None: they share none. `padded_because`: as `settle_attention` returns it: another
    attention than ours exchanges nothing.
    """
    if context is None:
        return
    decoder = text_decoder(causal_model(model))
    why = padded_because or why_whole(decoder.config, type(decoder))
    why = why or _fault(model, context, device, compute_dtype)
    if why is not None:
        raise not_shareable(context.ranks, why)


def _fault(
    model: nn.Module, context: ContextGroup, device: torch.device, compute_dtype: torch.dtype
) -> str | None:
    """What is wrong with rows that ranks share, the same on all ranks; None: nothing."""
    ids = [own.numpy() for own in trial_samples(model)]
    samples = [Tokens(own.astype("int32"), own > 0) for own in ids]
    training = model.training
    model.eval()
    found: dict[bool, float] = {}
    try:
        with torch.no_grad(), uncompiled():
            for packed in (True, False):
                whole = make_batch(samples, device, packed=packed)
                own = whole.part_of(context)
                found[packed] = _unlike(logits_of(model, whole), logits_of(model, own), own)
    except NotImplementedError as error:  # of the attention, on all ranks alike
        return str(error)
    finally:
        reshard(model)
        model.train(training)
    worst = torch.tensor(max(found.values()), device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    if float(worst) <= SAME[compute_dtype]:
        return None
    return "its layers compute something else of a part than of the whole sample"


def _unlike(whole: Tensor, part: Tensor, own: Batch) -> float:
    """The largest difference of a token's logits in its part of the row [rows, length, words] from
    those in the whole row, padding apart.
    """
    shared = own.shared
    assert shared is not None
    first = shared.part.first
    expected = whole[:, first : first + shared.part.length].float()
    given = part[:, : expected.shape[1]].float()
    pairs = [
        (given[row, :seen], expected[row, :seen])
        for row, tokens in enumerate(own.rows or (shared.length,))
        if (seen := max(0, min(tokens - first, shared.part.length)))
    ]
    if not pairs:
        return 0.0
    return difference([ours for ours, _ in pairs], [theirs for _, theirs in pairs])
