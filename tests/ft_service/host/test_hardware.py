from __future__ import annotations

import os
from pathlib import Path

import pytest

from ft_service.host import hardware
from ft_service.host.hardware import (
    amd_gpus,
    available_memory,
    build_of,
    core_count,
    counted_gpus,
    memory_bytes,
    memory_kills,
    own_group,
    torch_build,
    visible_gpus,
    wsl_models,
)


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [(None, ["0", "1"]), ("", []), ("-1", []), (" 3, GPU-1a ,", ["3", "GPU-1a"])],
)
def test_gpus_are_those_that_cuda_may_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, gpus: list[str]
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus(tmp_path) == gpus


@pytest.mark.parametrize(
    ("build", "nvidia", "wsl", "amd", "gpus"),
    [
        ("cuda", 2, 0, 0, 2),
        ("cuda", 0, 3, 0, 3),
        ("hip", 0, 0, 8, 8),
        ("hip", 1, 0, 2, 2),
        ("cuda", 1, 0, 1, 1),
        ("cuda", 0, 0, 1, 0),
        ("cpu", 0, 1, 1, 0),
        (None, 0, 1, 1, 1),
    ],
)
def test_gpus_are_those_that_pytorch_was_built_for(
    build: str | None, nvidia: int, wsl: int, amd: int, gpus: int
) -> None:
    assert counted_gpus(build, nvidia, wsl, amd) == gpus


@pytest.mark.parametrize(
    ("version", "build"),
    [
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "cuda"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4.43482-0f2d60242'\n", "hip"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", "cpu"),
        ("__version__ = '2.11.0'\ndebug = False\ncuda = '12.8'\nhip = None\n", "cuda"),
    ],
)
def test_what_pytorch_was_built_for_is_read_from_its_files(version: str, build: str) -> None:
    assert build_of(version) == build


def test_the_installed_pytorch_says_the_same() -> None:
    import torch

    assert torch_build() == (
        "hip" if torch.version.hip else "cuda" if torch.version.cuda else "cpu"
    )


def kfd_nodes(folder: Path) -> Path:
    """What AMD's driver lists on a host with two processors and three GPUs, of which a container
    may use two.
    """
    for number, gpu_id in enumerate((0, 0, 51109, 28323, 7)):
        (folder / str(number)).mkdir(parents=True)
        (folder / str(number) / "gpu_id").write_text(f"{gpu_id}\n")
        simds = 1216 if gpu_id else 0
        (folder / str(number) / "properties").write_text(
            f"cpu_cores_count {0 if gpu_id else 96}\nsimd_count {simds}\n"
        )
    (folder / "4" / "properties").unlink()
    (folder / "4" / "properties").mkdir()  # reading it fails, as it does there
    return folder


def test_amd_gpus_are_the_nodes_that_compute_and_can_be_read(tmp_path: Path) -> None:
    assert amd_gpus(kfd_nodes(tmp_path)) == ["2", "3"]
    assert amd_gpus(tmp_path / "absent") == []


@pytest.mark.parametrize(
    ("variables", "name", "gpus"),
    [
        ({}, "CUDA_VISIBLE_DEVICES", ["0", "1"]),
        ({"ROCR_VISIBLE_DEVICES": "1"}, "CUDA_VISIBLE_DEVICES", ["0"]),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0,1"}, "HIP_VISIBLE_DEVICES", ["1"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES", []),
    ],
)
def test_rocm_s_gpus_are_counted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    name: str,
    gpus: list[str],
) -> None:
    devices = tmp_path / "dev"
    devices.mkdir()
    (devices / "kfd").touch()
    monkeypatch.setattr(hardware, "KFD_NODES", kfd_nodes(tmp_path / "nodes"))
    monkeypatch.setattr(hardware, "torch_build", lambda: "hip")
    for known in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(known, raising=False)
    for known, value in variables.items():
        monkeypatch.setenv(known, value)
    assert hardware.visibility_variable() == name
    assert visible_gpus(devices) == gpus


