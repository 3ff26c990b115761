"""The model on meta: architecture from the Hugging Face config, storage formats, adapters. No weight is touched here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel, __version__

from ft_service.bases.base_files import require_openable
from ft_service.bases.contents import read_config
from ft_service.bases.families.acceptance import refuse_untunable
from ft_service.bases.module_rules import refuse_resharding_of_held
from ft_service.bases.wrapped import is_of_several
from ft_service.errors import SpecError
from ft_service.spec import JobSpec, WeightFormat
from workers.base.frozen import Loaded
from workers.base.turned import turn_convolutions
from workers.layers.noise import add_noise
from workers.layers.segment_attention import NAME as SEGMENTS
from workers.model.attention import stay_within_segments, stock_attention, takes_segments
from workers.model.lora import add_adapters
from workers.model.precision import choose_products, formats_of_base, precision_map, swap
from workers.model.wrapped import Unasked, causal_class, published_class, text_decoder, text_only
from workers.ranks.runtime import COMPUTE_DTYPE

PLAIN_LINEARS = frozenset({"FalconLinear"})
"""Classes derived from linear layers that compute what those do."""
STORAGE_DTYPE = torch.bfloat16
"""What frozen weights without a quantised format are stored in, and the face dtype of the quantised ones."""


@dataclass(frozen=True)
class BuiltModel:
    """A model on meta (buffers excepted), ready to be sharded."""

    peft_model: PeftModel
    layers: list[nn.Module]
    """The decoder layers, in order: the units of sharding."""
    formats: Mapping[str, WeightFormat]
    """Base module name → format of its weight: every linear layer and every stack of experts of the decoder layers, and linear
    layers elsewhere that the base holds quantised."""
    products: str | None = None
    """How layers stored in FP8 multiply, in words; None: there are none."""
    loaded: Loaded | None = None
    """What loading did, once that is done."""


def build(spec: JobSpec, device: torch.device) -> BuiltModel:
    """Config → modules → storage formats → adapters. Raises SpecError naming the option that does not fit the model."""
    base = base_on_meta(spec.model.path)
    restore_buffers(base, device, COMPUTE_DTYPE[spec.precision.compute])
    stay_within_segments(base)
    layers = decoder_layers(base)
    held = formats_of_base(base, layers, spec.model.path)
    refuse_resharding_of_held(spec.distributed.reshard_size, held)
    formats = precision_map(base, layers, spec.precision, held)
    swap(base, layers, formats)
    products = choose_products(base, spec.precision, COMPUTE_DTYPE[spec.precision.compute], device)
    peft_model = add_adapters(base, spec.lora, shared_experts=spec.shared_experts)
    if spec.training.neftune_noise_alpha is not None:
        add_noise(base, spec.training.neftune_noise_alpha)
    return BuiltModel(peft_model, layers, formats, products)


def base_on_meta(path: str) -> PreTrainedModel:
    """The architecture that `path`/config.json describes, every tensor on meta. Code from the folder is never run.

    Of a base made of several models it is the published class with its text decoder alone. Raises SpecError for anything else
    than a causal language model of transformers, and for values that no model can be built with.
    """
    refuse_untunable(read_config(Path(path)))  # as a plan does: by the file alone
    config = _config(path)
    try:
        return _on_meta(config)
    except SpecError:
        raise
    except Exception as error:  # architectures check their configs in many ways, or not at all
        raise _unusable(path, error) from None


def _on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    if getattr(config, "quantization_config", None) is not None:
        delattr(config, "quantization_config")  # the modules are those of a plain base; see `formats_of_base`
    text = config.get_text_config(decoder=True)
    _require_text_decoder(config, text)
    for part in (config, text):
        part.use_cache = False
        _without_noise(part)
    if text is not config or is_of_several(config.to_dict()):
        return _from_several(config)
    model = causal_class(config)
    assert model is not None
    attention = SEGMENTS if takes_segments(config, model) else stock_attention(config)
    with torch.device("meta"):
        built = model._from_config(config, dtype=STORAGE_DTYPE, attn_implementation=attention)
    for module in built.modules():
        if type(module).__name__ in PLAIN_LINEARS:
            module.__class__ = nn.Linear
    turn_convolutions(built)
    return built


def _from_several(config: PreTrainedConfig) -> PreTrainedModel:
    """The text part of a config of several models, with the attention that suits that part."""
    model = text_only(config, STORAGE_DTYPE)
    decoder = text_decoder(model)
    attention = SEGMENTS if takes_segments(decoder.config, type(decoder)) else stock_attention(decoder.config)
    if attention is not None:
        decoder.set_attn_implementation(attention)
    return model


def token_rows(path: str) -> int | None:
    """The number of rows of the embedding by `path`/config.json, to which loading holds the weights. None: config.json does not
    say.

    Raises SpecError for a config that transformers does not know.
    """
    rows = getattr(_config(path).get_text_config(decoder=True), "vocab_size", None)
    return rows if isinstance(rows, int) else None


def _config(path: str) -> PreTrainedConfig:
    require_openable(Path(path))
    kind = read_config(Path(path)).get("model_type")
    if isinstance(kind, str) and kind not in CONFIG_MAPPING:  # its own words say to install what may be too new for us
        raise SpecError(
            f"The base is a {kind[:80]} model, a type that transformers {__version__}, installed where the workers run, does "
            "not know. A later one may: pip install --upgrade transformers 'ft-service[workers]' takes the latest that works.",
            param="model",
        )
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except ValueError as error:
        raise SpecError(
            f"The base in {path} has a config.json that transformers does not know: {error}", param="model"
        ) from None
    except Exception as error:
        raise _unusable(path, error) from None


def _unusable(path: str, error: Exception) -> SpecError:
    said = " ".join(str(error).split())[:300]
    return SpecError(
        f"The base in {path} has a config.json that makes no model ({type(error).__name__}: {said}). Compare it with the one "
        "that the base was published with.",
        param="model",
    )


def _require_text_decoder(config: PreTrainedConfig, text: PreTrainedConfig) -> None:
    refuse_untunable(config.to_dict())
    if text is config and causal_class(config) is None and published_class(config) is None:
        raise SpecError(f"The base is a {config.model_type} model, which is no causal language model.", param="model")


def balance_note(path: str) -> str | None:
    """What is to be said of the balance loss of a base's routers. None: its config.json asks for none."""
    text = _config(path).get_text_config(decoder=True)
    if not getattr(text, "output_router_logits", False):
        return None
    return (
        "The base's config.json asks for the routers' balance loss (output_router_logits, router_aux_loss_coef). It is no part "
        "of the loss here: routers are frozen, and the loss is that of the target tokens alone."
    )


