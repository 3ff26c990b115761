"""One attempt on this rank: data, model, resume, training, outcome.

All its input and output is in the run directory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ft_service.bases.description import Description
from ft_service.bases.module_rules import choose_tower_targets, refuse_with_towers
from ft_service.data.token_options import TokenOptions
from ft_service.data.tokens.token_set import TokenSet
from ft_service.data.tokens.tokenize import load_tokenizer
from ft_service.errors import SpecError
from ft_service.reinforcement.schedule import RolloutSchedule
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.checkpoints import newest_checkpoint, set_damaged_aside, step_of
from ft_service.rundir.documents import Outcome, OutcomeKind
from ft_service.rundir.evaluations import evaluated_steps
from ft_service.rundir.manifest import Manifest
from ft_service.spec import DistillationOptions, JobSpec, KtoOptions
from ft_service.wording import counted
from workers.attempt.prepared_model import Prepare, PreparedModel, cached_description, construct
from workers.attempt.prepared_teacher import prepare_teacher
from workers.base.rank_objects import by_first, from_first, on_all
from workers.data.token_sets import job_samples, remove_own
from workers.describe import describe
from workers.images.computing import (
    LiveTower,
    compute_features,
    has_images,
    read_images,
    remove_features,
)
from workers.images.trained_tower import TrainedTower
from workers.job import origins
from workers.job.auto_on_ranks import settle_on_ranks, settled_options
from workers.job.parent_adapter import adopt
from workers.job.training_state import JobState
from workers.model.build import BuiltModel, token_rows
from workers.model.lora import adapted_in_towers
from workers.model.multimodal import causal_model
from workers.model.probes import Probed
from workers.model.whole_modules import EmbeddedRows
from workers.output import checkpoint
from workers.output.checkpoint_pruning import remove_unfinished
from workers.output.checkpoint_saver import WITH_ADAPTERS, Saver
from workers.output.event_files import FOLDER, EventFile
from workers.output.outcome import Measured, publish, use_best
from workers.output.publishing import remove_left_folders
from workers.output.report import Reporter
from workers.output.served_probes import measure
from workers.ranks.runtime import (
    Runtime,
    with_spec,
)
from workers.ranks.sharding import make_mesh
from workers.tinker.call_pictures import CallPictures
from workers.tinker.command_loop import CommandLoop
from workers.tinker.offered_prompts import offer_prompts
from workers.training.context import StopRequest, TrainingContext
from workers.training.distillation import Taught
from workers.training.evaluation_answers import Evaluator
from workers.training.evaluation_prompts import asked_of, pictured_prompts
from workers.training.forgetting import measure_forgetting, seconds_of_job
from workers.training.guards import AdapterWatch, check_ids, check_positions
from workers.training.kto import Labelled
from workers.training.loop import Schedule, Trainer
from workers.training.objective import Objective, Preference, Supervised, supervised
from workers.training.packing import limits_of
from workers.training.pictured_probe import pictured_probe
from workers.training.reference_logprobs import (
    NeededAnswers,
    Referred,
    compute_reference,
    find_reference,
    is_intact,
    key_of_reference,
)
from workers.training.served_quality import Comparison
from workers.training.shared_rows_trial import refuse_images_in_shared_rows
from workers.training.teachers import Teacher


def run_attempt(runtime: Runtime, stop: StopRequest, prepare: Prepare) -> Outcome:
    """Train a job from its start to its outcome, which is written. Called by all ranks together."""
    run = runtime.run
    fence = runtime.fence
    event_file = _event_file(runtime) if runtime.rank == 0 and runtime.spec.tensorboard else None
    with Reporter(
        run, fence.attempt, active=runtime.rank == 0, fence=fence, event_file=event_file
    ) as reporter:
        outcome = train(runtime, reporter, stop, prepare)
    if runtime.rank == 0:
        Attempt(run, fence.attempt).write_outcome(outcome)
    return outcome


def _event_file(runtime: Runtime) -> EventFile:
    """The TensorBoard file of this attempt."""
    start = runtime.start
    done = step_of(start.checkpoint) if start.checkpoint else 0
    return EventFile(runtime.run.path(FOLDER), f"attempt-{start.attempt}", first_step=done + 1)


@dataclass(frozen=True)
class _Ready:
    """A job whose data and model are on the ranks, before its first step or a resume."""

    began: float
    context: TrainingContext
    prepared: PreparedModel
    job: JobState
    train_set: TokenSet
    valid_set: TokenSet
    teacher: Teacher
    live: LiveTower | TrainedTower | None
    """The tower that looks at images while the job trains; None: there are no images, or their
    features are kept.
    """
    pictured: Description | None
    """What is known of the base of a job with images."""

    @property
    def held_out(self) -> TokenSet:
        """What the model is measured with."""
        return self.valid_set if len(self.valid_set) else self.train_set


def train(runtime: Runtime, reporter: Reporter, stop: StopRequest, prepare: Prepare) -> Outcome:
    """Build, load, resume, train, publish."""
    ready = _make_ready(runtime, reporter, stop, prepare)
    if ready.context.runtime.spec.by_commands:
        data = (ready.train_set, ready.valid_set)
        return _carry_out_commands(ready.context, ready.prepared, ready.job, data, ready.teacher)
    return _train_on_data(ready)


def _make_ready(
    runtime: Runtime, reporter: Reporter, stop: StopRequest, prepare: Prepare
) -> _Ready:
    """The order matters; each step says why it stands where it does."""
    began = time.monotonic()
    # first: the cheapest way to find out that a job cannot run.
    train_set, valid_set = _data(runtime, reporter)
    described = cached_description(runtime.spec.model.path)
    prompts = pictured_prompts(runtime.spec)
    pictured = has_images(train_set, valid_set, prompts)
    settled = settle_on_ranks(
        runtime.spec,
        runtime.device,
        train_set,
        lambda path: described or describe(path),
        with_images=pictured,
    )
    spec = settled.spec
    runtime = with_spec(runtime, settled.spec)
    for sentence in settled.news:
        reporter.message(sentence)
    refuse_images_in_shared_rows(runtime.context, pictured=pictured)
    live: LiveTower | TrainedTower | None = None
    if pictured:
        described = described or describe(spec.model.path)
        live = _trained_tower(runtime, reporter, described)
        live = live or _with_features(runtime, reporter, described, train_set, valid_set, prompts)
    prepared = prepare(runtime, reporter, None if described is None else Probed.of(described))
    prepared = _with_tower(prepared, live, spec)
    built = prepared.built
    if pictured:
        assert described is not None
        shared = prepared.resident is not None
        read_images(runtime.run, described, built.peft_model, shared=shared, live=live)
    check_positions(built.peft_model, train_set, valid_set)
    parent = _adopt_parent(runtime, prepared, reporter)
    # A job continues only on the base with which it began.
    for text in origins.record(
        runtime.run, spec, built, train_set, valid_set, parent, prepared.resident
    ):
        reporter.warn(text)
    teacher, padded_because = prepare_teacher(runtime, reporter, prepared, pictured=pictured)
    limits = limits_of(built.peft_model, spec, padded_because, reporter.warn)
    return _Ready(
        began=began,
        context=TrainingContext(
            runtime, built.peft_model, limits, reporter, stop, prepared.gradients, prepared.wait
        ),
        prepared=prepared,
        job=JobState(prepared.parameters, spec.training, prepared.changed),
        train_set=train_set,
        valid_set=valid_set,
        teacher=teacher,
        live=live,
        pictured=described if pictured else None,
    )


def _train_on_data(ready: _Ready) -> Outcome:
    """Resume, and train on the job's own samples to the end."""
    context = ready.context
    job = ready.job
    reporter = context.reporter
    # before the adapter changes
    objectives = _objectives(context, ready.train_set, ready.valid_set, ready.teacher)
    if objectives is None:
        return _stopped(
            context, "before the first step, while reference log-probabilities were computed"
        )
    train_data, valid_data = objectives
    schedule = Schedule.of(context.runtime.spec, len(train_data))
    evaluator = _evaluator(context, ready.held_out)
    if evaluator is not None and not evaluator.begin():
        return _stopped(
            context, "before the first step, while the prompts of the evaluation were answered"
        )
    _resume(context.runtime, reporter, job, schedule.total_steps)
    watch = AdapterWatch(job, reporter.warn, EmbeddedRows.of(context.model))
    stopped_at = Trainer(
        context, job, train_data, valid_data, schedule, _saver(context), watch, evaluator
    ).fit()
    if stopped_at is not None:
        reporter.message(f"Stopped at step {job.step}; checkpoint {stopped_at} is complete.")
        return Outcome(kind=OutcomeKind.STOPPED, checkpoint=stopped_at)
    if job.step < schedule.total_steps:
        waited = job.validations.without_progress
        reporter.message(
            f"Validation loss has made no progress {waited} times: training ends at step "
            f"{job.step}."
        )
    return _finish(ready, valid_data, evaluator)


