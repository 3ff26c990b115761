"""Random bases for measurements: a Llama or a mixture of experts of any shape, written as a Hugging
Face folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


@dataclass(frozen=True)
class Llama:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    vocabulary: int
    groups: int | None = None
    """Heads of keys and values; None: every head has its own."""

    @property
    def keys(self) -> int:
        """Width of all keys, and of all values."""
        return self.hidden // self.heads * (self.groups or self.heads)

    def shapes_of_layer(self) -> dict[str, tuple[int, int]]:
        """Its linear layers."""
        attention = {
            f"self_attn.{n}_proj": (self.keys if n in "kv" else self.hidden, self.hidden)
            for n in "qkvo"
        }
        inner = {f"mlp.{n}_proj": (self.intermediate, self.hidden) for n in ("gate", "up")}
        return {**attention, **inner, "mlp.down_proj": (self.hidden, self.intermediate)}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocabulary, self.hidden),
            "lm_head.weight": (self.vocabulary, self.hidden),
            "model.norm.weight": (self.hidden,),
        }
        for i in range(self.layers):
            layer = f"model.layers.{i}"
            shapes |= {
                f"{layer}.{name}.weight": shape for name, shape in self.shapes_of_layer().items()
            }
            shapes |= {
                f"{layer}.{n}_layernorm.weight": (self.hidden,) for n in ("input", "post_attention")
            }
        return shapes


def write_llama(folder: Path, llama: Llama, device: str = "cpu") -> int:
    """bf16 with random weights in one file; its bytes. `device`: where they are drawn."""
    from transformers import LlamaConfig  # after the command line is read: it takes seconds

    config = LlamaConfig(
        hidden_size=llama.hidden,
        intermediate_size=llama.intermediate,
        num_hidden_layers=llama.layers,
        num_attention_heads=llama.heads,
        num_key_value_heads=llama.groups or llama.heads,
        vocab_size=llama.vocabulary,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    (folder / "generation_config.json").write_text("{}")
    generator = torch.Generator(device).manual_seed(0)
    tensors = {
        name: torch.empty(shape, dtype=torch.bfloat16, device=device)
        .normal_(0, 0.02, generator=generator)
        .cpu()
        for name, shape in llama.shapes().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return (folder / "model.safetensors").stat().st_size


def write_mixture(
    folder: Path, family: str, sizes: Mapping[str, Any], device: torch.device | str = "cpu"
) -> None:
    """A model of a type of transformers in bf16 with its own random weights. `sizes`: of its
    config; others are the type's defaults. `device`: where they are drawn.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        config = AutoConfig.for_model(family, **sizes)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
