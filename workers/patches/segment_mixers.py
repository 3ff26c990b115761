"""Convolutions and recurrences within samples that are concatenated in a row: state and taps
restart at each.

Hybrids mix tokens by functions of their modeling module, which transformers takes from a kernel's
package where that is installed. Here stand others in their place, for every model of that module:

* A convolution or a scan of a packed row goes segment by segment; a GPU's kernel that knows
  segments gets them instead.
* Where ranks share rows, a convolution gets the tokens before the part that its taps reach, and a
  delta rule all tokens of the rank's heads. A scan of a state space is of whole rows.
* Kernels that fuse the projections around a scan are never taken: they multiply with the weights of
  those layers past the layers themselves, and so past adapters and quantised weights.

Replaces: functions of transformers' modeling modules, by the names in `MIXERS` and `FUSED`.
Written for: transformers 5.23
Fails when upstream changes: tests/workers/patches/test_segment_mixers.py
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ft_service.head_shares import head_shares
from workers.layers import exchange
from workers.layers.segments import CURRENT, RowPart

FUSED = ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn")
"""Functions that take projections' weights; where they return None, the layer computes with its
parts.
"""


@dataclass(frozen=True)
class _Mixer:
    """A function on tensors [rows, ..] with the tokens in dimension `dim` of every one that has at
    least three.
    """

    dim: int
    package: str = ""
    """Package of its kernel for packed rows; empty: it has none."""
    argument: str = ""
    """What that kernel calls the segments: `cu_seqlens` [segments + 1], or `seq_idx` [rows,
    tokens].
    """
    shared: str = ""
    """How ranks that share a row compute it: `heads` (queries and keys [rows, tokens, groups, ..],
    the rest [rows, tokens, heads, ..]), `taps` (channels [rows, channels, tokens], weights
    [channels, taps]); empty: they cannot.
    """


MIXERS = {
    "causal_conv1d_fn": _Mixer(2, "causal_conv1d", "seq_idx", "taps"),
    "torch_chunk_gated_delta_rule": _Mixer(1, "fla", "cu_seqlens", "heads"),
    "chunk_kimi_delta_attention": _Mixer(1, "fla", "cu_seqlens", "heads"),
    "mamba2_chunk_scan": _Mixer(1, "mamba_ssm", "seq_idx"),
    "mamba_selective_scan": _Mixer(2),
}


def are_known(model_class: type) -> bool:
    """Whether the layers of an architecture that mix tokens otherwise than by attention do so by
    functions known here.
    """
    return any(name in vars(sys.modules[model_class.__module__]) for name in MIXERS)


def of_whole_rows(model_class: type) -> list[str]:
    """The functions known here, of an architecture's modeling module, that ranks which share rows
    cannot compute.
    """
    names = vars(sys.modules[model_class.__module__])
    return [name for name, mixer in MIXERS.items() if name in names and not mixer.shared]


def use_segments(model: nn.Module) -> None:
    """Put functions that know segments in place of those that a model's layers call.

    Once for each modeling module.
    """
    for module in {sys.modules[type(part).__module__] for part in model.modules()}:
        if not module.__name__.startswith("transformers.models."):
            continue
        for name, mixer in MIXERS.items():
            stock = vars(module).get(name)
            if stock is not None and not isinstance(stock, _BySegment):
                setattr(module, name, _BySegment(stock, mixer))
        for name in FUSED:
            if name in vars(module):
                setattr(module, name, _not_fused)


def _not_fused(*_: Any, **__: Any) -> None:
    return None


class _BySegment:
    """A function of a modeling module that restarts at each segment of the current micro-batch."""

    def __init__(self, stock: Callable[..., Any], mixer: _Mixer) -> None:
        self._stock = stock
        self._mixer = mixer
        functools.update_wrapper(self, stock)

    def __call__(self, first: Tensor, *args: Any, **kwargs: Any) -> Any:
        length = first.shape[self._mixer.dim]
        part = CURRENT.part
        if part is not None and length == part.length:
            if self._mixer.shared == "taps":
                return self._with_taps_before(part, first, *args, **kwargs)
            if self._mixer.shared == "heads":
                return self._of_own_heads(part, first, *args, **kwargs)
            raise NotImplementedError(f"{self._stock.__name__} needs whole rows")
        if not CURRENT.packed or length != CURRENT.starts[-1]:  # of another model in this process
            return self._stock(first, *args, **kwargs)
        on_device = CURRENT.on_device if first.is_cuda else None
        return self._by_segment(CURRENT.starts, on_device, first, *args, **kwargs)

    def _by_segment(
        self, starts: Tensor, on_device: Tensor | None, first: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """`starts`, `on_device`: as in `Bounds`, of what is given."""
        if on_device is not None and self._mixer.package and _is_installed(self._mixer.package):
            told = {self._mixer.argument: self._told(first, on_device)}
            return self._stock(first, *args, **{**kwargs, **told})
        lengths = starts.diff().tolist()
        tensors = [first, *args]
        parts = zip(
            *(self._split(value, first, lengths) for value in (*tensors, *kwargs.values())),
            strict=True,
        )
        done = [
            self._stock(*own[: len(tensors)], **dict(zip(kwargs, own[len(tensors) :], strict=True)))
            for own in parts
        ]
        if isinstance(done[0], Tensor):
            return torch.cat(done, dim=self._mixer.dim)
        return torch.cat([result for result, *_ in done], dim=self._mixer.dim), *[None] * (
            len(done[0]) - 1
        )

    def _with_taps_before(self, part: RowPart, first: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """A convolution of the part, given the tokens before it that its taps reach."""
        weight = args[0] if args else kwargs["weight"]
        before = weight.shape[-1] - 1
        # Channels stay next to each other in memory, as a GPU's kernel for packed rows wants them.
        whole = exchange.with_tokens_before(first.transpose(1, 2), before).transpose(1, 2)
        if not CURRENT.packed:
            return self._stock(whole, *args, **kwargs)[:, :, before:]
        begin = part.first - before

        def within(starts: Tensor) -> Tensor:
            return (starts - begin).clamp(0, whole.shape[2])

        # Tokens before the row belong to no segment, and are the first of what is given.
        starts = torch.cat([torch.zeros(1, dtype=torch.int32), within(CURRENT.starts)]).unique()
        on_device = within(CURRENT.on_device) if first.is_cuda else None
        done = self._by_segment(starts, on_device, whole, *args, **kwargs)
        return done[:, :, before:]

    def _of_own_heads(
        self, part: RowPart, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """A recurrence of all tokens of the rank's heads; its last state is nobody's."""
        heads = value.shape[2]
        groups = query.shape[2]
        shares = head_shares(heads, groups, part.ranks)
        names = [
            name
            for name, given in kwargs.items()
            if isinstance(given, Tensor) and given.shape[1:3] == value.shape[1:3]
        ]
        repeated = [exchange.repeated_groups(own, shares) for own in (query, key)]
        others = [
            exchange.padded_heads(own, groups, shares)
            for own in (value, *(kwargs[name] for name in names))
        ]
        query, key, value, *given = exchange.of_all_tokens([*repeated, *others], part.ranks)
        kwargs |= dict(zip(names, given, strict=True))
        if CURRENT.packed:
            on_device = CURRENT.on_device if query.is_cuda else None
            out, *_ = self._by_segment(CURRENT.starts, on_device, query, key, value, **kwargs)
        else:
            out, *_ = self._stock(query, key, value, **kwargs)
        return exchange.with_all_heads(out, heads, groups, part.ranks), None

    def _split(self, value: Any, first: Tensor, lengths: Sequence[int]) -> Sequence[Any]:
        """An argument's share of each segment."""
        dim = self._mixer.dim
        if isinstance(value, Tensor) and value.ndim >= 3 and value.shape[dim] == first.shape[dim]:
            return value.split(list(lengths), dim=dim)
        return [value] * len(lengths)

    def _told(self, first: Tensor, on_device: Tensor) -> Tensor:
        if self._mixer.argument == "cu_seqlens":
            return on_device
        tokens = torch.arange(first.shape[self._mixer.dim], dtype=torch.int32, device=first.device)
        return torch.bucketize(tokens, on_device[1:], right=True, out_int32=True).unsqueeze(0)


@functools.lru_cache
def _is_installed(package: str) -> bool:
    try:
        importlib.import_module(package)
    except Exception:  # a package built for another torch raises what it likes
        return False
    return True
