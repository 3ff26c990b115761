"""Validation losses of the adapter as it is served, on the base in bf16 and merged into it, and as
it was trained.

Run once, after the last step: each rank reads its rows of the base again, in bf16, into a second
model that is sharded as the first; merging is done in place, row by row, and rounded as `ft merge`
rounds. Only the numbers are kept.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ft_service.bases.adapter_names import is_lora
from ft_service.data.answer_format import Answer
from ft_service.host.hardware import available_memory
from ft_service.rundir.evaluations import (
    ADAPTER_ON_BF16,
    AS_TRAINED,
    BOUND,
    MERGED,
    ServedQuality,
    finite_nats,
)
from ft_service.spec import JobSpec, PrecisionOptions
from ft_service.wording import counted, duration_text
from workers.base.frozen_weights import Level
from workers.base.load import adapters, rows_of
from workers.base.rank_objects import from_all, from_first
from workers.data.micro_batches import MicroBatchLimits
from workers.job.training_state import JobState
from workers.layers.linear import LoraLinear, magnitude_ratio
from workers.model.build import BuiltModel
from workers.quant.local_rows import local_rows
from workers.ranks.runtime import Runtime
from workers.training.context import TrainingContext
from workers.training.evaluation_answers import Evaluator, mean_scores
from workers.training.objective import Objective, RankShare, Shared, loss_with_baseline
from workers.training.packing import settle_limits
from workers.training.step import evaluate

MOST_SECONDS = 60.0
"""How long other jobs on the base wait for a job's answers where it is served, each way: alone they
may take hours.
"""
SHARE = 0.25
LEAST_SECONDS = 60.0
"""Share of the job's time that the comparison may take, and seconds that it may always take,
without reading the base again.
"""
NAMES = {AS_TRAINED: "as trained", ADAPTER_ON_BF16: "on the base in bf16", MERGED: "merged in bf16"}
MOST_SAMPLES = 64
"""Most samples of the validation file that are compared: the same for all three, which then differ
by the weights alone.
"""
GIB = 1024**3


@dataclass(frozen=True)
class Comparison:
    """The parts of a job that is over."""

    context: TrainingContext
    built: BuiltModel
    job: JobState
    valid: Objective
    evaluator: Evaluator | None
    construct: Callable[[JobSpec], BuiltModel]
    """A model of another spec, sharded over all ranks and loaded, with new adapters."""
    shares_base: bool = False
    """Whether other jobs train on the same base, which is then not merged into."""
    job_seconds: float = 0.0
    """The job's time; rank 0's counts."""

    def measured(self, step: int) -> ServedQuality | None:
        """Measure and report the losses, with a warning if one is beyond the bound.

        Called by all ranks together. Returns None if there is nothing to compare, or not enough
        memory, which is reported.

        A job's base in bf16 is merged in place, and so changed; what the job has trained is not.
        """
        items = list(range(min(len(self.valid), MOST_SAMPLES)))
        loaded = self.built.loaded
        if self.context.runtime.spec.precision.served_as is not None:
            return None  # it is served as it was trained, and in no other form
        published = loaded is not None and bool(loaded.kept or loaded.requantized)
        if self.context.runtime.spec.precision.compare_served == "off" or not items or published:
            return None
        budget = TimeBudget(max(LEAST_SECONDS, SHARE * self.job_seconds))
        losses = {AS_TRAINED: self._loss(self.built.peft_model, items, self.context.limits)}
        once = budget.spent  # any other way takes about as long
        answers: dict[str, list[Answer]] = {}
        model = self.built.peft_model
        quantised = set(self.built.formats.values()) != {"bf16"}
        if budget.left < once:
            self._tell_of_time(budget, (ADAPTER_ON_BF16, MERGED) if quantised else (MERGED,))
            return None
        if quantised or self.shares_base:
            lacking = lacking_memory(model, self.context.runtime)
            if lacking is not None:
                self.context.reporter.message(
                    f"{lacking} `ft merge` compares the losses where there is more memory."
                )
                return None
            with budget.paused():
                model = self._on_bf16()
            limits = settle_limits(
                model,
                self.context.runtime.spec,
                self.context.runtime.device,
                warn=lambda text: None,
            )
            if quantised:
                losses[ADAPTER_ON_BF16] = self._loss(model, items, limits)
                self._ask(model, ADAPTER_ON_BF16, answers, step, budget)
        limits = self.context.limits
        if budget.left < once:
            self._tell_of_time(budget, (MERGED,))
        else:
            with merged_in_place(model) as merged:
                if merged:
                    losses[MERGED] = self._loss(model, items, limits)
                    self._ask(model, MERGED, answers, step, budget)
        quality = ServedQuality(
            step=step,
            samples=len(items),
            loss=losses,
            bound=BOUND,
            answers={way: [answer.whole for answer in said] for way, said in answers.items()},
            metrics={way: self._scored(said) for way, said in answers.items()},
        )
        for level, text in messages(quality, sorted(set(self.built.formats.values()) - {"bf16"})):
            self.context.reporter.message(text, level)
        return quality

    def _on_bf16(self) -> PeftModel:
        """The job's adapter on its base in bf16."""
        spec = self.context.runtime.spec
        plain = PrecisionOptions(default="bf16", compute=spec.precision.compute)
        training = spec.training.model_copy(update={"neftune_noise_alpha": None})
        sharded = spec.distributed.model_copy(
            update={
                "replicate": 1,
                "compile": False,
                "ignored": [],
                "reshard_after_forward": True,
                "activation_checkpointing": "none",
            }
        )
        built = self.construct(
            spec.model_copy(
                update={"precision": plain, "training": training, "distributed": sharded}
            )
        )
        with torch.no_grad():
            for name, parameter in adapters(built.peft_model):
                whole = _whole(self.job.parameters[name])
                start, end = rows_of(parameter)
                local_rows(parameter.detach()).copy_(whole[start:end])
        return built.peft_model

    def _loss(self, model: nn.Module, items: Sequence[int], limits: MicroBatchLimits) -> float:
        """Mean loss of items. Called by all ranks together."""
        runtime = self.context.runtime
        training = model.training
        model.eval()
        with torch.compiler.set_stance("force_eager"):
            batches = partial(self._mine, limits)
            loss_of = loss_with_baseline(model, self.valid, items, runtime.world, batches)
            sums = evaluate(model, batches(self.valid, items), runtime.world, loss_of)
        model.train(training)
        return finite_nats(self.valid.read(sums.tolist(), items).mean_loss)

    def _mine(
        self, limits: MicroBatchLimits, objective: Shared, items: Sequence[int]
    ) -> Iterator[Any]:
        """This rank's micro-batches, reporting meanwhile that it goes on."""
        for batch in RankShare.of(self.context.runtime, limits).batches(objective, items):
            self.context.reporter.heartbeat()
            yield batch

    def _ask(
        self,
        model: nn.Module,
        way: str,
        answers: dict[str, list[Answer]],
        step: int,
        budget: TimeBudget,
    ) -> None:
        """Add the answers of a way.

        Other jobs on the base wait meanwhile, since the model is none of theirs.
        """
        if self.evaluator is None:
            return
        seconds = min(MOST_SECONDS, budget.left) if self.shares_base else budget.left
        said = self.evaluator.ask(step, model, seconds)
        if said is not None:
            answers[way] = said
        elif not self.context.stop.is_requested:
            why = (
                "other jobs of the engine wait for it, at most"
                if self.shares_base
                else "the comparison may take"
            )
            self.context.reporter.message(
                f"The prompts were not answered {NAMES[way]} to the end: {why} "
                f"{duration_text(seconds)}."
            )

    def _tell_of_time(self, budget: TimeBudget, ways: Sequence[str]) -> None:
        which = " and ".join(NAMES[way] for way in ways)
        self.context.reporter.message(
            f"How the adapter does {which} was not measured, since the comparison may take a "
            "quarter of the job's time, here "
            f"{duration_text(budget.seconds)}. `ft merge` compares the losses."
        )

    def _scored(self, answers: Sequence[Answer]) -> dict[str, float]:
        assert self.evaluator is not None, "there are answers"
        return mean_scores(self.evaluator.scores(answers))


