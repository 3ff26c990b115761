"""Rotary embeddings whose frequencies depend on a sample's length: packed and padded as
transformers has each sample alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.training.models import LONGROPE, save_tiny, spec_for
from tests.support.training.parity import CPU, samples
from workers.base.load import load
from workers.data.batches import collate, pack
from workers.model.build import build
from workers.training.packing import settle_attention
from workers.training.step import logits_of

DYNAMIC: dict[str, Any] = {
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "max_position_embeddings": 16,
}


@pytest.mark.parametrize(
    ("family", "rope"), [("phi3", LONGROPE), ("llama", DYNAMIC)], ids=["longrope", "dynamic"]
)
def test_a_sample_is_rotated_as_it_is_alone(
    family: str, rope: dict[str, Any], tmp_path: Path
) -> None:
    """Long samples, short ones behind them, and a long one again."""
    base = save_tiny(family, tmp_path / "base", **rope)
    spec = spec_for(base, precision={"default": "bf16", "compute": "fp32"}, lora={"r": 2})
    model = build(spec, CPU).peft_model
    load(model, base, seed=1, compute_dtype=torch.float32, device=CPU)
    model.eval()
    assert settle_attention(model, CPU, torch.float32) is None, "packed"
    data = samples()
    data = [data[0], data[5], data[2], data[6], data[1]]
    lengths = [len(sample.ids) for sample in data]
    assert min(lengths) < 16 < max(lengths)
    with torch.no_grad():
        packed = logits_of(model, pack(data, CPU))[0].split(lengths)
        padded = [
            row[:length]
            for row, length in zip(logits_of(model, collate(data, CPU)), lengths, strict=True)
        ]
        alone = []
        for sample in (
            data
        ):  # each by a new model: dynamic frequencies stay as long as the longest text made them
            stock = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
            alone.append(stock(input_ids=collate([sample], CPU).ids).logits[0])
        stock = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        together = stock(input_ids=collate(data, CPU).ids).logits
    for ours in (packed, padded):
        for own, truth in zip(ours, alone, strict=True):
            torch.testing.assert_close(own, truth, rtol=1e-5, atol=1e-5)
    apart = (together[1, : lengths[1]] - alone[1]).abs().max()
    assert apart > 1e-3, "transformers rotates a short sample differently next to a long one"
