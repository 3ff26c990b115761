"""The features of pictures, put in their places while a decoder computes.

They stand in place of the embeddings of placeholders, as in the published classes. Some towers give
features for the first decoder layers too (DeepStack, Meng et al., 2024), which are added to what
these layers return at the same places.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ft_service.bases.description import ImageFacts
from workers.layers.segments import CURRENT, tell_two_way
from workers.model.multimodal import decoder_layers, text_decoder
from workers.patches.forward import replace_forward

_TAKES = "_ft_takes_images"


def take_images(causal: PreTrainedModel, facts: ImageFacts) -> None:
    """Let a decoder take the pictures of the current micro-batch (`CURRENT.images`).

    Of a model that jobs share this is done once, before lanes are made of it; later calls change
    nothing.
    """
    embedding: nn.Module = text_decoder(causal).get_input_embeddings()
    if takes_images(causal):
        return
    replace_forward(embedding, partial(_in_place, embedding.forward))
    for number, layer in enumerate(decoder_layers(causal)[: facts.early_layers]):
        replace_forward(layer, partial(_added, number, layer.forward))
    tell_two_way(text_decoder(causal), facts.two_way)
    setattr(embedding, _TAKES, True)


def takes_images(causal: PreTrainedModel) -> bool:
    """Whether `take_images` was called."""
    return getattr(text_decoder(causal).get_input_embeddings(), _TAKES, False)


def _in_place(own: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """The embeddings, [rows, length, hidden], with features in place of placeholders."""
    embedded = own(*args, **kwargs)
    images = CURRENT.images
    if images is None:
        return embedded
    return embedded.index_put(_places(embedded), images.features.to(embedded.dtype))


def _added(number: int, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a decoder layer returns, with the features for it."""
    output = own(*args, **kwargs)
    images = CURRENT.images
    if images is None:
        return output
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    added = images.early[number].to(hidden.dtype)
    whole = hidden.index_put(_places(hidden), added, accumulate=True)
    return (whole, *output[1:]) if isinstance(output, tuple) else whole


def _places(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of every placeholder. No view of the rows is made, which FSDP2 warns of."""
    assert CURRENT.images is not None
    return CURRENT.images.places // hidden.shape[1], CURRENT.images.places % hidden.shape[1]
