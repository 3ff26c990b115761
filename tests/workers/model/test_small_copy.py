"""Small copies of large bases: which layers they keep, what they take, and that their products are
those of their weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from tests.support.training.models import save_tiny
from workers.layers.experts import ExpertsLinear
from workers.model.build import base_on_meta
from workers.model.packed_trial import logits_apart, trial_samples
from workers.model.small_copy import DENSE, SmallCopy, small_copy

LARGE: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 64,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 3,
    "vocab_size": 100_000,
}


def large_copy(folder: Path) -> SmallCopy:
    (folder / "config.json").write_text(json.dumps(LARGE))
    return small_copy(base_on_meta(str(folder)))


def test_one_layer_of_every_kind_is_kept_for_all_of_its_kind(tmp_path: Path) -> None:
    copy = large_copy(tmp_path)
    dense, mixture = (
        [f"model.layers.{number}" for number in numbers] for numbers in (range(3), range(3, 20))
    )
    assert copy.alike == {dense[0]: tuple(dense), mixture[0]: tuple(mixture)}


def test_two_layers_are_kept_where_all_are_alike(tmp_path: Path) -> None:
    copy = small_copy(base_on_meta(str(save_tiny("llama", tmp_path, num_hidden_layers=5))))
    assert copy.alike == {
        "model.layers.0": ("model.layers.0",),
        "model.layers.1": tuple(f"model.layers.{n}" for n in range(1, 5)),
    }


def test_a_large_base_takes_little_memory_and_runs(tmp_path: Path) -> None:
    copy = large_copy(tmp_path)
    held = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes()
        for p in copy.model.parameters()
        if not p.is_meta
    }
    assert sum(p.numel() for p in copy.model.parameters()) > 5e9
    assert sum(held.values()) < 50e6
    with torch.no_grad():
        logits = torch.cat(logits_apart(copy.model, trial_samples(copy.model), torch.device("cpu")))
    assert logits.shape[1] == 100_000
    assert logits.isfinite().all()
    assert logits.std() > 0.1


def test_products_are_those_of_the_weights(tmp_path: Path) -> None:
    copy = large_copy(tmp_path)
    layer: Any = copy.model.get_submodule("model.layers.0.mlp.up_proj")
    assert layer.weight.numel() > DENSE
    assert torch.linalg.matrix_rank(layer.weight[:200, :200]) == 200
    x = torch.randn(3, 1536)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight), rtol=1e-4, atol=1e-4)
    stack: Any = copy.model.get_submodule("model.layers.3.mlp.experts.down_proj")
    assert isinstance(stack, ExpertsLinear)
    counts = torch.zeros(64, dtype=torch.int64)
    counts[[5, 63]] = torch.tensor([1, 2])
    y = torch.randn(3, 1024)
    matrices = torch.stack([stack.weight[e * 1536 : (e + 1) * 1536] for e in (5, 63, 63)])
    torch.testing.assert_close(
        stack(y, counts), torch.einsum("noi,ni->no", matrices, y), rtol=1e-4, atol=1e-4
    )
