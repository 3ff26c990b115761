"""The outcome: the adapter in PEFT's layout, the metrics table, the manifest, and last of all result.json."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import peft
import torch
import torch.distributed as dist
import transformers
from peft import PeftConfig
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from ft_service import __version__
from ft_service.events import Metrics
from ft_service.provenance import MANIFEST, write_manifest
from ft_service.rundir import Result, RunDir
from ft_service.spec import JobSpec
from workers.model.build import BuiltModel
from workers.optim import JobState
from workers.quant.kernels import VERSION as BITSANDBYTES_VERSION
from workers.report import metrics_csv, metrics_of_all_attempts


def publish(run: RunDir, attempt: int, spec: JobSpec, built: BuiltModel, job: JobState) -> None:
    """Write the outcome of a finished job. Called by all ranks together; rank 0 writes."""
    tensors = dict(gathered_adapter(job))
    if dist.get_rank() == 0:
        rows = metrics_of_all_attempts(run, attempt)
        config = built.peft_model.peft_config["default"]
        last = next((row for row in rows if row.step == job.step), None)
        with new_folder(run.path("adapter")) as folder:
            write_adapter(folder, tensors, config, spec)
            manifest = write_manifest(
                run, folder, attempt=attempt, step=job.step, checkpoint=None, metrics=last, versions=versions()
            )
        run.put("metrics.csv", metrics_csv(rows).encode())
        run.write(MANIFEST, manifest)
        run.write("result.json", _result(attempt, job, rows))
    dist.barrier()


def gathered_adapter(job: JobState) -> Iterator[tuple[str, Tensor]]:
    """PEFT's name and whole value (fp32, CPU) of every adapter matrix, gathered one at a time."""
    for name, parameter in job.parameters.items():
        whole = parameter.detach()
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        yield name.replace(".default.", "."), whole.cpu().contiguous()


def versions() -> dict[str, str]:
    """Of what computed the adapter."""
    return {
        "ft-service": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "bitsandbytes": BITSANDBYTES_VERSION,
    }


def write_adapter(folder: Path, tensors: dict[str, Tensor], config: PeftConfig, spec: JobSpec) -> None:
    """PEFT's two files. `tensors`: by PEFT's names on disk, on the CPU."""
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config.base_model_name_or_path = spec.model.path
    config.inference_mode = True
    if isinstance(config.target_modules, set):  # pyright: ignore[reportAttributeAccessIssue]
        config.target_modules = sorted(config.target_modules)  # pyright: ignore  a set has another order in every process
    config.save_pretrained(str(folder))


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill beside `target`, which it replaces in the end: `target` is whole or not there."""
    beside = target.with_name(f"{target.name}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        yield beside
    except BaseException:
        shutil.rmtree(beside)
        raise
    shutil.rmtree(target, ignore_errors=True)
    os.replace(beside, target)


def _result(attempt: int, job: JobState, rows: list[Metrics]) -> Result:
    losses = [row.train_loss for row in rows if row.train_loss is not None]
    valid = [row.valid_loss for row in rows if row.valid_loss is not None]
    return Result(
        attempt=attempt,
        steps=job.step,
        trained_tokens=job.trained_tokens,
        train_loss=losses[-1] if losses else None,
        valid_loss=valid[-1] if valid else None,
    )
