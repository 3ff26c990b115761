"""Findings of `ft doctor`, and what it says to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from ft_service.control.checkup import (
    GIB,
    LITTLE_DISK,
    Verdict,
    checkup,
    coding_agents,
    database,
    disk,
    gpus,
    packages,
)
from ft_service.host.hardware import Gpu, nvidia_gpus
from ft_service.settings import Settings

H100 = Gpu("NVIDIA H100 80GB HBM3", 80 * GIB, "580.65.06")
OLD = Gpu("NVIDIA GeForce RTX 3090", 24 * GIB, "535.104.05")


@pytest.mark.parametrize(
    ("found", "used", "build", "versions", "verdicts", "said"),
    [
        ([], 0, None, None, {"torch": Verdict.FAULT}, "ft-service[workers]"),
        (
            [],
            0,
            "cpu",
            ("2.13.0+cpu", None),
            {"torch": Verdict.OK, "gpu": Verdict.LOOK},
            "processor",
        ),
        ([], 2, "hip", ("2.13.0", "7.1"), {"torch": Verdict.OK, "gpu": Verdict.OK}, "2 GPUs"),
        ([H100], 1, "cuda", ("2.13.0", "13.0"), {"torch": Verdict.OK, "gpu": Verdict.OK}, "H100"),
        (
            [H100],
            0,
            "cpu",
            ("2.13.0+cpu", None),
            {"torch": Verdict.OK, "gpu": Verdict.FAULT},
            "pytorch.org",
        ),
        ([OLD], 1, "cuda", ("2.13.0", "13.0"), {"torch": Verdict.OK, "gpu": Verdict.FAULT}, "580"),
        (
            [OLD],
            1,
            "cuda",
            ("2.11.0", "12.8"),
            {"torch": Verdict.OK, "gpu": Verdict.OK},
            "535.104.05",
        ),
        (
            [H100, H100],
            0,
            "cuda",
            ("2.13.0", "13.0"),
            {"torch": Verdict.OK, "gpu": Verdict.FAULT},
            "CUDA_VISIBLE_DEVICES",
        ),
    ],
)
def test_gpus_that_jobs_cannot_use_are_faults(
    found: list[Gpu],
    used: int,
    build: str | None,
    versions: tuple[str, str | None] | None,
    verdicts: dict[str, Verdict],
    said: str,
) -> None:
    findings = list(gpus(found, used, build, versions))
    assert {finding.what: finding.verdict for finding in findings} == verdicts
    assert said in findings[-1].found + findings[-1].advice
    assert all(finding.advice for finding in findings if finding.verdict is Verdict.FAULT)


def test_packages_that_make_jobs_faster_are_asked_for_where_they_do() -> None:
    assert [finding.what for finding in packages([OLD.name], lambda _: True)] == ["triton"]
    missing = {finding.what: finding.advice for finding in packages([H100.name], lambda _: False)}
    assert missing == {"triton": "pip install triton", "cudnn": "pip install nvidia-cudnn-frontend"}


def test_a_disk_with_little_room_and_a_clock_that_is_wrong_are_told(tmp_path: Path) -> None:
    assert disk(tmp_path, LITTLE_DISK).verdict is Verdict.OK
    assert disk(tmp_path, LITTLE_DISK - 1).verdict is Verdict.LOOK
    settings = Settings(home=tmp_path)
    assert database(settings, lambda: 0.0).verdict is Verdict.LOOK


def test_gpus_are_read_from_the_drivers_program(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771, 580.95.05'\necho 'garbage'\n")
    program.chmod(0o755)
    assert nvidia_gpus(str(program)) == [Gpu("NVIDIA H200", 143771 * 1024**2, "580.95.05")]
    assert nvidia_gpus(str(tmp_path / "absent")) == []


def test_the_checkup_names_all_that_jobs_need(tmp_path: Path) -> None:
    found = {finding.what: finding for finding in checkup(Settings(home=tmp_path / "home"))}
    assert found.keys() >= {
        "python",
        "machine",
        "torch",
        "gpu",
        "home",
        "disk",
        "server",
        "models",
        "python graders",
        "coding agents",
    }
    assert found["models"].advice == "Fetch one: ft pull ORG/NAME"


@pytest.mark.parametrize(
    ("wanted", "installed", "verdict"),
    [(False, False, Verdict.OK), (True, True, Verdict.OK), (True, False, Verdict.FAULT)],
)
def test_tools_for_coding_agents_need_their_package(
    wanted: bool, installed: bool, verdict: Verdict
) -> None:
    assert coding_agents(wanted, installed).verdict is verdict
