"""Trial of a model on packed rows: whether it is causal and can be run on them, with the weights
that it has.

What an architecture says of itself is not enough: a layer may mix tokens by a convolution or a
recurrence, or make a mask that no window describes. So a few tokens go through the model, packed
and apart, and the answers must agree. And no token may see those behind it, packed or padded: a
loss would then be of what the model has read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ft_service.errors import SpecError
from workers.layers.noise import use_noise
from workers.layers.segment_attention import NAME, described_mask
from workers.layers.segments import CURRENT
from workers.model.attention import own_attention, why_padded
from workers.model.multimodal import causal_model, text_decoder
from workers.patches.mask_interface import masks_made_by
from workers.ranks.sharding import reshard

LENGTHS = (5, 9, 7)
"""Tokens of the samples that are tried.

A convolution of four taps reaches over the end of one into the next.
"""
BEGINNING = 2
"""Tokens of a sample whose answers nothing behind them may change."""

SAME = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Largest difference between a token's logits, packed and apart, as a share of their spread:
rounding in deep models, or FP8 products; a token at a wrong place, or that sees others, differs by
more.
"""
UNMOVED = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""The same of samples that stand behind another one when that one's tokens change: nothing, but for
the order of sums where tokens are sorted by expert.
"""


class NotCausalError(SpecError):
    """A model whose tokens see later tokens."""


class NotRunnableError(SpecError):
    """A model whose forward fails on tokens alone."""


def settle_attention(
    model: nn.Module,
    device: torch.device,
    compute_dtype: torch.dtype,
    agreed: Callable[[bool], bool] = bool,
) -> str | None:
    """Try packed rows. Returns None if they may be used; else the model is given the architecture's
    own attention, for padded samples, and the answer says why.

    `agreed` returns whether any rank has passed it True. Raises NotCausalError for a model whose
    tokens see later tokens, and NotRunnableError for one that fails on padded samples.
    """
    base = text_decoder(causal_model(model))
    training = model.training
    model.eval()
    if base.config._attn_implementation == NAME:
        reason = _packing_fault(model, device, compute_dtype)
        if agreed(reason is not None):
            base.set_attn_implementation(own_attention(base))
            reason = reason or "another rank found that packed samples see each other"
    else:
        reason = why_padded(base.config, type(base)) or "the model was built with another attention"
    if reason is not None and agreed(_sees_behind(model, device, compute_dtype)):
        raise NotCausalError(
            f"The base is a {base.config.model_type} model whose tokens see those behind them: a "
            "change at the end of a text "
            "changes its answers to the beginning. Such a model is no causal language model and "
            "cannot be tuned here.",
            param="model",
        )
    model.train(training)
    return reason


def trial_samples(model: nn.Module) -> list[Tensor]:
    """The samples' tokens, int64 [length] each, on the CPU; the same at every call."""
    words = text_decoder(causal_model(model)).config.vocab_size
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, words, (length,), generator=generator) for length in LENGTHS]


def logits_apart(model: nn.Module, samples: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The logits of each sample, fp32 [tokens, words], computed as padded rows."""
    use_noise(model, None, None)
    CURRENT.use(None, lengths=tuple(map(len, samples)), device=device)
    logits = model(
        input_ids=pad_sequence(list(samples), batch_first=True).to(device)
    ).logits.float()
    return [row[: len(own)] for row, own in zip(logits, samples, strict=True)]


def logits_packed(
    model: nn.Module, samples: Sequence[Tensor], device: torch.device
) -> list[Tensor]:
    """The same, computed as one packed row."""
    lengths = [len(own) for own in samples]
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0).to(device)
    use_noise(model, None, None)
    CURRENT.use(starts, starts.to(device), max(lengths))
    logits = model(
        input_ids=torch.cat(list(samples)).unsqueeze(0).to(device), position_ids=positions
    ).logits.float()
    return list(logits[0].split(lengths))


@torch.no_grad()
def _packing_fault(
    model: nn.Module, device: torch.device, compute_dtype: torch.dtype
) -> str | None:
    samples = trial_samples(model)
    other = [_other_end(model, samples[0]), *samples[1:]]
    with uncompiled():
        try:
            with _masks_told() as faults:
                apart = logits_apart(model, samples, device)
            together = logits_packed(model, samples, device)
            beside_other = logits_packed(model, other, device)
        except (
            RuntimeError,
            LookupError,
            AttributeError,
            TypeError,
            ValueError,
            AssertionError,
        ) as error:
            return (
                f"the attention of its layers cannot be replaced ({type(error).__name__}: {error})"
            )
        finally:
            reshard(model)
    if faults:
        return faults[0]
    if difference(apart, together) > SAME[compute_dtype]:
        return "its packed samples are not computed as they are apart"
    if difference(together[1:], beside_other[1:]) > UNMOVED[compute_dtype]:
        return "its layers carry something from one packed sample into the next"
    if (
        difference([together[0][:BEGINNING]], [beside_other[0][:BEGINNING]])
        > UNMOVED[compute_dtype]
    ):
        return "its packed samples' tokens see those behind them"
    return None


@torch.no_grad()
def _sees_behind(model: nn.Module, device: torch.device, compute_dtype: torch.dtype) -> bool:
    """Whether a change of a sample's end changes the answers to its beginning."""
    ids = trial_samples(model)[0]
    try:
        with uncompiled():
            one, other = (
                logits_apart(model, [own], device)[0][:BEGINNING]
                for own in (ids, _other_end(model, ids))
            )
    except (
        NotImplementedError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        AssertionError,
    ) as error:
        kind = text_decoder(causal_model(model)).config.model_type
        raise NotRunnableError(
            f"The base is a {kind} model that cannot be run on text alone ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}): its forward needs more than tokens, which "
            "training does not have. Use a "
            "base that reads text alone.",
            param="model",
        ) from error
    reshard(model)
    return difference([one], [other]) > UNMOVED[compute_dtype]


def _other_end(model: nn.Module, ids: Tensor) -> Tensor:
    """The same tokens, but for all behind the beginning."""
    words = text_decoder(causal_model(model)).config.vocab_size
    return torch.cat([ids[:BEGINNING], 1 + ids[BEGINNING:] % (words - 1)])


def uncompiled() -> AbstractContextManager[object]:
    """Compiled layers run as they are meanwhile: what is tried here is not worth compiling.

    Does not load the compiler.
    """
    return (
        torch.compiler.set_stance("force_eager")
        if "torch._dynamo" in sys.modules
        else nullcontext()
    )


@contextmanager
def _masks_told() -> Iterator[list[str]]:
    """While it is entered, the model makes masks that say what they are, and its attention holds
    them against its windows.
    """
    faults: list[str] = []
    CURRENT.faults = faults
    try:
        with masks_made_by(described_mask, NAME):
            yield faults
    finally:
        CURRENT.faults = None


def difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest difference of a token's logits, as a share of their spread."""
    a = torch.cat(list(ours))
    b = torch.cat(list(theirs))
    spread = (b - b.mean(dim=-1, keepdim=True)).norm(dim=-1)
    return float(((a - b).norm(dim=-1) / spread.clamp(min=torch.finfo(torch.float32).tiny)).max())
