"""Which types are padded, and why; each sample of theirs is computed as its class computes it
alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.deepseek_v32 import modeling_deepseek_v32
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32ForCausalLM

from tests.support.training.answers_alone import (
    alone,
    error,
    loaded,
    of_kinds,
    padded_answers,
    shuffled,
)
from tests.support.training.causal_types import save_type
from tests.support.training.parity import CPU
from workers.model.attention import takes_segments
from workers.training.packing import settle_attention

OTHERWISE = "cannot be kept within packed samples"
OWN = "cannot be replaced"
PADDED = {
    **dict.fromkeys(
        ("deepseek_v4", "minimax", "minimax_m3_vl_text", "qwen4_exp_text", "zaya"), OTHERWISE
    ),
    **dict.fromkeys(
        ("biogpt", "bloom", "codegen", "doge", "falcon", "gpt_neo", "gpt_neox_japanese"), OWN
    ),
    **dict.fromkeys(("gptj", "mpt", "stablelm", "xglm"), OWN),
}
"""Type → why its samples are padded."""


@of_kinds(PADDED)
def test_a_sample_that_is_padded_is_computed_as_it_is_alone(kind: str, tmp_path: Path) -> None:
    """And the reason for padding is the type's own."""
    base = tmp_path / "base"
    assert save_type(kind, base)
    model = loaded(base)
    reason = settle_attention(model, CPU, torch.float32)
    assert reason is not None
    assert kind in reason
    assert PADDED[kind] in reason
    data = shuffled()
    for own, truth in zip(padded_answers(model.eval(), data), alone(base, data), strict=True):
        assert error(own, truth) < 1.5e-6


class BlockIndexer(nn.Module):
    """One that chooses blocks of keys takes no positions, or a mask of another kind."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Tensor,
        past_key_values: Any,
    ) -> Tensor:
        raise NotImplementedError


def test_indexers_of_another_kind_are_left_to_padded_rows() -> None:
    config = AutoConfig.for_model("deepseek_v32")
    assert takes_segments(config, DeepseekV32ForCausalLM)
    with patch.object(modeling_deepseek_v32, "BlockIndexer", BlockIndexer, create=True):
        assert not takes_segments(config, DeepseekV32ForCausalLM)
