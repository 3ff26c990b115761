"""The loss, or the targets' log-probabilities, inside the output head: a few tokens' logits at a time, and only of tokens that
have a target.

The logits of all tokens and their gradient would be the largest tensors of a step, 12 bytes per token and word. But the head is
frozen: its backward has to give only the gradient of its input, and that is known as soon as a token's logits are. So a chunk's
logits are made, turned into that gradient and thrown away; only [targets, hidden] stays.

The same holds for log-probabilities of which the loss is taken outside: a token's changes nothing but its own, so that its
gradient is kept as it is for a loss that grows as it does, and scaled once the true one is known.

The model runs as ever, so that FSDP2's hooks see what they expect; the head returns the loss in place of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from ft_service.bases.logit_chunks import IN_CHUNKS, chunk_rows
from workers.model.wrapped import text_decoder

_CAP = "final_logit_softcapping"


@dataclass
class Losses:
    """Sums over all targets of a micro-batch; scalars."""

    loss: Tensor
    """Sum of cross entropies in nats, fp32."""
    correct: Tensor
    """Targets that were the most likely token, fp64."""


def works_in_chunks(model: PreTrainedModel) -> bool:
    """Whether the step that the model takes after its head is known, so that the loss can be taken by chunks."""
    return text_decoder(model).config.model_type in IN_CHUNKS


@contextmanager
def loss_in_head(model: PreTrainedModel, places: Tensor, targets: Tensor, scale: float) -> Iterator[list[Losses]]:
    """While it is entered, a forward's `logits` are the sum of cross entropies times `scale`, and the list takes the sums.

    `places`, `targets`: int64 [targets], as in a `Batch`.
    """
    counted: list[Losses] = []

    def forward(own: Tensor, head: Any, cap: float | None) -> Tensor:
        scaled, loss, correct = _HeadLoss.apply(own, targets, head.weight, head.bias, cap, scale)  # pyright: ignore[reportGeneralTypeIssues]
        counted.append(Losses(loss, correct))
        return scaled

    with _in_head(model, places, forward):
        yield counted


@contextmanager
def log_probabilities_in_head(model: PreTrainedModel, places: Tensor, targets: Tensor) -> Iterator[list[Tensor]]:
    """While it is entered, a forward's `logits` are the log-probabilities of the targets, fp32 [targets], and the list takes
    which of them were the most likely token, bool [targets].

    `places`, `targets`: int64 [targets], as in a `Batch`.
    """
    likeliest: list[Tensor] = []

    def forward(own: Tensor, head: Any, cap: float | None) -> Tensor:
        logs, correct = _HeadLogProbabilities.apply(own, targets, head.weight, head.bias, cap)  # pyright: ignore[reportGeneralTypeIssues]
        likeliest.append(correct)
        return logs

    with _in_head(model, places, forward):
        yield likeliest


@contextmanager
def logits_in_head(model: PreTrainedModel, places: Tensor) -> Iterator[None]:
    """While it is entered, a forward's `logits` are those at these places alone, [places, words]. `places`: int64, as in a
    `Batch`.
    """

    def forward(own: Tensor, head: Any, cap: float | None) -> Tensor:
        logits = F.linear(own, head.weight, head.bias)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    with _in_head(model, places, forward):
        yield


@contextmanager
def _in_head(model: PreTrainedModel, places: Tensor, act: Callable[[Tensor, Any, float | None], Tensor]) -> Iterator[None]:
    """While it is entered, the head returns what `act` makes of the hidden states [places, hidden], the head, and its cap."""
    head: Any = model.get_output_embeddings()
    config = text_decoder(model).config
    cap = getattr(config, _CAP, None)
    values = vars(config)  # past what a config checks: a class may know its cap as a number alone

    def forward(hidden: Tensor) -> Tensor:
        return act(hidden.flatten(0, 1).index_select(0, places), head, cap)

    head.forward = forward
    if cap is not None:
        values[_CAP] = None  # done here, and not to what the head returns
    try:
        yield
    finally:
        del head.forward
        if cap is not None:
            values[_CAP] = cap


class _HeadLoss(torch.autograd.Function):
    """hidden [n, h], targets [n], weight [words, h], bias [words] or None → loss × scale, loss, number of correct ones."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, targets: Tensor, weight: Tensor, bias: Tensor | None, cap: float | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        wanted = ctx.needs_input_grad[0]
        gradient = torch.empty_like(hidden) if wanted else None
        loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
        correct = torch.zeros((), dtype=torch.float64, device=hidden.device)
        height = chunk_rows(weight.shape[0])
        for start in range(0, hidden.shape[0], height):
            rows, right = hidden[start : start + height], targets[start : start + height, None]
            logs, through = _log_softmax(rows, weight, bias, cap)
            correct += (logs.argmax(dim=-1, keepdim=True) == right).sum()
            loss -= logs.gather(1, right).sum(dtype=torch.float64)
            if gradient is not None:
                own = gradient[start : start + height]
                of_logits = _gradient(logs, right) if through is None else _gradient(logs, right).mul_(through)
                del through  # before a copy is made: two in fp32 are the most that there are at once
                of_logits = of_logits.to(rows.dtype)
                torch.addmm(own, of_logits, weight, beta=0, alpha=scale, out=own)
                del of_logits
            del logs  # before the next chunk's are made
        ctx.save_for_backward(gradient)
        rounded = loss.float()
        ctx.mark_non_differentiable(rounded, correct)
        return rounded * scale, rounded, correct

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None, None, None, None