def _without_noise(config: PreTrainedConfig) -> None:
    """A config without dropout and router noise in the frozen base: they draw from a rank's own generator, and a resume on
    another number of ranks would train another model.
    """
    for name, value in config.to_dict().items():
        if isinstance(value, float) and any(word in name for word in ("dropout", "pdrop", "jitter", "layerdrop")):
            setattr(config, name, 0.0)
    if getattr(config, "altup_coef_clip", None) is not None:  # in training alone, and past the layers: none is frozen so
        vars(config)["altup_coef_clip"] = None  # the config checks what it is set to, and its class knows None


def restore_buffers(model: PreTrainedModel, device: torch.device, compute_dtype: torch.dtype) -> None:
    """Compute the buffers that no file of the base holds (rotary frequencies, embedding scales) by the architecture's own
    rules.

    Parameters are still on meta, where initialising is free, so each module's initialiser can be called as it is. A buffer in
    the storage dtype gets the dtype that it would have in a model loaded for `compute_dtype`. Raises SpecError for one that no
    rule computes.
    """
    computed: dict[str, Tensor] = {}
    owners = list(_with_owners(model, model))
    names = {id(module): name for name, module in model.named_modules()}
    for module, _ in owners:
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers[name]
            if buffer is not None:
                dtype = compute_dtype if buffer.dtype == STORAGE_DTYPE else buffer.dtype
                poisoned = _poisoned(torch.empty_like(buffer, dtype=dtype, device=device))
                module._buffers[name] = computed[f"{names[id(module)]}.{name}"] = poisoned
    inside = set(text_decoder(model).modules())  # what lies around a decoder lacks what its initialiser fills
    for module, owner in owners:
        fills = isinstance(module, PreTrainedModel) and module in inside  # some models fill the buffers of their layers
        if module._non_persistent_buffers_set or fills:
            owner._init_weights(module)
    left = [name for name, buffer in computed.items() if _is_poisoned(buffer)]
    if left:
        raise SpecError(
            f"The base is a {model.config.model_type} model, of which nothing says how {left[0]} is computed, a buffer that no "
            "file holds: not supported.",
            param="model",
        )


def _poisoned(buffer: Tensor) -> Tensor:
    """A buffer filled with what no rule computes."""
    if buffer.is_floating_point() or buffer.is_complex():
        return buffer.fill_(float("nan"))
    return buffer if buffer.dtype == torch.bool else buffer.fill_(torch.iinfo(buffer.dtype).min)


def _is_poisoned(buffer: Tensor) -> bool:
    if buffer.is_floating_point() or buffer.is_complex():
        return bool(buffer.isnan().any())
    return buffer.dtype != torch.bool and bool((buffer == torch.iinfo(buffer.dtype).min).any())


def _with_owners(module: nn.Module, owner: PreTrainedModel) -> Iterator[tuple[nn.Module, PreTrainedModel]]:
    """Every module, and the innermost model of transformers that it is part of, whose rules it is initialised by."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    yield module, owner
    for child in module.children():
        yield from _with_owners(child, owner)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks, in order: those that the architecture says not to split, or else the only list as long as the config
    says. Raises SpecError where neither exists.
    """
    part = text_decoder(model)
    names = set(part._no_split_modules or ())
    count = getattr(part.config, "num_hidden_layers", None)
    stacks = [m for m in part.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    kinds = [{type(layer).__name__ for layer in stack if not isinstance(layer, Unasked)} for stack in stacks]
    named = [stack for stack, of_stack in zip(stacks, kinds, strict=True) if of_stack <= names]
    chosen = named or (stacks if len(stacks) == 1 else [])
    if not chosen:
        raise SpecError(
            f"{type(model).__name__}: its decoder layers were not found, so it cannot be sharded here.", param="model"
        )
    return [layer for layer in chosen[0] if not isinstance(layer, Unasked)]
