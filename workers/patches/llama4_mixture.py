"""Llama 4's mixture, in which a token meets the experts that it chose and no others.

transformers takes every token through every expert, multiplied by zero for those that were not
chosen.

Replaces: the forward of transformers' `Llama4TextMoe`.
Written for: transformers 5.23
Fails when upstream changes: tests/workers/patches/test_llama4_mixture.py
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from workers.patches.forward import replace_forward


def meet_only_the_chosen(block: nn.Module) -> None:
    """Let a mixture, whose `experts` are `FrozenExperts` already, call them with the choice of each
    token.
    """
    replace_forward(block, MethodType(_only_the_chosen, block))


def _only_the_chosen(block: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """(hidden, router's logits)."""
    hidden = hidden_states.reshape(-1, block.hidden_dim)
    logits = nn.functional.linear(hidden, block.router.weight)
    best, chosen = torch.topk(logits, block.top_k, dim=1)
    routed = block.experts(hidden, chosen, torch.sigmoid(best.float()).to(hidden.dtype))
    return block.shared_expert(hidden) + routed, logits