def _finish(ready: _Ready, valid_data: Objective, evaluator: Evaluator | None) -> Outcome:
    """Choose the step, measure the model with it, and publish the adapter."""
    context = ready.context
    runtime = context.runtime
    reporter = context.reporter
    job = ready.job
    built = ready.prepared.built
    steps = job.step
    chosen = use_best(runtime.run, runtime.spec, job, reporter.warn)
    # This step was evaluated already, unless the job was stopped meanwhile or the best step is an
    # earlier one.
    if evaluator is not None and evaluator.at(job.step, last=True) is None:
        last = from_first(newest_checkpoint(runtime.run))
        return _stopped(
            context, f"after step {steps}, while the prompts of the evaluation were answered", last
        )
    reporter.message(
        "The last step is done; the adapter is being written, and read again to compare."
    )
    by_first(reporter.flush)  # the metrics table is made from the events
    probes = measure(built.peft_model, ready.held_out, runtime.device)
    probes += pictured_probe(context, ready.held_out)
    # Before the model is merged.
    forgetting = measure_forgetting(context, job.step, seconds_of_job(runtime, ready.began))
    second = partial(_sharded_over_all, runtime, ready.pictured)
    shared = ready.prepared.resident is not None
    seconds = seconds_of_job(runtime, ready.began)
    comparison = Comparison(context, built, job, valid_data, evaluator, second, shared, seconds)
    # A merged base has no adapters of its tower.
    served = None if isinstance(ready.live, TrainedTower) else comparison.measured(job.step)
    publish(runtime, built, job, chosen, Measured(probes, forgetting, served), ready.prepared.wait)
    if runtime.rank == 0:
        remove_own(runtime.run)
        remove_features(runtime.run)
    which = (
        ""
        if job.step == steps
        else f" of step {job.step}, with the lowest validation loss{chosen.among},"
    )
    reporter.message(
        f"Training is complete after {counted(steps, 'step')}; the adapter{which} is written."
    )
    return Outcome(kind=OutcomeKind.SUCCEEDED)


