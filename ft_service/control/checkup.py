"""What a host has and lacks for its jobs: a finding for each thing that they need, with what to do.

`ft doctor` shows them.
"""

from __future__ import annotations

import importlib.util
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ft_service.control.bases.describe_bases import models_report
from ft_service.control.places.price_list import price_list
from ft_service.errors import FtError, SpecError
from ft_service.graders.limits import GraderLimits
from ft_service.host.disk import free_bytes
from ft_service.host.hardware import (
    Gpu,
    available_memory,
    core_count,
    gpu_count,
    memory_bytes,
    nvidia_gpus,
    torch_build,
    torch_versions,
)
from ft_service.host.home import openness, require_writable
from ft_service.host.port_owner import holder
from ft_service.host.running_servers import living_servers
from ft_service.launcher.local_launcher import host_id
from ft_service.money import money_text
from ft_service.settings import Settings
from ft_service.wording import counted

GIB = 1024**3
LITTLE_DISK = 20 * GIB
"""Free bytes below which a checkpoint or a fetched base may find no room."""
CLOCK_SECONDS = 5.0
"""Difference of clocks that is shown."""
_LEAST_DRIVER = {"12": 525, "13": 580}
"""Major version of CUDA → the oldest NVIDIA driver that runs it (NVIDIA's table of minor version
compatibility).
"""
_HOPPER = ("H100", "H200", "GH200")


