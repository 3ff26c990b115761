"""Runs the sections one after the other, each in a process of its own with a time limit, and writes
down what came of them.

The processes are forked from one that has imported what they need, which takes longer than some of
them.

    python -m benchmarks.gpu_report --only a
        a part of the report below ten minutes; also b, c, d and e
    python -m benchmarks.gpu_report [--device cuda] [--minutes 9.5] [--only ceilings,kernels]
            [--skip ..] [--out FOLDER]
    python -m benchmarks.gpu_report --device cpu --tiny
        every section in its smallest form, to prove that it runs

FOLDER/gpu_report.jsonl grows while sections run; rows of sections that are not run again stay.
After each, a table in Markdown is written next to it, and what the section printed is kept in
FOLDER/gpu_report_logs. A section that is killed, fails or lacks something is a row; the others
continue. Exit code 1 if any row says that something failed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest.mock import patch

from benchmarks.gpu_report.rows import Row, append, markdown, read
from benchmarks.gpu_report.sections import PARTS, SECTIONS, Section, run_forked

ROOT = Path(__file__).parents[2]
SHARED_MEMORY = Path("/dev/shm")
BASE_BYTES = 24 * 2**30
"""The base in bf16, of which the sections keep one, and what they write beside it."""
LEAST_SECONDS = 5.0
"""With less left, no section is begun."""
SLOWER = 6
"""How much longer a section may take on processors, which prove that it runs and measure
nothing.
"""
FIXED = {
    "HF_HUB_OFFLINE": "1",
    "FT_CACHE": "",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}
"""Variables of every section; the last is what supervisors set for ranks."""
PRELOAD = ["tests.support.without_torchao", "benchmarks.gpu_report.preloaded"]
TAIL = 1500
"""Characters of a failed section's output that its row shows."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="the smallest form of every section")
    parser.add_argument(
        "--minutes", type=float, help="for all sections together; 9.5 on a GPU, 60 without"
    )
    parser.add_argument(
        "--only", default="", help="names of sections or of parts (a to e), with commas"
    )
    parser.add_argument("--skip", default="", help="names of sections, with commas")
    parser.add_argument(
        "--out",
        type=Path,
        help="benchmarks/results on a GPU, build/gpu_report without: its numbers mean nothing",
    )
    options = parser.parse_args(arguments)
    options.out = options.out or ROOT / (
        "benchmarks/results" if options.device == "cuda" else "build/gpu_report"
    )
    only, skip = (set(filter(None, text.split(","))) for text in (options.only, options.skip))
    only = {name for given in only for name in PARTS.get(given, (given,))}
    if unknown := (only | skip) - SECTIONS.keys():
        parser.error(
            f"no such sections: {', '.join(sorted(unknown))}. There are: {', '.join(SECTIONS)}"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / "gpu_report.jsonl"
    chosen = {
        name: section
        for name, section in SECTIONS.items()
        if name not in skip and (not only or name in only)
    }
    keep(results, chosen)
    import_first()
    deadline = time.monotonic() + 60 * (
        options.minutes or (9.5 if options.device == "cuda" else 60)
    )
    with tempfile.TemporaryDirectory(
        prefix="gpu-report-", dir=scratch_in(0 if options.tiny else BASE_BYTES)
    ) as scratch:
        for name, section in chosen.items():
            began = time.monotonic()
            run_section(
                name, section, options.device, options.tiny, results, Path(scratch), deadline
            )
            (options.out / "gpu_report.md").write_text(markdown(read(results)))
            append(results, Row(name, "the section", "ok", {"seconds": time.monotonic() - began}))
            mine = [row for row in read(results) if row.section == name]
            failed = sum(row.status == "failed" for row in mine)
            print(
                f"{name}: {len(mine)} cases, {failed} failed, {time.monotonic() - began:.0f} s",
                flush=True,
            )
    print((options.out / "gpu_report.md").read_text())
    return int(any(row.status == "failed" for row in read(results)))


def keep(results: Path, chosen: Collection[str]) -> None:
    """Remove the rows of the chosen sections, which are to be run again."""
    rows = [row for row in read(results) if row.section not in chosen]
    results.unlink(missing_ok=True)
    for row in rows:
        append(results, row)


def scratch_in(needed: int) -> Path | None:
    """The folder in memory, if it has room for so many bytes; None: the system's own for temporary
    files.
    """
    has_room = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > needed
    return SHARED_MEMORY if has_room else None


def run_section(
    name: str,
    section: Section,
    device: str,
    tiny: bool,
    results: Path,
    scratch: Path,
    deadline: float,
) -> None:
    """Run a section to its end or to its limit.

    Its rows, and one more if it did not end well, are in `results`.
    """
    patience = 1 if device == "cuda" else SLOWER
    limit = min(patience * section.seconds, deadline - time.monotonic())
    if deadline - time.monotonic() < LEAST_SECONDS:
        append(results, Row(name, "-", "skipped", note="the report's minutes are over"))
        return
    log = results.parent / "gpu_report_logs" / f"{name}.log"
    log.parent.mkdir(exist_ok=True)
    log.touch()
    process = forking().Process(
        target=run_forked,
        args=(environment(os.environ, device), log, name, device, tiny, results, scratch),
    )
    process.start()
    try:
        process.join(limit)
        code = process.exitcode
    finally:
        with_children(process)
    if code is None:
        append(
            results,
            Row(name, "-", "failed", note=f"ended after its limit of {limit:.0f} s: {tail(log)}"),
        )
    elif code:
        append(results, Row(name, "-", "failed", {"exit_code": code}, tail(log)))


def import_first() -> None:
    """Start the server from which sections are forked, so that no section's time is that of its
    imports.
    """
    with patch.dict(os.environ, FIXED):  # some are read by what is imported
        first = forking().Process(target=int)
        first.start()
    first.join()


def forking() -> ForkServerContext:
    """Processes are forked from a server that has imported `PRELOAD`.

    It must not begin CUDA: no fork of it could use it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def environment(inherited: Mapping[str, str], device: str) -> dict[str, str]:
    """Of every section. No home and no cache of the caller's is touched.

    Whether there is a GPU is asked of its driver: a section whose ranks are forked must not begin
    CUDA before.
    """
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    path = os.pathsep.join(filter(None, (str(ROOT), inherited.get("PYTHONPATH"))))
    return {**inherited, "PYTHONPATH": path, **FIXED, **hidden}


def with_children(process: BaseProcess) -> None:
    """End a section, and what it started and left: its processes are a session of their own, once
    it has begun.
    """
    assert process.pid is not None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def tail(log: Path) -> str:
    return log.read_text(errors="replace")[-TAIL:]


if __name__ == "__main__":
    sys.exit(main())
