"""Llama 4's mixture, by the experts that a token chose alone, against the class that asks all of
them.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from workers.layers.experts import FrozenExperts, declare_input_scaled
from workers.patches.llama4_mixture import meet_only_the_chosen


def test_a_mixture_computes_what_its_class_does() -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    block: Any = Llama4TextMoe(Llama4TextConfig(**sizes)).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in block.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    hidden = torch.randn(2, 7, 16, generator=generator)
    published, logits = block(hidden)
    stacks = {name: parameter.clone() for name, parameter in block.experts.named_parameters()}
    declare_input_scaled(block.experts)
    block.experts = FrozenExperts(block.experts, dict.fromkeys(stacks))
    for name, stacked in stacks.items():  # [experts, in, out], as the class stacks them
        layer = getattr(block.experts, name)
        layer.weight = torch.nn.Parameter(
            stacked.mT.flatten(0, 1).contiguous(), requires_grad=False
        )
    assert block.experts.scales_input
    meet_only_the_chosen(block)
    ours, own_logits = block(hidden)
    torch.testing.assert_close(ours, published)
    torch.testing.assert_close(own_logits, logits)