class _HeadLogProbabilities(torch.autograd.Function):
    """hidden [n, h], targets [n], weight [words, h], bias [words] or None → log-probabilities fp32 [n], likeliest bool [n]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, targets: Tensor, weight: Tensor, bias: Tensor | None, cap: float | None
    ) -> tuple[Tensor, Tensor]:
        wanted = ctx.needs_input_grad[0]
        gradient = torch.empty_like(hidden) if wanted else None
        found = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        correct = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
        height = chunk_rows(weight.shape[0])
        for start in range(0, hidden.shape[0], height):
            rows, right = hidden[start : start + height], targets[start : start + height, None]
            logs, through = _log_softmax(rows, weight, bias, cap)
            found[start : start + height] = logs.gather(1, right).squeeze(1)
            correct[start : start + height] = logs.argmax(dim=-1) == right.squeeze(1)
            if gradient is not None:
                own = gradient[start : start + height]
                of_logits = _gradient(logs, right) if through is None else _gradient(logs, right).mul_(through)
                del through  # before a copy is made: two in fp32 are the most that there are at once
                of_logits = of_logits.to(rows.dtype)
                torch.addmm(own, of_logits, weight, beta=0, alpha=-1, out=own)
                del of_logits
            del logs  # before the next chunk's are made
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(correct)
        return found, correct

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * grads[0].unsqueeze(1)).to(gradient.dtype), None, None, None, None


def _log_softmax(rows: Tensor, weight: Tensor, bias: Tensor | None, cap: float | None) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of all words, fp32 [rows, words], and what the cap lets through of their gradient; None: all."""
    logits = F.linear(rows, weight, bias)
    if cap is None and logits.is_cuda:  # its kernel reads them as they are; others' would keep them beside a copy in fp32
        return logits.log_softmax(dim=-1, dtype=torch.float32), None
    logits = logits.float()
    if cap is None:
        return logits.log_softmax(dim=-1), None
    logits.div_(cap).tanh_().mul_(cap)
    logs = logits.log_softmax(dim=-1)
    return logs, logits.div_(cap).square_().neg_().add_(1)


def _gradient(logs: Tensor, right: Tensor) -> Tensor:
    """The gradient of the loss in the logits, softmax - one-hot, in place of `logs`, fp32.

    The one-hot is never subtracted: of a probability near 1 that would leave little.
    """
    of_right = logs.gather(1, right).expm1_()
    return logs.exp_().scatter_(1, right, of_right)
