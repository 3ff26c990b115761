"""Makes the adapter of any complete checkpoint from its shards: `python -m
workers.tasks.consolidate RUN_DIR CHECKPOINT OUT`.

No GPU, no process group, and no base weights: adapter matrices are read from the shards one after
the other, wherever they were cut, and written in PEFT's layout with their manifest. The checkpoint
was written by the service and is checked against COMPLETE first, since DCP's metadata is a pickle.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

from ft_service.host.quick_imports import begin_imports, end_imports
from workers.patches.absent_torchao import keep_torchao_out

if __name__ == "__main__":  # before transformers is imported
    keep_torchao_out()
    begin_imports()
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from ft_service.bases.adapter_names import peft_name
from ft_service.errors import NotFoundError
from ft_service.rundir.checkpoints import checkpoint_faults, checkpoint_key, read_marker
from ft_service.rundir.directory import RunDir
from ft_service.rundir.manifest import AdapterSource, Manifest
from ft_service.rundir.model_card import describe_adapter
from ft_service.spec import JobSpec
from workers.model.build import build
from workers.output.outcome import new_folder, versions, write_adapter
from workers.output.report import metrics_of_all_attempts
from workers.tasks import print_result

PREFIX = "adapter/"
"""Prefix of the names under which checkpoints hold adapter matrices."""


def consolidate(run: RunDir, name: str, out: Path) -> Manifest:
    """Write a checkpoint's adapter to the new folder `out`.

    Raises NotFoundError if the checkpoint is absent or not whole.
    """
    marker = read_marker(run, name)
    spec = run.read("spec.json", JobSpec)
    if marker is None or spec is None:
        raise NotFoundError(
            f"{run.root} holds no complete checkpoint {name!r}.",
            param="checkpoint",
            code="no_checkpoint",
        )
    faults = checkpoint_faults(run, name)
    if faults:
        raise NotFoundError(
            f"Checkpoint {name} is damaged: {faults[0]}.",
            param="checkpoint",
            code="checkpoint_damaged",
        )
    tensors = adapter_tensors(run.path(checkpoint_key(name)))
    config = build(spec, torch.device("cpu")).peft_model.peft_config["default"]
    rows = {row.step: row for row in metrics_of_all_attempts(run, marker.attempt)}
    with new_folder(out) as folder:
        write_adapter(
            folder, {name: t.shape for name, t in tensors.items()}, tensors.items(), config, spec
        )
        return describe_adapter(
            run,
            folder,
            AdapterSource(
                attempt=marker.attempt,
                step=marker.step,
                checkpoint=name,
                metrics=rows.get(marker.step),
                versions=versions(),
            ),
        )


def adapter_tensors(folder: Path) -> dict[str, Tensor]:
    """The adapter matrices of a checkpoint, whole, by PEFT's names on disk.

    Optimizer states are not read.
    """
    held = FileSystemReader(folder).read_metadata().state_dict_metadata
    wanted = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in held.items()
        if name.startswith(PREFIX) and isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():  # no process group is needed
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(dict(wanted), checkpoint_id=folder, no_dist=True)
    return {peft_name(name.removeprefix(PREFIX)): tensor for name, tensor in wanted.items()}


def main(arguments: list[str]) -> int:
    """Print one line of JSON: the adapter's folder, or the error. Exit code 0 or 64."""
    run_dir, name, out = arguments

    def task() -> dict[str, Any]:
        manifest = consolidate(RunDir(run_dir), name, Path(out))
        return {"adapter": out, "step": manifest.step, "digest": manifest.digest}

    return print_result(task)


if __name__ == "__main__":
    end_imports()
    sys.exit(main(sys.argv[1:]))
