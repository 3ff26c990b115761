"""A limit of a kernel is read in one place: who changes it changes what a rank does and what is
planned for it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ft_service import kernel_limits
from ft_service.plan.machines import MACHINES
from ft_service.plan.memory import RankBytes
from tests.support.bases import LLAMA_8B, llama_shapes, plan_of, save_base, spec_on
from tests.support.fake_cudnn import fake_cudnn
from tests.support.plans import plan_8b
from workers.layers import cudnn_attention
from workers.layers.scored_attention import AttentionPattern
from workers.layers.segments import Bounds
from workers.model.head import _Gradients, _Head
from workers.quant import grouped_linear
from workers.quant.weights import FP8Weight

H100 = MACHINES["H100"]


def planned(folder: Path, **options: Any) -> RankBytes:
    """A rank's bytes for a row of 8,192 tokens in four samples, of an 8B model in FP8."""
    training = {"batch_size": 4, "per_device_train_batch_size": 4, "max_length": 2048}
    distributed = {"activation_checkpointing": "full"}
    return plan_8b(folder, machine=H100, training=training, distributed=distributed, **options).rank


def test_logits_of_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def chunks() -> int:
        hidden = torch.ones(10, 4)
        weight = torch.ones(7, 4)
        gradients = _Gradients.of((False, False, False), hidden, weight, None)
        return len(
            list(
                _Head(weight, None, None).chunks(
                    hidden, torch.zeros(10, dtype=torch.long), gradients, 1
                )
            )
        )

    before = planned(tmp_path).logits
    assert chunks() == 1
    monkeypatch.setattr(kernel_limits, "CHUNK_LOGITS", 21)
    monkeypatch.setattr(kernel_limits, "CHUNK_ROWS", 3)
    assert chunks() == 4, "3, 3, 3 and 1 of ten rows"
    assert before - planned(tmp_path).logits == 8 * 128_256 * (1024 - 3)


@pytest.mark.parametrize(
    ("limit", "value"),
    [("ATTENTION_TOKENS", 8193), ("ATTENTION_WIDEST", 112), ("ATTENTION_SHORTEST", 2049)],
)
def test_attention_that_cudnn_computes(
    limit: str, value: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn_attention.KERNEL, "on", lambda device: SimpleNamespace())
    common: Any = {"is_cuda": True, "dtype": torch.bfloat16, "device": torch.device("cpu")}
    query: Any = SimpleNamespace(shape=(1, 32, 8192, 128), **common)
    key: Any = SimpleNamespace(shape=(1, 8, 8192, 128), **common)

    def taken() -> bool:
        bounds = Bounds(torch.arange(0, 8193, 2048), None, 2048)
        with fake_cudnn():
            return cudnn_attention.takes(query, key, key, bounds, AttentionPattern(0.1))

    by_cudnn = planned(tmp_path).workspace
    assert taken()
    monkeypatch.setattr(kernel_limits, limit, value)
    assert not taken()
    assert by_cudnn > planned(tmp_path).workspace


def test_scores_of_a_lot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = planned(tmp_path).workspace
    assert cudnn_attention.lots_of([2048] * 4, 32, 8)[0][0].count == 4
    monkeypatch.setattr(kernel_limits, "ATTENTION_SCORE_BYTES", 2**30 - 2**27)
    assert cudnn_attention.lots_of([2048] * 4, 32, 8)[0][0].count == 3, (
        "a sample's scores take 2^28"
    )
    assert before - planned(tmp_path).workspace == 2**27


def test_experts_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {
        **LLAMA_8B,
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "vocab_size": 1024,
    }
    config |= {"num_local_experts": 8, "num_experts_per_tok": 2}
    shapes = {name: shape for name, shape in llama_shapes(config).items() if ".mlp." not in name}
    before = "model.layers.0.mlp"
    shapes |= {f"{before}.gate.weight": (8, 64), f"{before}.experts.gate_up_proj": (8, 64, 64)}
    shapes |= {f"{before}.experts.down_proj": (8, 64, 32)}
    base = save_base(tmp_path / "base", {**config, "model_type": "mixtral"}, shapes)
    spec = spec_on(base, training={"max_length": 16, "batch_size": 1}, precision={"default": "nf4"})
    made: list[int] = []

    def lots() -> list[int]:
        made.clear()
        weight = FP8Weight.quantize(torch.ones(8 * 64, 64).bfloat16())
        stack = grouped_linear.GroupedWeight(list(weight.parts), "fp8", 64, 64)
        counts = torch.ones(8, dtype=torch.long)
        grouped_linear.grouped_product(torch.ones(8, 64).bfloat16(), counts, stack, transposed=True)
        return list(made)

    matrices = grouped_linear.GroupedWeight.matrices
    monkeypatch.setattr(
        grouped_linear.GroupedWeight,
        "matrices",
        lambda own, first, last, dtype: (
            made.append(last - first),
            matrices(own, first, last, dtype),
        )[1],
    )
    whole = plan_of(spec, H100).rank.workspace
    assert lots() == [8]
    monkeypatch.setattr(kernel_limits, "GROUPED_BYTES", 3 * 64 * 64 * 2)
    assert lots() == [3, 3, 2]
    copied = 16 * 2 * 2 * 2 * 64
    assert whole - plan_of(spec, H100).rank.workspace == (8 - 3) * 64 * 64 * 2 - copied
