"""Decoders that transformers does not know, each with one defect, registered with it while a test
needs them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

KIND = "odd_decoder"
"""Model type of all of them."""
DEFECTS = (
    "none",
    "sees behind",
    "mixes",
    "scales logits",
    "caps logits",
    "past the layer",
    "chooses",
    "raises",
)


class OddConfig(LlamaConfig):
    """Llama's values, and which `defect` the decoder has."""

    model_type = KIND
    defect: str = "none"


class OddLayer(LlamaDecoderLayer):
    """Llama's layer with what the defect does to the hidden states [rows, length, hidden]."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.defect: str = config.defect
        self.extra = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: Tensor, **others: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden: Any = super().forward(hidden_states, **others)
        if self.defect == "raises":
            raise NotImplementedError("no forward without an image")
        if self.defect == "sees behind":
            hidden = hidden + 0.1 * hidden.flip(1)
        if self.defect == "mixes":
            hidden = hidden + 0.1 * torch.cat([hidden[:, :1], hidden[:, :-1]], dim=1)
        if self.defect == "past the layer":
            return hidden + F.linear(hidden, self.extra.weight, self.extra.bias)
        if self.defect == "chooses":
            return hidden * (1 + self.extra(hidden).argmax(-1, keepdim=True) / hidden.shape[-1])
        return hidden + self.extra(hidden)


class OddForCausalLM(LlamaForCausalLM):
    """Llama with those layers, and what the defect does to the logits."""

    config_class = OddConfig
    _no_split_modules = ["OddLayer"]  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers = nn.ModuleList(
            [OddLayer(config, number) for number in range(config.num_hidden_layers)]
        )

    def forward(self, *inputs: Any, **others: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        out: Any = super().forward(*inputs, **others)
        if self.config.defect == "scales logits":
            out.logits = out.logits / 8
        if self.config.defect == "caps logits":
            out.logits = 30 * torch.tanh(out.logits / 30)
        return out


@contextmanager
def odd_types() -> Iterator[None]:
    """While it is entered, transformers knows the type."""
    AutoConfig.register(KIND, OddConfig)
    AutoModelForCausalLM.register(OddConfig, OddForCausalLM)
    try:
        yield
    finally:
        CONFIG_MAPPING._extra_content.pop(KIND)
        MODEL_FOR_CAUSAL_LM_MAPPING._extra_content.pop(OddConfig)


def save_odd(folder: Path, defect: str, **values: Any) -> Path:
    """A config.json of the type, of a small decoder."""
    small = {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 256,
    }
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": KIND,
        "architectures": ["OddForCausalLM"],
        "defect": defect,
        **small,
        **values,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
