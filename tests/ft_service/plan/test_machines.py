from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ft_service.plan import machines
from ft_service.plan.machines import (
    GIB,
    MACHINES,
    Machine,
    find_machine,
    machine_of_model,
    usable_bytes,
    usable_host_bytes,
)
from tests.support.bases import save_base, spec_on
from tests.support.plans import plan_8b


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA H200 NVL", "H200-NVL"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "H100"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A40", "A40"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 5090", "RTX-5090"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA L4", "L4"),
        ("Tesla T4", "T4"),
        ("NVIDIA B200", "B200"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI300X OAM", "MI300X"),
    ],
)
def test_gpus_are_known_by_the_names_that_the_driver_gives(model: str, name: str) -> None:
    assert machine_of_model(model) is MACHINES[name]


@pytest.mark.parametrize(
    "model",
    [
        *(
            "NVIDIA A100X",
            "NVIDIA L20",
            "NVIDIA T400",
            "NVIDIA H20",
            "Quadro RTX 6000",
            "NVIDIA RTX A600",
            "",
        ),
        *(
            "NVIDIA GeForce RTX 4090 Laptop GPU",
            "NVIDIA GeForce RTX 4090 D",
            "NVIDIA GeForce RTX 3090 Ti",
        ),
    ],
)
def test_a_gpu_that_is_only_named_alike_has_no_figures(model: str) -> None:
    assert machine_of_model(model).flops is None


def test_cards_for_pcie_are_slower_than_their_modules() -> None:
    for module, card in (
        ("H100", "H100-PCIe"),
        ("H100", "H100-NVL"),
        ("H200", "H200-NVL"),
        ("A100", "A100-PCIe"),
    ):
        ours = MACHINES[card]
        theirs = MACHINES[module]
        assert ours.flops is not None
        assert theirs.flops is not None
        assert ours.flops <= theirs.flops
        assert ours.link_bandwidth in (32e9, 64e9)


@pytest.mark.parametrize(
    ("name", "fuses", "by_cudnn", "host_bandwidth"),
    [
        ("B200", True, False, 64e9),
        ("GH200", True, True, 450e9),
        ("H100", True, True, 64e9),
        ("H200-NVL", True, True, 64e9),
        ("A100", True, False, 32e9),
        ("RTX-3090", True, False, 32e9),
        ("RTX-5090", True, False, 64e9),
        ("MI300X", False, False, 64e9),
        ("T4", False, False, 16e9),
    ],
)
def test_what_computes_on_a_card_and_how_fast_it_reads_its_host_go_by_its_kind(
    name: str, fuses: bool, by_cudnn: bool, host_bandwidth: float
) -> None:
    machine = MACHINES[name]
    assert (machine.fuses, machine.by_cudnn, machine.host_bandwidth) == (
        fuses,
        by_cudnn,
        host_bandwidth,
    )
    assert (machine.shared_memory, machine.heap_factor, machine.rank_memory) == (False, 1.0, 0)


def test_the_table_has_each_card_under_its_name_with_all_figures() -> None:
    for name, machine in MACHINES.items():
        assert machine.name == name
        assert machine.memory is not None
        assert machine.link_bandwidth is not None
        assert machine.memory_bandwidth is not None


def test_fp8_is_twice_as_fast_as_bf16_where_there_is_any() -> None:
    """So it is on every data sheet: sparse figures, which are twice as high, are easily taken for
    it.
    """
    for machine in MACHINES.values():
        assert machine.fp8_flops is None or machine.fp8_flops == pytest.approx(
            2 * (machine.flops or 0), rel=0.02
        ), machine.name


def test_the_host_s_gpu_is_named_by_its_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "gpu_count", lambda: 1)
    driver = tmp_path / "gpus"
    products = tmp_path / "drm"
    (driver / "0000:01:00.0").mkdir(parents=True)
    (driver / "0000:01:00.0/information").write_text("Model: \t\t NVIDIA A10G\nIRQ:   \t\t 11\n")
    for card, product in (("card0", ""), ("card1", "AMD Instinct MI300X OAM\n")):
        (products / card / "device").mkdir(parents=True)
        (products / card / "device/product_name").write_text(product)
    builds = {
        "cuda": ("A10G", "RTX-3090", "unknown GPU"),
        "hip": ("MI300X", "unknown GPU", "unknown GPU"),
    }
    for build, expected in builds.items():
        monkeypatch.setattr(machines, "torch_build", lambda build=build: build)
        with_driver = machines.this_host(driver, products, lambda: [])
        of_wsl = machines.this_host(
            tmp_path / "none", tmp_path / "none", lambda: ["NVIDIA GeForce RTX 3090"]
        )
        unnamed = machines.this_host(tmp_path / "none", tmp_path / "none", lambda: [])
        assert (with_driver.name, of_wsl.name, unnamed.name) == expected


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("4090", "RTX-4090"),
        ("a6000", "RTX-A6000"),
        ("h100-pcie", "H100-PCIe"),
        ("rtx 3090", "RTX-3090"),
        ("a100-40gb", "A100-40GB"),
        ("RTX4090", "RTX-4090"),
        ("h100 pcie", "H100-PCIe"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
    ],
)
def test_a_machine_is_found_by_what_it_is_called(name: str, known: str) -> None:
    assert find_machine(name) is MACHINES[known]


def test_memory_of_a_host_is_shared_by_its_ranks(tmp_path: Path) -> None:
    host = Machine("cpu", 8 * GIB, shared_memory=True)
    assert plan_8b(tmp_path, 4, host).memory == int(2 * GIB * 0.94)
    assert plan_8b(tmp_path, 4, replace(host, shared_memory=False)).memory == int(8 * GIB * 0.94)


def test_of_memory_that_is_not_known_nothing_is_said_and_of_any_other_a_part(
    tmp_path: Path,
) -> None:
    spec = spec_on(save_base(tmp_path), 4)
    gpu = Machine("x", 100, host_memory=1000, rank_memory=10)
    assert usable_bytes(replace(gpu, memory=None), spec) is None
    assert usable_bytes(gpu, spec) == 94
    assert usable_bytes(replace(gpu, shared_memory=True), spec) == int((25 + 10) * 0.94)
    assert usable_host_bytes(replace(gpu, host_memory=None), spec) is None
    assert usable_host_bytes(gpu, spec) == int((250 + 10) * 0.8)
