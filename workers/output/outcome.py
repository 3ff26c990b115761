"""The outcome: the adapter in PEFT's layout, the metrics table, the manifest, and last of all
result.json.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import bitsandbytes
import peft
import torch
import transformers
from peft import PeftConfig
from torch import Tensor
from torch.distributed.tensor import DTensor

from ft_service import __version__
from ft_service.bases.adapter_names import peft_name
from ft_service.bases.base_files import copy_base_file, read_document
from ft_service.bases.origin import portable_name
from ft_service.data.token_options import TokenOptions
from ft_service.data.tokenizer_files import tokenizer_files
from ft_service.data.tokens.image_processor import bounded_documents
from ft_service.host.helper_process import HelperFailed, Program, run_once
from ft_service.rundir.checkpoints import checkpoint_faults
from ft_service.rundir.directory import RunDir, unfinished
from ft_service.rundir.documents import Result
from ft_service.rundir.evaluations import (
    FORGETTING,
    PROBES,
    SERVED,
    Forgetting,
    Probe,
    Probes,
    ServedQuality,
    read_forgetting,
)
from ft_service.rundir.events import Event, Metrics
from ft_service.rundir.manifest import MANIFEST, AdapterSource
from ft_service.rundir.model_card import describe_adapter
from ft_service.shared_work.losses import persist
from ft_service.spec import JobSpec
from workers.base.rank_objects import Wait, by_first, on_all
from workers.job import reread_adapter
from workers.job.reread_adapter import WEIGHTS
from workers.job.training_state import JobState
from workers.model.build import BuiltModel
from workers.model.lora import name_towers
from workers.model.renamed_adapters import names_of
from workers.output import checkpoint
from workers.output.checkpoint_pruning import best, checkpoint_entries
from workers.output.event_files import write_event_file
from workers.output.model_shards import TensorPlan, write_file
from workers.output.publishing import adapter_folder, explained, put_document, sync, write_document
from workers.output.report import metrics_csv, steps_of_all_attempts, with_evaluations
from workers.ranks.runtime import ExportError, Runtime

BASE_CONFIG = "config.json"
"""The one of the base's tokenizer files that describes the model: in an adapter's folder it would
make that look like one.
"""

_PLACES = ("name_or_path", "special_tokens_map_file", "tokenizer_file")
"""Keys of tokenizer_config.json under which older versions of transformers wrote paths."""


@dataclass(frozen=True)
class PublishedStep:
    """The step whose adapter is published, and all that was trained."""

    checkpoint: str | None
    """The job's state is this checkpoint's; None: the last step's."""
    steps: int
    trained_tokens: int
    among: str = ""
    """Of which steps it is the best one, for display; empty: of all."""


def use_best(
    run: RunDir, spec: JobSpec, job: JobState, warn: Callable[[str], None]
) -> PublishedStep:
    """Restore the best checkpoint if the job has training.load_best_model_at_end.

    Called by all ranks together.

    Its files are compared with their digests first: nothing else would notice that they have
    changed. `warn`: called with a sentence if the best step has no intact checkpoint, and another
    one is published.
    """
    steps = job.step
    tokens = job.trained_tokens
    best_step = job.validations.best_step
    if not spec.training.load_best_model_at_end:
        return PublishedStep(None, steps, tokens)
    chosen, why = by_first(lambda: _best_checkpoint(run, job.step))
    if chosen is not None:
        checkpoint.restore(job, run, chosen, spec)
    if best_step in (0, job.step):
        return PublishedStep(chosen, steps, tokens)
    why = why or "it could not be written"
    warn(
        f"The best step, {best_step}, has no intact checkpoint ({why}): the adapter of step "
        f"{job.step} is published instead."
    )
    return PublishedStep(chosen, steps, tokens, " of those with an intact checkpoint")


@dataclass(frozen=True)
class Measured:
    """What was measured of the adapter that is published."""

    probes: list[Probe]
    forgetting: Forgetting | None = None
    """None: not measured, since the job's client runs the training loop."""
    served: ServedQuality | None = None
    """None: not compared."""


def publish(
    runtime: Runtime,
    built: BuiltModel,
    job: JobState,
    chosen: PublishedStep,
    measured: Measured,
    wait: Wait | None = None,
) -> None:
    """Write the outcome of a finished job. Called by all ranks together; rank 0 writes.

    `wait`: what the ranks do meanwhile; then rank 0 holds the whole adapter. Raises ExportError on
    rank 0 if the disk refuses the adapter or reads back another one, SealedError there if the
    attempt is over, and FailedElsewhere on the other ranks.
    """
    tensors = gathered_adapter(job)
    write = partial(_publish, runtime, built, job, chosen, measured)
    if wait is not None:
        whole = [pair for pair in tensors if runtime.rank == 0]
        by_first(lambda: write(whole), wait)
        return

    def act() -> None:
        try:
            if runtime.rank == 0:
                write(tensors)
        finally:
            for _ in tensors:  # the other ranks take part in every gather
                pass

    on_all(act)


