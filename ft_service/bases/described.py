"""The tensors of a base whose weights are not here, by what its config.json and, where there is one, its index say.

For a plan before a download. An index names the tensors; without one they are those of the decoders that all look alike. The
shapes follow from the config's dimensions.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ft_service.bases.base_files import is_base_file, require_openable
from ft_service.bases.config_defaults import refuse_unknown_type
from ft_service.bases.config_values import values_of_other_kinds
from ft_service.bases.contents import BaseContents, StoredTensor, read_config, read_contents
from ft_service.bases.families.acceptance import refuse_untunable
from ft_service.bases.published_layouts import FP8_DTYPE, LARGEST_SIZE, SCALES, declared_block, quantization_of
from ft_service.bases.safetensors_folder import INDEX, SINGLE, files_of, read_index
from ft_service.bases.wrapped import Parts, text_config
from ft_service.errors import SpecError

_ALIKE = ("llama", "mistral", "qwen2", "qwen3")
"""Architectures whose tensors are known without an index."""
_LAYER = re.compile(r"(?:^|.*\.)(?:layers|h)\.\d+\.(?P<inside>.+)$")
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.\d+\.(?P<matrix>[^.]+)\.weight$")
_SCALE = re.compile(r"\.(weight_scale_inv|weight_scale|input_scale)$")
_DOWN = ("down_proj", "w2")


def contents_or_description(folder: Path) -> tuple[BaseContents, bool]:
    """What `read_contents` reads; of a base whose weights are not there, or not all, what its config and index describe. And
    whether the weights are there.

    Raises SpecError where these do not say enough.
    """
    try:
        here = is_base_file(folder / SINGLE) if not os.path.lexists(folder / INDEX) else _whole(folder)
    except OSError:
        here = True  # let the reader say what is wrong
    return (read_contents(folder) if here else described(folder)), here


def described(folder: Path) -> BaseContents:
    """The base that config.json and the index describe, in bf16 or FP8. Raises SpecError where they do not say enough."""
    require_openable(folder)
    config = read_config(folder)
    with values_of_other_kinds():
        refuse_untunable(config)
        refuse_unknown_type(config)
        return _described(folder, config)


def _described(folder: Path, config: dict[str, Any]) -> BaseContents:
    index = read_index(folder) if os.path.lexists(folder / INDEX) else None
    quantization = quantization_of(config)
    quantized = quantization is not None
    sizes = _Sizes(text_config(config), folder)
    if index is None:
        if quantized or config.get("model_type") not in _ALIKE:
            kind = "a quantised base" if quantized else f"model_type {config.get('model_type')!r}"
            raise _too_little(folder, f"of {kind} the plan needs {INDEX} as well")
        return BaseContents(config, tuple(_tensor(name, sizes, "BF16") for name in _alike(config, sizes)))
    modules_in_fp8 = {_SCALE.sub("", name) for name in index if name.endswith(SCALES)}
    block = declared_block(quantization) if quantization is not None else None
    if quantized and not modules_in_fp8:
        raise _too_little(folder, "of a base quantised by bitsandbytes the plan needs the files with the weights")
    parts = Parts.of(config, index)
    tensors = [
        _scale(name, sizes, block) if _SCALE.search(name) else _tensor(name, sizes, _dtype(name, modules_in_fp8))
        for name in index
        if parts.is_text(name) and sizes.is_of_decoder(name)
    ]
    return BaseContents(config, tuple(tensors))


def _whole(folder: Path) -> bool:
    return all(is_base_file(path) for path in files_of(folder, read_index(folder)))


def _dtype(name: str, in_fp8: set[str]) -> str:
    return FP8_DTYPE if name.removesuffix(".weight") in in_fp8 else "BF16"


def _scale(name: str, sizes: _Sizes, block: tuple[int, int] | None) -> StoredTensor:
    """`block`: rows and columns that share a scale of weights. None: they are not by blocks."""
    if block is None or not name.endswith(SCALES):
        return StoredTensor(name, "F32", (1,), 4)
    shape = sizes.of(_SCALE.sub(".weight", name))
    grid = tuple(-(-size // side) for size, side in zip(shape, block, strict=True))
    return StoredTensor(name, "F32", grid, 4 * math.prod(grid))


def _tensor(name: str, sizes: _Sizes, dtype: str) -> StoredTensor:
    shape = sizes.of(name)
    return StoredTensor(name, dtype, shape, math.prod(shape) * (1 if dtype == FP8_DTYPE else 2))


class _Sizes:
    """Shapes of tensors by their names, from the config of a decoder."""

    def __init__(self, config: Mapping[str, Any], folder: Path) -> None:
        self._config, self._folder = config, folder
        self.layers = self._need("num_hidden_layers")
        hidden, heads = self._need("hidden_size"), self._need("num_attention_heads")
        head = self._number("head_dim") or hidden // heads
        queries, keys = heads * head, (self._number("num_key_value_heads") or heads) * head
        inner, vocabulary = self._need("intermediate_size"), self._need("vocab_size")
        experts = self._number("num_local_experts", "num_experts", "n_routed_experts") or 0
        self._expert = self._number("moe_intermediate_size") or inner
        self._hidden = hidden
        shared = self._number("shared_expert_intermediate_size") or inner
        self._outside = {
            "embed_tokens.weight": (vocabulary, hidden),
            "lm_head.weight": (vocabulary, hidden),
            "norm.weight": (hidden,),
        }
        self._inside = {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.qkv_proj": (queries + 2 * keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_up_proj": (2 * inner, hidden),
            "mlp.gate": (experts, hidden),
            "block_sparse_moe.gate": (experts, hidden),
            "mlp.shared_expert_gate": (1, hidden),
            **{f"mlp.{name}": (inner, hidden) for name in ("gate_proj", "up_proj")},
            "mlp.down_proj": (hidden, inner),
            **{f"mlp.shared_expert.{name}": (shared, hidden) for name in ("gate_proj", "up_proj")},
            "mlp.shared_expert.down_proj": (hidden, shared),
        }
        # OLMo norms queries and keys as a whole, the others head by head.
        whole = str(config.get("model_type")).startswith("olmo")
        self._norms = {
            "self_attn.q_norm": queries if whole else head,
            "self_attn.k_norm": keys if whole else head,
        }

    def is_of_decoder(self, name: str) -> bool:
        """Whether it is the causal model's own: no other tower's, no buffer, no layer beyond the last."""
        if re.match(r"(model\.)?(vision|visual|audio|multi_modal|mm_|mtp)", name) or name.endswith("inv_freq"):
            return False
        numbered = re.search(r"\.layers\.(\d+)\.", name)
        return numbered is None or int(numbered[1]) < self.layers

    def of(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor. Raises SpecError for one that is not known."""
        match = _LAYER.match(name)
        shape = self._in_layer(match["inside"]) if match else self._outside.get(".".join(name.split(".")[-2:]))
        if shape is None or 0 in shape:
            raise _too_little(self._folder, f"the shape of {name[:120]} does not follow from config.json")
        return shape

    def _in_layer(self, inside: str) -> tuple[int, ...] | None:
        if expert := _EXPERT.match(inside):
            down = expert["matrix"] in _DOWN
            return (self._hidden, self._expert) if down else (self._expert, self._hidden)
        module, _, parameter = inside.rpartition(".")
        if module in self._inside:
            shape = self._inside[module]
            return shape if parameter == "weight" else shape[:1]
        if module in self._norms:
            return (self._norms[module],)
        return (self._hidden,) if module.endswith("layernorm") else None

    def _need(self, name: str) -> int:
        number = self._number(name)
        if number is None:
            raise _too_little(self._folder, f"config.json names no {name}")
        return number

    def _number(self, *names: str) -> int | None:
        values = (self._config.get(name) for name in names)
        return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and 0 < v < LARGEST_SIZE), None)


