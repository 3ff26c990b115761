"""The model on meta: architecture from the Hugging Face config, storage formats, adapters.

No weight is touched here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from peft import PeftModel
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel, __version__

from ft_service.bases.base_files import read_config, require_openable
from ft_service.bases.module_rules import refuse_resharding_of_held, refuse_served
from ft_service.errors import SpecError
from ft_service.host.processor import slow_bf16_advice
from ft_service.spec import SERVED_FORMS, JobSpec, ServedAs, WeightFormat, WrapBySize
from workers.base.base_tensors import Safetensors
from workers.base.frozen_weights import Loaded
from workers.base.parameter_sources import turn_convolutions
from workers.base.quantized_rows import StoredBase
from workers.layers import fused
from workers.layers.experts import declare_input_scaled
from workers.layers.noise import add_noise
from workers.layers.packed_attention import DeterministicAttention
from workers.layers.segment_attention import NAME as SEGMENTS
from workers.model.attention import stay_within_segments, stock_attention, takes_segments
from workers.model.buffers import STORAGE_DTYPE, restore_buffers
from workers.model.head import set_works_in_chunks
from workers.model.joint_linears import join
from workers.model.lora import adapted_modules, add_adapters
from workers.model.merged_linears import merged_linears
from workers.model.multimodal import (
    BaseKind,
    decoder_layers,
    has_cross_attention,
    text_decoder,
    text_only,
    without_text,
)
from workers.model.precision import choose_products, formats_of_base, precision_map, swap
from workers.model.probes import Probed, probe
from workers.model.products import products
from workers.model.special_types import INPUT_SCALED_EXPERTS
from workers.model.tunable import (
    READS_ENCODER,
    no_model,
    not_causal,
    refuse_numbers,
    refuse_untunable,
    wrong_value,
)
from workers.model.whole_modules import compute_in
from workers.patches.fused_layers import fuse
from workers.patches.plain_linears import make_linears_plain
from workers.patches.unchecked_config import set_unchecked
from workers.ranks.runtime import COMPUTE_DTYPE


@dataclass(frozen=True)
class Arithmetic:
    """How the layers of a base compute, in words."""

    products: str | None = None
    """How layers stored in FP8 multiply; None: there are none."""
    fused: str | None = None
    """What fused kernels compute; None: nothing."""
    slow: str | None = None
    """What would be faster on a processor that is slow in bf16; None: nothing."""
    served: str | None = None
    """What the layers round base and adapter to together; None: nothing."""

    @property
    def notes(self) -> list[str]:
        return [
            note for note in (self.products, self.fused, self.slow, self.served) if note is not None
        ]


@dataclass(frozen=True)
class BuiltModel:
    """A model on meta (buffers excepted), ready to be sharded."""

    peft_model: PeftModel
    layers: list[nn.Module]
    """The decoder layers, in order: the units of sharding."""
    formats: Mapping[str, WeightFormat]
    """Base module name → format of its weight: every linear layer and every stack of experts of the
    decoder layers, and linear layers elsewhere that the base holds quantised.
    """
    arithmetic: Arithmetic = Arithmetic()
    """How the layers compute."""
    loaded: Loaded | None = None
    """What loading did, once that is done."""
    row_wise: tuple[nn.Module, ...] = ()
    """The feed-forwards that compute every token by itself."""


@dataclass(frozen=True)
class BuiltBase:
    """A base on meta (buffers excepted) in its storage formats, without adapters.

    The fields are those of `BuiltModel`.
    """

    model: PreTrainedModel
    layers: list[nn.Module]
    formats: Mapping[str, WeightFormat]
    arithmetic: Arithmetic
    probed: Probed


def build(spec: JobSpec, device: torch.device, probed: Probed | None = None) -> BuiltModel:
    """Config → modules → storage formats → adapters.

    Raises SpecError naming the option that does not fit the model.

    `probed`: what is known of the base; None: it is probed here, which takes seconds.
    """
    base = build_base(spec, device, probed)
    not_adapted = base.probed.not_adapted
    peft_model = add_adapters(
        base.model,
        spec.lora,
        shared_experts=spec.shared_experts,
        not_adapted=not_adapted,
        served_as=spec.precision.served_as,
    )
    if not isinstance(
        spec.distributed.wrap, WrapBySize
    ):  # which may gather layers of a module apart
        join(base.model)
    compute_in(base.model, COMPUTE_DTYPE[spec.precision.compute])
    if spec.training.neftune_noise_alpha is not None:
        add_noise(base.model, spec.training.neftune_noise_alpha)
    row_wise = tuple(base.model.get_submodule(name) for name in base.probed.row_wise)
    return BuiltModel(peft_model, base.layers, base.formats, base.arithmetic, row_wise=row_wise)


def _refuse_served(
    model: PreTrainedModel, spec: JobSpec, form: ServedAs, not_adapted: Mapping[str, str]
) -> None:
    """Raise SpecError for a base that cannot be merged to a form, or not with these adapters.

    `model`: on meta, before layers are put on their storage formats.
    """
    with Safetensors(spec.model.path) as files:
        names = StoredBase.open(files, spec.model.path).names()
    linears = merged_linears(
        model,
        frozenset(names),
        SERVED_FORMS[form].merged_to or form,
        param="precision.served_as",
        instead="leave precision.served_as out",
    )
    adapted = adapted_modules(
        model, spec.lora, shared_experts=spec.shared_experts, not_adapted=not_adapted
    )
    modules: dict[str, Any] = dict(model.named_modules())
    widths = {name: modules[name].in_features for name in sorted(linears)}
    refuse_served(form, widths, adapted, experts=False)


def build_base(spec: JobSpec, device: torch.device, probed: Probed | None = None) -> BuiltBase:
    """`build` without adapters: what jobs have in common that train on one base in one
    precision.
    """
    base = base_on_meta(spec.model.path)
    probed = probed or probe(base)
    restore_buffers(base, device, COMPUTE_DTYPE[spec.precision.compute])
    stay_within_segments(base)
    layers = decoder_layers(base)
    held = formats_of_base(base, layers, spec.model.path)
    formats = precision_map(base, layers, spec.precision, held)
    refuse_resharding_of_held(spec.distributed.reshard_size, held, formats)
    if spec.precision.served_as is not None:
        _refuse_served(base, spec, spec.precision.served_as, probed.not_adapted)
    swap(base, layers, formats)
    arithmetic = choose_arithmetic(base, spec, device)
    set_works_in_chunks(base, probed.loss_in_chunks)
    base.requires_grad_(False)
    return BuiltBase(base, layers, formats, arithmetic, probed)


def choose_arithmetic(base: nn.Module, spec: JobSpec, device: torch.device) -> Arithmetic:
    """Let a base's layers compute in the way that is fastest on a device, as far as the spec allows
    it.
    """
    compute = COMPUTE_DTYPE[spec.precision.compute]
    DeterministicAttention.wanted = spec.precision.deterministic_attention
    products = choose_products(base, spec.precision, compute, device)
    served = _served_note(spec.precision.served_as)
    if device.type != "cuda" or not spec.wants_fused_kernels:
        return Arithmetic(products, slow=_slow_bf16(compute, device), served=served)
    if fused.KERNEL.on(device) is None:
        return Arithmetic(products, served=served)
    return Arithmetic(products, f"Fused kernels compute {fuse(base)}.", served=served)


def _served_note(form: ServedAs | None) -> str | None:
    if form is None:
        return None
    return (
        f"The adapter is trained to be merged and served in {form} (precision.served_as): base and "
        f"adapter are rounded together at every step. {SERVED_FORMS[form].how} writes the same "
        "codes; without that rounding the adapter is another model."
    )


def _slow_bf16(compute: torch.dtype, device: torch.device) -> str | None:
    """The advice for a processor that is slow in bf16, if the layers compute in it there."""
    if device.type != "cpu" or compute != torch.bfloat16:
        return None
    found = products()
    return slow_bf16_advice(found) if found.slow_in_bf16 else None


def base_on_meta(path: str) -> PreTrainedModel:
    """The architecture that `path`/config.json describes, every tensor on meta.

    Code from the folder is never run.

    Of a base made of several models it is the published class with its text decoder alone. Raises
    SpecError for anything else than a causal language model of transformers, and for values that no
    model can be built with.
    """
    config = _config(path)
    try:
        return _on_meta(config)
    except SpecError:
        raise
    except Exception as error:  # architectures check their configs in many ways, or not at all
        raise wrong_value(config) or _unusable(path, error) from None


def towers_on_meta(path: str, decoder: Callable[[Any], nn.Module]) -> PreTrainedModel:
    """The published class of a base of several models without its text, every tensor on meta.

    `decoder`: makes what stands in place of its decoder. Raises SpecError for a base of one model,
    and as `base_on_meta`.
    """
    config = _config(path)
    kind = BaseKind.of(config)
    if not kind.of_several:
        raise SpecError("The base is a text model: it reads no images.", param="model")
    if getattr(config, "quantization_config", None) is not None:
        delattr(config, "quantization_config")
    for part in (config, *_parts(config)):
        _without_noise(part)
    return without_text(kind, torch.float32, decoder)


def _parts(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    found = (getattr(config, name, None) for name in config.sub_configs)
    return [part for part in found if isinstance(part, PreTrainedConfig)]


def _on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    if getattr(config, "quantization_config", None) is not None:
        # The modules are those of a plain base; see `formats_of_base`
        delattr(config, "quantization_config")
    kind = BaseKind.of(config)
    refuse_untunable(kind)
    for part in (config, kind.text):
        part.use_cache = False
        _without_noise(part)
    built = _from_several(kind) if kind.of_several else _from_one(kind)
    make_linears_plain(built)
    _keep_in_fp32(built)
    for module in built.modules():
        if type(module).__name__ == INPUT_SCALED_EXPERTS:
            declare_input_scaled(module)
    turn_convolutions(built)
    if _shares_weights(decoder_layers(built)):
        why = "several of its layers are one block, which its files hold once"
        raise not_causal(config.model_type, f"and cannot be tuned here: {why}")
    return built


def _from_one(kind: BaseKind) -> PreTrainedModel:
    """The base of one model, with the attention that suits it."""
    config = kind.config
    model = kind.model_class
    assert model is not None, "refuse_untunable asks for it"
    attention = SEGMENTS if takes_segments(config, model) else stock_attention(config)
    with torch.device("meta"):
        built = model._from_config(config, dtype=STORAGE_DTYPE, attn_implementation=attention)
    if has_cross_attention(built):
        raise not_causal(config.model_type, READS_ENCODER)
    return built


def _from_several(kind: BaseKind) -> PreTrainedModel:
    """The text part of a base of several models, with the attention that suits that part."""
    model = text_only(kind, STORAGE_DTYPE)
    decoder = text_decoder(model)
    attention = (
        SEGMENTS
        if takes_segments(decoder.config, type(decoder))
        else stock_attention(decoder.config)
    )
    if attention is not None:
        decoder.set_attn_implementation(attention)
    return model


def _keep_in_fp32(model: PreTrainedModel) -> None:
    """Put the parameters into fp32 that transformers loads in fp32 whatever dtype a model is asked
    for, by its own rule: those whose names its classes list. Routers are among them, which choose
    other experts once they are rounded.
    """
    patterns = [
        re.compile(name.replace("*", ".*")) for name in model._keep_in_fp32_modules_strict or ()
    ]
    for name, parameter in model.named_parameters():
        if any(pattern.search(name) for pattern in patterns):
            parameter.data = parameter.data.float()


def _shares_weights(layers: list[nn.Module]) -> bool:
    """True if a parameter is in several layers: they cannot be sharded, nor adapted, one by one."""
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    return len({id(parameter) for parameter in parameters}) < len(parameters)


def token_rows(path: str) -> int | None:
    """The embedding's number of rows by `path`/config.json, which loading requires of the
    weights. None: config.json does not say.

    Raises SpecError for a config that transformers does not know.
    """
    rows = getattr(_config(path).get_text_config(decoder=True), "vocab_size", None)
    return rows if isinstance(rows, int) else None


def _config(path: str) -> PreTrainedConfig:
    require_openable(Path(path))
    given = read_config(Path(path))
    refuse_numbers(given)
    kind = given.get("model_type")
    if (
        isinstance(kind, str) and kind not in CONFIG_MAPPING
    ):  # transformers' message advises what may be too new here
        raise SpecError(
            f"The base is a {kind[:80]} model, a type that transformers {__version__}, installed "
            "where the workers run, does "
            "not know. A later one may: pip install --upgrade transformers 'ft-service[workers]' "
            "takes the latest that works.",
            param="model",
        )
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except ValueError as error:
        raise SpecError(
            f"The base in {path} has a config.json that transformers does not know: {error}",
            param="model",
        ) from None
    except Exception as error:
        raise _wrong_type(given, error) or _unusable(path, error) from None


def _wrong_type(given: Mapping[str, Any], error: Exception) -> SpecError | None:
    """The refusal, if transformers refused a value in `given` for its type; None: it did not."""
    words = str(error)
    field = words.partition("'")[2].partition("'")[0]
    types = " or ".join(dict.fromkeys(re.findall(r"expected (\w+), got", words)))
    if (
        not isinstance(error, StrictDataclassFieldValidationError)
        or field not in given
        or not types
    ):
        return None
    return no_model(field, given[field], f"it must be {types}")


def _unusable(path: str, error: Exception) -> SpecError:
    said = " ".join(str(error).split())[:300]
    return SpecError(
        f"The base in {path} has a config.json that makes no model ({type(error).__name__}: "
        f"{said}). Compare it with the one "
        "that the base was published with.",
        param="model",
    )


def balance_note(path: str) -> str | None:
    """What is to be said of the balance loss of a base's routers.

    None: its config.json asks for none.
    """
    text = _config(path).get_text_config(decoder=True)
    if not getattr(text, "output_router_logits", False):
        return None
    return (
        "The base's config.json asks for the routers' balance loss (output_router_logits, "
        "router_aux_loss_coef). It is no part "
        "of the loss here: routers are frozen, and the loss is that of the target tokens alone."
    )


def _without_noise(config: PreTrainedConfig) -> None:
    """A config without dropout and router noise in the frozen base: they draw from a rank's own
    generator, and a resume on another number of ranks would train another model.
    """
    for name, value in config.to_dict().items():
        if isinstance(value, float) and any(
            word in name for word in ("dropout", "pdrop", "jitter", "layerdrop")
        ):
            setattr(config, name, 0.0)
    if (
        getattr(config, "altup_coef_clip", None) is not None
    ):  # in training it clamps weights, which are to stay frozen
        # The config checks what it is set to, and its class knows None.
        set_unchecked(config, "altup_coef_clip", None)
