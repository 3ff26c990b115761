"""Worker processes without a GPU that produce files from a job's output: the adapter of a
checkpoint, a merged model.

They need torch, so each runs in a process of its own, which answers with one line of JSON.
`python -m ft_service.serving.worker_tasks RUN_DIR CHECKPOINT OUT` writes the adapter of a
checkpoint by hand.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ft_service.errors import FtError, NotFoundError, SpecError
from ft_service.host.helper_process import HelperFailed, Program, run_once
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
from ft_service.rundir.verified_files import adapter_faults
from ft_service.shared_work.losses import persist

CONSOLIDATE = "workers.tasks.consolidate"


class WorkersMissingError(FtError):
    """Packages that workers need, such as torch, are not installed in this environment."""


def run_worker(
    module: str, arguments: Sequence[str], *, python: str = sys.executable
) -> dict[str, Any]:
    """Run `python -m module` and return its report. Blocks: a server must call it on a thread.

    One that the host kills is started again. Raises SpecError or NotFoundError for what the worker
    refuses, WorkersMissingError, HelperFailed.
    """
    program = Program(
        command=(python, "-P", "-m", module, *arguments), variables={"PYTHONSAFEPATH": "1"}
    )
    try:
        return persist(module, partial(run_once, program))
    except SpecError as error:
        if error.code in ("no_checkpoint", "checkpoint_damaged"):
            raise NotFoundError(error.message, param=error.param, code=error.code) from None
        raise
    except HelperFailed as error:
        if any("No module named" in line for line in error.last_words[-1:]):
            message = f"{error.message} Install the workers: pip install 'ft-service[workers]'."
            raise WorkersMissingError(message) from None
        raise


def make_checkpoint_adapter(run_dir: Path, checkpoint: str | int) -> Path:
    """Return the folder with the PEFT adapter of a checkpoint (its name, or its step), made at the
    first call and kept. A damaged one is made again while its checkpoint is intact.

    Raises NotFoundError if there is no such complete checkpoint, or if it is damaged.
    """
    run = RunDir(run_dir)
    name = name_of_step(run, checkpoint) if isinstance(checkpoint, int) else checkpoint
    if not CHECKPOINT_NAME.fullmatch(name):
        raise NotFoundError(
            f"There is no checkpoint {name!r}.", param="checkpoint", code="no_checkpoint"
        )
    folder = run.path(f"adapters/{name}")
    if folder.is_dir() and adapter_faults(folder) and not checkpoint_faults(run, name):
        with exclusive(run.path(f"adapters/{name}.lock")):
            if folder.is_dir() and adapter_faults(folder):
                shutil.rmtree(folder)
    if not folder.is_dir():  # it appears complete or not at all, and outlives the checkpoint
        with exclusive(run.path(f"adapters/{name}.lock")):  # of several callers, one makes it
            if not folder.is_dir() and not _take_exported(run, name, folder):
                _consolidate(run, name, folder)
    if run.plain(f"adapters/{name}") is None:
        raise _damaged(name, "its adapter is a symbolic link")
    return folder


def _take_exported(run: RunDir, name: str, folder: Path) -> bool:
    """Copy the adapter that the checkpoint itself contains; False: it contains none.

    Raises NotFoundError if it is damaged.
    """
    try:
        marker = read_marker(run, name)
    except UnreadableDocumentError as error:
        raise _damaged(name, error.message.rstrip(".")) from None
    files = (
        [file for file in marker.files if file.name.startswith(f"{CHECKPOINT_ADAPTER}/")]
        if marker
        else []
    )
    if not files:
        return False
    temporary = unfinished(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for file in files:
        copy = temporary / file.name.removeprefix(f"{CHECKPOINT_ADAPTER}/")
        try:
            shutil.copyfile(run.plain(f"{checkpoint_key(name)}/{file.name}") or "", copy)
        except FileNotFoundError:
            raise _damaged(name, f"{file.name} is missing") from None
        if sha256_of(copy) != file.sha256:
            raise _damaged(name, f"{file.name} has other contents than when it was written")
    os.replace(temporary, folder)
    return True


def _damaged(name: str, fault: str) -> NotFoundError:
    return NotFoundError(
        f"Checkpoint {name} is damaged: {fault}.", param="checkpoint", code="checkpoint_damaged"
    )


def _consolidate(run: RunDir, name: str, folder: Path) -> None:
    try:
        run_worker(CONSOLIDATE, [str(run.root), name, str(folder)])
    except WorkersMissingError:
        raise NotFoundError(
            f"Checkpoint {name} contains shards and no adapter, and the service has no torch to "
            "convert them. Checkpoints "
            "contain their adapters if FT_CHECKPOINT_ADAPTERS is set for the workers. Where the "
            "workers are installed and "
            "the run directory can be read, run: python -m ft_service.serving.worker_tasks "
            f"RUN_DIR {name} OUT",
            param="checkpoint",
            code="no_adapter",
        ) from None


def name_of_step(run: RunDir, step: int) -> str:
    """Return the newest attempt's checkpoint of a step, among those on disk and those with an
    adapter made before.

    Raises NotFoundError that lists the available steps.
    """
    names = [name for name in obtainable_checkpoints(run) if name.startswith(f"step-{step}-a")]
    if not names:
        steps = ", ".join(name.split("-")[1] for name in complete_checkpoints(run)) or "none"
        raise NotFoundError(
            f"There is no complete checkpoint of step {step}. There are checkpoints of steps: "
            f"{steps}.",
            param="checkpoint",
            code="no_checkpoint",
        )
    return max(names, key=lambda name: int(name.rpartition("a")[2]))


if __name__ == "__main__":
    try:
        print(json.dumps(run_worker(CONSOLIDATE, sys.argv[1:])))
    except FtError as failed:
        sys.exit(failed.message)
