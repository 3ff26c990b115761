"""The plan's bytes of "tiled" and "offload" against those of tensors in a step of the worker, for
lengths at which they count.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from ft_service.spec import JobSpec
from tests.support.bases import plan_of
from tests.support.fused_attention import fused_attention
from tests.support.ranks import Cases, often_and_slow
from tests.support.training.late_copies import on_small_scale
from tests.support.training.live_bytes import peak_bytes
from tests.support.training.measured_machines import GPU, kernels_of_a_gpu
from tests.support.training.models import save_tiny, spec_for
from tests.support.training.parity import CPU, constructed
from workers.base.load import adapters
from workers.data.batches import Tokens, make_batch
from workers.job.training_state import JobState
from workers.layers import fused, packed_attention
from workers.model import build
from workers.patches.fused_layers import fuse
from workers.training.step import forward_backward

TILE = 1024
BLOCK = 2**18
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 224,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 131_072,
    "pad_token_id": None,
}
"""Of Llama-3.1-8B's proportions."""
CASES = {
    f"{mode}, {length:,} tokens": (mode, length)
    for mode in ("full", "tiled", "offload")
    for length in (8192, 32_768, 131_072)
}
SLOW = CASES.keys() - {"offload, 8,192 tokens"}


def spec_of(base: Path, length: int) -> JobSpec:
    return spec_for(
        base,
        precision={"default": "nf4", "compute": "bf16"},
        training={"batch_size": 1, "max_length": length, "tokens_per_micro_batch": length},
        lora={"r": 4},
        distributed={"activation_checkpointing": "full"},
    )


def in_mode(spec: JobSpec, mode: str) -> JobSpec:
    distributed = spec.distributed.model_copy(update={"activation_checkpointing": mode})
    return spec.model_copy(update={"distributed": distributed})


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> Cases[tuple[int, int]]:
    base = save_tiny("llama", tmp_path_factory.mktemp("base") / "base", **SHAPE)
    specs = {name: in_mode(spec_of(base, length), mode) for name, (mode, length) in CASES.items()}
    return Cases(peak_of_a_step, specs, SLOW, timeout=3000)


@pytest.mark.parametrize("case", often_and_slow(CASES, SLOW))
def test_long_samples_take_the_planned_bytes(case: str, peaks: Cases[tuple[int, int]]) -> None:
    """To 10 %, and in the host's memory exactly."""
    spec, [(measured, pinned)] = peaks.of(case)
    with on_small_scale(TILE, BLOCK):
        plan = plan_of(spec, GPU)
    rank = plan.rank
    planned = rank.live - sum(rank.base.values()) - rank.adapters - rank.optimizer
    assert planned == pytest.approx(measured, rel=0.1)
    assert pinned == rank.host


def peak_of_a_step(_rank: int, _world: int, spec: JobSpec) -> tuple[int, int]:
    """Most bytes of tensors during a step, besides those that were there before it, and bytes of
    pinned memory.
    """
    kernels = kernels_of_a_gpu(spec.training.max_length // 64)
    with (
        patch.object(
            build, "choose_arithmetic", lambda base, *_: build.Arithmetic(fused=str(fuse(base)))
        ),
        patch.object(fused.KERNEL, "on", lambda device: kernels),
        fused_attention(),
        patch.object(packed_attention, "_kernel", _attended),
        patch.object(packed_attention, "_kernel_grad", _gradients),
        on_small_scale(TILE, BLOCK) as copies,
    ):
        built = constructed(spec, 1)
        job = JobState(dict(adapters(built.peft_model)), spec.training)
        length = spec.training.max_length
        ids = torch.randint(0, 64, (length,), generator=torch.Generator().manual_seed(1)).int()
        sample = Tokens(ids.numpy(), ids.numpy() >= 0)

        def step() -> None:
            batches = [make_batch([sample], CPU, None, packed=True)]
            forward_backward(built.peft_model, batches, sample.target_count, 1)
            job.update(1e-4, 1.0)

        gc.collect()  # the case before has left cycles
        peak = peak_bytes(step)
    return peak, sum(block.nbytes for block in copies.blocks)


def _attended(query: Tensor, *_rest: Any, **_seen: Any) -> tuple[Any, ...]:
    """What a GPU's kernel allocates for a forward; the values are made up."""
    return query.clone(), query.new_zeros(query.shape[1], len(query), dtype=torch.float32), 0, 0, 0


def _gradients(
    _grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_rest: Any, **_seen: Any
) -> tuple[Tensor, ...]:
    """The same for a backward: the query's sum in fp32, and keys and values for each head."""
    found = tuple(torch.zeros_like(own) for own in (query, key, value))
    workspace = (
        query.new_empty(query.shape, dtype=torch.float32),
        *map(torch.empty_like, (query, query)),
    )
    del workspace
    return found
