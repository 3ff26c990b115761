"""The base as the plan sees it: the frozen weights by decoder layer and kind, and the few dimensions that sizes depend on.

Names are those of the model's modules, which patterns in a spec match; they are those of the base's files without the prefixes
of other model classes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from ft_service.bases.config_defaults import refuse_unknown_type
from ft_service.bases.config_values import CHOSEN, COUNTS, values_of_other_kinds
from ft_service.bases.contents import BaseContents
from ft_service.bases.families.acceptance import refuse_untunable, untested
from ft_service.bases.families.family import Family
from ft_service.bases.families.known import family_of
from ft_service.bases.logit_chunks import IN_CHUNKS
from ft_service.bases.module_rules import WeightNames, kept_plain, last_name
from ft_service.bases.published_layouts import LARGEST_SIZE
from ft_service.bases.wrapped import Parts, layers_of_images, text_config
from ft_service.errors import SpecError
from ft_service.plan.logical import LogicalTensor, logical_tensors
from ft_service.spec import WeightFormat

Kind = Literal["linear", "embedding", "head", "experts", "router", "norm", "bias", "other"]

_NUMBERED = re.compile(r"^(?P<stack>[^0-9]*?)\.?(?P<layer>\d+)\.(?P<inside>.+)$")
_EXPERT = re.compile(r"^(?P<before>.*\bexperts)\.(?P<expert>\d+)\.(?P<matrix>[^.]+)(\.weight)?$")
_BUFFERS = re.compile(
    r"\.(inv_freq|rotary_emb\.alpha|masked_bias|e_score_correction_bias|layer_scalar|act_fn\.beta|act_fn\.eps|balancing_biases|feed_forward\.expert_bias|slope_rate|query_decay|key_decay|diagonal_decay|tid2eid|layer_multipliers|ngram_heads_vocab_sizes|ngram_heads_offsets|attention\.bias|attn\.bias)$"
)
_KEYS_AND_VALUES = re.compile(r"self_attn\.[kv]_(proj|norm)\.")
_EMBEDDING = re.compile(r"embed|^wte$|^wpe$|position")
"""In the last name of a table from which rows are taken, among weights outside the decoder layers; others are linear layers."""
_DOWN = ("down_proj", "w2")
_NORMS_OF_HEADS = ("q_norm", "k_norm")
"""Norms with a row for each head, in some families."""
_HEADS = ("lm_head", "embed_out", "output")
_STEMS = {"gpt_neox": "gpt_neox.", "gpt2": "transformer.", "falcon": "transformer.", "bloom": "transformer."}
"""What a causal model calls its trunk, where that is not `model.`."""


@dataclass(frozen=True)
class Weight:
    """One frozen parameter of the model."""

    module: str
    """Full name of the module that holds it."""
    parameter: str
    """`weight`, `bias` or what else the module calls it."""
    shape: tuple[int, ...]
    kind: Kind
    layer: int | None
    """Number of the decoder layer; None: outside of them."""
    held: WeightFormat | None = None
    """Format that a base holds it in which is published quantised."""

    @property
    def name(self) -> str:
        return f"{self.module}.{self.parameter}"

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def numel_of_row(self) -> int:
        numel = 1
        for size in self.shape[1:]:
            numel *= size
        return numel

    @property
    def numel(self) -> int:
        return self.rows * self.numel_of_row


@dataclass(frozen=True)
class Shape:
    """Dimensions of the decoder. `q`, `kv`: heads × head size of queries, and of keys or values."""

    layers: int
    hidden: int
    heads: int
    q: int
    kv: int
    intermediate: int
    vocabulary: int
    norms: int
    """Norms of the hidden state in a layer."""
    head_norms: bool
    """Whether queries and keys are normed as well."""
    gated: bool
    """Whether the feed-forward multiplies two projections of its input."""
    experts: int
    """Experts a layer; 0: a dense feed-forward."""
    experts_per_token: int
    expert_intermediate: int
    max_positions: int | None


@dataclass(frozen=True)
class BaseShape:
    """The frozen weights of a base, and the dimensions of its decoder."""

    shape: Shape
    weights: tuple[Weight, ...]
    loss_in_chunks: bool
    """Whether the logits of all targets are never there at once."""
    family: Family
    model_type: str
    """Of the decoder, as in config.json."""
    untested: str | None = None
    """What is to be said of a decoder that no test knows; None: one does."""

    def quantizable(self) -> list[Weight]:
        """The weights that the precision map decides on: linear layers and experts inside the decoder layers."""
        inside = [w for w in self.weights if w.layer is not None and w.kind in ("linear", "experts")]
        return [w for w in inside if not kept_plain(w.module)]

    def held(self) -> dict[str, WeightFormat]:
        """Format of the linear layers and experts that the base holds quantised, by module name."""
        layers = [w for w in self.weights if w.kind in ("linear", "experts", "head") and not kept_plain(w.module)]
        return {w.module: w.held for w in layers if w.held is not None}

    def adaptable(self) -> list[Weight]:
        """Linear layers but the output head."""
        return [w for w in self.weights if w.kind == "linear"]

    def experts(self) -> list[Weight]:
        return [w for w in self.weights if w.kind == "experts"]

    def names(self) -> WeightNames:
        """The module names that patterns of a spec are matched against."""
        weighted = {w.module: w for w in self.weights if len(w.shape) > 1}
        stacks = {w.module.rpartition(".")[0] for w in self.experts()}
        outside = [name for name, weight in weighted.items() if weight.layer is None]
        return WeightNames([w.module for w in self.quantizable()], outside, [*weighted, *sorted(stacks)])


@lru_cache(maxsize=32)
def base_shape(contents: BaseContents) -> BaseShape:
    """The shape of a base, from its tensors. Raises SpecError if it is not a decoder whose layers can be told apart, or if its
    config.json holds values of other kinds than configs have.
    """
    with values_of_other_kinds():
        return _base_shape(contents)


def _base_shape(contents: BaseContents) -> BaseShape:
    refuse_untunable(contents.config)
    refuse_unknown_type(contents.config)
    config, family = text_config(contents.config), family_of(contents.config)
    parts = Parts.of(contents.config, (tensor.name for tensor in contents.tensors))
    logical = logical_tensors(contents)
    tensors = [t for t in logical if parts.is_text(t.name)]
    stack = _decoder_stack(tensors, _layers(config))
    named = (_weight(tensor, stack, config, parts, family) for tensor in tensors if _belongs(tensor, stack, config, family))
    weights = _joined(
        w for w in named if w.parameter in family.parameters or not _BUFFERS.search(w.name.removesuffix(".weight"))
    )
    weights = _stack_experts(weights, _number(config, "hidden_size"))
    weights = _tie(weights, config)
    _require_head(weights, config)
    in_chunks = str(config.get("model_type")) in IN_CHUNKS
    kind, note = str(config.get("model_type")), untested(contents.config)
    return BaseShape(_shape(config, weights), tuple(weights), in_chunks, family, kind, note)


def _decoder_stack(tensors: Iterable[LogicalTensor], layers: int | None) -> str:
    """The part of names before the layer number: `model.layers`. Of several stacks the one with most tensors."""
    stacks = Counter(match["stack"] for t in tensors if (match := _NUMBERED.match(t.name)))
    if not stacks or layers is None:
        raise SpecError(
            "The base's tensors are not those of a decoder with numbered layers, or its config.json does not say how many: "
            "its architecture is not supported.",
            param="model",
        )
    return stacks.most_common(1)[0][0]


def _belongs(tensor: LogicalTensor, stack: str, config: Mapping[str, Any], family: Family) -> bool:
    """Whether the causal model has this tensor: not other towers' stacks, nor layers for predicting several tokens, nor keys
    and values of layers that take those of others.
    """
    match = _NUMBERED.match(tensor.name)
    if match is None or last_name(match["stack"]) in family.beside_layers:
        return True
    layers, number = _layers(config), int(match["layer"])
    if match["stack"] != stack or layers is None or number >= layers:
        return False
    shared = _number(config, "num_kv_shared_layers") or 0
    return number < layers - shared or not _KEYS_AND_VALUES.match(match["inside"])


def _weight(tensor: LogicalTensor, stack: str, config: Mapping[str, Any], parts: Parts, family: Family) -> Weight:
    match = _NUMBERED.match(tensor.name)
    layer = int(match["layer"]) if match and match["stack"] == stack else None
    name = parts.published(tensor.name)
    for theirs, ours in family.renamed.items():
        name = re.sub(theirs, ours, name)
    bare = "." not in stack and not parts.several
    stem = _STEMS.get(str(config.get("model_type")), "model.")
    if bare and not name.startswith((*_HEADS, stem)):
        name = stem + name
    module, _, parameter = name.rpartition(".")
    if parameter not in ("weight", "bias"):
        module, parameter = (name, "weight") if len(tensor.shape) == 3 else (module, parameter)
    shape, kind = tensor.shape, _kind(module, parameter, tensor.shape, layer, config, family)
    if kind == "experts" and len(shape) == 3 and not tensor.by_outputs and _is_turned(module, shape, config, family):
        shape = (shape[0], shape[2], shape[1])
    if kind == "linear" and last_name(module) in family.turned:
        shape = shape[::-1]
    return Weight(module, parameter, shape, kind, layer, tensor.held)


def _is_turned(module: str, shape: tuple[int, ...], config: Mapping[str, Any], family: Family) -> bool:
    """Whether the files hold a stack of experts as [experts, in, out]."""
    outputs, inputs = shape[1:] if last_name(module) == "down_proj" else (shape[2], shape[1])
    hidden = _number(config, "hidden_size")
    return family.experts_transposed or (family.experts_either_way and inputs == hidden != outputs)


def _kind(
    module: str, parameter: str, shape: tuple[int, ...], layer: int | None, config: Mapping[str, Any], family: Family
) -> Kind:
    last = module.rpartition(".")[2]
    if parameter == "bias":
        return "bias"
    if len(shape) == 1 or last in _NORMS_OF_HEADS:
        return "norm" if "norm" in last or last.startswith("ln") else "other"
    if len(shape) == 3 and ".experts" in module:
        return "experts"
    if len(shape) != 2 or parameter != "weight":
        return "other"
    if layer is None and last in _HEADS:
        return "head"
    if layer is None and (_EMBEDDING.search(last) or shape[0] == _number(config, "vocab_size")):
        return "embedding"
    if last in ("gate", "router") and shape[0] == _experts(config):
        return "router"
    return "other" if last in family.other_layers else "linear"


def _joined(weights: Iterable[Weight]) -> list[Weight]:
    """The weights, those of one name above each other."""
    by_name: dict[str, Weight] = {}
    for weight in weights:
        other = by_name.get(weight.name)
        rows = weight.rows + other.rows if other and weight.shape else 0
        by_name[weight.name] = replace(weight, shape=(rows, *weight.shape[1:])) if rows else weight
    return list(by_name.values())


def _stack_experts(weights: list[Weight], hidden: int | None) -> list[Weight]:
    """Experts as the worker stores them: all matrices of a projection above each other, gate and up as one."""
    matrices = {match["matrix"] for weight in weights if (match := _EXPERT.match(weight.module))}
    stacks: dict[str, list[Weight]] = {}
    kept: list[Weight] = []
    for weight in weights:
        match = _EXPERT.match(weight.module)
        if match is None:
            kept.append(_flattened(weight, hidden) if weight.kind == "experts" else weight)
            continue
        if not weight.shape:
            raise SpecError(f"The base's {weight.name} is one number: not the weight of an expert.", param="model")
        stacks.setdefault(f"{match['before']}.{_projection_of(match['matrix'], matrices)}", []).append(weight)
    for module, parts in stacks.items():
        rows = sum(part.rows for part in parts)
        held = parts[0].held if len({part.held for part in parts}) == 1 else None
        kept.append(Weight(module, "weight", (rows, parts[0].shape[-1]), "experts", parts[0].layer, held))
    return sorted(kept, key=lambda weight: -1 if weight.layer is None else weight.layer)


def _projection_of(matrix: str, matrices: Collection[str]) -> str:
    """The stack that a matrix of one expert belongs to. `matrices`: the names of all the matrices of an expert."""
    if matrix in _DOWN:
        return "down_proj"
    return "up_proj" if set(matrices) == {"up_proj", "down_proj"} else "gate_up_proj"


def _flattened(weight: Weight, hidden: int | None) -> Weight:
    last = weight.module.rpartition(".")[2]
    turned = last == "gate_up_proj" and hidden == weight.shape[1] != weight.shape[2]
    if turned or last not in ("gate_up_proj", "up_proj", "down_proj"):
        raise SpecError(
            f"The experts of this base ({weight.module}) are not supported. Supported are stacks gate_up_proj and down_proj, "
            "or up_proj and down_proj, stored as the architecture's own.",
            param="model",
        )
    experts, rows, cols = weight.shape
    return Weight(weight.module, weight.parameter, (experts * rows, cols), "experts", weight.layer, weight.held)


def _tie(weights: list[Weight], config: Mapping[str, Any]) -> list[Weight]:
    """A head that is the embedding is one weight, whatever the files hold."""
    if not config.get("tie_word_embeddings"):
        return weights
    return [weight for weight in weights if weight.kind != "head"]


def _require_head(weights: list[Weight], config: Mapping[str, Any]) -> None:
    """Raises SpecError where the head is not the embedding, and no file holds one.

    A matrix of the vocabulary that is not called an embedding is a head, whatever its name (BioGPT's is `output_projection`).
    """
    if config.get("tie_word_embeddings") is not False or any(_is_head(weight) for weight in weights):
        return
    raise SpecError(
        "The base's config.json says, or leaves it to its class to say, tie_word_embeddings = false, and its files hold no "
        "output head (lm_head). Give it the head, or say tie_word_embeddings = true if the embedding is the head.",
        param="model",
        code="model_unreadable",
    )


def _is_head(weight: Weight) -> bool:
    named = weight.module.rpartition(".")[2]
    return weight.kind == "head" or (weight.kind == "embedding" and not _EMBEDDING.search(named))


def _shape(config: Mapping[str, Any], weights: list[Weight]) -> Shape:
    linears = [w for w in weights if w.layer is not None and w.kind == "linear"]
    hidden = _number(config, "hidden_size", "n_embd", "d_model")
    heads = _number(config, "num_attention_heads", "n_head", "n_heads", "attention_heads", "num_heads")
    if not hidden or not heads or not linears:
        raise SpecError("The base's config.json names no hidden_size or num_attention_heads: not supported.", param="model")
    head = _number(config, "head_dim") or hidden // heads
    experts = _experts(config)
    if not experts and any(w.kind == "experts" for w in weights):
        raise SpecError(
            f"The base holds experts, and its config.json does not say how many (one of {', '.join(COUNTS)}): not supported.",
            param="model",
        )
    intermediate = _number(config, "intermediate_size", "n_inner", "ffn_dim") or 4 * hidden
    return Shape(
        layers=(_layers(config) or 0) - len(layers_of_images(config)),
        hidden=hidden,
        heads=heads,
        q=heads * head,
        kv=(_number(config, "num_key_value_heads") or heads) * head,
        intermediate=intermediate,
        vocabulary=max((w.rows for w in weights if w.kind in ("embedding", "head")), default=0),
        norms=sum(1 for w in weights if w.kind == "norm" and w.layer == 0 and w.shape == (hidden,)),
        head_norms=any(w.module.endswith((".q_norm", ".k_norm")) for w in weights),
        gated=any("gate" in w.module.rpartition(".")[2] for w in weights if w.kind in ("linear", "experts")),
        experts=experts,
        experts_per_token=min(experts, _number(config, *CHOSEN) or 1),
        expert_intermediate=_number(config, "moe_intermediate_size") or intermediate,
        max_positions=_number(config, "max_position_embeddings", "n_positions"),
    )


def _layers(config: Mapping[str, Any]) -> int | None:
    """The number of decoder layers; hybrids may only list them."""
    listed = (config.get(name) for name in ("layer_types", "layers_block_type", "hybrid_override_pattern"))
    lengths = (len(layers) for layers in listed if isinstance(layers, (list, str)))
    return _number(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers") or next(lengths, None)


def _experts(config: Mapping[str, Any]) -> int:
    return _number(config, *COUNTS) or 0


def _number(config: Mapping[str, Any], *names: str) -> int | None:
    """The first of these keys that the config holds as a positive integer of a size that models have; of one for each layer
    the largest.
    """
    values = (_largest(config.get(name)) for name in names)
    return next((value for value in values if value is not None), None)


def _largest(value: Any) -> int | None:
    values = value if isinstance(value, list) else [value]
    sizes = [v for v in values if isinstance(v, int) and not isinstance(v, bool) and 0 < v < LARGEST_SIZE]
    return max(sizes, default=None)
