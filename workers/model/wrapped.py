"""Bases that are published as several models in one, such as `…ForConditionalGeneration`: the text decoder inside, under the
names of the published class.

The published class is built on meta and all that is not its decoder or head is taken out, so nothing of a tower is read,
sharded or adapted, and every name is the one that PEFT and vLLM find on the model as it is downloaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from ft_service.bases.wrapped import NO_DECODER, generates, is_within, layers_of_images, not_tunable

_DECODER, _TOWERS, _UNSEEN = "_ft_decoder", "_ft_towers", "_ft_unseen"
UNTOLD = "does not say where its text decoder or its head is"
_CLASSES = (
    "MODEL_FOR_MULTIMODAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
)
"""Where transformers says which class a config is published as; older versions lack the first."""


def published_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The class that a base of several models is published as. None: none that generates text from left to right."""
    for mapping in (getattr(modeling_auto, name, {}) for name in _CLASSES):
        found = mapping.get(type(config), None)
        found = found[0] if isinstance(found, (list, tuple)) else found
        if found is not None and generates(found.__name__):
            return found
    return None


def causal_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The class of a base of one model that generates text. None: there is none."""
    found: Any = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    published = published_class(config)  # transformers lists some under several models alone
    return found or (published if published is not None and published.__name__.endswith("ForCausalLM") else None)


def text_only(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The published class of a wrapped config on meta, with nothing in it but its text decoder and head.

    Raises SpecError for one whose text part is no causal decoder that can be told from the rest.
    """
    published = published_class(config)
    if published is None:
        raise not_tunable(config.model_type, NO_DECODER)
    try:
        model: Any = _on_meta(published, config, dtype)
    except (ImportError, ValueError, TypeError, AttributeError) as error:  # classes check their configs in many ways
        raise not_tunable(config.model_type, f"cannot be built from its config.json ({error})") from None
    whole = [name for name, _ in model.named_modules()]
    unseen = any(isinstance(module, NotHere) for module in model.modules())
    decoder, head = _decoder_and_head(model, config.get_text_config(decoder=True))
    _take_out(model, {id(decoder), id(head)})
    if decoder.config is config:
        _take_out_within(decoder)
    _leave_unasked(decoder)
    if any("CrossAttention" in type(module).__name__ for module in decoder.modules()):
        raise not_tunable(config.model_type, "reads images through layers inside its text decoder")
    _pass_through(model, decoder, head)
    left = set(dict(model.named_modules()))
    object.__setattr__(model, _DECODER, decoder)
    object.__setattr__(model, _TOWERS, tuple(name for name in whole if name not in left))
    object.__setattr__(model, _UNSEEN, unseen)
    return model


class NotHere(nn.Module):
    """The place of a tower whose package is not installed: nothing of it is read, sharded or adapted."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.config = config


def _on_meta(published: Any, config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    """A model of a class, every tensor on meta; if need be with `NotHere` in place of towers."""
    with torch.device("meta"):
        try:
            return published._from_config(config, dtype=dtype)
        except ImportError:
            with _towers_may_lack(type(config.get_text_config(decoder=True))):
                return published._from_config(config, dtype=dtype)


@contextmanager
def _towers_may_lack(text: type) -> Iterator[None]:
    """While it lasts, AutoModel makes `NotHere` of what needs packages that are not here, but for configs of type `text`."""
    stock = AutoModel.__dict__["from_config"]

    def made(config: PreTrainedConfig, **options: Any) -> nn.Module:
        try:
            return stock.__get__(None, AutoModel)(config, **options)
        except ImportError:
            if isinstance(config, text):
                raise
            return NotHere(config)

    AutoModel.from_config = made
    try:
        yield
    finally:
        AutoModel.from_config = stock


def text_decoder(model: nn.Module) -> Any:
    """The text decoder of a model made by `text_only`; any other model itself."""
    return getattr(model, _DECODER, model)


def names_of_towers(model: nn.Module) -> tuple[str, ...]:
    """Full names of the modules that the published class has and a model made by `text_only` has not."""
    return getattr(model, _TOWERS, ())


def has_unseen_towers(model: nn.Module) -> bool:
    """Whether the published class has modules whose names are not known here."""
    return getattr(model, _UNSEEN, False)


def _decoder_and_head(model: PreTrainedModel, text: PreTrainedConfig) -> tuple[Any, nn.Linear]:
    """The text decoder and the head that takes its hidden states, as the classes say; and let the whole say so too.

    Raises SpecError where they say nothing.
    """
    writer: Any = model
    while writer.get_output_embeddings() is None:
        parts = [child for child in writer.children() if isinstance(child, PreTrainedModel)]
        writer = next((part for part in parts if type(part.config.get_text_config(decoder=True)) is type(text)), None)
        if writer is None:
            raise not_tunable(model.config.model_type, UNTOLD)
    head = writer.get_output_embeddings()
    decoder = _innermost_decoder(writer, head)
    if type(decoder.config) is not type(text) or not isinstance(head, nn.Linear) or decoder is model:
        raise not_tunable(model.config.model_type, UNTOLD)
    if writer is not model:
        model.get_output_embeddings = writer.get_output_embeddings
        model.get_input_embeddings = writer.get_input_embeddings
    return decoder, head


def _innermost_decoder(model: PreTrainedModel, head: Any) -> Any:
    """What gives the hidden states that the head takes, as the classes say; a class with a head says itself."""
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


class Unasked(nn.Module):
    """The place of a decoder layer that looks at an image and nothing else: the decoder passes it by where there is none."""


def _leave_unasked(decoder: Any) -> None:
    layers = layers_of_images(decoder.config.to_dict())
    for stack in (module for module in decoder.children() if layers and isinstance(module, nn.ModuleList)):
        for number in layers:
            if number < len(stack):
                stack[number] = Unasked()


def _take_out_within(module: nn.Module, name: str = "") -> None:
    """Remove what reads images and the like from a decoder whose class holds it too. `name`: of the module, and a dot."""
    for last, child in list(module.named_children()):
        if is_within(f"{name}{last}."):
            del module._modules[last]
        else:
            _take_out_within(child, f"{name}{last}.")


def _take_out(module: nn.Module, kept: set[int]) -> None:
    """Remove every child that neither is, nor holds, one of `kept`; and the parameters of those that hold them."""
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


def _pass_through(model: Any, decoder: nn.Module, head: nn.Module) -> None:
    """Let text go from the published class's forward straight to its decoder: the class between them mixes in the towers.

    The class that holds decoder and head does with the logits what it ever does.
    """
    holder = model
    while True:
        within = [c for c in holder.children() if {id(decoder), id(head)} <= {id(inner) for inner in c.modules()}]
        if not within:
            break
        holder = within[0]
    if holder is not model:
        model.forward = _Passing(holder)
    between = next(child for child in holder.children() if any(inner is decoder for inner in child.modules()))
    if between is not decoder:
        between.forward = _Passing(decoder, as_text=True)


class _Passing:
    """A forward that gives ids and positions to another module. No submodule: that one keeps its one name."""

    def __init__(self, module: nn.Module, *, as_text: bool = False) -> None:
        self._module = module
        self._as_text = as_text

    def __call__(
        self, input_ids: Tensor | None = None, position_ids: Tensor | None = None, attention_mask: Any = None, **_: Any
    ) -> Any:
        done = self._module(input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask)
        return _TextOutput(done.last_hidden_state) if self._as_text else done


class _TextOutput:
    """A decoder's output as the published class looks at it: what towers would add is None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
