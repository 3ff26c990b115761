"""Admission of a job: its plan decides whether it may start, "auto" options are chosen, and its
first events are written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from ft_service.bases.base_files import unreadable_base
from ft_service.bases.description import Description, why_no_images
from ft_service.bases.safetensors_folder import weight_files
from ft_service.errors import SpecError
from ft_service.plan.auto_options import sentences, settle
from ft_service.plan.fitting_settings import AUTO, COMPILE, FITTED, with_options
from ft_service.plan.job import MOST_PER_HOST, Plan, plan_job
from ft_service.plan.machines import Machine
from ft_service.plan.plan_text import change_text, summary
from ft_service.plan.sample_lengths import SampleLengths
from ft_service.plan.speed import TrainingWork, whole_training
from ft_service.plan.vocabulary_check import refuse_ids_without_row
from ft_service.rundir.engine import SeatSize
from ft_service.spec import DataFileRef, JobSpec
from ft_service.wording import bytes_text

FirstEvent = tuple[Literal["info", "warn"], str]
"""Level and message."""


@dataclass(frozen=True)
class Admitted:
    """A job that may start."""

    spec: JobSpec
    """The spec with "auto" options chosen for the machine, if that is known."""
    events: tuple[FirstEvent, ...]
    work: TrainingWork | None = None
    """The likely work of the training; None: the size of its data is not known."""
    seat: SeatSize | None = None
    """The job in an engine. None: not planned."""


def admit(
    base: Description,
    spec: JobSpec,
    machine: Machine,
    lengths: SampleLengths | None = None,
    most_per_host: int = MOST_PER_HOST,
) -> Admitted:
    """Plan a job for a machine. `lengths`: lengths of its samples. Until they are counted
    (`settle_counted`), options that depend on them are chosen for the longest possible samples, and
    the events do not mention them. `most_per_host`: as in `plan_job`.

    Raises SpecError for a base whose weights are not downloaded or whose tokenizer does not fit,
    for patterns and names that match nothing in it, for a job that cannot fit, and for
    precision.default "auto" on a machine whose memory is not known. Terms that depend on the data
    (activations, logits) are upper estimates: they cause warnings, and no refusal.
    """
    _refuse_absent(base, Path(spec.model.path))
    _refuse_unseen(base, spec)
    # again, since the tokenizer may change without the weights.
    refuse_ids_without_row(base, Path(spec.model.path))
    no_file = DataFileRef(name="", path="", sha256="")
    without_effect = {
        "job_id": "",
        "tuned_name": "",
        "seed": 0,
        "training_data": no_file,
        "parent": None,
    }
    options = spec.model_copy(
        update=without_effect | {"validation_data": spec.validation_data and no_file}
    )
    # Some warnings concern only options that the user has set.
    given = options.model_dump_json(exclude_unset=True)
    admitted = _admitted(base, given, machine, lengths, most_per_host)
    sections = {
        name: getattr(admitted.spec, name)
        for name in ("precision", "training", "distributed", "chosen")
    }
    return replace(admitted, spec=spec.model_copy(update=sections))


def settle_counted(
    base: Description,
    spec: JobSpec,
    machine: Machine,
    lengths: SampleLengths,
    most_per_host: int = MOST_PER_HOST,
) -> Admitted:
    """`admit` again for a job that has not begun, now that its samples are counted: options that
    were chosen for it are chosen by their lengths, as a plan of the same data and its ranks choose.
    Raises SpecError as `admit`.
    """
    again = dict.fromkeys((option for option in spec.chosen if option in (*FITTED, COMPILE)), AUTO)
    chosen = {option: why for option, why in spec.chosen.items() if option not in again}
    return admit(
        base,
        with_options(spec.model_copy(update={"chosen": chosen}), again),
        machine,
        lengths,
        most_per_host,
    )


def _refuse_unseen(base: Description, spec: JobSpec) -> None:
    """Raise SpecError for prompts of the evaluation with images that the base does not see."""
    given = spec.evaluation.given if spec.evaluation is not None else []
    number = next((at for at, own in enumerate(given, 1) if own.shows_images), None)
    if number is not None and base.images is None:
        raise SpecError(
            f"evaluation.prompts: prompt {number} shows an image, and the base sees none here: "
            f"{why_no_images(base)}. Leave it out, or take another base.",
            param="evaluation.prompts",
        )


@lru_cache(maxsize=128)
def _admitted(
    base: Description,
    options: str,
    machine: Machine,
    lengths: SampleLengths | None,
    most_per_host: int,
) -> Admitted:
    """`admit`, cached since scripts submit the same options again and again."""
    spec = settle(base, JobSpec.model_validate_json(options), machine, lengths).spec
    plan = plan_job(base, spec, machine, lengths, most_per_host)
    _refuse_what_cannot_fit(plan)
    ways = "; ".join(change_text(change) for change in plan.changes if change.fits)
    is_counted = lengths is not None and lengths.samples is not None
    by_samples = (*FITTED, COMPILE)
    final = [
        sentence
        for option, sentence in sentences(spec).items()
        if is_counted == (option in by_samples)
    ]
    chosen = f"Chosen: {' '.join(final)}" if final else ""
    level = "warn" if plan.fits is False else "info"
    basis = (
        "This is by the lengths of its samples."
        if is_counted
        else "This is for samples of training.max_length tokens."
    )
    planned: FirstEvent = level, " ".join(filter(None, (summary(plan), basis, ways, chosen)))
    return Admitted(
        spec,
        (planned, *(("warn", warning) for warning in plan.warnings)),
        _work(spec, plan, lengths),
        plan.seat,
    )


def _refuse_absent(base: Description, folder: Path) -> None:
    """Raises SpecError naming a file with weights that is not in the base's folder."""
    if base.downloaded:
        return
    absent = next((path.name for path in weight_files(folder) if not path.exists()), None)
    if absent is not None:
        raise unreadable_base(folder / absent, "it is not there")


def _work(spec: JobSpec, plan: Plan, lengths: SampleLengths | None) -> TrainingWork | None:
    if lengths is None:
        return None
    likely = plan.likely or plan
    return whole_training(lengths.of_training(spec), likely.flops_per_token, likely.speed)


def _refuse_what_cannot_fit(plan: Plan) -> None:
    if plan.stored_fits is not False:
        return
    assert plan.memory is not None, "what is not known cannot be too little"
    enough = [change for change in plan.changes if change.fits]
    ways = (
        "; ".join(change_text(change) for change in enough or plan.changes) or "take a smaller base"
    )
    raise SpecError(
        f"The job does not fit {plan.machine}: its weights, adapters and optimizer alone take "
        f"{bytes_text(plan.rank.resident)} per rank, {bytes_text(plan.memory)} are usable. "
        f"In all it is {bytes_text(plan.rank.total)}; {ways}.",
        code="does_not_fit",
    )
