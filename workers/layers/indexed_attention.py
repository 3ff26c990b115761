"""Attention to the keys that an indexer chooses (DeepSeek V3.2, GLM-5): some of those before a token in its own sample.

An indexer is a small part of a layer that scores every key for every query and names the best `index_topk`, by places in what
it is given; it gets no gradient. Given a packed row it would choose among the keys of all samples, so here it is given each
sample by itself, and attention within segments takes the places that it names as those in the segment. A sample of no more
tokens than may be chosen needs no indexer: each of its queries sees all before it.

The scores of a sample are made for a number of queries at a time, by the protocol by which an indexer goes on from a cache.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from workers.layers.segment_attention import NAME
from workers.layers.segments import CURRENT

KINDS = frozenset({"indexed_attention", "deepseek_sparse_attention"})
"""What configs call such layers; the second until transformers 5.17."""
SCORES_AT_ONCE = 1 << 27
"""Numbers of an indexer's scores, fp32 [queries, heads, keys], that exist at once; of at least one query."""
_ALWAYS = frozenset({"hidden_states", "position_embeddings", "attention_mask", "position_ids", "past_key_values"})
_PARAMETERS = _ALWAYS | {"q_resid"}
"""Of the forward of an indexer that is known here: others choose blocks of keys, or keys that stand for several."""


def are_known(model_class: type) -> bool:
    """Whether the indexers of an architecture are such as are known here."""
    named = [value for name, value in vars(sys.modules[model_class.__module__]).items() if name.endswith("Indexer")]
    return bool(named) and all(isinstance(value, type) and _is_known(value) for value in named)


def _is_known(indexer: type) -> bool:
    names = set(inspect.signature(indexer.forward).parameters) - {"self"} if hasattr(indexer, "forward") else set()
    return names >= _ALWAYS and names <= _PARAMETERS


def choose_by_sample(model: nn.Module) -> None:
    """Let the indexers of a model choose within each sample of the micro-batch in hand."""
    for module in list(model.modules()):
        indexer = getattr(module, "indexer", None)
        if isinstance(indexer, nn.Module) and _is_known(type(indexer)):
            indexer.forward = _BySample(indexer, indexer.forward, module)
            module.register_forward_pre_hook(_with_mask, with_kwargs=True)


def _with_mask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an attention, which takes part of its mask for the indexer: an empty one where none is made."""
    if _is_ours(module) and kwargs.get("attention_mask") is None:
        kwargs["attention_mask"] = kwargs["hidden_states"].new_empty(1, 1, 1, 0)
    return args, kwargs


def _is_ours(module: Any) -> bool:
    return module.config._attn_implementation == NAME


class _BySample:
    """In place of an indexer's forward. It holds the modules as no submodules: these keep their one name."""

    def __init__(self, module: nn.Module, stock: Callable[..., Tensor], attention: nn.Module) -> None:
        self._module: Any = module
        self._attention = attention  # in a base of several models the indexer's config is another, which says less
        self._stock = stock
        self._names = list(inspect.signature(stock).parameters)

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Places of the chosen keys in their sample, int32 [rows, length, index_topk]; [rows, length, 0]: all are."""
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        if not _is_ours(self._attention) or given.get("past_key_values") is not None:
            return self._stock(*args, **kwargs)
        hidden, most = given["hidden_states"], self._module.index_topk
        rows, length, _ = hidden.shape
        if CURRENT.bounds(length, 0).longest <= most:
            return hidden.new_empty(rows, length, 0, dtype=torch.int32)
        # The first keys: all that are there for queries among them, and for padding as good as any.
        chosen = torch.arange(most, dtype=torch.int32, device=hidden.device).repeat(rows, length, 1)
        CURRENT.choosing = True
        try:
            for row, span in _samples(rows, length):
                for queries, places in self._chosen(given, row, span) if span.stop - span.start > most else ():
                    chosen[row, queries] = places
        finally:
            CURRENT.choosing = False
        return chosen

    def _chosen(self, given: Mapping[str, Any], row: int, span: slice) -> Iterator[tuple[slice, Tensor]]:
        """The keys that the queries of one sample choose, a number of queries at a time.

        All queries have scores of all keys, masked or not: of equal scores topk takes one or another by how many there are.
        """
        length = span.stop - span.start
        keys, places = _Keys(length), torch.arange(length, device=given["hidden_states"].device)
        at_once = max(1, SCORES_AT_ONCE // (self._module.n_heads * length))
        for first in range(0, length, at_once):
            last = min(first + at_once, length)
            queries = slice(span.start + first, span.start + last)
            own = {name: _part(value, row, queries) for name, value in given.items()}
            mask = places[first:last, None] >= places
            yield queries, self._stock(**{**own, "attention_mask": mask[None], "past_key_values": keys})[0]


def _samples(rows: int, length: int) -> Iterator[tuple[int, slice]]:
    """Row and place of each sample of the micro-batch in hand; rows of which nothing is known are one sample each."""
    if CURRENT.packed:
        assert CURRENT.starts[-1] == length, "the segments are those of another micro-batch"
        yield from ((0, slice(start, end)) for start, end in pairwise(CURRENT.starts.tolist()))
    else:
        own = CURRENT.lengths if len(CURRENT.lengths) == rows else [length] * rows
        yield from ((row, slice(0, min(end, length))) for row, end in enumerate(own))


def _part(value: Any, row: int, queries: slice) -> Any:
    """Of an argument [rows, length, ..], or [1, length, ..] for all rows, that of some queries of a row."""
    if isinstance(value, tuple):
        return tuple(_part(one, row, queries) for one in value)
    if not isinstance(value, Tensor):
        return value
    row = row if value.shape[0] > 1 else 0
    return value[row : row + 1, queries]


class _Keys:
    """An indexer's keys of one sample, in the place of a cache: those that are not there yet are zero, and masked."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._known = 0
        self._keys: Tensor | None = None

    def update_indexer(self, keys: Tensor, _layer: int) -> Tensor:
        """Add keys [1, queries, d]; those of the whole sample, [1, length, d]."""
        if self._keys is None:
            self._keys = keys.new_zeros(1, self._length, keys.shape[-1])
        end = self._known + keys.shape[1]
        self._keys[:, self._known : end] = keys
        self._known = end
        return self._keys
