"""Indexers: packed and padded, each sample is computed as its class computes it alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from tests.support.training.answers_alone import (
    alone,
    error,
    loaded,
    of_kinds,
    padded_answers,
    shuffled,
)
from tests.support.training.causal_types import save_type
from tests.support.training.parity import CPU, samples
from workers.data.batches import pack
from workers.model import activation_checkpointing
from workers.patches import indexed_attention
from workers.training.packing import settle_attention
from workers.training.step import logits_of

INDEXED = [
    kind
    for kind in ("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "dots3_note_text")
    if kind in CONFIG_MAPPING
]


@of_kinds(INDEXED)
def test_a_sample_is_computed_as_it_is_alone(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token by token in fp32, with an indexer's scores made for three queries at a time.

    Some samples are the shortest that are not seen whole.
    """
    monkeypatch.setattr(indexed_attention, "SCORES_AT_ONCE", 2 * 24 * 3)
    base = tmp_path / "base"
    assert save_type(kind, base)
    model = loaded(base)
    assert settle_attention(model, CPU, torch.float32) is None, "packed"
    model.eval()
    data = [*shuffled(), *samples(1, longest=9), *samples(1, longest=8)]
    lengths = [len(sample.ids) for sample in data]
    with torch.no_grad():
        packed = logits_of(model, pack(data, CPU))[0].split(lengths)
    for own, apart, truth in zip(
        packed, padded_answers(model, data), alone(base, data), strict=True
    ):
        assert error(own, apart) < 1.5e-6
        assert error(own, truth) < 1.5e-6


def test_an_indexer_is_asked_only_where_there_is_a_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what it answers matters."""
    base = tmp_path / "base"
    assert save_type("deepseek_v32", base)
    model = loaded(base)
    asked: list[int] = []
    product = torch.ones(3, 3)

    def kept(factor: Tensor) -> bool:
        return activation_checkpointing._is_costly(2, torch.ops.aten.mm.default, (factor, factor))

    assert kept(product)
    choose = indexed_attention._BySample.chosen_in

    def watched(self: Any, given: Any, row: int, span: slice) -> Any:
        asked.append(span.stop - span.start)
        assert not kept(product), "backward wants nothing of its scores"
        return choose(self, given, row, span)

    monkeypatch.setattr(indexed_attention._BySample, "chosen_in", watched)
    data = shuffled()
    with torch.no_grad():
        chosen = logits_of(model, pack(data, CPU))
        assert asked == [24, 18, 22] * 2, "of two layers; samples of 6 and 4 tokens have no choice"
        indexers: list[Any] = [
            module for module in model.modules() if hasattr(module, "index_topk")
        ]
        for indexer in indexers:
            indexer.index_topk = 24
        asked.clear()
        assert (logits_of(model, pack(data, CPU)) - chosen).abs().max() > 1e-2
    assert not asked
    assert kept(product)
