"""Indexers, compressors and lightning attention: packed and padded, each sample is computed as its class computes it alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.models.deepseek_v32 import modeling_deepseek_v32
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32ForCausalLM

from tests.support.training.causal_types import save_type
from tests.support.training.models import spec_for
from tests.support.training.parity import CPU, samples
from workers.base.load import load
from workers.data.batches import collate, pack
from workers.layers.by_sample import indexed_attention
from workers.layers.by_sample.compressed_attention import best_blocks
from workers.model import activation_checkpointing
from workers.model.attention import takes_segments
from workers.model.build import build
from workers.training.packing import settle_attention
from workers.training.step import logits_of

INDEXED = [kind for kind in ("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "dots3_note_text") if kind in CONFIG_MAPPING]
IN_BLOCKS = ["deepseek_v4", "minimax_m3_vl_text", "qwen4_exp_text"]
WHOLE = ["biogpt", "bloom", "codegen", "doge", "gpt_neo", "gpt_neox_japanese", "gptj", "mpt", "stablelm", "xglm", "zaya"]
"""Whose attention runs as it is."""
QUICK = ("deepseek_v32", "deepseek_v4", "glm_moe_dsa", "minimax")


def loaded(base: Path) -> nn.Module:
    spec = spec_for(base, precision={"default": "bf16", "compute": "fp32"}, lora={"r": 2})
    model = build(spec, CPU).peft_model
    load(model, base, seed=1, compute_dtype=torch.float32, device=CPU)
    return model.eval()


def alone(base: Path, data: list[Any]) -> list[Tensor]:
    """The answers of the class as transformers loads it, to one sample after the other."""
    stock: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    with torch.no_grad():
        return [stock(input_ids=collate([sample], CPU).ids).logits[0] for sample in data]


def shuffled() -> list[Any]:
    """Long samples, some that are no longer than what is chosen or a block, and a long one again."""
    data = samples(5)
    short = samples(2, longest=6)
    return [data[0], short[0], data[3], short[1], data[1]]


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow)
        for kind in ("minimax", *INDEXED, *IN_BLOCKS, *WHOLE)
    ],
)
def test_a_sample_is_computed_as_it_is_alone(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token by token in fp32, with an indexer's scores made for three queries at a time. Some samples are the shortest that are
    not seen whole.
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
        padded = [row[:length] for row, length in zip(logits_of(model, collate(data, CPU)), lengths, strict=True)]
    for own, apart, truth in zip(packed, padded, alone(base, data), strict=True):
        assert error(own, apart) < 1.5e-6
        assert error(own, truth) < 1.5e-6


def error(own: Tensor, truth: Tensor) -> float:
    """Of the token whose answer is farthest from the truth, relative."""
    return float(((own - truth).norm(dim=-1) / truth.norm(dim=-1)).max())


def test_an_indexer_is_asked_only_where_there_is_a_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it answers matters."""
    base = tmp_path / "base"
    assert save_type("deepseek_v32", base)
    model = loaded(base)
    asked: list[int] = []
    product = torch.ones(3, 3)

    def kept(factor: Tensor) -> bool:
        return activation_checkpointing._is_costly(2, torch.ops.aten.mm.default, (factor, factor))

    assert kept(product)
    choose = indexed_attention._KeysBySample.chosen_in

    def watched(self: Any, given: Any, row: int, span: slice) -> Any:
        asked.append(span.stop - span.start)
        assert not kept(product), "backward wants nothing of its scores"
        return choose(self, given, row, span)

    monkeypatch.setattr(indexed_attention._KeysBySample, "chosen_in", watched)
    data = shuffled()
    with torch.no_grad():
        chosen = logits_of(model, pack(data, CPU))
        assert asked == [24, 18, 22] * 2, "of two layers; samples of 6 and 4 tokens have no choice"
        indexers: list[Any] = [module for module in model.modules() if hasattr(module, "index_topk")]
        for indexer in indexers:
            indexer.index_topk = 24
        asked.clear()
        assert (logits_of(model, pack(data, CPU)) - chosen).abs().max() > 1e-2
    assert not asked
    assert kept(product)


def test_the_best_blocks_are_among_the_complete_ones() -> None:
    """And the block that the query is in is seen beside them; however many queries are looked at together."""
    scores = torch.rand(20, 9, generator=torch.Generator().manual_seed(0))
    complete = torch.arange(3, 23) // 2
    one_by_one, at_once = (best_blocks(scores, complete.clamp(max=9), 2, one_by_one=way) for way in (True, False))
    for own, other, row, count in zip(one_by_one, at_once, scores, complete.clamp(max=9).tolist(), strict=True):
        right = {*sorted(range(count), key=lambda block: -float(row[block]))[:2], count}
        assert {block for block in own.tolist() if block <= count} == right
        assert {block for block in other.tolist() if block <= count} == right


class BlockIndexer(nn.Module):
    """One that chooses blocks of keys takes no positions, or a mask of another kind."""

    def forward(self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Tensor, past_key_values: Any) -> Tensor:
        raise NotImplementedError


def test_indexers_of_another_kind_are_left_to_padded_rows() -> None:
    config = AutoConfig.for_model("deepseek_v32")
    assert takes_segments(config, DeepseekV32ForCausalLM)
    with patch.object(modeling_deepseek_v32, "BlockIndexer", BlockIndexer, create=True):
        assert not takes_segments(config, DeepseekV32ForCausalLM)
