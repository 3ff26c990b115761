"""The outcome: the adapter in PEFT's layout, the metrics table, the manifest, and last of all result.json."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from typing import Any

import peft
import torch
import torch.distributed as dist
import transformers
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from ft_service import __version__
from ft_service.events import Metrics
from ft_service.rundir import Result, RunDir, sha256_of
from ft_service.spec import JobSpec
from workers.model.build import BuiltModel
from workers.model.frozen import Loaded
from workers.optim import JobState
from workers.quant.kernels import VERSION as BITSANDBYTES_VERSION
from workers.quant.rowwise import RowQuantized
from workers.report import metrics_csv, metrics_of_all_attempts


def publish(run: RunDir, attempt: int, spec: JobSpec, built: BuiltModel, job: JobState, loaded: Loaded) -> None:
    """Write the outcome of a finished job. Called by all ranks together; rank 0 writes."""
    tensors = dict(gathered_adapter(job))
    formats = stored_formats(built, loaded)
    if dist.get_rank() == 0:
        _write_adapter(run, spec, built.peft_model, tensors)
        rows = metrics_of_all_attempts(run, attempt)
        run.put("metrics.csv", metrics_csv(rows).encode())
        run.put("manifest.json", json.dumps(manifest(run, attempt, spec, formats), indent=2).encode())
        run.write("result.json", _result(attempt, job, rows))
    dist.barrier()


def gathered_adapter(job: JobState) -> Iterator[tuple[str, Tensor]]:
    """PEFT's name and whole value (fp32, CPU) of every adapter matrix, gathered one at a time."""
    for name, parameter in job.parameters.items():
        whole = parameter.detach()
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        yield name.replace(".default.", "."), whole.cpu().contiguous()


def stored_formats(built: BuiltModel, loaded: Loaded) -> list[dict[str, Any]]:
    """Every linear layer of the base: the format it is stored in, its bytes over all ranks, and its relative error.

    The error is ‖stored - read‖ / ‖read‖; 0.0: stored exactly as the base's files hold it.
    """
    found = []
    base: Any = built.peft_model.get_base_model()
    for name, weight_format in built.formats.items():
        module = base.get_submodule(name)
        weight = getattr(module, "base_layer", module).weight
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        own = local.stored_bytes if isinstance(local, RowQuantized) else local.nbytes
        found.append(
            {
                "module": name,
                "format": weight_format,
                "shape": list(weight.shape),
                "bytes": own,
                "relative_error": loaded.changed.get(f"{name}.weight", 0.0),
            }
        )
    total = torch.tensor([entry["bytes"] for entry in found], dtype=torch.int64)
    dist.all_reduce(total)
    return [entry | {"bytes": whole} for entry, whole in zip(found, total.tolist(), strict=True)]


def manifest(run: RunDir, attempt: int, spec: JobSpec, formats: list[dict[str, Any]]) -> dict[str, Any]:
    """Where the adapter comes from and what is in it."""
    adapter = run.path("adapter")
    return {
        "version": 1,
        "job": spec.job_id,
        "attempt": attempt,
        "tuned_name": spec.tuned_name,
        "spec": spec.model_dump(mode="json"),
        "world_size": dist.get_world_size(),
        "frozen_linear_layers": formats,
        "files": {path.name: sha256_of(path) for path in sorted(adapter.iterdir())},
        "versions": {
            "ft-service": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "peft": peft.__version__,
            "bitsandbytes": BITSANDBYTES_VERSION,
        },
    }


def _write_adapter(run: RunDir, spec: JobSpec, model: PeftModel, tensors: dict[str, Tensor]) -> None:
    """Into a folder beside, then renamed: `adapter/` is whole or not there."""
    target, beside = run.path("adapter"), run.path("adapter.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    save_file(tensors, beside / "adapter_model.safetensors", metadata={"format": "pt"})
    config = model.peft_config["default"]
    config.base_model_name_or_path = spec.model.path
    config.inference_mode = True
    config.save_pretrained(str(beside))
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
