"""Whether a job may start here, by its plan, what is chosen for it, and the events that tell its owner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from ft_service.bases.contents import BaseContents, read_contents
from ft_service.errors import SpecError
from ft_service.plan.base import base_shape
from ft_service.plan.choose import AUTO, COMPILE, FITTED, with_options
from ft_service.plan.job import Plan, plan_job
from ft_service.plan.lengths import Lengths
from ft_service.plan.machines import Machine, this_host
from ft_service.plan.quantities import bytes_text
from ft_service.plan.settle import sentences, settle
from ft_service.plan.speed import Work, whole_training
from ft_service.plan.text import change_text, summary
from ft_service.plan.vocabulary import refuse_ids_without_row
from ft_service.spec import DataFileRef, JobSpec

Told = tuple[Literal["info", "warn"], str]


@dataclass(frozen=True)
class Admitted:
    """A job that may start."""

    spec: JobSpec
    """With what is "auto" chosen for the machine, if that is known."""
    told: tuple[Told, ...]
    """(level, message) of its first events."""
    work: Work | None = None
    """What the training is likely to be; None: the size of its data is not known."""
    memory: int | None = None
    """Bytes that a rank needs: all that it may take where that fits the machine, else what it surely takes."""
    fits: bool | None = None
    """Whether all that it may take fits the machine; None: not known."""


def trainable_contents(folder: Path) -> BaseContents:
    """A base as its files are now. Raises SpecError for one that cannot be read, or whose tokenizer is another's."""
    contents = read_contents(folder)
    refuse_ids_without_row(base_shape(contents), folder)  # here too, since the tokenizer may change without the weights
    return contents


def admit_on(
    machines: Sequence[Machine],
    spec: JobSpec,
    lengths: Lengths | None = None,
    read_base: Callable[[Path], BaseContents] = trainable_contents,
) -> Admitted:
    """`admit` for whichever of several machines will train: the first that it fits, with what it needs where it needs least.
    Raises SpecError if it fits none."""
    found: list[Admitted] = []
    refused: list[SpecError] = []
    for machine in machines:
        try:
            found.append(admit(spec, machine, lengths, read_base))
        except SpecError as error:
            refused.append(error)
    if not found:
        raise refused[0]
    fitting = [one for one in found if one.fits] or found
    needs = [one.memory for one in fitting if one.memory is not None]
    return replace(fitting[0], memory=min(needs, default=None))


def admit(
    spec: JobSpec,
    machine: Machine | None = None,
    lengths: Lengths | None = None,
    read_base: Callable[[Path], BaseContents] = trainable_contents,
) -> Admitted:
    """Plan a job for a machine (None: this host). `lengths`: of its samples; until they are counted (`settle_counted`) what
    follows from them is chosen for the longest that there may be, and not told yet. `read_base`: for who admits many at once.

    Raises SpecError for a base that cannot be read or whose tokenizer is another's, for patterns and names that match nothing
    in it, for a job that cannot fit, and for a format to be chosen where the memory is not known. Terms that depend on the data
    (activations, logits) are upper estimates: they warn, and refuse nothing.
    """
    no_file = DataFileRef(name="", path="", sha256="")
    of_no_effect = {"job_id": "", "tuned_name": "", "seed": 0, "training_data": no_file, "parent": None}
    options = spec.model_copy(update=of_no_effect | {"validation_data": spec.validation_data and no_file})
    given = options.model_dump_json(exclude_unset=True)  # some warnings are only for what the user has set
    contents = read_base(Path(spec.model.path))
    admitted = _admitted(contents, given, machine or this_host(), lengths)
    sections = {name: getattr(admitted.spec, name) for name in ("precision", "training", "distributed", "chosen")}
    return replace(admitted, spec=spec.model_copy(update=sections))


def settle_counted(
    machines: Sequence[Machine],
    spec: JobSpec,
    lengths: Lengths,
    read_base: Callable[[Path], BaseContents] = trainable_contents,
) -> Admitted:
    """`admit_on` for a job that was admitted and has not begun, now that its samples are counted: what was chosen for it is
    chosen by them, as a plan of the same data does and as its ranks will. Raises the same."""
    again = dict.fromkeys((option for option in spec.chosen if option in (*FITTED, COMPILE)), AUTO)
    chosen = {option: why for option, why in spec.chosen.items() if option not in again}
    return admit_on(machines, with_options(spec.model_copy(update={"chosen": chosen}), again), lengths, read_base)


@lru_cache(maxsize=128)
def _admitted(base: BaseContents, options: str, machine: Machine, lengths: Lengths | None) -> Admitted:
    """`admit`, remembered since scripts submit the same options again and again. `base`: as it is on the disk now."""
    spec = settle(JobSpec.model_validate_json(options), machine, lengths).spec
    plan = plan_job(spec, machine, lengths)
    _refuse_what_cannot_fit(plan)
    ways = "; ".join(change_text(change) for change in plan.changes if change.fits)
    is_counted = lengths is not None and lengths.samples is not None
    by_samples = (*FITTED, COMPILE)
    final = [sentence for option, sentence in sentences(spec).items() if is_counted == (option in by_samples)]
    chosen = f"Chosen: {' '.join(final)}" if final else ""
    memory = plan.rank.total if plan.fits else plan.rank.resident
    told: Told = ("warn" if plan.fits is False else "info", " ".join(filter(None, (summary(plan), ways, chosen))))
    return Admitted(
        spec, (told, *(("warn", warning) for warning in plan.warnings)), _work(spec, plan, lengths), memory, plan.fits
    )


def _work(spec: JobSpec, plan: Plan, lengths: Lengths | None) -> Work | None:
    if lengths is None:
        return None
    likely = plan.likely or plan
    return whole_training(lengths.of_training(spec), likely.flops_per_token, likely.speed)


def _refuse_what_cannot_fit(plan: Plan) -> None:
    if plan.stored_fits is not False:
        return
    assert plan.memory is not None, "what is not known cannot be too little"
    enough = [change for change in plan.changes if change.fits]
    ways = "; ".join(change_text(change) for change in enough or plan.changes)
    raise SpecError(
        f"The job does not fit {plan.machine}: its weights, adapters and optimizer alone take "
        f"{bytes_text(plan.rank.resident)} per rank, {bytes_text(plan.memory)} are usable. "
        f"In all it is {bytes_text(plan.rank.total)}; {ways}.",
        code="does_not_fit",
    )
