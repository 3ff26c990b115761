"""Bases that are published as several models in one, such as `…ForConditionalGeneration`: the text
decoder inside, under the names of the published class.

The published class is built on meta and all that is not its decoder or head is taken out, so
nothing of a tower is read, sharded or adapted, and every name is the one that PEFT and vLLM find on
the model as it is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from ft_service.errors import SpecError
from workers.patches.absent_towers import MissingTower, allow_missing_towers
from workers.patches.text_forward import answer_as, pass_text_through

_DECODER = "_ft_decoder"
_TOWERS = "_ft_towers"
_TOWER_LINEARS = "_ft_tower_linears"
_UNSEEN = "_ft_unseen"
UNKNOWN_PARTS = "does not say where its text decoder or its head is"
NO_DECODER = "has no text part that reads from left to right on its own"
_CROSS = frozenset({"encoder_attn", "crossattention", "cross_attn"})
"""Names by which transformers' classes call attention to what another model makes."""
_OF_SEVERAL = ("MODEL_FOR_MULTIMODAL_LM_MAPPING", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING")
_OF_ONE = "MODEL_FOR_CAUSAL_LM_MAPPING"
"""Where transformers says which class a config is published as; older versions lack the first of
several.
"""


@dataclass(frozen=True)
class BaseKind:
    """What transformers says of a base's config, asked once."""

    config: PreTrainedConfig
    text: PreTrainedConfig
    """The part of it that describes the text decoder; of a base of one model the whole."""
    of_several: bool
    """Whether it describes several models: its text part is one section, or its values stand next
    to other sections.
    """
    model_class: type[PreTrainedModel] | None
    """The class that the base is published as. None: transformers has no such class that generates
    text.
    """

    @classmethod
    def of(cls, config: PreTrainedConfig) -> BaseKind:
        text = config.get_text_config(decoder=True)
        of_several = text is not config or (
            bool(config.sub_configs)
            and any(_class_in(name, config) is not None for name in _OF_SEVERAL)
        )
        # transformers lists some classes of one model among those of several alone.
        of_one = None if of_several else _class_in(_OF_ONE, config)
        return cls(config, text, of_several, of_one or _writing_class(config))


def _writing_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The first class of a config that generates text."""
    found = (_class_in(name, config) for name in (*_OF_SEVERAL, _OF_ONE))
    return next((one for one in found if one is not None and one.can_generate()), None)


def _class_in(mapping: str, config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The class that one of transformers' mappings has for a config."""
    found: Any = getattr(modeling_auto, mapping, {}).get(type(config), None)
    return found[0] if isinstance(found, (list, tuple)) else found


def not_tunable(kind: str, why: str) -> SpecError:
    """The refusal of a base of several models."""
    return SpecError(
        f"The base is a {kind} model, made of several, and {why}: it cannot be tuned here. Use a "
        "text-only language model.",
        param="model",
    )


def text_only(kind: BaseKind, dtype: torch.dtype) -> PreTrainedModel:
    """The published class of a base of several models on meta, with nothing in it but its text
    decoder and head.

    Raises SpecError for one whose text part is not a causal decoder that can be separated from the
    rest.
    """
    config = kind.config
    try:
        model: Any = _on_meta(kind, dtype)
    except (
        ImportError,
        ValueError,
        TypeError,
        AttributeError,
    ) as error:  # classes check their configs in many ways
        raise not_tunable(
            config.model_type, f"cannot be built from its config.json ({error})"
        ) from None
    whole = [name for name, _ in model.named_modules()]
    linears = {
        name: (own.out_features, own.in_features)
        for name, own in model.named_modules()
        if type(own) is nn.Linear
    }
    unseen = any(isinstance(module, MissingTower) for module in model.modules())
    decoder, head = _decoder_and_head(model, kind.text)
    _take_out(model, {id(decoder), id(head)})
    called = _called_by_text(decoder)
    if decoder.config is config:
        if called is None:
            raise not_tunable(config.model_type, UNKNOWN_PARTS)
        _take_out_within(decoder, decoder, called)
    if called is not None:
        _replace_unused_layers(decoder, called)
    if has_cross_attention(decoder):
        raise not_tunable(config.model_type, "reads images through layers inside its text decoder")
    pass_text_through(model, decoder, head)
    left = set(dict(model.named_modules()))
    object.__setattr__(model, _DECODER, decoder)
    object.__setattr__(model, _TOWERS, tuple(name for name in whole if name not in left))
    taken = {name: shape for name, shape in linears.items() if name not in left}
    object.__setattr__(model, _TOWER_LINEARS, taken)
    object.__setattr__(model, _UNSEEN, unseen)
    return model


def _on_meta(kind: BaseKind, dtype: torch.dtype) -> Any:
    """The published class, every tensor on meta; if need be with `MissingTower` in place of towers.

    Raises SpecError if there is no such class.
    """
    if kind.model_class is None:
        raise not_tunable(kind.config.model_type, NO_DECODER)
    with torch.device("meta"):
        try:
            return kind.model_class._from_config(kind.config, dtype=dtype)
        except ImportError:
            with allow_missing_towers(type(kind.text)):
                return kind.model_class._from_config(kind.config, dtype=dtype)


def without_text(
    kind: BaseKind, dtype: torch.dtype, decoder: Callable[[Any], nn.Module]
) -> PreTrainedModel:
    """The published class of a base of several models on meta, without its text decoder and head.

    `decoder`: makes what stands in the decoder's place, of the decoder on meta. Raises SpecError as
    `text_only`, and for a class whose towers are not known here.
    """
    model: Any = _on_meta(kind, dtype)
    if any(isinstance(module, MissingTower) for module in model.modules()):
        raise not_tunable(kind.config.model_type, "has a tower that is not known here")
    text, head = _decoder_and_head(model, kind.text)
    put_in_place(model, {text: decoder(text), head: MissingHead()})
    return model


class MissingHead(nn.Identity):
    """Stands in place of a head."""


def put_in_place(model: nn.Module, others: Mapping[nn.Module, nn.Module]) -> None:
    """Replace modules of a model by others, wherever they are registered."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in others:
                parent._modules[name] = others[child]


def text_decoder(model: nn.Module) -> Any:
    """The text decoder of a model made by `text_only`; any other model itself."""
    return getattr(model, _DECODER, model)


def causal_model(model: nn.Module) -> PreTrainedModel:
    """The base model inside its adapters."""
    causal = model.get_base_model() if isinstance(model, PeftModel) else model
    assert isinstance(causal, PreTrainedModel)
    return causal


def names_of_towers(model: nn.Module) -> tuple[str, ...]:
    """Full names of the modules that the published class has and a model made by `text_only` has
    not.
    """
    return getattr(model, _TOWERS, ())


def linears_of_towers(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Full name of a linear layer of these modules → rows and columns of its weight."""
    return getattr(model, _TOWER_LINEARS, {})


def has_unseen_towers(model: nn.Module) -> bool:
    """Whether the published class has modules whose names are not known here."""
    return getattr(model, _UNSEEN, False)


def _decoder_and_head(model: PreTrainedModel, text: PreTrainedConfig) -> tuple[Any, nn.Linear]:
    """The text decoder and the head that takes its hidden states, as the classes say; and let the
    whole say so too.

    Raises SpecError where they say nothing.
    """
    writer: Any = model
    while writer.get_output_embeddings() is None:
        parts = [child for child in writer.children() if isinstance(child, PreTrainedModel)]
        writer = next(
            (
                part
                for part in parts
                if type(part.config.get_text_config(decoder=True)) is type(text)
            ),
            None,
        )
        if writer is None:
            raise not_tunable(model.config.model_type, UNKNOWN_PARTS)
    head = writer.get_output_embeddings()
    decoder = _innermost_decoder(writer, head)
    if (
        type(decoder.config) is not type(text)
        or not isinstance(head, nn.Linear)
        or decoder is model
    ):
        raise not_tunable(model.config.model_type, UNKNOWN_PARTS)
    if writer is not model:
        answer_as(model, writer)
    return decoder, head


def _innermost_decoder(model: PreTrainedModel, head: Any) -> Any:
    """What gives the hidden states that the head takes, as the classes say; a class with a head
    says itself.
    """
    found: Any = model
    for _ in range(4):
        inner = found.get_decoder()
        if inner is found or not isinstance(inner, PreTrainedModel):
            break
        found = inner
    while any(module is head for module in found.modules()):
        within = [child for child in found.children() if isinstance(child, PreTrainedModel)]
        if len(within) != 1:
            break
        found = within[0]
    return found


def has_cross_attention(decoder: nn.Module) -> bool:
    """True if layers of a decoder attend to what another model makes: an encoder of text, or a
    tower of images.
    """
    named = (name.rpartition(".")[2] for name, _ in decoder.named_modules())
    return not _CROSS.isdisjoint(named) or any(
        "CrossAttention" in type(module).__name__ for module in decoder.modules()
    )


class SkippedLayer(nn.Module):
    """Placeholder of a decoder layer that only reads images: the decoder skips it if there are
    none.
    """


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks, in order: those that the architecture says not to split, or else the
    only list as long as the config says. Raises SpecError where neither exists.
    """
    part = text_decoder(model)
    names = set(part._no_split_modules or ())
    count = getattr(part.config, "num_hidden_layers", None)
    stacks = [m for m in part.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    kinds = [
        {type(layer).__name__ for layer in stack if not isinstance(layer, SkippedLayer)}
        for stack in stacks
    ]
    named = [
        stack
        for stack, of_stack in zip(stacks, kinds, strict=True)
        if of_stack and of_stack <= names
    ]
    chosen = named or (stacks if len(stacks) == 1 else [])
    if not chosen:
        raise SpecError(
            f"{type(model).__name__}: its decoder layers were not found, so it cannot be sharded "
            "here.",
            param="model",
        )
    return [layer for layer in chosen[0] if not isinstance(layer, SkippedLayer)]


def _called_by_text(decoder: Any) -> set[int] | None:
    """Ids of the modules that a text without images or sounds passes through, by a forward on meta.

    None: it cannot be run there, since what it does depends on values.
    """
    called: set[int] = set()
    known = {module: set(vars(module)) for module in decoder.modules()}
    hooks = [
        module.register_forward_pre_hook(lambda own, _: called.add(id(own)))
        for module in decoder.modules()
    ]
    ids = torch.ones(1, 2, dtype=torch.long, device="meta")
    # A mask of four dimensions is used as it is; its values are not read.
    mask = torch.zeros(1, 1, 2, 2, dtype=decoder.dtype, device="meta")
    try:
        with torch.no_grad():
            decoder(input_ids=ids, attention_mask=mask, use_cache=False)
    except Exception:  # classes differ in what they ask of a forward
        return None
    finally:
        for hook in hooks:
            hook.remove()
        for module, names in known.items():
            for name in (
                vars(module).keys() - names
            ):  # rotations keep what they compute once, which is on meta here
                delattr(module, name)
    return called


def _replace_unused_layers(decoder: nn.Module, called: set[int]) -> None:
    """Put placeholders in place of decoder layers that no text passes through."""
    for stack in (module for module in decoder.children() if isinstance(module, nn.ModuleList)):
        if any(id(layer) in called for layer in stack):
            for number, layer in enumerate(stack):
                if id(layer) not in called:
                    stack[number] = SkippedLayer()


def _take_out_within(decoder: nn.Module, module: nn.Module, called: set[int]) -> None:
    """Remove what reads images and the like from a decoder whose class holds it too: every module
    within `module` whose weights a text does not pass through, if the decoder runs without it.
    """
    for last, child in list(module.named_children()):
        weights = [inner for inner in child.modules() if inner._parameters and not inner._modules]
        if weights and not any(id(inner) in called for inner in weights):
            whole = dict(module._modules)
            del module._modules[last]
            if _called_by_text(decoder) is not None:
                continue
            module._modules = whole
        _take_out_within(decoder, child, called)


def _take_out(module: nn.Module, kept: set[int]) -> None:
    """Remove every child that neither is, nor holds, one of `kept`; and the parameters of those
    that hold them.
    """
    for name in list(module._parameters):
        del module._parameters[name]
    for name in list(module._buffers):
        del module._buffers[name]
        module._non_persistent_buffers_set.discard(name)
    for name, child in list(module.named_children()):
        if id(child) in kept:
            continue
        if any(id(inner) in kept for inner in child.modules()):
            _take_out(child, kept)
        else:
            del module._modules[name]
