"""cuDNN's attention of a row of samples, on the GPUs on which it is faster than PyTorch's kernel,
by NVIDIA's package for its graphs. Its gradients repeat bit for bit.

For a repeatable backward cuDNN writes the gradients of scores, 2 bytes for each pair of tokens of a
sample and head. So it is given lots of samples of like length, and parts of the heads, for which
that takes a bounded number of bytes; samples of which not even a group of heads fits are left to
PyTorch's kernel. A graph is built for each shape, which takes most of a second for a backward: lots
have few shapes, filled up with samples without tokens.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ft_service.kernel_limits import Lot, attends_by_cudnn, lots_of, next_power, padded_length
from workers.layers import packed_attention
from workers.layers.scored_attention import (
    AttentionPattern,
    Longest,
    assert_same,
    joined,
    most_tokens,
)
from workers.layers.segments import Bounds
from workers.quant import frozen_linear, gpu_kernels
from workers.quant.direct_function import DirectFunction, once_differentiable

log = logging.getLogger(__name__)

CAPABILITY = (9, 0)
"""Compute capability of the GPUs on which it was measured."""
_COMPARED = 300, 1100, 1, 70, 300
"""Tokens of the samples that are compared before a job begins: a full lot of four, which do not all
follow each other, and one that is filled up.
"""
_GRAPHS = 128
"""Kept of each direction, those used last."""
_ALIGNED = 4
"""Numbers of 4 bytes in 16, at multiples of which a tensor begins."""


def takes(
    query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, pattern: AttentionPattern
) -> bool:
    """Return whether cuDNN computes the attention of a row of samples: query [1, heads, tokens, d],
    key and value [1, groups, tokens, d].
    """
    if (
        frozen_linear.watched()
    ):  # asked first: the compiler would make a variant of a layer for each number that is compared
        return False
    _, heads, tokens, width = query.shape
    if not pattern.is_plain or pattern.spans is not None:
        return False
    if pattern.window and pattern.window < bounds.longest:
        return False
    if not query.is_cuda or any(tensor.dtype != torch.bfloat16 for tensor in (query, key, value)):
        return False
    if value.shape != key.shape:
        return False
    assert bounds.starts is not None, "rows are packed"
    if not attends_by_cudnn(tokens, tokens / max(1, len(bounds.starts) - 1), heads, width):
        return False
    if KERNEL.on(query.device) is None:
        return False
    return (
        _forward_graph(query.device, _row_shape(bounds, heads, key.shape[1], width), pattern.scale)
        is not None
    )


def _is_faster(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) == CAPABILITY


def _compare(_: Any, device: torch.device) -> None:
    """Raise the package's error if cuDNN has no graph for what is compared, AssertionError if it
    computes something else.
    """

    def kernel(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        starts: Tensor,
        longest: Longest,
        pattern: AttentionPattern,
    ) -> Tensor:
        bounds = Bounds(starts.cpu(), starts, most_tokens(longest, starts, query.shape[2]))
        row = _row_shape(bounds, query.shape[1], key.shape[1], query.shape[3])
        tables = _Tables.of(bounds, row)
        backward = [(_backward_graph, tables.shape_of(lot), _add_backward) for lot in tables.lots]
        for find, shape, add in ((_forward_graph, row, _add_forward), *backward):
            if find(query.device, shape, pattern.scale) is None:
                _build(query.device, shape, pattern.scale, add)  # raises why
        return attend_packed(query, key, value, bounds, pattern)

    for sinks in (None, torch.tensor([-1.0, 0.0, 2.0, 4.0], device=device)):
        assert_same(
            kernel, AttentionPattern(0.2, sinks=sinks), device, windows=(0,), lengths=_COMPARED
        )


KERNEL = gpu_kernels.CheckedKernel("cudnn", _compare, suits=_is_faster)


def attend_packed(
    query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, pattern: AttentionPattern
) -> Tensor:
    """Attention of a row of samples that it `takes`: query [1, heads, tokens, d], key and value [1,
    groups, tokens, d] → [1, tokens, heads, d]."""
    return _CudnnAttention.apply(query, key, value, pattern.sinks, bounds, pattern.scale)  # pyright: ignore[reportReturnType]


class _CudnnAttention(DirectFunction):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        bounds: Bounds,
        scale: float,
    ) -> Tensor:
        query, key, value = (joined(tensor).contiguous() for tensor in (query, key, value))
        heads = query.shape[1]
        groups = key.shape[1]
        width = query.shape[2]
        out = torch.empty_like(query)
        sums = query.new_empty(query.shape[:2], dtype=torch.float32)
        shape = _row_shape(bounds, heads, groups, width)
        tables = _Tables.of(bounds, shape)
        assert tables.tokens == len(query), "the segments are those of another micro-batch"
        graph = _forward_graph(query.device, shape, scale)
        assert graph is not None, "takes()"
        tensors = {_Id.Q: query, _Id.K: key, _Id.V: value, _Id.OUT: out, _Id.SUMS: sums}
        _run(query.device, [(graph, _addresses(tensors) | tables.row)])
        if sinks is not None:
            sums = packed_attention.add_sinks(out.transpose(0, 1), sums.t(), sinks).t().contiguous()
        ctx.save_for_backward(query, key, value, out, sums, bounds.on_device)
        ctx.rest = tables, bounds.longest, scale
        return out.unsqueeze(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        tables, longest, scale = ctx.rest
        *saved, starts = ctx.saved_tensors
        grad = grads[0].flatten(0, 1).contiguous()
        found = _gradients(grad, saved, tables, scale)
        if found is None:
            query, key, value, out, sums = saved
            sums = sums.t().contiguous()
            found = packed_attention._gradients(
                grad, query, key, value, out, sums, None, starts, longest, scale, 0
            )
        return *(tensor.unsqueeze(0).transpose(1, 2) for tensor in found), None, None, None


def _gradients(
    grad: Tensor, saved: Sequence[Tensor], tables: _Tables, scale: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Those of query, key and value, [tokens, heads or groups, d].

    None: cuDNN has no graph for one of the lots.
    """
    query, key, value, out, sums = saved
    lots = [(lot, _backward_graph(grad.device, tables.shape_of(lot), scale)) for lot in tables.lots]
    made = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    of_heads = {_Id.Q: query, _Id.OUT: out, _Id.GRAD: grad, _Id.SUMS: sums, _Id.Q_GRAD: made[0]}
    of_groups = {_Id.K: key, _Id.V: value, _Id.K_GRAD: made[1], _Id.V_GRAD: made[2]}
    calls: list[tuple[_Built, dict[int, int]]] = []
    for (lot, graph), places in zip(lots, tables.of_lot, strict=True):
        if graph is None:
            return None
        for head in range(0, tables.heads, lot.heads):
            group = head * tables.groups // tables.heads
            calls.append(
                (graph, _addresses(of_heads, head) | _addresses(of_groups, group) | places)
            )
    _run(grad.device, calls)
    for (start, end), starts in tables.long:
        g, q, k, v, o = (tensor[start:end] for tensor in (grad, query, key, value, out))
        own_sums = sums[start:end].t().contiguous()
        given = g, q, k, v, o, own_sums, None, starts
        parts = packed_attention._gradients(*given, end - start, scale, 0)
        for whole, part in zip(made, parts, strict=True):
            whole[start:end] = part
    return made


