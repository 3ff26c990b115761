"""Attention to the keys that an indexer chooses (DeepSeek V3.2, GLM-5, MiniMax M3): some of those before a token in its own
sample, one by one or in blocks.

An indexer is a small part of a layer that scores keys for every query and names the best of them, or of their blocks, by places
in what it is given; it gets no gradient. Given a packed row it would choose among the keys of all samples, so here it is given
each sample by itself, and attention within segments takes the places that it names as those in the segment. A sample of no more
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

from workers.layers.segment_attention import NAME, Selection
from workers.layers.segments import CURRENT

KINDS = frozenset({"indexed_attention", "deepseek_sparse_attention", "minimax_m3_sparse"})
"""What configs call such layers; the second until transformers 5.17."""
SCORES_AT_ONCE = 1 << 27
"""Numbers of an indexer's scores, fp32 [queries, heads, keys], that exist at once; of at least one query."""
_BLOCKS = frozenset({"hidden_states", "position_embeddings", "position_ids", "past_key_values"})
_KEYS = _BLOCKS | {"attention_mask"}


def is_known(indexer: Any) -> bool:
    """Whether a class of indexers is such as are known here: by what their forward takes."""
    names = _parameters(indexer)
    return names in (_KEYS, _KEYS | {"q_resid"}) or _chooses_blocks(indexer)


def _chooses_blocks(indexer: type) -> bool:
    return _parameters(indexer) == _BLOCKS and hasattr(indexer, "build_block_mask")


def _parameters(indexer: Any) -> frozenset[str]:
    is_module = isinstance(indexer, type) and hasattr(indexer, "forward")
    return frozenset(inspect.signature(indexer.forward).parameters) - {"self"} if is_module else frozenset()


def indexers_of(model_class: type) -> list[Any]:
    """The classes of indexers in the modeling module of an architecture."""
    return [value for name, value in vars(sys.modules[model_class.__module__]).items() if name.endswith("Indexer")]


def choose_by_sample(model: nn.Module) -> None:
    """Let the indexers of a model choose within each sample of the micro-batch in hand."""
    for module in list(model.modules()):
        indexer = getattr(module, "indexer", None)
        if not isinstance(indexer, nn.Module) or not is_known(type(indexer)):
            continue
        if _chooses_blocks(type(indexer)):
            indexer.forward = _BlocksBySample(indexer, module)
        else:
            indexer.forward = _KeysBySample(indexer, module)
            module.register_forward_pre_hook(_with_mask, with_kwargs=True)


