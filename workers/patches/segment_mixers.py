"""Convolutions and recurrences within samples that are concatenated in a row: state and taps
restart at each.

Hybrids mix tokens by functions of their modeling module, which transformers takes from a kernel's
package where that is installed. Here stand others in their place, for every model of that module:

* A convolution or a scan of a packed row goes segment by segment; a GPU's kernel that knows
  segments gets them instead.
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

from workers.layers.segments import CURRENT

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


MIXERS = {
    "causal_conv1d_fn": _Mixer(2, "causal_conv1d", "seq_idx"),
    "torch_chunk_gated_delta_rule": _Mixer(1, "fla", "cu_seqlens"),
    "chunk_kimi_delta_attention": _Mixer(1, "fla", "cu_seqlens"),
    "mamba2_chunk_scan": _Mixer(1, "mamba_ssm", "seq_idx"),
    "mamba_selective_scan": _Mixer(2),
}


def are_known(model_class: type) -> bool:
    """Whether the layers of an architecture that mix tokens otherwise than by attention do so by
    functions known here.
    """
    return any(name in vars(sys.modules[model_class.__module__]) for name in MIXERS)


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
        if (
            not CURRENT.packed or first.shape[self._mixer.dim] != CURRENT.starts[-1]
        ):  # of another model in this process
            return self._stock(first, *args, **kwargs)
        if first.is_cuda and self._mixer.package and _is_installed(self._mixer.package):
            return self._stock(
                first, *args, **{**kwargs, self._mixer.argument: self._segments(first)}
            )
        lengths = CURRENT.starts.diff().tolist()
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

    def _split(self, value: Any, first: Tensor, lengths: Sequence[int]) -> Sequence[Any]:
        """An argument's share of each segment."""
        dim = self._mixer.dim
        if isinstance(value, Tensor) and value.ndim >= 3 and value.shape[dim] == first.shape[dim]:
            return value.split(list(lengths), dim=dim)
        return [value] * len(lengths)

    def _segments(self, first: Tensor) -> Tensor:
        if self._mixer.argument == "cu_seqlens":
            return CURRENT.on_device
        tokens = torch.arange(first.shape[self._mixer.dim], dtype=torch.int32, device=first.device)
        return torch.bucketize(tokens, CURRENT.on_device[1:], right=True, out_int32=True).unsqueeze(
            0
        )


@functools.lru_cache
def _is_installed(package: str) -> bool:
    try:
        importlib.import_module(package)
    except Exception:  # a package built for another torch raises what it likes
        return False
    return True
