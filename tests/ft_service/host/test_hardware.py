from __future__ import annotations

from pathlib import Path

import pytest

from ft_service.host.hardware import available_memory, memory_bytes, visible_gpus


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


def test_memory_is_the_containers_where_it_has_a_limit(tmp_path: Path) -> None:
    whole = memory_bytes(tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_bytes(tmp_path) == whole
    (tmp_path / "memory.max").write_text("1048576\n")
    assert memory_bytes(tmp_path) == 2**20


def test_available_memory_is_read_from_the_kernel_or_is_all_of_it(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 64 kB\nMemAvailable:   32 kB\n")
    assert available_memory(meminfo) == 32 * 1024
    assert available_memory(tmp_path / "absent") == memory_bytes()
