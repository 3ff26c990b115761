"""Worker processes that make something of what a job left behind, without a GPU: the adapter of a checkpoint, a merged model.

What needs torch runs beside this process; it answers with one line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ft_service.errors import FtError, NotFoundError, SpecError
from ft_service.lifetime import exclusive
from ft_service.rundir import CHECKPOINT_NAME, RunDir, complete_checkpoints, obtainable_checkpoints

WRONG = 64


def run_worker(module: str, arguments: Sequence[str], *, python: str = sys.executable) -> dict[str, Any]:
    """Run `python -m module` to its end and return its report. Raises the FtError that it reports, or one with its last words.

    Blocks for as long as it takes: from a server, call it on a thread.
    """
    command = [python, "-P", "-m", module, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONSAFEPATH": "1"}, check=False)
    lines = ended.stdout.splitlines()
    if ended.returncode == 0 and lines:
        return json.loads(lines[-1])
    if ended.returncode == WRONG and lines:
        error = json.loads(lines[-1])
        kind = NotFoundError if error["code"] in ("no_checkpoint", "checkpoint_damaged") else SpecError
        raise kind(error["error"], param=error["param"], code=error["code"])
    last = (ended.stderr.strip().splitlines() or [f"it ended with code {ended.returncode}"])[-1]
    hint = " Install the workers: pip install 'ft-service[workers]'." if "ModuleNotFoundError" in last else ""
    raise FtError(f"{module} has failed: {last}{hint}")


def checkpoint_adapter(run_dir: Path, checkpoint: str | int) -> Path:
    """The folder with the PEFT adapter of a checkpoint (its name, or its step), made at the first call and kept.

    Raises NotFoundError if there is no such complete checkpoint, or if it is damaged.
    """
    run = RunDir(run_dir)
    name = name_of_step(run, checkpoint) if isinstance(checkpoint, int) else checkpoint
    if not CHECKPOINT_NAME.fullmatch(name):
        raise NotFoundError(f"There is no checkpoint {name!r}.", param="checkpoint", code="no_checkpoint")
    folder = run.path(f"adapters/{name}")
    if not folder.is_dir():  # it appears whole or not at all, and outlives the checkpoint
        with exclusive(run.path(f"adapters/{name}.lock")):  # of several who ask at once, one makes it
            if not folder.is_dir():
                run_worker("workers.consolidate", [str(run.root), name, str(folder)])
    return folder


def name_of_step(run: RunDir, step: int) -> str:
    """The newest attempt's checkpoint of a step, among those on disk and those whose adapter was made before.

    Raises NotFoundError that lists the steps there are.
    """
    names = [name for name in obtainable_checkpoints(run) if name.startswith(f"step-{step}-a")]
    if not names:
        steps = ", ".join(name.split("-")[1] for name in complete_checkpoints(run)) or "none"
        raise NotFoundError(
            f"There is no complete checkpoint of step {step}. There are checkpoints of steps: {steps}.",
            param="checkpoint",
            code="no_checkpoint",
        )
    return max(names, key=lambda name: int(name.rpartition("a")[2]))
