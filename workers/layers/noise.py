"""NEFTune: noise on the embeddings while training, computed from counters instead of a generator,
as dropout is (dropout.py).

The noise of a number follows from (seed, step, sample, position in the sample, channel): it is the
same on any rank, among any other samples, and after a resume.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from workers.layers.dropout import even_numbers, key_of
from workers.layers.segments import CURRENT


class Noise:
    """The noise of one model.

    It is no `nn.Module`, so that nothing of it is sharded, converted or saved.
    """

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self._tokens: Tensor | None = None
        self._lengths: Tensor | None = None

    def use(self, tokens: Tensor | None, lengths: Tensor | None) -> None:
        """Set the keys of the tokens, int32 [rows, length], and their samples' lengths, fp32, for
        the coming forward. None: it has no noise.
        """
        self._tokens = tokens
        self._lengths = lengths

    def __call__(self, module: nn.Module, inputs: Any, embedded: Tensor) -> Tensor:
        """Forward hook of the embedding: adds noise to its output [rows, length, width]."""
        if not module.training or self._tokens is None or self._lengths is None:
            return embedded
        width = embedded.shape[-1]
        spread = self.alpha / (self._lengths * width).sqrt()
        numbers = even_numbers(self._tokens, key_of("noise on embeddings"), width).view(
            *self._tokens.shape, width
        )
        noise = (numbers * spread.unsqueeze(-1)).to(embedded.dtype)
        if CURRENT.images is not None:  # which stand in place of what is embedded
            noise = noise.flatten(0, 1).index_fill(0, CURRENT.images.places, 0).view_as(noise)
        return embedded + noise


_known: WeakKeyDictionary[nn.Module, list[Noise]] = WeakKeyDictionary()
"""Noise by model: a walk through all modules takes as long as a decoder layer."""


def add_noise(model: Any, alpha: float) -> None:
    """Give a model's embedding noise. `model`: of transformers."""
    _known.clear()
    embedding = model.get_input_embeddings()
    embedding.noise = Noise(alpha)
    embedding.register_forward_hook(embedding.noise)


def use_noise(model: nn.Module, tokens: Tensor | None, lengths: Tensor | None) -> None:
    """Set what the noise follows from before a forward, if the model has any."""
    if model not in _known:
        _known[model] = [
            noise for m in model.modules() if isinstance(noise := getattr(m, "noise", None), Noise)
        ]
    for noise in _known[model]:
        noise.use(tokens, lengths)
