"""Worker processes that make something of what a job left behind, without a GPU: the adapter of a checkpoint, a merged model.

What needs torch runs beside this process; it answers with one line of JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ft_service.errors import FtError, NotFoundError, SpecError
from ft_service.host.environment import child_environment
from ft_service.host.lifetime import exclusive
from ft_service.rundir.checkpoints import (
    CHECKPOINT_ADAPTER,
    CHECKPOINT_NAME,
    checkpoint_faults,
    checkpoint_key,
    complete_checkpoints,
    obtainable_checkpoints,
    read_marker,
)
from ft_service.rundir.directory import RunDir, UnreadableDocumentError, sha256_of, unfinished
from ft_service.rundir.intact import adapter_faults

WRONG = 64


class WorkersMissingError(FtError):
    """What workers need, torch above all, is not installed beside this process."""


def run_worker(module: str, arguments: Sequence[str], *, python: str = sys.executable) -> dict[str, Any]:
    """Run `python -m module` to its end and return its report. Raises the FtError that it reports, or one with its last words.

    Blocks for as long as it takes: from a server, call it on a thread.
    """
    command = [python, "-P", "-m", module, *arguments]
    environment = child_environment(os.environ, PYTHONSAFEPATH="1")
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    lines = ended.stdout.splitlines()
    if ended.returncode == 0 and lines:
        return json.loads(lines[-1])
    if ended.returncode == WRONG and lines:
        error = json.loads(lines[-1])
        kind = NotFoundError if error["code"] in ("no_checkpoint", "checkpoint_damaged") else SpecError
        raise kind(error["error"], param=error["param"], code=error["code"])
    last = (ended.stderr.strip().splitlines() or [f"it ended with code {ended.returncode}"])[-1]
    if "No module named" in last:
        raise WorkersMissingError(f"{module} has failed: {last} Install the workers: pip install 'ft-service[workers]'.")
    raise FtError(f"{module} has failed: {last}")


def make_checkpoint_adapter(run_dir: Path, checkpoint: str | int) -> Path:
    """The folder with the PEFT adapter of a checkpoint (its name, or its step), made at the first call and kept. One that is
    damaged is made anew, as long as its checkpoint is whole.

    Raises NotFoundError if there is no such complete checkpoint, or if it is damaged.
    """
    run = RunDir(run_dir)
    name = name_of_step(run, checkpoint) if isinstance(checkpoint, int) else checkpoint
    if not CHECKPOINT_NAME.fullmatch(name):
        raise NotFoundError(f"There is no checkpoint {name!r}.", param="checkpoint", code="no_checkpoint")
    folder = run.path(f"adapters/{name}")
    if folder.is_dir() and adapter_faults(folder) and not checkpoint_faults(run, name):
        with exclusive(run.path(f"adapters/{name}.lock")):
            if folder.is_dir() and adapter_faults(folder):
                shutil.rmtree(folder)
    if not folder.is_dir():  # it appears whole or not at all, and outlives the checkpoint
        with exclusive(run.path(f"adapters/{name}.lock")):  # of several who ask at once, one makes it
            if not folder.is_dir() and not _take_exported(run, name, folder):
                _consolidate(run, name, folder)
    if run.plain(f"adapters/{name}") is None:
        raise _damaged(name, "its adapter is a link to elsewhere")
    return folder


def _take_exported(run: RunDir, name: str, folder: Path) -> bool:
    """Copy the adapter that the checkpoint itself holds; False: it holds none. Raises NotFoundError if it is damaged."""
    try:
        marker = read_marker(run, name)
    except UnreadableDocumentError as error:
        raise _damaged(name, error.message.rstrip(".")) from None
    files = [file for file in marker.files if file.name.startswith(f"{CHECKPOINT_ADAPTER}/")] if marker else []
    if not files:
        return False
    beside = unfinished(folder)
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    for file in files:
        copy = beside / file.name.removeprefix(f"{CHECKPOINT_ADAPTER}/")
        try:
            shutil.copyfile(run.plain(f"{checkpoint_key(name)}/{file.name}") or "", copy)
        except FileNotFoundError:
            raise _damaged(name, f"{file.name} is missing") from None
        if sha256_of(copy) != file.sha256:
            raise _damaged(name, f"{file.name} has other contents than when it was written")
    os.replace(beside, folder)
    return True


def _damaged(name: str, fault: str) -> NotFoundError:
    return NotFoundError(f"Checkpoint {name} is damaged: {fault}.", param="checkpoint", code="checkpoint_damaged")


def _consolidate(run: RunDir, name: str, folder: Path) -> None:
    try:
        run_worker("workers.tasks.consolidate", [str(run.root), name, str(folder)])
    except WorkersMissingError:
        raise NotFoundError(
            f"Checkpoint {name} holds shards and no adapter, and the service has no torch to make one of them. Checkpoints "
            "hold their adapters where FT_CHECKPOINT_ADAPTERS is set for the workers. Where the workers are installed and "
            f"the run directory can be read, one is made with: python -m workers.tasks.consolidate RUN_DIR {name} OUT",
            param="checkpoint",
            code="no_adapter",
        ) from None


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