def _with_mask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an attention, which takes part of its mask for the indexer: an empty one where none is made."""
    if is_ours(module) and kwargs.get("attention_mask") is None:
        kwargs["attention_mask"] = kwargs["hidden_states"].new_empty(1, 1, 1, 0)
    return args, kwargs


def is_ours(attention: Any) -> bool:
    """Whether a module of attention leaves what it does to attention within segments."""
    return attention.config._attn_implementation == NAME


class BySample:
    """In place of an indexer's forward. It holds the modules as no submodules: these keep their one name."""

    def __init__(self, module: nn.Module, attention: nn.Module) -> None:
        self.module: Any = module
        self.module.by_sample = True  # the ranks call what is inside a different number of times: workers/ranks/grouping.py
        self.stock: Callable[..., Tensor] = module.forward
        self._attention = attention  # in a base of several models the indexer's config is another, which says less
        self._names = list(inspect.signature(self.stock).parameters)

    @property
    def whole(self) -> int:
        """Tokens of a sample whose queries see all before them."""
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, int]:
        """Choices for each query, and places of each. The first places are all of a sample that is seen whole."""
        raise NotImplementedError

    def chosen_in(self, given: Mapping[str, Any], row: int, span: slice) -> Iterator[tuple[slice, Tensor]]:
        """The places that the queries of one sample choose, [choices, queries, places], a number of queries at a time. `given`:
        the arguments of forward.
        """
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self.given(args, kwargs)
        if not is_ours(self._attention) or given.get("past_key_values") is not None:
            return self.stock(*args, **kwargs)
        return self.choices(given)

    def given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by their names."""
        return {**dict(zip(self._names, args, strict=False)), **kwargs}

    def tell(self, told: Selection, given: Mapping[str, Any]) -> None:
        """Add what is chosen to what attention is told."""
        chosen = self.choices(given)
        if chosen.shape[-1]:
            told.chosen, told.whole = chosen, self.whole

    @torch.no_grad()
    def choices(self, given: Mapping[str, Any]) -> Tensor:
        """Places in their sample of what each query sees, int32 [rows, choices, length, places]; none of them: all is seen."""
        hidden, (choices, places) = given["hidden_states"], self.shape
        rows, length, _ = hidden.shape
        if CURRENT.bounds(length, 0).longest <= self.whole:
            return hidden.new_empty(rows, choices, length, 0, dtype=torch.int32)
        # The first: all that are there for queries among them, and for padding as good as any.
        chosen = torch.arange(places, dtype=torch.int32, device=hidden.device).repeat(rows, choices, length, 1)
        CURRENT.choosing = True
        try:
            for row, span in _samples(rows, length):
                for queries, own in self.chosen_in(given, row, span) if span.stop - span.start > self.whole else ():
                    chosen[row, :, queries] = own
        finally:
            CURRENT.choosing = False
        return chosen


class _KeysBySample(BySample):
    """Of indexers that choose keys."""

    @property
    def whole(self) -> int:
        return self.module.index_topk

    @property
    def shape(self) -> tuple[int, int]:
        return 1, self.module.index_topk

    def choices(self, given: Mapping[str, Any]) -> Tensor:
        """int32 [rows, length, index_topk], or [rows, length, 0]."""
        return super().choices(given).squeeze(1)

    def chosen_in(self, given: Mapping[str, Any], row: int, span: slice) -> Iterator[tuple[slice, Tensor]]:
        """All queries have scores of all keys, masked or not: of equal scores topk takes one or another by how many there
        are.
        """
        length = span.stop - span.start
        keys, places = _Keys(length), torch.arange(length, device=given["hidden_states"].device)
        for queries in portions(span, self.module.n_heads * length):
            own = {name: part(value, row, queries) for name, value in given.items()}
            mask = places[queries.start - span.start : queries.stop - span.start, None] >= places
            yield queries, self.stock(**{**own, "attention_mask": mask[None], "past_key_values": keys})


class _BlocksBySample(BySample):
    """Of indexers that choose blocks of keys, for each group of heads its own."""

    @property
    def whole(self) -> int:
        return self.module.topk_blocks * self.module.block_size

    @property
    def shape(self) -> tuple[int, int]:
        return self.module.num_heads, self.module.topk_blocks

    def chosen_in(self, given: Mapping[str, Any], row: int, span: slice) -> Iterator[tuple[slice, Tensor]]:
        length = span.stop - span.start
        keys = _Keys(length)
        for queries in portions(span, self.module.num_heads * length):
            own = {name: part(value, row, queries) for name, value in given.items()}
            yield queries, self.stock(**{**own, "past_key_values": keys})[0]


def portions(span: slice, numbers: int, multiple: int = 1) -> Iterator[slice]:
    """The queries of a sample, a number of them at a time. `numbers`: a query's scores; `multiple`: of how many tokens."""
    at_once = max(1, SCORES_AT_ONCE // numbers // multiple) * multiple
    for first in range(span.start, span.stop, at_once):
        yield slice(first, min(first + at_once, span.stop))


def _samples(rows: int, length: int) -> Iterator[tuple[int, slice]]:
    """Row and place of each sample of the micro-batch in hand; rows of which nothing is known are one sample each."""
    if CURRENT.packed:
        assert CURRENT.starts[-1] == length, "the segments are those of another micro-batch"
        yield from ((0, slice(start, end)) for start, end in pairwise(CURRENT.starts.tolist()))
    else:
        own = CURRENT.lengths if len(CURRENT.lengths) == rows else [length] * rows
        yield from ((row, slice(0, min(end, length))) for row, end in enumerate(own))


def part(value: Any, row: int, queries: slice) -> Any:
    """Of an argument [rows, length, ..], or [1, length, ..] for all rows, that of some queries of a row."""
    if isinstance(value, tuple):
        return tuple(part(one, row, queries) for one in value)
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

    @property
    def layers(self) -> Mapping[int, _Keys]:
        """Of which a layer's own is asked."""
        return Everywhere(self)

    def update_index(self, keys: Tensor) -> Tensor:
        """The same for keys [1, 1, queries, d]."""
        return self.update_indexer(keys[:, 0], 0)[:, None]


class Everywhere(dict[int, Any]):
    """The same for every layer."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self._value = value

    def __missing__(self, _: int) -> Any:
        return self._value
