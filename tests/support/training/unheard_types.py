"""Decoders that no version of transformers has, registered as a user's own package would: nothing
of the product names them.

`unheard_plain`: modules called otherwise than anywhere else. `unheard_experts`: stacks of experts
in transformers' form. `unheard_both_ways`: tokens see those behind them. `unheard_scaled`: the
logits are scaled after the head.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationMixin,
    MixtralConfig,
    PreTrainedModel,
)
from transformers.integrations.moe import use_experts_implementation
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.mixtral.modeling_mixtral import (
    MixtralExperts,
    MixtralRMSNorm,
    MixtralRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from tests.support.training.causal_types import show_vectors
from tests.support.training.checks import measure
from tests.support.training.models import COMMON, VOCABULARY, save_tokenizer

SCALE = 0.25


class PlainConfig(MixtralConfig):
    model_type = "unheard_plain"
    scale = 1.0


class ExpertsConfig(PlainConfig):
    model_type = "unheard_experts"


class BothWaysConfig(PlainConfig):
    model_type = "unheard_both_ways"


class ScaledConfig(PlainConfig):
    model_type = "unheard_scaled"
    scale = SCALE


class Mixing(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.width = config.hidden_size // config.num_attention_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.width**-0.5
        self.is_causal = not isinstance(config, BothWaysConfig)
        self.to_queries = nn.Linear(
            config.hidden_size, config.num_attention_heads * self.width, bias=False
        )
        self.to_keys = nn.Linear(
            config.hidden_size, config.num_key_value_heads * self.width, bias=False
        )
        self.to_values = nn.Linear(
            config.hidden_size, config.num_key_value_heads * self.width, bias=False
        )
        self.back = nn.Linear(
            config.num_attention_heads * self.width, config.hidden_size, bias=False
        )

    def forward(
        self, hidden_states: Tensor, positions: Any, attention_mask: Any, **kwargs: Any
    ) -> Tensor:
        shape = (*hidden_states.shape[:-1], -1, self.width)
        queries, keys, values = (
            to(hidden_states).view(shape).transpose(1, 2)
            for to in (self.to_queries, self.to_keys, self.to_values)
        )
        queries, keys = apply_rotary_pos_emb(queries, keys, *positions)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        mixed, _ = attend(
            self, queries, keys, values, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs
        )
        return self.back(mixed.reshape(*hidden_states.shape[:-1], -1).contiguous())


class Feeding(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.widen = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.narrow = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.narrow(nn.functional.silu(self.widen(hidden)))


@use_experts_implementation
class ManyFeeding(MixtralExperts):
    pass


class Choosing(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.chosen = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_local_experts, bias=False)
        self.experts = ManyFeeding(config)

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.flatten(0, -2)
        shares, chosen = self.gate(flat).softmax(dim=-1).topk(self.chosen, dim=-1)
        return self.experts(flat, chosen, shares).view_as(hidden)


class Block(GradientCheckpointingLayer):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.before = MixtralRMSNorm(config.hidden_size)
        self.mixing = Mixing(config)
        self.between = MixtralRMSNorm(config.hidden_size)
        self.feeding = (Choosing if isinstance(config, ExpertsConfig) else Feeding)(config)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        hidden_states = hidden_states + self.mixing(self.before(hidden_states), **kwargs)
        return hidden_states + self.feeding(self.between(hidden_states))


class Unheard(PreTrainedModel):
    base_model_prefix = "trunk"
    _no_split_modules = ["Block"]  # noqa: RUF012  as transformers has it
    _supports_sdpa = True
    _supports_attention_backend = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, MixtralExperts):
            for parameter in module.parameters():
                parameter.normal_(0.0, 0.02)


class Trunk(Unheard):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.words_in = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.num_hidden_layers)])
        self.last = MixtralRMSNorm(config.hidden_size)
        self.rotary = MixtralRotaryEmbedding(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.words_in

    def forward(
        self, input_ids: Tensor, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any
    ) -> Any:
        kwargs.pop("use_cache", None)
        hidden = self.words_in(input_ids)
        positions = (
            torch.arange(input_ids.shape[1], device=hidden.device)[None]
            if position_ids is None
            else position_ids
        )
        mask = create_causal_mask(
            self.config, hidden, attention_mask, past_key_values=None, position_ids=positions
        )
        both = isinstance(self.config, BothWaysConfig)
        turned = self.rotary(hidden, position_ids=positions)
        for block in self.blocks:
            hidden = block(
                hidden,
                positions=turned,
                attention_mask=None if both else mask,
                position_ids=positions,
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.last(hidden))


class UnheardForCausalLM(Unheard, GenerationMixin):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.trunk = Trunk(config)
        self.words_out = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.trunk.words_in

    def get_output_embeddings(self) -> nn.Module:
        return self.words_out

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        hidden = self.trunk(input_ids, **kwargs).last_hidden_state
        return CausalLMOutputWithPast(logits=self.words_out(hidden) * self.config.scale)


def _register(config_class: Any) -> None:
    AutoConfig.register(config_class.model_type, config_class)
    own = type(
        f"{config_class.__name__.removesuffix('Config')}ForCausalLM",
        (UnheardForCausalLM,),
        {"config_class": config_class},
    )
    AutoModelForCausalLM.register(config_class, own)


CONFIGS: dict[str, Any] = {
    config.model_type: config
    for config in (PlainConfig, ExpertsConfig, BothWaysConfig, ScaledConfig)
}
for _config in CONFIGS.values():
    _register(_config)


def save_unheard(kind: str, folder: Path) -> Path:
    """A tiny random base of one of these types, with a tokenizer."""
    torch.manual_seed(0)
    sizes = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 2,
        "sliding_window": None,
    }
    config = CONFIGS[kind](**{**COMMON, **sizes, "vocab_size": VOCABULARY})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    show_vectors(model)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def measure_unheard(*given: Any) -> Any:
    """`measure` on a rank, which has to import this module so that it knows the types."""
    return measure(*given)