def _publish(
    runtime: Runtime,
    built: BuiltModel,
    job: JobState,
    chosen: PublishedStep,
    measured: Measured,
    tensors: Iterable[tuple[str, Tensor]],
) -> None:
    run = runtime.run
    fence = runtime.fence
    reported = with_evaluations(steps_of_all_attempts(run, fence.attempt), run)
    rows = [event.metrics for event in reported if event.metrics is not None]
    try:
        write_document(run, PROBES, Probes(step=job.step, probes=measured.probes), fence)
        if measured.forgetting is not None:
            write_document(run, FORGETTING, measured.forgetting, fence)
        if measured.served is not None:
            write_document(run, SERVED, measured.served, fence)
        _write_outcome(runtime, built, job, tensors, reported, chosen.checkpoint)
    except OSError as error:
        fence.check()  # a later attempt removes what this one has not finished
        needed = sum(
            parameter.numel() * parameter.element_size() for parameter in job.parameters.values()
        )
        raise ExportError(
            f"The adapter could not be written: {explained(error, run.root, needed)}"
        ) from error
    up_to = [row for row in rows if row.step <= job.step]
    result = _result(fence.attempt, chosen.steps, chosen.trained_tokens, up_to)
    write_document(run, "result.json", result, fence)


@contextmanager
def export_adapter(
    target: Path, job: JobState, config: PeftConfig, runtime: Runtime
) -> Iterator[Path | None]:
    """Write the adapter as it is now, in PEFT's layout.

    Called by all ranks together; yields on rank 0 the folder, to add files to before it becomes
    `target`, elsewhere None.

    Raises ExportError on rank 0, once all ranks are through, if the disk refuses it or reads back
    another one.
    """
    tensors = gathered_adapter(job)
    if runtime.rank != 0:
        for _ in tensors:
            pass
        yield None
        return
    shapes = {peft_name(name): tuple(parameter.shape) for name, parameter in job.parameters.items()}
    try:
        runtime.fence.check()
        with new_folder(target) as folder:
            write_adapter(folder, shapes, tensors, copy.deepcopy(config), runtime.spec)
            yield folder
    except OSError as error:
        needed = sum(
            parameter.numel() * parameter.element_size() for parameter in job.parameters.values()
        )
        raise ExportError(
            f"The adapter could not be written: {explained(error, target, needed)}"
        ) from error
    finally:
        for _ in tensors:  # the other ranks take part in every gather
            pass


def gathered_adapter(job: JobState) -> Iterator[tuple[str, Tensor]]:
    """PEFT's name and the whole value (fp32, CPU) of every adapter matrix, one at a time.

    Called by all ranks together. A matrix that lies whole on the CPU is not copied.
    """
    for name, parameter in job.parameters.items():
        # Gathered there: on a device, gloo would read its memory as the host's.
        whole = parameter.detach().cpu()
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        yield peft_name(name), whole.contiguous()


def versions() -> dict[str, str]:
    """Versions of the packages that computed the adapter."""
    return {
        "ft-service": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "bitsandbytes": bitsandbytes.__version__,
    }


