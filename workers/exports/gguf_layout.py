"""Layout of an architecture of transformers in GGUF: metadata, names, and the order of rows. Pure.

llama.cpp computes an architecture as its own code says, whatever a file says: what it would
ignore is refused here by name. Where it has no sliding window, the context is cut to one window,
within which both agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ft_service.errors import SpecError

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
}
"""Model type of transformers → architecture of llama.cpp."""
_ROTATED_IN_PAIRS = ("llama",)
"""Architectures whose rotary embedding turns neighbouring rows; transformers turns row i and row i
+ half.
"""
_SHIFTED = ("gemma", "gemma2", "gemma3")
"""Architectures whose norms transformers stores less one."""
_ACTIVATIONS = {
    "gemma": "gelu_pytorch_tanh",
    "gemma2": "gelu_pytorch_tanh",
    "gemma3": "gelu_pytorch_tanh",
}
_LARGEST_GEMMAS = {("gemma2", 46), ("gemma3", 62)}
"""(Architecture, layers) whose attention llama.cpp scales by the width of the model instead of that
of a head.
"""
_LOCAL_THETA = 10_000.0

Value = int | float | bool | str


@dataclass(frozen=True)
class GgufLayout:
    """What a GGUF file of an architecture holds besides weights and vocabulary."""

    architecture: str
    layers: int
    values: dict[str, Value]
    """Metadata, by names without the architecture in front."""
    heads: dict[str, int] = field(default_factory=dict)
    """End of a module's name → heads whose rows are put into pairs."""
    shifted: bool = False
    """Whether 1 is added to norms."""
    divided: tuple[float, ...] = ()
    """What each rotary frequency is divided by; empty: nothing."""
    notes: tuple[str, ...] = ()


def layout_of(config: Mapping[str, Any]) -> GgufLayout:
    """`config`: of the text decoder, as transformers completes it.

    Raises SpecError for what llama.cpp would compute otherwise.
    """
    kind = str(config["model_type"])
    architecture = ARCHITECTURES.get(kind)
    if architecture is None:
        raise refusal(
            f"the architecture {kind} is not exported to GGUF (only "
            f"{', '.join(sorted(ARCHITECTURES))}): "
            "serve the adapter with vLLM or PEFT, or merge it (ft merge)"
        )
    _require_activation(config, architecture)
    rope, divided = _rope(config, architecture)
    window, notes = _window(config, architecture)
    head = _head_width(config)
    values: dict[str, Value] = {
        "block_count": config["num_hidden_layers"],
        "context_length": min(
            config["max_position_embeddings"], window or config["max_position_embeddings"]
        ),
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": _kv_heads(config),
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "attention.key_length": head,
        "attention.value_length": head,
        "vocab_size": config["vocab_size"],
        **rope,
        **_of_architecture(config, architecture),
    }
    heads = {"q_proj": config["num_attention_heads"], "k_proj": _kv_heads(config)}
    return GgufLayout(
        architecture=architecture,
        layers=config["num_hidden_layers"],
        values=values,
        heads=heads if architecture in _ROTATED_IN_PAIRS else {},
        shifted=architecture in _SHIFTED,
        divided=divided,
        notes=notes,
    )


def refusal(why: str) -> SpecError:
    return SpecError(f"GGUF: {why}.", param="format", code="not_exportable")


