"""What pictures give the decoder of the current micro-batch, and the hooks that put it there.

A picture's features stand in place of the embeddings of its placeholders, as in the published
classes. Some towers give features for the first decoder layers too (DeepStack, Meng et al., 2024),
which are added to what these layers return at the same places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from workers.layers.segments import CURRENT


@dataclass(frozen=True)
class ImageInputs:
    """The features of all pictures of a micro-batch."""

    places: Tensor
    """int64 [n]: the placeholders, counted through all rows."""
    features: Tensor
    """[n, hidden]: what stands there in place of an embedding."""
    early: Tensor
    """[layers, n, hidden]: what is added to the results of the first decoder layers; of no layer
    where the base's tower gives none.
    """


def take_images(embedding: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Let a decoder take the pictures of the current micro-batch (`CURRENT.images`).

    `layers`: the first decoder layers, as many as the tower gives features for. A decoder that
    several jobs share may be given here once for each.
    """
    if _in_place in embedding._forward_hooks.values():
        return
    embedding.register_forward_hook(_in_place)
    for number, layer in enumerate(layers):
        layer.register_forward_hook(partial(_added, number))


def _in_place(_embedding: nn.Module, _args: Any, embedded: Tensor) -> Tensor:
    """[rows, length, hidden], with features in place of placeholders."""
    images = CURRENT.images
    if images is None:
        return embedded
    flat = embedded.flatten(0, 1)
    return flat.index_copy(0, images.places, images.features.to(flat.dtype)).view_as(embedded)


def _added(number: int, _layer: nn.Module, _args: Any, output: Any) -> Any:
    """What a decoder layer returns, with the features for it."""
    images = CURRENT.images
    if images is None:
        return output
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    added = images.early[number].to(hidden.dtype)
    whole = hidden.flatten(0, 1).index_add(0, images.places, added).view_as(hidden)
    return (whole, *output[1:]) if isinstance(output, tuple) else whole