def write_adapter(
    folder: Path,
    shapes: Mapping[str, Sequence[int]],
    tensors: Iterable[tuple[str, Tensor]],
    config: PeftConfig,
    spec: JobSpec,
) -> None:
    """Write PEFT's two files and the base's tokenizer durably, and prove that another process reads
    the same tensors from them.

    `shapes`: by the model's names as PEFT calls them; `tensors`: in the same order, fp32 on the
    CPU, held one at a time. Raises ExportError if what is read differs.
    """
    names = names_of(config)
    again = {first: second for second, first in names.tied.items()}
    digests: dict[str, str] = {}

    def in_file(name: str) -> list[str]:
        return [names.in_file(name), *([again[name]] if name in again else [])]

    def hashed() -> Iterator[Tensor]:
        for name, tensor in tensors:
            for written in in_file(name):
                digests[written] = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
                yield tensor

    plans = [
        TensorPlan(written, tuple(shape), "F32")
        for name, shape in shapes.items()
        for written in in_file(name)
    ]
    write_file(folder / WEIGHTS, plans, hashed(), names.metadata)
    config.base_model_name_or_path = portable_name(Path(spec.model.path), spec.model.name)
    config.inference_mode = True
    name_towers(config, shapes)
    if isinstance(config.target_modules, set):  # pyright: ignore[reportAttributeAccessIssue]
        config.target_modules = sorted(config.target_modules)  # pyright: ignore  a set has another order in every process
    config.save_pretrained(str(folder))
    for path in tokenizer_files(
        Path(spec.model.path)
    ):  # so that the folder can be used, and shared, by itself
        if path.name != BASE_CONFIG and path.parent == Path(spec.model.path):
            _copy_for_others(path, folder / path.name)
    if (
        spec.chat_template
    ):  # goes before the one in the tokenizer's configuration, wherever the folder is loaded
        (folder / "chat_template.jinja").write_text(spec.chat_template, encoding="utf-8")
    options = TokenOptions.of(spec)
    for name, document in bounded_documents(spec.model.path, options.pixels).items():
        (folder / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    sync(folder)
    _check_in_fresh_process(folder, digests)


def _copy_for_others(source: Path, target: Path) -> None:
    """Copy one of a tokenizer's files without the paths of the machine on which it was saved."""
    if source.name == "tokenizer_config.json":
        settings = read_document(source)
        kept = {
            name: value
            for name, value in settings.items()
            if name not in _PLACES or not str(value).startswith("/")
        }
        if kept != settings:
            target.write_text(
                json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
            )
            return
    copy_base_file(source, target)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A temporary folder next to `target`, which it replaces at the end: `target` is whole or
    absent.
    """
    temporary = unfinished(target)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
    except BaseException:
        shutil.rmtree(temporary)
        raise
    shutil.rmtree(target, ignore_errors=True)
    os.replace(temporary, target)


def _best_checkpoint(run: RunDir, last_step: int) -> tuple[str | None, str]:
    """The intact checkpoint to publish in place of the last step, None: the last step; and what is
    wrong with better ones.
    """
    left = checkpoint_entries(run)
    damaged = list[str]()
    while (found := best(left)) is not None and found.step != last_step:
        faults = checkpoint_faults(run, found.name)
        if not faults:
            return found.name, "; ".join(damaged)
        damaged.append(f"{found.name}: {faults[0]}")
        left.remove(found)
    return None, "; ".join(damaged)


def _write_outcome(
    runtime: Runtime,
    built: BuiltModel,
    job: JobState,
    tensors: Iterable[tuple[str, Tensor]],
    reported: list[Event],
    chosen: str | None,
) -> None:
    run = runtime.run
    fence = runtime.fence
    spec = runtime.spec
    rows = [event.metrics for event in reported if event.metrics is not None]
    shapes = {peft_name(name): tuple(parameter.shape) for name, parameter in job.parameters.items()}
    config = built.peft_model.peft_config["default"]
    with adapter_folder(run.path("adapter"), fence) as folder:
        write_adapter(folder, shapes, tensors, config, spec)
        if spec.tensorboard:
            write_event_file(folder, spec.job_id, reported)
        manifest = describe_adapter(
            run,
            folder,
            AdapterSource(
                attempt=fence.attempt,
                step=job.step,
                checkpoint=chosen,
                metrics=next((row for row in rows if row.step == job.step), None),
                versions=versions(),
                forgetting=read_forgetting(run),
            ),
        )
    put_document(run, "metrics.csv", metrics_csv(rows).encode(), fence)
    write_document(run, MANIFEST, manifest, fence)


def _check_in_fresh_process(folder: Path, digests: Mapping[str, str]) -> None:
    # As a file: by its module's name Python would import the package first, and torch with it, for
    # every checkpoint.
    program = Program(command=(sys.executable, "-P", reread_adapter.__file__, str(folder)))
    try:
        faults = persist("reading an adapter back", lambda: run_once(program, digests))
    except HelperFailed as error:
        if error.is_lost:
            raise
        faults = [error.message]
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise ExportError(
            f"The adapter in {folder} is not the one that was trained: {faults[0]}{more}."
        )


def _result(attempt: int, steps: int, trained_tokens: int, rows: list[Metrics]) -> Result:
    """The body of result.json. `rows`: metrics up to the step of the adapter."""
    losses = [row.train_loss for row in rows if row.train_loss is not None]
    valid = [row.valid_loss for row in rows if row.valid_loss is not None]
    return Result(
        attempt=attempt,
        steps=steps,
        trained_tokens=trained_tokens,
        train_loss=losses[-1] if losses else None,
        valid_loss=valid[-1] if valid else None,
    )