def _alike(config: Mapping[str, Any], sizes: _Sizes) -> Iterator[str]:
    """Names of the tensors of a decoder of `_ALIKE`."""
    kind = config["model_type"]
    biased = ("q_proj", "k_proj", "v_proj") if kind == "qwen2" else ()
    biased = ("q_proj", "k_proj", "v_proj", "o_proj") if config.get("attention_bias") else biased
    inside = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    inside += [f"self_attn.{name}_proj.weight" for name in "qkvo"] + [f"self_attn.{name}.bias" for name in biased]
    inside += [f"self_attn.{name}_norm.weight" for name in "qk"] if kind == "qwen3" else []
    for name in ("gate_proj", "up_proj", "down_proj"):
        inside += [f"mlp.{name}.weight", *([f"mlp.{name}.bias"] if config.get("mlp_bias") else [])]
    yield "model.embed_tokens.weight"
    for layer in range(sizes.layers):
        yield from (f"model.layers.{layer}.{name}" for name in inside)
    yield "model.norm.weight"
    if not config.get("tie_word_embeddings"):
        yield "lm_head.weight"


def _too_little(folder: Path, why: str) -> SpecError:
    message = f"The weights of the base in {folder} are not here, and without them it cannot be planned: {why}."
    return SpecError(message, param="model", code="model_unreadable")