def _carry_out_commands(
    context: TrainingContext,
    prepared: PreparedModel,
    job: JobState,
    data: tuple[TokenSet, TokenSet],
    teacher: Teacher,
) -> Outcome:
    """Train as the job's client says, or where answers are sampled the service: by commands that
    come meanwhile (workers/tinker). `data`: the prompts for training and validation. `teacher`: of
    the student whose answers they are.
    """
    runtime = context.runtime
    reporter = context.reporter
    built = prepared.built
    steps = None
    if runtime.spec.reinforcement is not None:
        by_first(lambda: offer_prompts(runtime.run, runtime.spec, *data))
        together = 2 if runtime.spec.in_pairs else 1
        prompts = (len(samples) // together for samples in data)
        steps = RolloutSchedule.of(runtime.spec, *prompts).total_steps
    _resume(runtime, reporter, job, steps)
    vocabulary = built.peft_model.get_input_embeddings().num_embeddings
    watch = AdapterWatch(job, reporter.warn, EmbeddedRows.of(built.peft_model))
    path = runtime.spec.model.path
    pictures = CallPictures(
        runtime,
        built.peft_model,
        lambda: cached_description(path) or describe(path),
        shared=prepared.resident is not None,
    )
    saver = _saver(context)
    loop = CommandLoop(context, job, saver, watch, vocabulary, prepared.wait, pictures, teacher)
    finished, checkpoint = loop.run()
    if not finished and loop.left_alone is not None:
        reporter.warn(
            f"The ranks leave: for {loop.left_alone:g} seconds there was no sign of the service."
        )
    if not finished:
        return _stopped(context, f"after step {job.step}", checkpoint)
    who = (
        "The client has finished" if runtime.spec.reinforcement is None else "The last step is done"
    )
    reporter.message(f"{who}; the adapter is being written, and read again to compare.")
    by_first(reporter.flush)  # the metrics table is made from the events
    step = use_best(runtime.run, runtime.spec, job, reporter.warn)
    probes = measure(built.peft_model, loop.newest_sequences, runtime.device)
    publish(runtime, built, job, step, Measured(probes), prepared.wait)
    if runtime.rank == 0:
        remove_features(runtime.run)
    which = (
        ""
        if job.step == step.steps
        else f" of step {job.step}, with the highest mean reward{step.among},"
    )
    reporter.message(
        f"Training is complete after {counted(step.steps, 'step')}; the adapter{which} is written."
    )
    return Outcome(kind=OutcomeKind.SUCCEEDED)


def _saver(context: TrainingContext) -> Saver:
    config = context.model.peft_config["default"] if os.environ.get(WITH_ADAPTERS) else None
    return Saver(context.runtime, context.reporter, config, context.wait)


def _stopped(context: TrainingContext, when: str, checkpoint: str | None = None) -> Outcome:
    context.reporter.message(f"Stopped {when}.")
    return Outcome(
        kind=OutcomeKind.STOPPED, checkpoint=checkpoint or context.runtime.start.checkpoint
    )


def _adopt_parent(runtime: Runtime, prepared: PreparedModel, reporter: Reporter) -> Manifest | None:
    """Let the adapters begin with those of the tuned model that the job starts from; None if they
    need not.

    A resumed attempt has its adapter from its own checkpoint, and needs the parent only for what is
    lost of its beginning.
    """
    run = runtime.run
    spec = runtime.spec
    resumes = runtime.start.checkpoint is not None
    first_answers = evaluated_steps(run).get(0, "")
    lost = bool(spec.evaluation and not run.path(first_answers).is_file()) or bool(
        spec.has_reference and not is_intact(run)
    )
    parent = spec.parent if spec.parent and from_first(not resumes or lost) else None
    adopted = on_all(partial(adopt, prepared.parameters, parent)) if parent else None
    if adopted is not None and prepared.changed is not None:
        prepared.changed()
    if adopted is not None and not resumes:
        reporter.message(
            f"The adapter is that of {adopted.tuned_name}, step {adopted.step}; the optimizer "
            "starts from zero."
        )
    return adopted


def _objectives(
    context: TrainingContext, train: TokenSet, valid: TokenSet, teacher: Teacher
) -> tuple[Objective, Objective] | None:
    """Training and validation data with their loss; None if the job was stopped meanwhile."""
    run = context.runtime.run
    spec = context.runtime.spec
    of_samples: Callable[[TokenSet], Referred]
    match spec.loss:
        case None:
            return supervised(train, spec, packed=context.limits.packed), Supervised(valid)
        case DistillationOptions() as options:
            return Taught(train, options, teacher), Taught(valid, options, teacher)
        case KtoOptions() as options:
            of_samples = partial(
                Labelled.without_values,
                options=options,
                seed=spec.seed,
                max_length=spec.training.max_length,
            )
        case options:
            of_samples = partial(Preference.without_reference, options=options)
    training, validation = of_samples(train), of_samples(valid)
    if not spec.has_reference:
        return training, validation
    needed = NeededAnswers.of(spec, training, validation)
    key = key_of_reference(run, spec, train, valid)
    reference = find_reference(run, key, needed) or compute_reference(context, key, needed)
    if reference is None:
        return None
    own = len(training.parts)
    return training.with_reference(reference[:own]), validation.with_reference(reference[own:])


def _answered(spec: JobSpec, samples: TokenSet) -> Sequence[int]:
    """Numbers of the samples whose answers are worth learning."""
    if samples.labels is not None:
        return np.flatnonzero(samples.labels).tolist()
    return range(0, len(samples), 2 if spec.in_pairs else 1)


def _evaluator(context: TrainingContext, samples: TokenSet) -> Evaluator | None:
    """The prompts of the job: its own, or the first samples, each up to its last answer; of each
    pair the preferred one, of answers with labels the good ones.
    """
    spec = context.runtime.spec
    if spec.evaluation is None:
        return None
    tokenizer = load_tokenizer(spec.model.path, TokenOptions.of(spec).chat_template)
    chosen = [samples[i] for i in _answered(spec, samples)[: spec.evaluation.count]]
    return Evaluator(context, asked_of(spec, chosen, tokenizer), tokenizer, spec.evaluation)


def _sharded_over_all(runtime: Runtime, pictured: Description | None, spec: JobSpec) -> BuiltModel:
    """The model of another spec, sharded over all ranks.

    `pictured`: the base's, if samples have pictures.
    """
    mesh = make_mesh(runtime.device.type, runtime.world, 1)
    built = construct(spec, mesh, runtime.device, warn=lambda text: None)
    if pictured is not None:
        read_images(runtime.run, pictured, built.peft_model)
    return built


def _data(runtime: Runtime, reporter: Reporter) -> tuple[TokenSet, TokenSet]:
    """Training and validation samples.

    What the files hold was reported when the job was submitted.
    """
    spec = runtime.spec
    training, validation = job_samples(runtime.run, spec, warn=reporter.warn)
    rows = token_rows(spec.model.path)
    if rows is not None:
        check_ids(training, rows)
        check_ids(validation, rows)
    return training, validation


def _trained_tower(runtime: Runtime, reporter: Reporter, base: Description) -> TrainedTower | None:
    """The tower with adapters, of a job with pictures that asks for some there."""
    spec = runtime.spec
    linears = [weight.module for weight in base.linears]
    targets = choose_tower_targets(base.tower_linears, spec.lora.target_modules, linears)
    if not targets:
        return None
    refuse_with_towers(spec, targets)
    reporter.message(
        f"lora.target_modules names {counted(len(targets), 'layer')} of the base's tower: it is "
        "trained on every rank, and looks at the images of each micro-batch."
    )
    device = runtime.device
    pixels = TokenOptions.of(spec).pixels
    return on_all(
        lambda: TrainedTower(spec.model.path, base, targets, spec.lora, spec.seed, device, pixels)
    )


def _with_tower(
    prepared: PreparedModel, live: LiveTower | TrainedTower | None, spec: JobSpec
) -> PreparedModel:
    """The model of a job with the adapters of its tower. Raises SpecError where these cannot be
    trained.
    """
    causal = causal_model(prepared.built.peft_model)
    named = adapted_in_towers(causal, spec.lora)
    if not isinstance(live, TrainedTower):
        if named and not isinstance(spec.lora.target_modules, str):
            raise SpecError(
                f"lora.target_modules names {named[0]}, a layer of the base's tower, and no sample "
                "has an image. Leave it out, or add images to the data.",
                param="lora.target_modules",
            )
        return prepared
    if prepared.resident is not None:
        raise SpecError(
            f"lora.target_modules names {named[0]}, a layer of the base's tower, which jobs that "
            "share a base do not train. Set engine: off.",
            param="engine",
        )
    prepared.gradients.add(live.parameters.values())
    return replace(prepared, parameters={**prepared.parameters, **live.parameters})


def _with_features(
    runtime: Runtime, reporter: Reporter, base: Description, *sets: TokenSet
) -> LiveTower | None:
    """Have the features of all pictures written; or else the tower that computes them for each
    micro-batch.

    Before the model is built: a tower whose answers are kept is never in memory beside it.
    """
    path = runtime.spec.model.path
    compute = runtime.spec.precision.compute
    began = time.monotonic()
    pixels = TokenOptions.of(runtime.spec).pixels
    count = compute_features(runtime.run, path, base, sets, runtime.device, compute, pixels)
    if count is None:
        reporter.message(
            "The features of the images would take more than half of the free disk of the run "
            "directory, and are not kept: the base's tower stays on every rank and looks at the "
            "images of each micro-batch anew. The numbers are the same."
        )
        return on_all(lambda: LiveTower(path, base, runtime.device, compute, pixels))
    if count:
        seconds = time.monotonic() - began
        reporter.message(
            f"The base's tower has looked at {counted(count, 'image')} in {seconds:.1f} s; its "
            "answers are kept for all steps."
        )
    return None


def _set_damaged_aside(runtime: Runtime, reporter: Reporter) -> None:
    """Report the damaged checkpoints that were passed over for the one that this attempt begins
    with.
    """
    begins = runtime.start.checkpoint or "the first step"
    runtime.fence.check()
    for name, faults in set_damaged_aside(runtime.run, runtime.start).items():
        reporter.warn(
            f"Checkpoint {name} is damaged ({'; '.join(faults)}) and not used: training begins "
            f"with {begins}."
        )


def _remove_unfinished(runtime: Runtime) -> None:
    """Remove what earlier attempts were killed at writing."""
    remove_unfinished(runtime.run, runtime.fence)
    remove_left_folders(runtime.run.path("adapter"), runtime.fence)


def _resume(runtime: Runtime, reporter: Reporter, job: JobState, total_steps: int | None) -> None:
    """Begin, or continue from the attempt's checkpoint.

    `total_steps`: None: the job's client decides.
    """
    by_first(lambda: _set_damaged_aside(runtime, reporter))
    by_first(lambda: _remove_unfinished(runtime))
    where = f"on {counted(runtime.world, 'rank')} ({runtime.device.type})"
    if runtime.start.checkpoint is None:
        which = "as its client says" if total_steps is None else counted(total_steps, "step")
        reporter.begin(f"Training starts {where}: {which}.", settled_options(runtime.spec))
        return
    checkpoint.restore(job, runtime.run, runtime.start.checkpoint, runtime.spec)
    of_all = "" if total_steps is None else f" of {total_steps}"
    reporter.begin(
        f"Training resumes {where} after step {job.step}{of_all}.", settled_options(runtime.spec)
    )
