"""Bases that are published as several models in one, such as `…ForConditionalGeneration`: the text decoder inside, under the
names of the published class.

The published class is built on meta and all that is not its decoder or head is taken out, so nothing of a tower is read,
sharded or adapted, and every name is the one that PEFT and vLLM find on the model as it is downloaded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from ft_service.bases.wrapped import NO_DECODER, generates, not_tunable
from workers.model.towers import absent_where_not_installed, are_all_known

_DECODER, _TOWERS, _ALL_KNOWN = "_ft_decoder", "_ft_towers", "_ft_all_known"
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
        with torch.device("meta"), absent_where_not_installed():
            model: Any = published._from_config(config, dtype=dtype)
    except (ImportError, ValueError, TypeError, AttributeError) as error:  # classes check their configs in many ways
        raise not_tunable(config.model_type, f"cannot be built from its config.json ({error})") from None
    all_known = are_all_known(model)
    head = model.get_output_embeddings()
    decoder = _innermost_decoder(model, head)
    if (
        type(decoder.config) is not type(config.get_text_config(decoder=True))
        or not isinstance(head, nn.Linear)
        or decoder is model
    ):
        raise not_tunable(config.model_type, "does not say where its text decoder or its head is")
    if any("CrossAttention" in type(module).__name__ for module in decoder.modules()):
        raise not_tunable(config.model_type, "reads images through layers inside its text decoder")
    names = [name for name, _ in model.named_modules()]
    _take_out(model, {id(decoder), id(head)})
    _pass_through(model, decoder, head)
    left = {name for name, _ in model.named_modules()}
    object.__setattr__(model, _ALL_KNOWN, all_known)
    object.__setattr__(model, _DECODER, decoder)
    object.__setattr__(model, _TOWERS, tuple(name for name in names if name not in left))
    return model


def text_decoder(model: nn.Module) -> Any:
    """The text decoder of a model made by `text_only`; any other model itself."""
    return getattr(model, _DECODER, model)


def are_towers_known(model: nn.Module) -> bool:
    """Whether `names_of_towers` has all there are: what cannot be built here has names that nobody knows."""
    return getattr(model, _ALL_KNOWN, True)


def names_of_towers(model: nn.Module) -> tuple[str, ...]:
    """Full names of the modules that the published class has and a model made by `text_only` has not."""
    return getattr(model, _TOWERS, ())


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
