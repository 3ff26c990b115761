from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ft_service.errors import SpecError
from ft_service.host.processor import Products, processor_kind
from ft_service.plan import machines
from ft_service.plan.machines import (
    GIB,
    MACHINES,
    Machine,
    find_machine,
    host_cpu,
    machine_of_gpu,
    machine_of_model,
    measured,
    ranks_per_host,
    this_host,
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


def test_the_figures_of_every_card_are_of_the_size_of_data_sheets() -> None:
    """A figure in another unit, or a product that became a quotient, is far outside."""
    for name, machine in MACHINES.items():
        assert machine.name == name
        figures = (machine.memory, machine.flops, machine.memory_bandwidth, machine.link_bandwidth)
        memory, flops, bandwidth, link = (figure or 0 for figure in figures)
        assert 14 * GIB < memory < 300 * GIB, name
        assert 8e12 <= flops <= 2.3e15, name
        assert 3e11 <= bandwidth <= 8e12, name
        assert 1.6e10 <= link <= 9e11, name


PRODUCTS = Products(processor_kind(), 4e10, 1e10, True)


def test_a_processor_is_what_was_measured_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "memory_bytes", lambda: 7 * GIB)
    host = host_cpu()
    assert (
        find_machine("CPU")
        == host
        == Machine("cpu", 7 * GIB, 75e9, 2.5e9, 1e9, shared_memory=True, heap_factor=1.4)
    )
    found = measured(host, PRODUCTS)
    assert found == replace(host, flops=4e10, products=PRODUCTS)
    assert (found.flops_in("bf16"), found.flops_in("fp32")) == (1e10, 4e10)
    assert (host.flops_in("bf16"), host.flops_in("fp32")) == (75e9, 75e9)
    gpu = MACHINES["H100"]
    assert (gpu.flops_in("bf16"), gpu.flops_in("fp32")) == (989e12, None)
    for machine, products in (
        (host, None),
        (gpu, PRODUCTS),
        (host, replace(PRODUCTS, kind="another")),
    ):
        assert measured(machine, products) is machine
    assert (found.slow_in_bf16, host.slow_in_bf16) == (PRODUCTS, None)
    assert measured(host, replace(PRODUCTS, bf16_flops=8e10)).slow_in_bf16 is None
    monkeypatch.setattr(machines, "gpu_count", lambda: 0)
    assert this_host() == host
    part = machine_of_gpu("NVIDIA H100 80GB HBM3", 10 * GIB)
    assert part == replace(gpu, memory=10 * GIB, host_memory=7 * GIB)
    assert machine_of_gpu("", 1) == Machine("unknown GPU", 1, host_memory=7 * GIB)
    monkeypatch.setattr(machines, "gpu_count", lambda: 1)
    none = Path("/nowhere")
    assert this_host(none, none, lambda: ["NVIDIA L4"]) == replace(
        MACHINES["L4"], host_memory=7 * GIB
    )


def test_a_machine_that_is_not_known_is_refused_with_those_that_are() -> None:
    with pytest.raises(SpecError, match=r"'RTX-5080': not known\..*RTX-3090, cpu; ") as refused:
        find_machine("RTX-5080")
    assert refused.value.param == "hardware"
    with pytest.raises(SpecError, match="not known"):
        find_machine("NVIDIA RTX 4090 Max-Q")
    assert machine_of_model("NVIDIA RTX 4090 Max").name == "RTX-4090"


@pytest.mark.parametrize(("ranks", "nodes", "per_host"), [(6, 2, 3), (4, 1, 4), (1, 2, 1)])
def test_ranks_of_a_host_are_its_share_of_all(ranks: int, nodes: int, per_host: int) -> None:
    spec: Any = SimpleNamespace(world_size=ranks, distributed=SimpleNamespace(nnodes=nodes))
    assert ranks_per_host(spec) == per_host
