"""Attempts as the service runs them: supervised, with checkpoints during training, a stop and a
resume, and the start.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_report.jobs import adapter_bytes, events_of, losses_of, steps_of
from benchmarks.gpu_report.sections import Context
from ft_service.jobs.states import Ended
from ft_service.launcher.local_launcher import LocalLauncher
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.checkpoints import newest_checkpoint
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Start
from ft_service.spec import JobSpec
from tests.support.attempts import wait_for
from tests.support.training.attempts import supervise
from tests.support.training.models import save_chat_base, save_chats, spec_for

STOPPED = 75
"""Exit code of a supervisor whose attempt stopped as it was asked to."""
SECONDS = 80.0


def measure(context: Context) -> None:
    spec = spec_for(
        save_chat_base(context.scratch / "service-base"),
        save_chats(context.scratch / "service.jsonl", 32),
        precision={"default": "nf4"},
        training={"max_steps": 8, "batch_size": 8, "learning_rate": 1e-2},
        checkpoint={"save_steps": 3},
    )
    context.rows.run(
        "stopped and resumed, checkpoints beside training",
        lambda: stopped_and_resumed(context.scratch, spec),
    )
    if context.tiny:
        context.rows.add("start", "skipped", "takes seconds of imports; not in the smallest form")
        return
    context.rows.run("start", lambda: starts(context.scratch, spec))


def stopped_and_resumed(scratch: Path, spec: JobSpec) -> dict[str, Any]:
    whole = RunDir(scratch / "runs/whole")
    parts = RunDir(scratch / "runs/parts")
    for run in (whole, parts):
        run.write("spec.json", spec)
    parts.put("attempts/1/stop.json", b'{"reason": "the report asks for it"}')
    codes = [supervise(parts, 1, None)]
    codes += [supervise(parts, 2, newest_checkpoint(parts)), supervise(whole, 1, None)]
    found = [*losses_of(parts), *losses_of(parts, 2)]
    expected = losses_of(whole)
    apart = max((abs(a - b) / b for a, b in zip(found, expected, strict=True)), default=1.0)
    stalls = [
        event.metrics.checkpoint_stall_seconds or 0.0
        for event in events_of(whole)
        if event.kind == "checkpoint" and event.metrics
    ]
    same = adapter_bytes(parts) == adapter_bytes(whole)
    return {
        "ok": codes == [STOPPED, 0, 0] and apart < 1e-4 and same,
        "exit_codes": codes,
        "loss_apart": apart,
        "adapters_have_the_same_bits": same,
        "longest_stall_ms": 1e3 * max(stalls, default=0.0),
    }


def starts(scratch: Path, spec: JobSpec) -> dict[str, Any]:
    """Seconds from the start of an attempt to the end of its first step."""
    return {
        "ok": True,
        "first_step_seconds": first_step(prepared(scratch / "runs/start", spec), LocalLauncher(1)),
    }


def prepared(folder: Path, spec: JobSpec) -> RunDir:
    run = RunDir(folder)
    run.write("spec.json", spec)
    run.write(
        "attempts/1/start.json",
        Start(job_id=spec.job_id, attempt=1, world_size=1, generation=1, checkpoint=None),
    )
    return run


def first_step(run: RunDir, launcher: LocalLauncher) -> float:
    began = time.time()
    launcher.start(Attempt(run, 1))
    seen = wait_for(
        lambda: seen if isinstance(seen := launcher.observe(Attempt(run, 1)), Ended) else None,
        SECONDS,
    )
    assert seen.exit is not None, "the attempt left no exit record"
    assert seen.exit.reason == "succeeded", seen.exit
    return steps_of(run)[0][0] - began
