from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ft_service.plan.machines import GIB, MACHINES, Machine, find_machine, machine_of_model
from tests.support.plans import plan_8b


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 5090", "RTX-5090"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA L4", "L4"),
        ("Tesla T4", "T4"),
        ("NVIDIA B200", "B200"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_gpus_are_known_by_the_names_that_the_driver_gives(model: str, name: str) -> None:
    assert machine_of_model(model) is MACHINES[name]


@pytest.mark.parametrize("model", ["NVIDIA A10G", "NVIDIA L40", "NVIDIA T400", "NVIDIA GeForce RTX 4090 Laptop GPU", ""])
def test_a_gpu_that_is_only_named_alike_has_no_figures(model: str) -> None:
    assert machine_of_model(model).flops is None


@pytest.mark.parametrize(("name", "known"), [("4090", "RTX-4090"), ("rtx 3090", "RTX-3090"), ("a100-40gb", "A100-40GB")])
def test_a_machine_is_found_by_what_it_is_called(name: str, known: str) -> None:
    assert find_machine(name) is MACHINES[known]


def test_memory_of_a_host_is_shared_by_its_ranks(tmp_path: Path) -> None:
    host = Machine("cpu", 8 * GIB, shared_memory=True)
    assert plan_8b(tmp_path, 4, host).memory == int(2 * GIB * 0.94)
    assert plan_8b(tmp_path, 4, replace(host, shared_memory=False)).memory == int(8 * GIB * 0.94)
