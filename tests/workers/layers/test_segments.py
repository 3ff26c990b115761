"""Bounds of the samples in a row, whole and cut into chunks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from workers.layers.segments import CURRENT, Bounds, Segments, chunk_of, tell_chunks


class Attention(nn.Module):
    """One of a decoder, that adds its chunk."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx

    def forward(self, x: Tensor) -> Tensor:
        return x + chunk_of(self)


def places(bounds: Bounds) -> list[int]:
    assert bounds.starts is not None
    return bounds.starts.tolist()


def test_chunks_begin_anew_at_each_sample() -> None:
    segments = Segments()
    segments.use(torch.tensor([0, 5, 7], dtype=torch.int32), longest=5)
    assert places(segments.bounds(7, 0)) == [0, 5, 7]
    assert places(segments.bounds(7, 5)) == [0, 5, 7], "no sample is longer than a chunk"
    cut = segments.bounds(7, 2)
    assert cut.longest_given is not None
    assert (places(cut), cut.longest, int(cut.longest_given)) == ([0, 2, 4, 5, 7], 2, 2)
    assert segments.bounds(7, 2) is cut
    segments.use(torch.tensor([0, 2, 4], dtype=torch.int32), longest=2)
    assert places(segments.bounds(4, 2)) == [0, 2, 4], "the samples before were longer"


def test_padded_rows_are_one_sample_each() -> None:
    segments = Segments()
    segments.use(None)
    assert not segments.packed
    assert segments.bounds(7, 0).starts is None
    assert segments.bounds(7, 7).starts is None
    assert places(segments.bounds(7, 3)) == [0, 3, 6, 7]
    assert places(segments.bounds(6, 3)) == [0, 3, 6]


def test_the_compiler_specialises_on_whether_samples_are_longer_than_a_limit_and_not_on_their_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CURRENT, "_longer", {})  # another test may have asked for the same limit
    counter = CompileCounter()

    def asked(x: Tensor) -> Tensor:
        return x + 1 if CURRENT.has_longer(len(x), 8) else x - 1

    compiled = torch.compile(asked, backend=counter, fullgraph=True, dynamic=True)
    found = []
    for longest in (2, 3, 5, 7, 8, 9, 10, 30, 4):
        CURRENT.use(torch.tensor([0, longest, longest + 2], dtype=torch.int32), longest=longest)
        assert compiled(torch.zeros(longest + 2))[0] == (1 if longest > 8 else -1)
        found.append(counter.frame_count)
    assert found == [1, 2, 2, 2, 2, 3, 3, 3, 3]


def test_layers_that_see_the_same_chunk_are_compiled_together() -> None:
    config = SimpleNamespace(
        layer_types=["chunked_attention", "full_attention"] * 3, attention_chunk_size=4
    )
    layers = nn.ModuleList(Attention(config, place) for place in range(6))
    assert list(map(chunk_of, layers)) == [0] * 6, "none was told"
    tell_chunks(layers)
    assert list(map(chunk_of, layers)) == [4, 0] * 3
    counter = CompileCounter()
    for layer in layers:
        torch.compile(layer.forward, backend=counter, fullgraph=True, dynamic=True)(torch.zeros(3))
    assert counter.frame_count == 2
