from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.bases import spec_on
from workers.layers import cudnn_attention
from workers.model.build import BuiltModel
from workers.model.kernel_faults import KERNEL_USES, kernel_faults

FP32 = {"compute": "fp32"}
OF_BF16 = ["head", "packed_attention", "cudnn_attention"]
JOBS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], list[str]]] = {
    "in fp32": ({}, {"precision": FP32}, {}, []),
    "in bf16": ({}, {}, {}, [*OF_BF16, "fused"]),
    "by the model's own operations": ({}, {"precision": {"fused_kernels": "off"}}, {}, OF_BF16),
    "compiled": ({}, {"distributed": {"compile": True}}, {}, OF_BF16),
    "with dropout": ({}, {"precision": FP32, "lora": {"lora_dropout": 0.1}}, {}, ["dropout"]),
    "products in FP8": ({"in_fp8": True}, {"precision": FP32}, {}, ["fp8_products", "low_rank"]),
    "FP8, dequantised": ({"in_fp8": False}, {"precision": FP32}, {}, []),
    "stored in NF4": ({}, {"precision": FP32}, {"q_proj": "nf4"}, ["nf4"]),
    "with sinks": (
        {"sinks": nn.Parameter(torch.zeros(2))},
        {"precision": FP32},
        {},
        ["packed_attention"],
    ),
    "soft-capped": (
        {"attn_logit_softcapping": 50.0},
        {"precision": FP32},
        {},
        ["capped_attention"],
    ),
}
"""What a layer has, a job's options, its base's formats, and the modules of the kernels it uses."""


def faults(job: str, device: torch.device) -> list[tuple[str, str]]:
    attributes, options, formats, _ = JOBS[job]
    layer = nn.Linear(1, 1)
    for name, value in attributes.items():
        setattr(layer, name, value)
    model: Any = nn.Sequential(layer)
    return list(
        kernel_faults(spec_on(Path("base"), **options), BuiltModel(model, [], formats), device)
    )


@pytest.mark.parametrize("job", JOBS)
def test_a_job_is_told_of_the_kernels_that_it_would_use(
    job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for use in KERNEL_USES:
        name = use.kernel.compare.__module__.rpartition(".")[2]
        monkeypatch.setattr(use.kernel, "fault", lambda device, name=name: name)
    told = faults(job, torch.device("cuda", 7))
    assert [text.rpartition(": ")[2] for _, text in told] == JOBS[job][3]
    of_options = [text.startswith(("lora.", "precision.")) for _, text in told]
    assert [level == "warn" for level, _ in told] == of_options


def test_a_processor_goes_without_kernels_and_has_no_fault() -> None:
    assert [told for job in JOBS for told in faults(job, torch.device("cpu"))] == []


@pytest.mark.parametrize(
    ("fault", "hint"),
    [
        ("ModuleNotFoundError: No module named 'cudnn'", " (pip install 'ft-service[workers]')"),
        ("Error: no engine", ""),
    ],
)
def test_the_extra_that_brings_cudnn_is_named(
    fault: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a version that is known to work; the newest one is another."""
    monkeypatch.setattr(cudnn_attention.KERNEL, "fault", lambda device: fault)
    [text] = [text for _, text in faults("in bf16", torch.device("cpu"))]
    assert text.endswith(f"more slowly than by cuDNN's: {fault}{hint}")