class TimeBudget:
    """Time for the comparison. All ranks ask for what is left together, and get rank 0's."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._began = time.monotonic()

    @property
    def spent(self) -> float:
        return from_first(time.monotonic() - self._began)

    @property
    def left(self) -> float:
        return from_first(self.seconds) - self.spent

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time within."""
        began = time.monotonic()
        yield
        self._began += time.monotonic() - began


def messages(found: ServedQuality, formats: Sequence[str]) -> list[tuple[Level, str]]:
    """(level, sentence) for events. `formats`: other than bf16 that the base was trained on."""
    losses = ", ".join(f"{NAMES[way]} {loss:.4f}" for way, loss in found.loss.items())
    said: list[tuple[Level, str]] = [
        (
            "info",
            f"Validation loss by where it is served, over {counted(found.samples, 'sample')}: "
            f"{losses}.",
        )
    ]
    before = found.loss[AS_TRAINED]
    instead = {
        ADAPTER_ON_BF16: f"Serve it on the base stored as {' and '.join(formats)}, as it was "
        "trained, or train with "
        "precision.default: bf16 (a job may continue from this model).",
        MERGED: "Serve the adapter on its base instead of merging it, or train longer at a higher "
        "rate: updates smaller "
        "than bf16 can hold are lost in merging.",
    }
    for way in found.beyond:
        more = found.loss[way] - before
        text = (
            f"Served {NAMES[way]} the model is worse: its validation loss is {more:.4f} higher "
            "than as trained"
        )
        said.append(("warn", f"{text}, and more than {BOUND} is no rounding. {instead[way]}"))
    return said


