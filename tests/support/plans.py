"""Plans of published bases, for tests of the arithmetic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ft_service.plan.job import Plan
from ft_service.plan.machines import GIB, MACHINES, Machine, host_cpu
from ft_service.plan.sample_lengths import SampleLengths
from ft_service.spec import JobSpec
from tests.support.bases import LLAMA_8B, TINY, plan_of, save_base, spec_on

H100 = MACHINES["H100"]


def plan_8b(tmp_path: Path, ranks: int = 1, machine: Machine = H100, **options: Any) -> Plan:
    return plan_of(spec_on(save_base(tmp_path / "8b", LLAMA_8B), ranks, **options), machine)


AUTO: dict[str, Any] = {"replicate": "auto", "activation_checkpointing": "auto", "compile": "auto"}
CHATS = SampleLengths(20_000_000, 40_000, 2048)
"""Samples of 500 tokens on average."""
LLAMA_70B = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
SMALL = {
    **LLAMA_8B,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
BASES = {"70b": LLAMA_70B, "8b": LLAMA_8B, "0.5b": SMALL, "tiny": TINY}
HOST = replace(host_cpu(), memory=16 * GIB, heap_factor=1.0)
MACHINE = {**MACHINES, "cpu": HOST}


def open_spec(folder: Path, base: str, ranks: int = 1, **options: Any) -> JobSpec:
    distributed = {**AUTO, **options.pop("distributed", {})}
    training = {"batch_size": 16 * ranks, "max_length": 2048, **options.pop("training", {})}
    return spec_on(
        save_base(folder / base, BASES[base]),
        ranks,
        distributed=distributed,
        training=training,
        **options,
    )
