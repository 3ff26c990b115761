"""The next token of a sequence from its logits, and what the model thought of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float = 1.0
    """0: the most likely token."""
    top_p: float = 1.0
    top_logprobs: int | None = None
    """Alternatives to report for each token; None: no log-probabilities at all."""


@dataclass(frozen=True)
class Choice:
    """A token, and with `top_logprobs` its log-probability in nats and the likeliest ones (token, log-probability)."""

    token: int
    logprob: float | None = None
    top: Sequence[tuple[int, float]] = ()


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Choice:
    """`logits`: fp32 [words], on the CPU. Log-probabilities are the model's own, before temperature and top_p."""
    if sampling.temperature == 0:
        token = int(logits.argmax())
    else:
        token = _drawn(logits / sampling.temperature, sampling.top_p, generator)
    if sampling.top_logprobs is None:
        return Choice(token)
    logs = logits.log_softmax(dim=-1)
    values, tokens = logs.topk(min(sampling.top_logprobs, len(logs)))
    return Choice(token, float(logs[token]), list(zip(tokens.tolist(), values.tolist(), strict=True)))


def _drawn(logits: Tensor, top_p: float, generator: torch.Generator) -> int:
    shares = logits.softmax(dim=-1)
    if top_p >= 1:
        return int(torch.multinomial(shares, 1, generator=generator))
    ordered, tokens = shares.sort(descending=True)
    kept = ordered.cumsum(dim=-1) - ordered < top_p  # the first one always
    return int(tokens[torch.multinomial(ordered * kept, 1, generator=generator)])