def lacking_memory(model: nn.Module, runtime: Runtime) -> str | None:
    """Return a sentence if memory has no room for the base in bf16 too.

    The same on all ranks, called by all together.
    """
    frozen = [parameter.numel() for parameter in model.parameters() if not parameter.requires_grad]
    # A shard, or the whole as it computes; the largest weights gathered twice over, and as much
    # again for what a layer makes of its input.
    size = torch.bfloat16.itemsize if runtime.world > 1 else runtime.compute_dtype.itemsize
    needed = size * sum(frozen) // runtime.world + 8 * max(frozen)
    free = min(from_all(_free_bytes(runtime.device)))
    if needed <= free:
        return None
    return (
        f"How the adapter does on the base in bf16 was not measured: it takes {needed / GIB:.1f} "
        "GiB a rank, and "
        f"{free / GIB:.1f} are free."
    )


def _free_bytes(device: torch.device) -> int:
    """Bytes that this rank may still take."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return available_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@contextmanager
def merged_in_place(model: PeftModel) -> Iterator[bool]:
    """A model whose adapter is in the base's plain weights, rounded to bf16 as merged models are
    stored. Yields False, with nothing done, if it changes more than linear layers (stacks of
    experts). Called by all ranks together.

    The base stays merged. What is trained whole is put back at the end, as it is the job's own, in
    fp32.
    """
    whole = [
        local_rows(parameter.detach()) for name, parameter in adapters(model) if not is_lora(name)
    ]
    masters = [own.to("cpu", copy=True) for own in whole]
    try:
        yield _merge(model, whole)
    finally:
        for own, master in zip(whole, masters, strict=True):
            own.copy_(master)


@torch.no_grad()
def _merge(model: PeftModel, whole: Sequence[Tensor]) -> bool:
    """Merge and round in place; False, with nothing done: it cannot be.

    `whole`: rows of parameters in place of the base's.
    """
    layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
    held = sum(parameter.requires_grad for layer in layers for parameter in layer.parameters())
    plain = all(type(layer.base_layer) is nn.Linear for layer in layers)
    if not plain or held != sum(is_lora(name) for name, _ in adapters(model)):
        return False
    for own in whole:
        own.copy_(own.bfloat16())
    for layer in layers:
        (name,) = layer.active_adapters
        a, b = (_whole(getattr(layer, part)[name].weight).float() for part in ("lora_A", "lora_B"))
        weight = layer.base_layer.weight
        assert isinstance(weight, nn.Parameter)
        start, end = rows_of(weight)
        local = local_rows(weight.detach())
        update = layer.scaling[name] * (b[start:end].to(local.device) @ a.to(local.device))
        merged = local.float() + update
        if layer.magnitude is not None:
            magnitude = _whole(layer.magnitude)[start:end].to(local.device)
            merged *= magnitude_ratio(magnitude, merged.norm(dim=1))[:, None]
        local.copy_(merged.bfloat16())
        layer.scaling[name] = 0.0
    return True


def _whole(parameter: Tensor) -> Tensor:
    # Gathered there, as an adapter is that is written (workers/output/outcome.py)
    whole = parameter.detach().cpu()
    return whole.full_tensor() if isinstance(whole, DTensor) else whole