class Verdict(StrEnum):
    """How a finding is meant."""

    OK = "ok"
    LOOK = "look"
    """Jobs run, and something is worth knowing."""
    FAULT = "fault"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `advice`: what to do; empty: nothing."""

    what: str
    verdict: Verdict
    found: str
    advice: str = ""


def checkup(settings: Settings) -> Iterator[Finding]:
    """Yield the findings on this host and FT_HOME, without the database."""
    yield Finding("python", Verdict.OK, ".".join(map(str, sys.version_info[:3])))
    memory = memory_bytes() / GIB
    free = available_memory() / GIB
    yield Finding(
        "machine",
        Verdict.OK,
        f"{counted(core_count(), 'core')}, {memory:.1f} GiB of memory, {free:.1f} GiB available",
    )
    if settings.launcher == "local":
        yield from _gpus()
    yield _home(settings.home)
    yield disk(settings.home, free_bytes(settings.home))
    yield _port(settings)
    folders = list(models_report(settings))
    empty = all(": 0 bases" in line for line in folders)
    for line in folders:
        yield Finding(
            "models",
            Verdict.LOOK if empty else Verdict.OK,
            line,
            "Fetch one: ft pull ORG/NAME" if empty else "",
        )
    yield prices(settings)
    yield coding_agents(settings.mcp == "on", importlib.util.find_spec("mcp") is not None)
    refused = GraderLimits.from_settings(settings).no_python
    advice = "Only `python` graders need it: install bubblewrap." if refused else ""
    yield Finding(
        "python graders",
        Verdict.LOOK if refused else Verdict.OK,
        refused or "fenced by bubblewrap",
        advice,
    )


def prices(settings: Settings) -> Finding:
    """Return the finding on the prices (docs/costs.md), and whether this host has one."""
    try:
        known = price_list(settings)
    except SpecError as error:
        return Finding("prices", Verdict.FAULT, error.message, "Mend the file, or unset FT_PRICES.")
    if known.currency is None:
        return Finding("prices", Verdict.OK, "none (FT_PRICES): costs are not counted")
    if settings.launcher != "local":
        return Finding("prices", Verdict.OK, f"in {known.currency}")
    rate = known.rate(host_id())
    if rate is None:
        return Finding(
            "prices",
            Verdict.LOOK,
            f"in {known.currency}, and none is of this host",
            f"Give FT_PRICES a slot_hour, or one in places under {platform.node()}.",
        )
    return Finding(
        "prices", Verdict.OK, f"{money_text(rate.price, rate.currency)} a slot-hour on this host"
    )


def coding_agents(wanted: bool, installed: bool) -> Finding:
    """Return the finding on the tools for coding agents (docs/agents.md).

    Args:
        wanted: Whether FT_MCP is on.
        installed: Whether the package that speaks their protocol is there.
    """
    if not wanted:
        return Finding("coding agents", Verdict.OK, "have no tools here (FT_MCP is off)")
    if not installed:
        return Finding(
            "coding agents",
            Verdict.FAULT,
            "FT_MCP is on, and the package mcp is missing",
            "pip install 'ft-service[mcp]'",
        )
    return Finding("coding agents", Verdict.OK, "find their tools at /mcp: ft mcp add AGENT")


def database(settings: Settings, now: Callable[[], float]) -> Finding:
    """Return the finding on the database and its clock.

    `now`: the database's time, in seconds. Raises FtError as it.
    """
    kind = settings.resolved_database_url().partition(":")[0].partition("+")[0]
    begun = time.time()
    theirs = now()
    ours = time.time()
    apart = max(begun - theirs, theirs - ours, 0.0)
    if apart > CLOCK_SECONDS:
        said = f"{kind}, whose clock is {apart:.0f} seconds from this host's"
        return Finding(
            "database",
            Verdict.LOOK,
            said,
            "Let both follow a time server (chrony, systemd-timesyncd).",
        )
    return Finding("database", Verdict.OK, f"{kind}, of this version")


def _gpus() -> Iterator[Finding]:
    found = nvidia_gpus()
    yield from gpus(found, gpu_count(), torch_build(), torch_versions())
    if gpu_count():
        names = [gpu.name for gpu in found]
        yield from packages(names, lambda name: importlib.util.find_spec(name) is not None)


def gpus(
    found: Sequence[Gpu], used: int, build: str | None, versions: tuple[str, str | None] | None
) -> Iterator[Finding]:
    """Yield the findings on GPUs and PyTorch.

    `found`: what NVIDIA's driver lists; `used`: number that ranks see; `build`: as `torch_build`;
    `versions`: those of PyTorch and of the CUDA or ROCm that it was built for.
    """
    if build is None or versions is None:
        yield Finding(
            "torch", Verdict.FAULT, "PyTorch is not installed", "pip install 'ft-service[workers]'"
        )
        return
    torch, toolkit = versions
    yield Finding(
        "torch",
        Verdict.OK,
        f"{torch}, built for {f'{build} {toolkit}' if toolkit else 'processors'}",
    )
    if not found:
        said = counted(used, "GPU") if used else "none: jobs train on the processor"
        yield Finding("gpu", Verdict.OK if used else Verdict.LOOK, said)
        return
    listed = ", ".join(f"{gpu.name} ({gpu.bytes / GIB:.0f} GiB)" for gpu in found)
    if build != "cuda":
        advice = (
            "Install the build for CUDA that pytorch.org names: pip install torch --index-url URL"
        )
        yield Finding("gpu", Verdict.FAULT, f"{listed}, which this PyTorch cannot use", advice)
        return
    driver = found[0].driver
    least = _LEAST_DRIVER.get((toolkit or "").partition(".")[0], 0)
    if int(driver.partition(".")[0] or 0) < least:
        said = f"{listed}, with driver {driver}: CUDA {toolkit} needs {least} or later"
        yield Finding(
            "gpu", Verdict.FAULT, said, "Update the driver, or install PyTorch for an older CUDA."
        )
    elif not used:
        yield Finding(
            "gpu", Verdict.FAULT, f"{listed}, and CUDA_VISIBLE_DEVICES hides them all", "Unset it."
        )
    else:
        yield Finding("gpu", Verdict.OK, f"{listed}, driver {driver}; {used} of {len(found)} used")


def packages(names: Sequence[str], has: Callable[[str], bool]) -> Iterator[Finding]:
    """Yield the findings on packages that make jobs on GPUs faster.

    `names`: of the GPUs; `has`: whether a package is there.
    """
    wanted = {"triton": "our kernels"}
    if any(card in name for name in names for card in _HOPPER):
        wanted["cudnn"] = "cuDNN's attention on Hopper"
    for package, what in wanted.items():
        if has(package):
            yield Finding(package, Verdict.OK, f"there: {what}")
        else:
            install = {"cudnn": "nvidia-cudnn-frontend"}.get(package, package)
            yield Finding(
                package,
                Verdict.LOOK,
                f"not installed: {what} is left out",
                f"pip install {install}",
            )


def _home(home: Path) -> Finding:
    if not home.exists():
        return Finding("home", Verdict.OK, f"{home} (FT_HOME) is made at the first start")
    try:
        require_writable(home)
    except FtError as error:
        return Finding("home", Verdict.FAULT, str(error))
    warning = openness(home)
    return Finding(
        "home",
        Verdict.LOOK if warning else Verdict.OK,
        warning or f"{home} (FT_HOME), for its owner only",
    )


def disk(home: Path, free: int) -> Finding:
    """Return the finding on the disk of FT_HOME. `free`: its bytes."""
    said = f"{free / GIB:,.1f} GiB free for {home}"
    if free >= LITTLE_DISK:
        return Finding("disk", Verdict.OK, said)
    return Finding(
        "disk", Verdict.LOOK, said, "Free some (ft prune), or put FT_HOME on a larger disk."
    )


def _port(settings: Settings) -> Finding:
    if servers := living_servers(settings.home):
        return Finding("server", Verdict.OK, f"runs at {servers[0].url}")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.bind, settings.port))
        except OSError as error:
            said = (
                f"{settings.bind}:{settings.port} cannot be used: "
                f"{(error.strerror or str(error)).lower()}"
            )
            return Finding(
                "server",
                Verdict.LOOK,
                f"{said} ({holder(settings.port)})",
                "Start with another: ft serve --port N",
            )
    return Finding("server", Verdict.OK, f"does not run; {settings.bind}:{settings.port} is free")
