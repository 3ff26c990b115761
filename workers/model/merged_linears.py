"""The layers that `ft merge` stores quantised: the linear layers of the decoder layers."""

from __future__ import annotations

from collections.abc import Container

from transformers import PreTrainedModel

from ft_service.errors import SpecError
from ft_service.spec import PrecisionOptions
from workers.base.parameter_sources import turned_weights
from workers.layers.experts import experts_of
from workers.model.multimodal import decoder_layers, names_of_towers
from workers.model.precision import precision_map


def merged_linears(
    model: PreTrainedModel, tensors: Container[str], to: str, *, param: str, instead: str
) -> set[str]:
    """Names of the linear layers inside the decoder layers.

    `tensors`: those of the base's files. Raises SpecError, about `param`, where they cannot be
    stored quantised when they are merged to `to`; `instead`: what to do then.
    """
    layers = decoder_layers(model)
    names = set(precision_map(model, layers, PrecisionOptions()))
    missing = sorted(f"{name}.weight" for name in names if f"{name}.weight" not in tensors)
    if names_of_towers(model):
        why = (
            f"is made of several models, of which merging to {to} would leave some as they are; no "
            "reader of that layout knows which"
        )
    elif turned_weights(model):
        why = f"holds its matrices the other way round, which merging to {to} does not"
    elif missing:
        why = f"does not hold {missing[0]} by that name, which merging to {to} does not support"
    elif experts_of(layers):
        why = f"is a mixture of experts, which merging to {to} does not support"
    else:
        return names
    raise SpecError(f"The base {why}: {instead}.", param=param)
