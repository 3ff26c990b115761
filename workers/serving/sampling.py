"""Sampling of the next token from logits, and the log-probabilities of tokens that are given.

Pure, but for the generator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ft_service.errors import SpecError
from ft_service.spec import GREEDY

Likeliest = list[tuple[int, float]]
"""Tokens with their log-probabilities in nats, the likeliest first."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float = 1.0
    """0: the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    """Draw only from so many likeliest tokens; 0 or less: from all."""
    top_logprobs: int | None = None
    """Alternatives to report for each token; None: no log-probabilities at all."""
    logprobs_at: float = 1.0
    """The temperature of reported log-probabilities, whatever is drawn from."""


@dataclass(frozen=True)
class Choice:
    """A token, and with `top_logprobs` its log-probability in nats and the likeliest ones."""

    token: int
    logprob: float | None = None
    top: Sequence[tuple[int, float]] = ()


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Choice:
    """Draw a token. `logits`: fp32 [words], on the CPU.

    Raises SpecError for logits that are no numbers.

    Log-probabilities are those before top_k and top_p, at `logprobs_at`: 1 gives the model's own,
    which a client's trainer computes of the same tokens. Reinforcement asks for the temperature
    that is drawn at: its policy is what is drawn from, and its trainer divides logits too, so that
    the ratio of the two is 1 while the weights are the same. Those of what the filters leave would
    be neither, and infinite for all other tokens at temperature 0.
    """
    _require_finite(logits)
    if sampling.temperature < GREEDY:
        token = int(logits.argmax())
    else:
        shares, tokens = distribution(logits, sampling)
        drawn = int(torch.multinomial(shares, 1, generator=generator))
        token = drawn if tokens is None else int(tokens[drawn])
    if sampling.top_logprobs is None:
        return Choice(token)
    logs = _log_probabilities(logits, sampling.logprobs_at)
    return Choice(token, float(logs[token]), _likeliest(logs[None], sampling.top_logprobs)[0])


def distribution(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """The shares of tokens in what is drawn from, fp32 and in any scale, and the tokens; None: all,
    in their order.

    `logits`: fp32 [words], at a temperature above 0. First the `top_k` likeliest are kept; among
    them, with shares that sum to 1, the likeliest whose shares together reach `top_p`. This is the
    order of transformers and of vLLM.
    """
    shares = ((logits - logits.max()) / sampling.temperature).softmax(dim=-1)
    filtered = 0 < sampling.top_k < len(shares)
    if not filtered and sampling.top_p >= 1:
        return shares, None
    ordered, tokens = shares.topk(sampling.top_k) if filtered else shares.sort(descending=True)
    if sampling.top_p >= 1:
        return ordered, tokens
    ordered = ordered / ordered.sum()
    kept = ordered.cumsum(dim=-1) - ordered < sampling.top_p
    kept[0] = True  # the first one always: the least of top_p are 0 in fp32
    return ordered * kept, tokens


def scores(
    logits: Tensor, targets: Sequence[int], top: int, temperature: float = 1.0
) -> tuple[list[float], list[Likeliest]]:
    """Log-probabilities of targets at a temperature in nats, and the `top` likeliest tokens at each
    of their places.

    `logits`: fp32 [targets, words], on any device. Raises SpecError for logits that are no numbers.
    """
    _require_finite(logits)
    logs = _log_probabilities(logits, temperature)
    after = torch.tensor(targets, device=logs.device)[:, None]
    return logs.gather(1, after)[:, 0].tolist(), _likeliest(logs, top)


def _log_probabilities(logits: Tensor, temperature: float) -> Tensor:
    return (logits if temperature == 1 else logits / temperature).log_softmax(dim=-1)


def _likeliest(logs: Tensor, top: int) -> list[Likeliest]:
    """The `top` likeliest of log-probabilities [places, words]."""
    values, tokens = logs.topk(min(top, logs.shape[-1]), dim=-1)
    pairs = zip(tokens.tolist(), values.tolist(), strict=True)
    return [list(zip(own, logprobs, strict=True)) for own, logprobs in pairs]


def _require_finite(logits: Tensor) -> None:
    if not bool(logits.amax(dim=-1).isfinite().all()):
        raise SpecError(
            "The model's logits are no finite numbers: its weights are damaged, or its training "
            "has diverged. Use an earlier "
            "version of it.",
            code="model_not_served",
        )