def _head_width(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _kv_heads(config: Mapping[str, Any]) -> int:
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def _require_activation(config: Mapping[str, Any], architecture: str) -> None:
    expected = _ACTIVATIONS.get(architecture, "silu")
    given = config.get("hidden_activation") or config.get("hidden_act")
    if given != expected and not (
        architecture == "gemma" and given == "gelu"
    ):  # which transformers reads as the tanh one
        raise refusal(f"hidden_act = {given!r}: llama.cpp computes {expected} in {architecture}")


def _rope(
    config: Mapping[str, Any], architecture: str
) -> tuple[dict[str, Value], tuple[float, ...]]:
    """Metadata of the rotary embedding, and by what its frequencies are divided."""
    given = config.get("rope_parameters") or {}
    if architecture == "gemma3":
        given = _global_rope(given)
    theta = float(given.get("rope_theta") or config.get("rope_theta") or _LOCAL_THETA)
    values: dict[str, Value] = {"rope.freq_base": theta}
    width = _head_width(config)
    share = float(given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    if share != 1.0 and architecture != "phi3":
        raise refusal(
            f"partial_rotary_factor = {share:g}: llama.cpp turns whole heads in {architecture}"
        )
    if architecture in ("llama", "phi3"):
        values["rope.dimension_count"] = int(width * share)
    kind = given.get("rope_type") or "default"
    if kind == "linear":
        return {
            **values,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": float(given["factor"]),
        }, ()
    if kind == "llama3" and architecture == "llama":
        return values, _divisors_of_llama3(given, theta, width)
    if kind != "default":
        raise refusal(
            f"rope_type = {kind!r}: its frequencies are not said in GGUF for {architecture}"
        )
    return values, ()


def _global_rope(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotary embedding of Gemma 3's global layers, which GGUF holds; llama.cpp's code has that
    of the local ones.
    """
    local = given.get("sliding_attention") or {}
    if (
        float(local.get("rope_theta") or _LOCAL_THETA) != _LOCAL_THETA
        or local.get("rope_type", "default") != "default"
    ):
        raise refusal(
            f"rope_parameters.sliding_attention = {dict(local)}: llama.cpp turns local layers by "
            f"{_LOCAL_THETA:g}"
        )
    return given.get("full_attention") or {}


def _divisors_of_llama3(given: Mapping[str, Any], theta: float, width: int) -> tuple[float, ...]:
    """Llama 3.1's scaling: low frequencies are divided by the factor, high ones are left, those
    between are blended.
    """
    factor, low, high = (
        float(given[name]) for name in ("factor", "low_freq_factor", "high_freq_factor")
    )
    before = float(given["original_max_position_embeddings"])
    divisors = []
    for place in range(0, width, 2):
        turns = before / (6.283185307179586 * theta ** (place / width))
        blend = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1.0 / ((1.0 - blend) / factor + blend))
    return tuple(divisors)


def _window(config: Mapping[str, Any], architecture: str) -> tuple[int | None, tuple[str, ...]]:
    """What the context is cut to. None: nothing."""
    window = config.get("sliding_window")
    unused = architecture in ("qwen2", "qwen3") and not config.get("use_sliding_window")
    if (
        not window
        or unused
        or architecture in ("gemma2", "gemma3")
        or window >= config["max_position_embeddings"]
    ):
        return None, ()
    return window, (
        f"llama.cpp knows no sliding window in {architecture}: its context is cut to the window, "
        f"{window} tokens",
    )


def _of_architecture(config: Mapping[str, Any], architecture: str) -> dict[str, Value]:
    """Metadata that only this architecture has."""
    if architecture == "phi3":
        before = config.get("original_max_position_embeddings") or config["max_position_embeddings"]
        return {"rope.scaling.original_context_length": int(before)}
    if architecture not in ("gemma2", "gemma3"):
        return {}
    _require_scale(config, architecture)
    _require_order_of_layers(config, architecture)
    if config.get("use_bidirectional_attention"):
        raise refusal("use_bidirectional_attention: llama.cpp looks back only")
    values: dict[str, Value] = {"attention.sliding_window": config["sliding_window"]}
    caps = {
        name: config.get(name) for name in ("attn_logit_softcapping", "final_logit_softcapping")
    }
    if architecture == "gemma3" and any(caps.values()):
        raise refusal(
            f"{next(name for name, cap in caps.items() if cap)}: llama.cpp caps nothing in gemma3"
        )
    if architecture == "gemma2":
        if not all(caps.values()):
            raise refusal(
                f"{next(name for name, cap in caps.items() if not cap)} is missing, which "
                "llama.cpp always computes"
            )
        values |= {name: float(cap or 0) for name, cap in caps.items()}
    return values


def _require_scale(config: Mapping[str, Any], architecture: str) -> None:
    by_width = (architecture, config["num_hidden_layers"]) in _LARGEST_GEMMAS
    width = (
        config["hidden_size"] // config["num_attention_heads"] if by_width else _head_width(config)
    )
    if config.get("query_pre_attn_scalar") not in (None, width):
        raise refusal(
            f"query_pre_attn_scalar = {config['query_pre_attn_scalar']}: llama.cpp takes {width} "
            f"in {architecture} of this size"
        )


def _require_order_of_layers(config: Mapping[str, Any], architecture: str) -> None:
    """llama.cpp's code, not the file, gives every second or sixth layer full attention."""
    period = 2 if architecture == "gemma2" else 6
    expected = [
        "full_attention" if (i + 1) % period == 0 else "sliding_attention"
        for i in range(config["num_hidden_layers"])
    ]
    if list(config.get("layer_types") or expected) != expected:
        raise refusal(
            f"layer_types: llama.cpp has full attention in every layer that {period} divides, and "
            "nowhere else"
        )
