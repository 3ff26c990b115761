"""Peak memory of a step on a GPU against the plan, and a base that lies in the host's memory."""

from __future__ import annotations

import csv
import gc
from pathlib import Path

import pytest
import torch

from benchmarks.bases import Llama, write_llama
from ft_service.data.tokens.sample import Tokens
from ft_service.plan.machines import MACHINES
from ft_service.rundir.directory import RunDir
from ft_service.spec import JobSpec
from tests.support.bases import plan_of
from tests.support.training.attempts import supervise
from tests.support.training.models import save_chat_base, save_chats, spec_for
from workers.base.load import adapters, load
from workers.data.batches import pack
from workers.job.training_state import JobState
from workers.layers import (
    cudnn_attention,
    dropout,
    expert_rows,
    fused,
    low_rank,
    packed_attention,
)
from workers.model import head
from workers.model.activation_checkpointing import checkpoint_activations
from workers.model.build import build
from workers.model.offloaded_inputs import copies_for
from workers.quant import decoding, fp8_products, nf4
from workers.training.step import forward_backward

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

LLAMA = Llama(hidden=2048, intermediate=5632, layers=6, heads=16, vocabulary=32_000)
LENGTH = 2048


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_llama(folder, LLAMA)
    return folder


@pytest.mark.parametrize("weight_format", ["bf16", "fp8", "nf4"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("fused_kernels", ["auto", "off"])
def test_peak_memory_is_within_ten_percent_of_the_plan(
    base: Path, fused_kernels: str, weight_format: str, checkpointing: str
) -> None:
    spec = spec_for(
        base,
        precision={"default": weight_format, "fused_kernels": fused_kernels},
        training={"batch_size": 2, "per_device_train_batch_size": 2, "max_length": LENGTH},
        lora={"r": 16, "target_modules": "all-linear"},
        distributed={"activation_checkpointing": checkpointing},
    )
    planned = plan_of(spec, MACHINES["H200"]).rank.total
    assert peak_of_two_steps(spec) == pytest.approx(planned, rel=0.1)


@pytest.mark.parametrize("checkpointing", ["full", "tiled", "offload"])
def test_a_long_sample_takes_what_is_planned(base: Path, checkpointing: str) -> None:
    spec = spec_for(
        base,
        precision={"default": "nf4"},
        training={"batch_size": 2, "per_device_train_batch_size": 2, "max_length": 32_768},
        lora={"r": 16},
        gpus=1,
        distributed={"activation_checkpointing": checkpointing},
    )
    planned = plan_of(spec, MACHINES["H200"]).rank.total
    assert peak_of_two_steps(spec) == pytest.approx(planned, rel=0.1)


def test_offloaded_inputs_change_no_bit(base: Path) -> None:
    """Over layers that take less time than the copies beside them: what does not wait would show."""
    device = torch.device("cuda", 0)
    found: list[dict[str, torch.Tensor]] = []
    for checkpointing in ("full", "offload", "offload"):
        spec = spec_for(base, precision={"default": "bf16"}, lora={"r": 16})
        built = build(spec, device)
        checkpoint_activations(
            built.layers,
            checkpointing,
            16,
            copies=copies_for(device) if checkpointing == "offload" else None,
        )
        load(built.peft_model, spec.model.path, seed=0, compute_dtype=torch.bfloat16, device=device)
        built.peft_model.train()
        trained = dict(adapters(built.peft_model))
        for name, own in trained.items():
            if "lora_B" in name:
                torch.nn.init.constant_(own, 1e-3)
        ids = torch.arange(4 * LENGTH).remainder(LLAMA.vocabulary).int().numpy()
        batch = pack([Tokens(ids, ids >= 0)], device)
        for _ in range(3):
            forward_backward(built.peft_model, [batch], len(ids) - 1, 1)
        found.append({n: own.grad for n, own in trained.items() if own.grad is not None})
        assert found[-1].keys() == trained.keys()
    for other in found[1:]:
        assert all(torch.equal(grad, other[name]) for name, grad in found[0].items())


def peak_of_two_steps(spec: JobSpec) -> int:
    """Bytes that tensors take at most, from the first forward on."""
    device = torch.device("cuda", 0)
    gc.collect()  # models of other tests
    built = build(spec, device)
    mode = spec.distributed.checkpointing
    checkpoint_activations(
        built.layers,
        mode,
        spec.lora.r,
        row_wise=built.row_wise,
        copies=copies_for(device) if mode == "offload" else None,
    )
    load(built.peft_model, spec.model.path, seed=0, compute_dtype=torch.bfloat16, device=device)
    # Compared with others before a job begins.
    for kernels in (
        fused,
        packed_attention,
        cudnn_attention,
        head,
        nf4,
        fp8_products,
        low_rank,
        dropout,
        expert_rows,
        decoding,
    ):
        kernels.KERNEL.fault(device)
    built.peft_model.train()
    job = JobState(dict(adapters(built.peft_model)), spec.training)
    length = spec.training.max_length
    ids = (
        torch.randint(0, LLAMA.vocabulary, (2, length), generator=torch.Generator().manual_seed(0))
        .int()
        .numpy()
    )
    batch = pack([Tokens(row, row >= 0) for row in ids], device)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        forward_backward(built.peft_model, [batch], 2 * (length - 1), 1)
        job.update(1e-4, 1.0)
    return torch.cuda.max_memory_allocated()


@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="what is sharded can be offloaded: needs two GPUs"
)
def test_a_base_in_the_hosts_memory_trains_to_the_same_losses(tmp_path: Path) -> None:
    folder = save_chat_base(tmp_path / "base")
    data = save_chats(tmp_path / "train.jsonl", 16)
    found: list[dict[str, str]] = []
    for offload in (False, True):
        spec = spec_for(
            folder,
            data,
            ranks=2,
            gpus=2,
            precision={"default": "nf4"},
            training={"max_steps": 6, "batch_size": 4},
            distributed={"offload": offload},
        )
        run = RunDir(tmp_path / f"offload-{offload}")
        run.write("spec.json", spec)
        assert supervise(run, 1, None, world=2) == 0
        with run.path("metrics.csv").open() as table:
            found.append({row["step"]: row["train_loss"] for row in csv.DictReader(table)})
    plain, offloaded = ({step: float(loss) for step, loss in losses.items()} for losses in found)
    assert offloaded == pytest.approx(plain, rel=1e-3)