# What graphs are told of samples
# ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _GraphShape:
    """What a graph is built for."""

    samples: int
    length: int
    """Tokens of a sample at most."""
    heads: int
    """Heads of a call."""
    groups: int
    row_heads: int
    """Heads of a token in memory, and its groups."""
    row_groups: int
    width: int
    tokens: int
    """Most tokens of a row, by which a backward's workspace is sized; 0 for a forward."""


def _row_shape(bounds: Bounds, heads: int, groups: int, width: int) -> _GraphShape:
    """Of a forward, which takes all samples at once."""
    assert bounds.starts is not None, "rows are packed"
    samples = max(16, next_power(len(bounds.starts) - 1))
    return _GraphShape(
        samples, padded_length(bounds.longest), heads, groups, heads, groups, width, 0
    )


class _Tables:
    """Where the samples of a micro-batch stand, on the device, as the graphs of layers of one shape
    want it.
    """

    def __init__(self, bounds: Bounds, shape: _GraphShape) -> None:
        assert bounds.starts is not None, "rows are packed"
        starts = bounds.starts.tolist()
        lengths = [end - start for start, end in pairwise(starts)]
        self.heads = shape.heads
        self.groups = shape.groups
        self.width = shape.width
        self.tokens = starts[-1]
        self.lots, long = lots_of(lengths, self.heads, self.groups)
        table: list[list[int]] = []
        rows = [
            (tuple(range(len(lengths))), shape.samples),
            *((lot.samples, lot.count) for lot in self.lots),
        ]
        for samples, count in rows:
            empty = count - len(samples)
            places = [*(starts[i] for i in samples), *[starts[-1]] * (empty + 1)]
            factors = self.heads * self.width, self.groups * self.width, self.heads
            table += [[place * factor for place in places] for factor in factors]
            table.append([*(lengths[i] for i in samples), *[0] * empty])
        table += [[0, lengths[sample]] for sample in long]
        assert bounds.on_device is not None
        self._held = _on_device(table, bounds.on_device.device)
        parts = iter(self._held)
        names = _Id.Q_STARTS, _Id.K_STARTS, _Id.SUM_STARTS, _Id.LENGTHS
        self.row, *self.of_lot = (_addresses({name: next(parts) for name in names}) for _ in rows)
        self.long = [((starts[sample], starts[sample + 1]), next(parts)) for sample in long]

    @classmethod
    def of(cls, bounds: Bounds, shape: _GraphShape) -> _Tables:
        """Those of a micro-batch, made by its first layer of this shape."""
        if shape not in bounds.kept:
            bounds.kept[shape] = cls(bounds, shape)
        return bounds.kept[shape]

    def shape_of(self, lot: Lot) -> _GraphShape:
        groups = self.groups * lot.heads // self.heads
        tokens = next_power(self.tokens)
        return _GraphShape(
            lot.count, lot.length, lot.heads, groups, self.heads, self.groups, self.width, tokens
        )


