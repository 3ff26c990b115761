"""Counters of energy: files as the kernel writes them, and a driver as NVML's package has it."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ft_service.host.energy import (
    GpuCounter,
    Load,
    ProcessorCounter,
    busy_seconds,
    processor_zones,
    seconds_of,
)
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import MOST_LOADS, Energy, GpuLoad
from ft_service.supervisor.energy_meter import EnergyMeter

SPAN = 1_000_000


def zone(root: Path, folder: str, name: str, microjoules: int) -> Path:
    path = root / folder
    path.mkdir(parents=True)
    (path / "name").write_text(f"{name}\n")
    (path / "energy_uj").write_text(f"{microjoules}\n")
    (path / "max_energy_range_uj").write_text(f"{SPAN}\n")
    return path


class Nvml:
    """As the package pynvml, of two GPUs."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, mig: bool = False) -> None:
        self.millijoules = {0: 5_000, 1: 7_000}
        self.mig = mig

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index not in self.millijoules:
            raise self.NVMLError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return {"GPU-b": 1}[uuid]

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        if handle == 0:
            raise self.NVMLError("Not Supported")
        return [int(self.mig), 0]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        return self.millijoules[handle]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(used=(handle + 1) * 2**30)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=80 + 10 * handle)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        if self.mig:
            raise self.NVMLError("Not Supported")
        return 300_000 + handle


def test_gpus_count_from_the_first_look() -> None:
    nvml = Nvml()
    counter = GpuCounter(["0", "GPU-b"], nvml)
    assert counter.joules() == 0.0
    nvml.millijoules = {0: 6_000, 1: 9_500}
    assert counter.joules() == 3.5
    nvml.millijoules[0] = 10  # the driver was loaded again
    assert counter.joules() == 2.5


def test_gpus_say_what_they_do_where_their_driver_does() -> None:
    found = GpuCounter(["0", "GPU-b"], Nvml()).load()
    assert found is not None
    assert found.busy == pytest.approx(0.85)
    assert found.watts == pytest.approx(600.001)
    assert found == Load(2 * 2**30, found.busy, found.watts)
    untold = GpuCounter(["0"], Nvml(mig=True))
    assert (untold.load(), untold.joules()) == (None, 0.0)


def test_what_gpus_do_is_kept_at_equal_distances_and_bounded(tmp_path: Path) -> None:
    looks = threading.Semaphore(0)

    class Counted(GpuCounter):
        def load(self) -> Load | None:
            looks.release()
            return super().load()

    files = Attempt(RunDir(tmp_path), 1)
    meter = EnergyMeter(files.node(0, 1), lambda: Counted(["0"], Nvml()), every_seconds=0.001)
    for _ in range(MOST_LOADS + 5):
        assert looks.acquire(timeout=60)
    meter.close()
    loads = files.gpu_loads(1)
    assert MOST_LOADS / 2 <= len(loads) < MOST_LOADS / 2 + 60, "every second one is left out"
    assert loads[0] == GpuLoad(time=loads[0].time, memory=2**30, busy=0.8, watts=300.0)
    assert [load.time for load in loads] == sorted(load.time for load in loads)


def test_a_part_of_a_gpu_and_a_missing_one_are_not_counted() -> None:
    with pytest.raises(OSError, match="MIG"):
        GpuCounter(["1"], Nvml(mig=True))
    with pytest.raises(Nvml.NVMLError):
        GpuCounter(["7"], Nvml())


def test_packages_and_their_memory_are_counted_once(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 0)
    zone(tmp_path, "intel-rapl:0:0", "core", 0)
    zone(tmp_path, "intel-rapl:0:1", "dram", 0)
    zone(tmp_path, "intel-rapl:1", "package-1", 0)
    zone(tmp_path, "intel-rapl:2", "psys", 0)
    (tmp_path / "intel-rapl").mkdir()
    names = [path.name for path in processor_zones(tmp_path)]
    assert names == ["intel-rapl:0", "intel-rapl:0:1", "intel-rapl:1"]


def test_processors_are_divided_by_time_and_begin_again(tmp_path: Path) -> None:
    zones = [zone(tmp_path, f"intel-rapl:{at}", f"package-{at}", 999_000) for at in (0, 1)]
    times = {"busy": 100.0, "own": 10.0}
    counter = ProcessorCounter(1, zones=zones, busy=lambda: times["busy"], own=lambda: times["own"])
    (zones[0] / "energy_uj").write_text("499999")  # beyond the end of its range
    (zones[1] / "energy_uj").write_text("1000000")
    times.update(busy=104.0, own=11.0)
    assert counter.joules() == pytest.approx((0.501 + 0.001) / 4)
    assert counter.joules() == pytest.approx(0.502 / 4), "no time, no energy"
    (zones[0] / "energy_uj").write_text("599999")
    times.update(busy=105.0, own=20.0)  # clocks of unlike steps
    assert counter.joules() == pytest.approx(0.502 / 4 + 0.1)


def test_without_a_counter_nothing_is_measured(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no counters"):
        ProcessorCounter(1, zones=[])
    hidden = zone(tmp_path, "intel-rapl:0", "package-0", 1)
    (hidden / "energy_uj").unlink()
    with pytest.raises(OSError, match="energy_uj"):
        ProcessorCounter(1, zones=[hidden])


def test_times_of_processes(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("cpu  100 20 30 400 50 6 7 0 0 0\ncpu0 1\n")
    assert busy_seconds(tmp_path) == 1.63
    rows = {1: (0, "1 2 3 4"), 2: (1, "10 20 30 40"), 3: (2, "100 0 0 0"), 4: (0, "9 9 9 9")}
    for pid, (parent, ticks) in rows.items():
        (tmp_path / str(pid)).mkdir()
        before = " ".join("0" for _ in range(9))
        text = f"{pid} (a) b) S {parent} {before} {ticks} 20 0\n"
        (tmp_path / str(pid) / "stat").write_text(text)
    assert seconds_of(1, tmp_path) == 2.1
    assert seconds_of(3, tmp_path) == 1.0
    before = seconds_of(os.getpid())
    sum(range(3_000_000))
    assert seconds_of(os.getpid()) > before
    assert busy_seconds() > 0


def test_the_meter_writes_what_the_counter_says(tmp_path: Path) -> None:
    attempt = Attempt(RunDir(tmp_path), 1)
    looked = threading.Event()
    readings = iter([1.5, 4.0, 4.0, 4.0])

    def joules() -> float:
        looked.set()
        return next(readings)

    counter: Any = SimpleNamespace(source="nvml", joules=joules, load=lambda: None)
    meter = EnergyMeter(attempt.node(), lambda: counter, every_seconds=0.01)
    assert looked.wait(30)
    meter.close()
    found = attempt.joules(nodes=1)
    assert found in (1.5, 4.0)
    assert attempt.joules(nodes=2) is None


def test_a_node_without_a_counter_leaves_no_record(tmp_path: Path) -> None:
    attempt = Attempt(RunDir(tmp_path), 1)

    def broken() -> Any:
        raise OSError("no driver")

    EnergyMeter(attempt.node(), broken).close()
    assert attempt.joules(nodes=1) is None
    attempt.node(0, 2).write_energy(Energy(joules=2.0, source="rapl"))
    attempt.node(1, 2).write_energy(Energy(joules=3.0, source="rapl"))
    assert attempt.joules(nodes=2) == 5.0
    (tmp_path / attempt.keys.node(1, 2).energy).write_text('{"joules": -1, "source": "rapl"}')
    assert attempt.joules(nodes=2) == 2.0
