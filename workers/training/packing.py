"""Whether a model can be trained, and on packed rows: by its architecture, and then by trying it with its own weights.

What an architecture says of itself is not enough: a layer may mix tokens by a convolution or a recurrence, or make a mask that
no window describes. So before training a few tokens go through the model, packed and apart, and the answers must agree. And no
token may see those behind it, packed or padded: a loss would then be of what the model has read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionMaskInterface

from ft_service.data.tokens.sample import Tokens
from ft_service.errors import SpecError
from ft_service.spec import JobSpec
from workers.data.batches import Batch, collate, pack
from workers.data.sharing import Limits, attention_share
from workers.layers.by_sample.whole_attention import is_by_sample
from workers.layers.segment_attention import NAME, described_mask
from workers.layers.segments import CURRENT
from workers.model.attention import own_attention
from workers.model.wrapped import text_decoder
from workers.ranks.runtime import COMPUTE_DTYPE
from workers.ranks.sharding import reshard
from workers.training.step import causal_model, logits_of

_LENGTHS = (5, 9, 7)
"""Tokens of the samples that are tried. A convolution of four taps reaches over the end of one into the next."""
_BEGINNING = 2
"""Tokens of a sample whose answers nothing behind them may change."""

_SAME = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Largest difference between a token's logits, packed and apart, as a share of their spread: rounding in deep models, or FP8
products; a token at a wrong place, or that sees others, differs by more."""
_UNMOVED = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""The same of samples that stand behind another one when that one's tokens change: nothing, but for the order of sums where
tokens are sorted by expert."""


TOKENS = 2048
"""Of a micro-batch, where nothing has chosen."""


def settle_limits(model: nn.Module, spec: JobSpec, device: torch.device, warn: Callable[[str], None]) -> Limits:
    """What a micro-batch of the loaded model may hold. Called by all ranks together, before training.

    `warn`: called with a sentence if samples cannot be packed although the spec asks for it.
    """
    reason = settle_attention(model, device, COMPUTE_DTYPE[spec.precision.compute])
    options = spec.training
    if options.packing and reason is not None:
        warn(f"training.packing: samples are padded, in micro-batches of like length, since {reason}.")
    return Limits(
        tokens=TOKENS if options.tokens_per_micro_batch == "auto" else options.tokens_per_micro_batch,
        samples=options.per_device_train_batch_size,
        packed=options.packing and reason is None,
        per_token=attention_share(getattr(text_decoder(causal_model(model)).config, "hidden_size", 0)),
    )


def settle_attention(model: nn.Module, device: torch.device, compute_dtype: torch.dtype) -> str | None:
    """Try packed rows. Returns None if they may be used; else the model has the architecture's own attention, for padded
    samples, and the answer says why. Called by all ranks together, before training. Raises SpecError for a model whose tokens
    see those behind them.
    """
    base = text_decoder(causal_model(model))
    training = model.training
    model.eval()
    reason = f"{base.config.model_type} has layers other than attention that mix tokens"
    replaced = base.config._attn_implementation == NAME
    if replaced or is_by_sample(base):
        reason = _tried(model, device, compute_dtype)
        if _anywhere(reason is not None, device):
            if replaced:
                base.set_attn_implementation(own_attention(base))
            reason = reason or "another rank found that packed samples see each other"
    if reason is not None:
        _refuse_not_causal(model, device, compute_dtype)
    model.train(training)
    return reason


@torch.no_grad()
def _tried(model: nn.Module, device: torch.device, compute_dtype: torch.dtype) -> str | None:
    words = text_decoder(causal_model(model)).config.vocab_size
    generator = np.random.default_rng(0)
    samples = [_sample(generator.integers(1, words, length)) for length in _LENGTHS]
    other = [_sample(_other_end(samples[0].ids, words)), *samples[1:]]
    with _uncompiled():
        try:
            with _masks_told() as faults:
                apart = _answers(model, collate(samples, device))
            together = _answers(model, pack(samples, device))
            beside_other = _answers(model, pack(other, device))
        except (RuntimeError, LookupError, AttributeError, TypeError, ValueError, AssertionError) as error:
            return f"the attention of its layers cannot be replaced ({type(error).__name__}: {error})"
        finally:
            reshard(model)
    if faults:
        return faults[0]
    if _difference(apart, together, slice(0, None)) > _SAME[compute_dtype]:
        return "its packed samples are not computed as they are apart"
    if _difference(together, beside_other, slice(1, None)) > _UNMOVED[compute_dtype]:
        return "its layers carry something from one packed sample into the next"
    if _difference([together[0][:_BEGINNING]], [beside_other[0][:_BEGINNING]], slice(0, None)) > _UNMOVED[compute_dtype]:
        return "its packed samples' tokens see those behind them"
    return None


@torch.no_grad()
def _refuse_not_causal(model: nn.Module, device: torch.device, compute_dtype: torch.dtype) -> None:
    """Raises SpecError, on all ranks alike, if a change of a sample's end changes the answers to its beginning."""
    words = text_decoder(causal_model(model)).config.vocab_size
    ids = np.random.default_rng(0).integers(1, words, _LENGTHS[0])
    with _uncompiled():
        one, other = (logits_of(model, collate([_sample(own)], device)).float() for own in (ids, _other_end(ids, words)))
    reshard(model)
    moved = _difference([one[0, :_BEGINNING]], [other[0, :_BEGINNING]], slice(0, None))
    if _anywhere(moved > _UNMOVED[compute_dtype], device):
        kind = text_decoder(causal_model(model)).config.model_type
        raise SpecError(
            f"The base is a {kind} model whose tokens see those behind them: a change at the end of a text changes its answers "
            "to the beginning. Such a model is no causal language model and cannot be tuned here.",
            param="model",
        )


def _other_end(ids: np.ndarray, words: int) -> np.ndarray:
    """The same tokens, but for all behind the beginning."""
    return np.concatenate([ids[:_BEGINNING], 1 + ids[_BEGINNING:] % (words - 1)])


def _uncompiled() -> AbstractContextManager[object]:
    """Compiled layers run as they are meanwhile: what is tried here is not worth compiling. Does not load the compiler."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def _masks_told() -> Iterator[list[str]]:
    """While it is entered, the model makes masks that say what they are, and its attention holds them against its windows."""
    faults: list[str] = []
    AttentionMaskInterface.register(NAME, described_mask)
    CURRENT.faults = faults
    try:
        yield faults
    finally:
        CURRENT.faults = None
        AttentionMaskInterface._global_mapping.pop(NAME)


def _sample(ids: np.ndarray) -> Tokens:
    return Tokens(ids.astype(np.int32), np.zeros(len(ids), dtype=bool))


def _answers(model: nn.Module, batch: Batch) -> list[Tensor]:
    """The logits of each sample, [tokens, words], fp32."""
    logits = logits_of(model, batch).float()
    if batch.packing is None:
        return [row[:length] for row, length in zip(logits, _LENGTHS, strict=True)]
    return list(logits[0].split(_LENGTHS))


def _difference(ours: list[Tensor], theirs: list[Tensor], which: slice) -> float:
    """The largest difference of a token's logits, as a share of their spread."""
    a, b = torch.cat(ours[which]), torch.cat(theirs[which])
    spread = (b - b.mean(dim=-1, keepdim=True)).norm(dim=-1)
    return float(((a - b).norm(dim=-1) / spread.clamp(min=torch.finfo(torch.float32).tiny)).max())


def _anywhere(here: bool, device: torch.device) -> bool:
    flag = torch.tensor([here], dtype=torch.uint8, device=device)
    if dist.is_initialized():
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())
