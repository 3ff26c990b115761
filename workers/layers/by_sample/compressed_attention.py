"""Attention that looks at a sample's tokens in blocks, each compressed to one key (DeepSeek V4, Qwen4): blocks begin anew at
each sample of a packed row.

DeepSeek V4 sees the last tokens one by one, and beside them a compressed key for each whole block before the query, or those
of them that an indexer chooses. Qwen4 sees the tokens of the blocks that an indexer chooses by their compressed keys, and those
of the block that the query is in.

The layers hand their attention only what transformers has names for. What else it needs goes the way of a cache: it is given to
the layer as one, which asks it for tokens to compress and tells it what they became, and to attention as an option.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from workers.layers.by_sample.indexed_attention import BySample, Everywhere, is_ours, part, portions
from workers.layers.segment_attention import Selection
from workers.layers.segments import CURRENT

KINDS = frozenset({"compressed_sparse_attention", "heavily_compressed_attention", "indexed_attention", "qwen_sparse_attention"})
"""What configs call such layers; the last until transformers 5.17."""
_COMPRESSORS = ("HCACompressor", "CSACompressor")
"""How the names of classes end."""
_COMPRESSED_INDEXER = "DeepseekV4Indexer"
_BLOCK_INDEXER = "QSAIndexer"


def is_known(indexer: type) -> bool:
    """Whether a class of indexers is such as are known here."""
    return indexer.__name__.endswith((_COMPRESSED_INDEXER, _BLOCK_INDEXER))


def compress_by_sample(model: nn.Module) -> None:
    """Let the layers of a model compress and choose within each sample of the micro-batch in hand."""
    for module in list(model.modules()):
        compressor, indexer = getattr(module, "compressor", None), getattr(module, "indexer", None)
        if isinstance(compressor, nn.Module) and type(compressor).__name__.endswith(_COMPRESSORS):
            module.register_forward_pre_hook(_with_pooled, with_kwargs=True)
            inner: Any = getattr(compressor, "indexer", None)
            if isinstance(inner, nn.Module):
                inner.forward = _ChoosingPooled(inner, module)
        elif isinstance(indexer, nn.Module) and type(indexer).__name__.endswith(_BLOCK_INDEXER):
            module.register_forward_pre_hook(_with_selection, with_kwargs=True)
            indexer.forward = _ChoosingBlocks(indexer, module)


class _Told(Selection):
    """A selection in the place of a cache."""

    def update(self, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        """Those of the whole sample: nothing came before."""
        return key, value


_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _with_selection(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
    """The arguments of an attention of chosen blocks."""
    if is_ours(module) and kwargs.get("past_key_values") is None:
        told = _Told(kwargs.get("attention_mask"))
        hidden = args[0] if args else kwargs["hidden_states"]
        nothing = torch.empty(1, 1, 1, 0, dtype=torch.bool, device=hidden.device)
        kwargs.update(past_key_values=told, selection=told, attention_mask=nothing)
    return args, kwargs


def _with_pooled(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
    """The arguments of an attention beside compressed keys."""
    if is_ours(module) and kwargs.get("past_key_values") is None:
        told = _Pooled(module.compressor, kwargs.get("attention_mask"))
        kwargs.update(past_key_values=told, selection=told, attention_mask=None)
    return args, kwargs


# Compressed keys beside tokens --------------------------------------------------------------------------------------------


class _Pooled(_Told):
    """What a compressor goes by in one forward: it compresses all samples of a row at once, and no block reaches over their
    ends.

    Where a compressed key is made of the block before it too, an empty block stands behind each sample: what it passes on has
    no weight, as it is at the beginning of a row, and what becomes of itself is dropped.
    """

    def __init__(self, compressor: Any, mask: Tensor | None) -> None:
        super().__init__(mask, compressor.compress_rate)
        self._width: int = compressor.head_dim
        self._sizes: list[int] = []
        """Blocks of the first sample, empty ones behind it, those of the next, and so on."""

    @property
    def layers(self) -> Mapping[int, _Pooled]:
        """Of which a layer's own is asked."""
        return Everywhere(self)

    def store_compression_weights(self, _: str, keys: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, Tensor | int]:
        """The tokens of whole blocks, of keys and gates [rows, length, channels]; and for each block what is to be added to its
        place in the row to make it that in its sample, in tokens.
        """
        bounds = CURRENT.bounds(keys.shape[1], 0)
        lengths = bounds.starts.diff().tolist()
        behind = int(len(lengths) > 1 and keys.shape[2] > self._width)
        self._sizes = [size for length in lengths for size in (length // self.block, behind)]
        empty = keys.new_zeros(keys.shape[0], behind * self.block, keys.shape[2])
        shut = torch.cat([torch.full_like(empty[..., : self._width], -torch.inf), empty[..., self._width :]], dim=-1)
        if len(lengths) == 1:
            return self._whole(keys, lengths, empty), self._whole(gates, lengths, shut), 0
        starts = bounds.starts if bounds.on_device is None else bounds.on_device
        sizes = starts.to(keys.device).diff() // self.block + behind
        first = (sizes.cumsum(0) - sizes).repeat_interleave(sizes, output_size=sum(self._sizes))
        return self._whole(keys, lengths, empty), self._whole(gates, lengths, shut), -self.block * first

    def _whole(self, tensor: Tensor, lengths: list[int], behind: Tensor) -> Tensor:
        """Of tokens [rows, length, channels] those of whole blocks, and behind each sample's the same."""
        rests = [length % self.block for length in lengths]
        sizes = [size for length, rest in zip(lengths, rests, strict=True) for size in (length - rest, rest)]
        return torch.cat([own for part_of in tensor.split(sizes, dim=1)[::2] for own in (part_of, behind)], dim=1)

    def update_overlap_state(self, *_: Any) -> tuple[None, None]:
        """Nothing came before."""
        return None, None

    def update_compressor_states(self, _: str, compressed: Tensor) -> Tensor:
        """Keep the compressed keys, [rows, blocks, d], for attention; the layer goes on without any."""
        blocks = compressed.split(self._sizes, dim=1)[::2] if sum(self._sizes) else [compressed]
        self.pooled = torch.cat(list(blocks), dim=1).unsqueeze(1)
        return compressed[:, :0]


class _ChoosingPooled(BySample):
    """Of the indexer of a compressor: places of compressed keys."""

    @property
    def whole(self) -> int:
        return (self.module.index_topk + 1) * self.module.compress_rate - 1

    @property
    def shape(self) -> tuple[int, int]:
        return 1, self.module.index_topk

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Places for the layer itself, which has no compressed keys: none, [rows, length, 0]."""
        given = self.given(args, kwargs)
        told = given["past_key_values"]
        if not isinstance(told, _Pooled):
            return self.stock(*args, **kwargs)
        self.tell(told, given)
        return given["position_ids"].new_empty(*given["hidden_states"].shape[:2], 0)

    def chosen_in(self, given: Mapping[str, Any], row: int, span: slice) -> Iterator[tuple[slice, Tensor]]:
        rate = self.module.compress_rate
        blocks = (span.stop - span.start) // rate
        keys = _CompressedKeys(blocks, rate)
        for queries in portions(span, self.module.num_heads * blocks, rate):
            own = {name: part(value, row, queries) for name, value in given.items()}
            yield queries, self.stock(**{**own, "past_key_values": keys})


class _CompressedKeys:
    """An indexer's keys of one sample, in the place of a cache: those that are not there yet are zero, and masked."""

    def __init__(self, blocks: int, rate: int) -> None:
        self._rate = rate
        self._blocks = blocks
        self._known = 0
        self._keys: Tensor | None = None
        self._before: tuple[Tensor | None, Tensor | None] = (None, None)

    @property
    def layers(self) -> Mapping[int, _CompressedKeys]:
        """Of which a layer's own is asked."""
        return Everywhere(self)

    def store_compression_weights(self, _: str, keys: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, int]:
        """The tokens of whole blocks, and the place of the first of them in the sample."""
        usable = keys.shape[1] // self._rate * self._rate
        return keys[:, :usable], gates[:, :usable], self._known * self._rate

    def update_overlap_state(self, _: str, keys: Tensor, gates: Tensor, width: int) -> tuple[Tensor | None, Tensor | None]:
        """What the block before the first of these passes on: of [1, blocks, tokens, channels]."""
        before, self._before = self._before, (keys[:, -1, :, :width], gates[:, -1, :, :width])
        return before

    def update_compressor_states(self, _: str, compressed: Tensor) -> Tensor:
        """Add keys [1, new, d]; those of the whole sample, [1, blocks, d]."""
        if self._keys is None:
            self._keys = compressed.new_zeros(1, self._blocks, compressed.shape[-1])
        end = self._known + compressed.shape[1]
        self._keys[:, self._known : end] = compressed
        self._known = end
        return self._keys


# Tokens of chosen blocks --------------------------------------------------------------------------------------------------


class _ChoosingBlocks(BySample):
    """Of an indexer of blocks of tokens. The arithmetic is that of the class, which goes query by query."""

    @property
    def whole(self) -> int:
        return (self.module.block_topk + 1) * self.module.compress_ratio - 1

    @property
    def shape(self) -> tuple[int, int]:
        return 1, self.module.block_topk + 1

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """A mask for the layer itself that says nothing."""
        given = self.given(args, kwargs)
        told = given["past_key_values"]
        if not isinstance(told, _Told):
            return self.stock(*args, **kwargs)
        told.block = self.module.compress_ratio
        self.tell(told, given)
        return given["attention_mask"]

    def chosen_in(self, given: Mapping[str, Any], row: int, span: slice) -> Iterator[tuple[slice, Tensor]]:
        indexer, length = self.module, span.stop - span.start
        heads, width, ratio = indexer.index_n_heads, indexer.index_head_dim, indexer.compress_ratio
        rotated: Callable[..., Tensor] = vars(sys.modules[type(indexer).__module__])["apply_rotary_pos_emb"]
        cos, sin = part(given["position_embeddings"], row, span)
        query, key = indexer.index_qk_proj(given["hidden_states"][row : row + 1, span]).split([heads * width, width], dim=-1)
        query = rotated(indexer.q_layernorm(query.unflatten(-1, (heads, width))), cos=cos, sin=sin, unsqueeze_dim=2)
        first = slice(0, length // ratio * ratio, ratio)
        pooled = key[0, : first.stop].unflatten(0, (-1, ratio)).float().mean(dim=1).to(key.dtype)
        keys = rotated(indexer.k_layernorm(pooled).unsqueeze(1), cos=cos[0, first], sin=sin[0, first]).squeeze(1).float()
        for queries in portions(span, heads * len(keys)):
            own = slice(queries.start - span.start, queries.stop - span.start)
            scores = torch.relu(query[0, own].float() @ keys.mT).sum(dim=1) / math.sqrt(width)
            complete = torch.arange(own.start + 1, own.stop + 1, device=keys.device) // ratio
            yield queries, best_blocks(scores, complete, indexer.block_topk, one_by_one=not keys.is_cuda)


def best_blocks(scores: Tensor, complete: Tensor, most: int, one_by_one: bool) -> Tensor:
    """The `most` best of the complete blocks before each query, and the block behind those, of which it is part: int32
    [queries, most + 1]. `scores`: [queries, blocks]; `complete`: int [queries], ascending.

    `one_by_one`: for each number of complete blocks by itself, so that of equal scores the same are taken as in a sample that
    ends there; else all queries at once, where that would be many kernels.
    """
    blocks = torch.arange(scores.shape[1], device=scores.device)
    if not one_by_one:
        best = scores.masked_fill(blocks >= complete[:, None], -torch.inf).topk(most, dim=-1).indices
        return torch.cat([best, complete[:, None]], dim=-1).int()
    best = torch.arange(most + 1, dtype=torch.int32).repeat(len(scores), 1)
    row = 0
    for count, queries in zip(*(values.tolist() for values in complete.unique_consecutive(return_counts=True)), strict=True):
        if count > most:
            best[row : row + queries, :most] = scores[row : row + queries, :count].topk(most, dim=-1).indices.int()
            best[row : row + queries, most] = count
        row += queries
    return best