def test_gpus_of_wsl2_are_those_that_nvidia_smi_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\ntest $1 = --query-gpu=name && echo 'NVIDIA GeForce RTX 3090' && echo 'NVIDIA "
        "RTX A6000'\n"
    )
    program.chmod(0o755)
    assert wsl_models(program) == ("NVIDIA GeForce RTX 3090", "NVIDIA RTX A6000")
    assert wsl_models(tmp_path / "absent") == ()
    monkeypatch.setattr(hardware, "wsl_models", lambda: wsl_models(program))
    monkeypatch.setattr(hardware, "torch_build", lambda: "cuda")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, gpus in (("without", []), ("with", ["0", "1"])):
        (tmp_path / name).mkdir()
        if name == "with":
            (tmp_path / name / "dxg").touch()
        assert visible_gpus(tmp_path / name) == gpus


def test_memory_is_the_containers_where_it_has_a_limit(tmp_path: Path) -> None:
    whole = memory_bytes(tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_bytes(tmp_path) == whole
    (tmp_path / "memory.max").write_text("1048576\n")
    assert memory_bytes(tmp_path) == 2**20
    older = tmp_path / "older"
    (older / "memory").mkdir(parents=True)
    for limit, found in {2**63 - 4096: whole, 2**21: 2**21}.items():
        (older / "memory" / "memory.limit_in_bytes").write_text(f"{limit}\n")
        assert memory_bytes(older) == found


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 16),
        ({"cpu.max": "max 100000\n"}, 16),
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "6400000 100000\n"}, 16),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 16),
    ],
)
def test_cores_are_those_that_this_process_may_use(
    files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of a large host's containers had as many slots as the host has cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert core_count(tmp_path) == cores


def test_available_memory_is_read_from_the_kernel_or_is_all_of_it(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 64 kB\nMemAvailable:   32 kB\n")
    assert available_memory(meminfo) == 32 * 1024
    assert available_memory(tmp_path / "absent", tmp_path) == memory_bytes(tmp_path)


def test_available_memory_is_what_the_containers_limit_leaves(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemAvailable: 64 kB\n")
    (tmp_path / "memory.current").write_text("40000\n")
    (tmp_path / "memory.stat").write_text("anon 30000\nactive_file 6000\ninactive_file 4000\n")
    for limit, available in {"max": 65_536, "50000": 20_000, "30000": 0, "1000000": 65_536}.items():
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert available_memory(meminfo, tmp_path) == available


def test_available_memory_within_a_limit_of_the_older_control_groups(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    group = tmp_path / "memory"
    meminfo.write_text("MemAvailable: 64 kB\n")
    group.mkdir()
    (group / "memory.usage_in_bytes").write_text("40000\n")
    (group / "memory.stat").write_text(
        "active_file 1\ntotal_active_file 6000\ntotal_inactive_file 4000\n"
    )
    for limit, available in {50_000: 20_000, 2**63 - 4096: 65_536}.items():
        (group / "memory.limit_in_bytes").write_text(f"{limit}\n")
        assert available_memory(meminfo, tmp_path) == available


def test_kills_for_want_of_memory_are_those_of_the_own_group_or_else_of_the_host(
    tmp_path: Path,
) -> None:
    listed = tmp_path / "cgroup"
    counters = tmp_path / "vmstat"
    counters.write_text("nr_free_pages 1\noom_kill 7\n")
    group = tmp_path / "system.slice/ft.service"
    group.mkdir(parents=True)
    assert memory_kills(group, counters) == 7
    assert memory_kills(group, tmp_path / "absent") == 0
    (group / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    assert memory_kills(group, counters) == 2
    for text, own in {
        "0::/system.slice/ft.service\n": group,
        "0::/gone\n": tmp_path,
        "1:memory:/a\n": tmp_path,
    }.items():
        listed.write_text(text)
        assert own_group(tmp_path, listed) == own
    assert memory_kills() >= 0, "this host's"
