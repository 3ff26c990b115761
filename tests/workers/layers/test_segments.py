"""Bounds of the samples in a row, whole and cut into chunks."""

from __future__ import annotations

import torch

from workers.layers.segments import Segments


def test_chunks_begin_anew_at_each_sample() -> None:
    segments = Segments()
    segments.use(torch.tensor([0, 5, 7], dtype=torch.int32), longest=5)
    assert segments.bounds(7, 0).starts.tolist() == [0, 5, 7]
    assert segments.bounds(7, 5).starts.tolist() == [0, 5, 7], "no sample is longer than a chunk"
    cut = segments.bounds(7, 2)
    assert (cut.starts.tolist(), cut.longest) == ([0, 2, 4, 5, 7], 2)
    assert segments.bounds(7, 2) is cut


def test_padded_rows_are_one_sample_each() -> None:
    segments = Segments()
    segments.use(None)
    assert not segments.packed
    assert segments.bounds(7, 0).starts.tolist() == [0, 7]
    assert segments.bounds(7, 3).starts.tolist() == [0, 3, 6, 7]
