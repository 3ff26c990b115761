"""The weights that `ft merge` stores quantised: the linear layers of the decoder layers, and the
matrices of experts.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Protocol

from transformers import PreTrainedModel

from ft_service.errors import SpecError
from ft_service.spec import PrecisionOptions
from workers.base.parameter_sources import find_pieces, is_stack, turned_weights
from workers.layers.experts import experts_of
from workers.model.multimodal import decoder_layers, names_of_towers
from workers.model.precision import precision_map


class NamedShapes(Container[str], Protocol):
    """The tensors of a base's files."""

    def names(self) -> list[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...


def merged_linears(
    model: PreTrainedModel, tensors: Container[str], to: str, *, param: str, instead: str
) -> set[str]:
    """Names of the linear layers inside the decoder layers, of a model that has no experts.

    `tensors`: those of the base's files. Raises SpecError, about `param`, where they cannot be
    stored quantised when they are merged to `to`; `instead`: what to do then.
    """
    layers = decoder_layers(model)
    names = set(precision_map(model, layers, PrecisionOptions()))
    why = _why_not(model, names, tensors, to)
    if why is None and experts_of(layers):
        why = f"is a mixture of experts, which merging to {to} does not support"
    if why is not None:
        raise SpecError(f"The base {why}: {instead}.", param=param)
    return names


def merged_weights(model: PreTrainedModel, files: NamedShapes, to: str) -> set[str]:
    """Tensors of the base's files, one matrix each, that are stored quantised when they are merged
    to `to`: weights of linear layers inside the decoder layers, and of experts.

    Raises SpecError where they cannot be, as where experts lie in stacks: readers of
    compressed-tensors know them one by one.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names = set(precision_map(model, decoder_layers(model), PrecisionOptions()))
    stacks = names & parameters.keys()
    why = _why_not(model, names - stacks, files, to)
    pieces = find_pieces(model, stacks, files.names())
    experts = {piece.tensor for found in pieces.values() for piece in found}
    if why is None and (stacks - pieces.keys() or any(is_stack(files.shape(t)) for t in experts)):
        why = f"holds its experts in stacks, which merging to {to} does not support"
    if why is not None:
        raise SpecError(f"The base {why}: merge to bf16.", param="to")
    return {f"{name}.weight" for name in names - stacks} | experts


def _why_not(
    model: PreTrainedModel, linears: set[str], tensors: Container[str], to: str
) -> str | None:
    """Why linear layers of these names cannot be stored quantised; None: they can."""
    missing = sorted(f"{name}.weight" for name in linears if f"{name}.weight" not in tensors)
    if names_of_towers(model):
        return (
            f"is made of several models, of which merging to {to} would leave some as they are; no "
            "reader of that layout knows which"
        )
    if turned_weights(model):
        return f"holds its matrices the other way round, which merging to {to} does not"
    if missing:
        return f"does not hold {missing[0]} by that name, which merging to {to} does not support"
    return None
