"""A stand-in of NVIDIA's package for cuDNN's graphs, which computes attention on a processor, at
the addresses and by the sizes, strides and places of samples that a graph was built with.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from workers.layers import cudnn_attention


class FakeTensor:
    """What a graph knows of a tensor."""

    def __init__(self, **known: Any) -> None:
        self.known = known

    def __getattr__(self, name: str) -> Any:
        assert name.startswith("set_")
        return lambda value: (self.known.update({name.removeprefix("set_"): value}), self)[1]

    def of_sample(self, addresses: Mapping[int, int], sample: int, length: int) -> Tensor:
        """[heads, length, channels] in memory."""
        known = self.known
        places = numbers(addresses[known["ragged_offset"].known["uid"]], known["dim"][0] + 1)
        _, heads, most, width = known["dim"]
        assert length <= most, "the graph computes no more tokens of a sample"
        strides = known["stride"][1:]
        kind = known.get("data_type", torch.float32)
        count = 1 + (heads - 1) * strides[0] + max(0, length - 1) * strides[1] + width - 1
        memory = (ctypes.c_byte * (count * kind.itemsize)).from_address(
            addresses[known["uid"]] + places[sample] * kind.itemsize
        )
        return torch.frombuffer(memory, dtype=kind).as_strided((heads, length, width), strides)


def numbers(address: int, count: int) -> list[int]:
    assert address % 16 == 0, "a tensor begins at a multiple of 16 bytes"
    return list((ctypes.c_int32 * count).from_address(address))


class FakeGraph:
    """A graph with one operation."""

    refuses: str = ""
    """Name of the operation of which no graph can be built."""
    ran: list[dict[str, Any]]
    """The options of what was run."""

    def __init__(self, **_: Any) -> None:
        self._options: dict[str, Any] = {}
        self._operation = ""

    def tensor(self, **known: Any) -> FakeTensor:
        return FakeTensor(**known)

    def sdpa(self, **options: Any) -> list[FakeTensor]:
        return self._add("sdpa", options, 2)

    def sdpa_backward(self, **options: Any) -> list[FakeTensor]:
        return self._add("sdpa_backward", options, 3)

    def _add(self, operation: str, options: dict[str, Any], count: int) -> list[FakeTensor]:
        self._operation = operation
        self._options = {**options, "made": [FakeTensor() for _ in range(count)]}
        return self._options["made"]

    def validate(self) -> None:
        if self._operation == self.refuses:
            raise RuntimeError("no engine")

    def build_operation_graph(self) -> None: ...
    def create_execution_plans(self, modes: list[str]) -> None: ...
    def check_support(self) -> None: ...
    def build_plans(self) -> None: ...

    def get_workspace_size(self) -> int:
        return 16

    def execute(self, addresses: Mapping[int, int], workspace: int, handle: Any) -> None:
        options = self._options
        assert options["use_padding_mask"]
        assert options["diagonal_band_right_bound"] == 0
        assert options["seq_len_q"] is options["seq_len_kv"]
        FakeGraph.ran.append(options)
        lengths = numbers(
            addresses[options["seq_len_q"].known["uid"]], options["q"].known["dim"][0]
        )
        for sample, length in enumerate(lengths):
            if length:
                self._compute(FakeSample(addresses, sample, length))

    def _compute(self, sample: FakeSample) -> None:
        options = self._options
        query, key, value = (sample.read(options[name]) for name in ("q", "k", "v"))
        shared = query.shape[0] // key.shape[0]
        keys, values = (tensor.repeat_interleave(shared, dim=0) for tensor in (key, value))
        seen = torch.ones(query.shape[1], query.shape[1], dtype=torch.bool).tril()
        scores = (query @ keys.mT * options["attn_scale"]).masked_fill(~seen, float("-inf"))
        if self._operation == "sdpa":
            out, sums = options["made"]
            sample.write(out, scores.softmax(dim=-1) @ values)
            sample.write(sums, scores.logsumexp(dim=-1, keepdim=True))
            return
        assert options["use_deterministic_algorithm"]
        out, sums, grad = (sample.read(options[name]) for name in ("o", "stats", "dO"))
        shares = (scores - sums).exp()
        of_scores = (
            shares
            * (grad @ values.mT - (grad * out).sum(dim=-1, keepdim=True))
            * options["attn_scale"]
        )
        for tensor, whole in zip(
            options["made"], (of_scores @ keys, of_scores.mT @ query, shares.mT @ grad), strict=True
        ):
            sample.write(tensor, whole.unflatten(0, (tensor.known["dim"][1], -1)).sum(dim=1))


@dataclass(frozen=True)
class FakeSample:
    """One sample of what a graph is run on."""

    addresses: Mapping[int, int]
    sample: int
    length: int

    def read(self, tensor: FakeTensor) -> Tensor:
        return tensor.of_sample(self.addresses, self.sample, self.length).clone()

    def write(self, tensor: FakeTensor, value: Tensor) -> None:
        assert tensor.known["output"]
        tensor.of_sample(self.addresses, self.sample, self.length).copy_(value)


PACKAGE = SimpleNamespace(
    data_type=SimpleNamespace(BFLOAT16=torch.float32, FLOAT=torch.float32, INT32=torch.int32),
    heur_mode=SimpleNamespace(A="A"),
    pygraph=FakeGraph,
    set_stream=lambda **_: None,
)


@contextmanager
def fake_cudnn(refuses: str = "") -> Iterator[list[dict[str, Any]]]:
    """While it is entered, graphs are the stand-in's, in fp32, so that they can be compared
    exactly. Yields the options of what was run.
    """
    FakeGraph.ran = []
    FakeGraph.refuses = refuses
    caches = cudnn_attention._forward_graph, cudnn_attention._backward_graph
    for cache in caches:
        cache.cache_clear()
    try:
        with (
            patch.object(cudnn_attention, "_handle", lambda device: (PACKAGE, None)),
            patch.object(
                torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0)
            ),
        ):
            yield FakeGraph.ran
    finally:
        for cache in caches:
            cache.cache_clear()
