"""Attention to the keys that an indexer chooses (DeepSeek V3.2, GLM-5): some of those before a
token in its own sample.

An indexer is a small part of a layer that scores keys for every query and names the best of them by
their positions in what it is given; it gets no gradient. Given a packed row it would choose among
the keys of all samples, so here it is given each sample separately, and attention within segments
reads the positions as those in the segment. A sample of at most as many tokens as may be chosen
needs no indexer: each of its queries sees all keys before it.

The scores of a sample are computed for a number of queries at a time, by the protocol with which an
indexer continues from a cache.

Replaces: the forward of transformers' indexers (`DeepseekV32Indexer` and those with the same
parameters), and the cache that they are given.
Written for: transformers 5.23
Fails when upstream changes: tests/workers/patches/test_indexed_attention.py
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from workers.layers.segment_attention import NAME
from workers.layers.segments import CURRENT
from workers.patches.forward import replace_forward

KINDS = frozenset({"indexed_attention", "deepseek_sparse_attention"})
"""What configs call such layers; the second until transformers 5.17."""
SCORES_AT_ONCE = 1 << 27
"""Numbers of an indexer's scores, fp32 [queries, heads, keys], that exist at once; of at least one
query.
"""
_PARAMETERS = frozenset(
    {"hidden_states", "position_embeddings", "position_ids", "past_key_values", "attention_mask"}
)


def is_known(indexer: Any) -> bool:
    """Whether a class is an indexer that chooses keys one by one, judged by the parameters of its
    forward.
    """
    if not (isinstance(indexer, type) and hasattr(indexer, "forward")):
        return False
    names = frozenset(inspect.signature(indexer.forward).parameters) - {"self"}  # pyright: ignore[reportAttributeAccessIssue]
    return names in (_PARAMETERS, _PARAMETERS | {"q_resid"})


def indexers_of(model_class: type) -> list[Any]:
    """The classes of indexers in the modeling module of an architecture."""
    return [
        value
        for name, value in vars(sys.modules[model_class.__module__]).items()
        if name.endswith("Indexer")
    ]


def choose_by_sample(model: nn.Module) -> None:
    """Let the indexers of a model choose within each sample of the current micro-batch."""
    for module in list(model.modules()):
        indexer = getattr(module, "indexer", None)
        if isinstance(indexer, nn.Module) and is_known(type(indexer)):
            replace_forward(indexer, _BySample(indexer, module))
            module.register_forward_pre_hook(_with_mask, with_kwargs=True)


def _with_mask(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an attention, which takes part of its mask for the indexer: an empty one
    where none is made.
    """
    if _is_ours(module) and kwargs.get("attention_mask") is None:
        kwargs["attention_mask"] = kwargs["hidden_states"].new_empty(1, 1, 1, 0)
    return args, kwargs


def _is_ours(attention: Any) -> bool:
    """Whether a module of attention leaves what it does to attention within segments."""
    return attention.config._attn_implementation == NAME


class _BySample:
    """Replaces an indexer's forward.

    The modules that it holds are not submodules, so that each keeps one name.
    """

    def __init__(self, module: nn.Module, attention: nn.Module) -> None:
        self._module: Any = module
        # the ranks call what is inside a different number of times: workers/ranks/grouping.py
        self._module.by_sample = True
        self._stock: Any = module.forward
        # in a base of several models the indexer's config is another, which says less
        self._attention = attention
        self._names = list(inspect.signature(self._stock).parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Positions in their sample of the keys that each query sees, int32 [rows, length,
        index_topk], or [rows, length, 0] where all are seen.
        """
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        if not _is_ours(self._attention) or given.get("past_key_values") is not None:
            return self._stock(*args, **kwargs)
        return self._choices(given)

    @torch.no_grad()
    def _choices(self, given: Mapping[str, Any]) -> Tensor:
        hidden = given["hidden_states"]
        most = self._module.index_topk
        rows, length, _ = hidden.shape
        if not CURRENT.has_longer(length, most):
            return hidden.new_empty(rows, length, 0, dtype=torch.int32)
        # The first keys: all that there are for queries among them, and for padding as good as any.
        chosen = torch.arange(most, dtype=torch.int32, device=hidden.device).repeat(rows, length, 1)
        CURRENT.choosing = True
        try:
            for row, span in _samples(rows, length):
                for queries, own in (
                    self.chosen_in(given, row, span) if span.stop - span.start > most else ()
                ):
                    chosen[row, queries] = own
        finally:
            CURRENT.choosing = False
        return chosen

    def chosen_in(
        self, given: Mapping[str, Any], row: int, span: slice
    ) -> Iterator[tuple[slice, Tensor]]:
        """The keys that the queries of one sample choose, [1, queries, index_topk], a number of
        queries at a time. `given`: the arguments of forward.

        All queries have scores of all keys, masked or not: of equal scores topk takes one or
        another by how many there are.
        """
        length = span.stop - span.start
        keys = _Keys(length)
        positions = torch.arange(length, device=given["hidden_states"].device)
        at_once = max(1, SCORES_AT_ONCE // (self._module.n_heads * length))
        for first in range(span.start, span.stop, at_once):
            queries = slice(first, min(first + at_once, span.stop))
            own = {name: _part(value, row, queries) for name, value in given.items()}
            mask = (
                positions[queries.start - span.start : queries.stop - span.start, None] >= positions
            )
            yield (
                queries,
                self._stock(**{**own, "attention_mask": mask[None], "past_key_values": keys}),
            )


def _samples(rows: int, length: int) -> Iterator[tuple[int, slice]]:
    """Row and place of each sample of the current micro-batch; rows of which nothing is known are
    one sample each.
    """
    if CURRENT.packed:
        assert CURRENT.starts[-1] == length, "the segments are those of another micro-batch"
        yield from ((0, slice(start, end)) for start, end in pairwise(CURRENT.starts.tolist()))
    else:
        own = CURRENT.lengths if len(CURRENT.lengths) == rows else [length] * rows
        yield from ((row, slice(0, min(end, length))) for row, end in enumerate(own))


def _part(value: Any, row: int, queries: slice) -> Any:
    """The part of an argument [rows, length, ..], or [1, length, ..] for all rows, that belongs to
    some queries of a row.
    """
    if isinstance(value, tuple):
        return tuple(_part(item, row, queries) for item in value)
    if not isinstance(value, Tensor):
        return value
    row = row if value.shape[0] > 1 else 0
    return value[row : row + 1, queries]


class _Keys:
    """An indexer's keys of one sample, in the place of a cache: those that are not there yet are
    zero, and masked.
    """

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