def _on_device(table: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """int32 tensors of these numbers, by one copy that the host does not wait for."""
    values = list[int]()
    sizes = list[int]()
    for numbers in table:
        sizes.append(len(numbers) + -len(numbers) % _ALIGNED)
        values += [*numbers, *[0] * (sizes[-1] - len(numbers))]
    held = torch.tensor(values, dtype=torch.int32).to(device, non_blocking=True)
    return [part[: len(numbers)] for part, numbers in zip(held.split(sizes), table, strict=True)]


# Graphs
# ------------------------------------------------------------------------------


class _Id(IntEnum):
    """Names of a graph's tensors."""

    Q = 1
    K = 2
    V = 3
    OUT = 4
    SUMS = 5
    GRAD = 6
    Q_GRAD = 7
    K_GRAD = 8
    V_GRAD = 9
    Q_STARTS = 10
    K_STARTS = 11
    SUM_STARTS = 12
    LENGTHS = 13


@dataclass(frozen=True)
class _Built:
    """A graph that is ready to run, and the bytes that it works in."""

    graph: Any
    workspace: int


def _addresses(tensors: Mapping[_Id, Tensor], head: int = 0) -> dict[int, int]:
    """Where tensors [tokens, heads, ..] begin in memory, from one of their heads on."""
    return {
        int(name): tensor.data_ptr() + (head and head * tensor.stride(1) * tensor.element_size())
        for name, tensor in tensors.items()
    }


def _run(device: torch.device, calls: Sequence[tuple[_Built, Mapping[int, int]]]) -> None:
    """Run graphs one after the other, on tensors at these addresses."""
    package, handle = _handle(device)
    package.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
    workspace = torch.empty(
        max((built.workspace for built, _ in calls), default=0), dtype=torch.uint8, device=device
    )
    for built, tensors in calls:
        built.graph.execute(tensors, workspace.data_ptr(), handle=handle)


@functools.lru_cache(maxsize=8)
def _handle(device: torch.device) -> tuple[Any, Any]:
    """The package, and cuDNN's own state for a device."""
    import cudnn  # pyright: ignore[reportMissingImports]

    with torch.cuda.device(device):
        return cudnn, cudnn.create_handle()


@functools.lru_cache(maxsize=_GRAPHS)
def _forward_graph(device: torch.device, shape: _GraphShape, scale: float) -> _Built | None:
    """The graph of a forward; None: cuDNN has none for this shape."""
    return _built(device, shape, scale, _add_forward)


@functools.lru_cache(maxsize=_GRAPHS)
def _backward_graph(device: torch.device, shape: _GraphShape, scale: float) -> _Built | None:
    return _built(device, shape, scale, _add_backward)


def _built(device: torch.device, shape: _GraphShape, scale: float, add: Any) -> _Built | None:
    try:
        return _build(device, shape, scale, add)
    except Exception:  # the package raises what it likes
        log.warning("cuDNN has no graph for attention of %s", shape, exc_info=True)
        return None


def _build(device: torch.device, shape: _GraphShape, scale: float, add: Any) -> _Built:
    package, handle = _handle(device)
    kinds = package.data_type
    graph = package.pygraph(
        io_data_type=kinds.BFLOAT16,
        intermediate_data_type=kinds.FLOAT,
        compute_data_type=kinds.FLOAT,
        handle=handle,
    )
    add(graph, kinds, shape, scale)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([package.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    return _Built(graph, graph.get_workspace_size())


class _Tensors:
    """Makes a graph's tensors of a shape."""

    def __init__(self, graph: Any, kinds: Any, shape: _GraphShape) -> None:
        self._graph = graph
        self._kinds = kinds
        self._shape = shape
        count = shape.samples + 1, 1, 1, 1
        self._starts = {
            name: self._number(name, count) for name in (_Id.Q_STARTS, _Id.K_STARTS, _Id.SUM_STARTS)
        }
        self.lengths = self._number(_Id.LENGTHS, (shape.samples, 1, 1, 1))

    def _number(self, name: _Id, sizes: tuple[int, ...]) -> Any:
        return self._graph.tensor(
            dim=sizes,
            stride=(1, 1, 1, 1),
            data_type=self._kinds.INT32,
            name=name.name,
            uid=int(name),
        )

    def _layout(self, name: _Id) -> tuple[tuple[int, ...], tuple[int, ...], _Id]:
        """Sizes and strides, [samples, heads, length, channels], and by what its samples are
        found.
        """
        shape = self._shape
        if name == _Id.SUMS:
            sizes = shape.samples, shape.heads, shape.length, 1
            return sizes, (shape.length * shape.row_heads, 1, shape.row_heads, 1), _Id.SUM_STARTS
        grouped = name in (_Id.K, _Id.V, _Id.K_GRAD, _Id.V_GRAD)
        heads, in_row = (
            (shape.groups, shape.row_groups) if grouped else (shape.heads, shape.row_heads)
        )
        strides = shape.length * in_row * shape.width, shape.width, in_row * shape.width, 1
        return (
            (shape.samples, heads, shape.length, shape.width),
            strides,
            _Id.K_STARTS if grouped else _Id.Q_STARTS,
        )

    def given(self, name: _Id) -> Any:
        sizes, strides, starts = self._layout(name)
        kind = self._kinds.FLOAT if name == _Id.SUMS else self._kinds.BFLOAT16
        options = {
            "data_type": kind,
            "ragged_offset": self._starts[starts],
            "name": name.name,
            "uid": int(name),
        }
        return self._graph.tensor(dim=sizes, stride=strides, **options)

    def made(self, name: _Id, tensor: Any) -> None:
        sizes, strides, starts = self._layout(name)
        tensor.set_uid(int(name)).set_output(True).set_dim(sizes).set_stride(
            strides
        ).set_ragged_offset(self._starts[starts])
        if name == _Id.SUMS:
            tensor.set_data_type(self._kinds.FLOAT)

    def options(self, scale: float) -> dict[str, Any]:
        """Of both directions: causal within each sample."""
        options = {
            "attn_scale": scale,
            "use_padding_mask": True,
            "seq_len_q": self.lengths,
            "seq_len_kv": self.lengths,
        }
        return options | {"diagonal_band_right_bound": 0, "name": "attention"}


def _add_forward(graph: Any, kinds: Any, shape: _GraphShape, scale: float) -> None:
    tensors = _Tensors(graph, kinds, shape)
    query, key, value = (tensors.given(name) for name in (_Id.Q, _Id.K, _Id.V))
    out, sums = graph.sdpa(q=query, k=key, v=value, generate_stats=True, **tensors.options(scale))
    tensors.made(_Id.OUT, out)
    tensors.made(_Id.SUMS, sums)


def _add_backward(graph: Any, kinds: Any, shape: _GraphShape, scale: float) -> None:
    tensors = _Tensors(graph, kinds, shape)
    names = {"q": _Id.Q, "k": _Id.K, "v": _Id.V, "o": _Id.OUT, "dO": _Id.GRAD, "stats": _Id.SUMS}
    most = {"max_total_seq_len_q": shape.tokens, "max_total_seq_len_kv": shape.tokens}
    given = {argument: tensors.given(name) for argument, name in names.items()}
    found = graph.sdpa_backward(
        **given, **most, **tensors.options(scale), use_deterministic_algorithm=True
    )
    for name, tensor in zip((_Id.Q_GRAD, _Id.K_GRAD, _Id.V_GRAD), found, strict=True):
        tensors.made(name, tensor)
