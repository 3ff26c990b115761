"""The main path of a rank: torchrun starts `python -m workers.train RUN_DIR ATTEMPT` once per rank.

All its input and output is in the run directory. Exit code 0: the attempt ended as `outcome.json` says; 1: an error, which is
there as well.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ft_service.host.lifetime import die_with_parent, hold_rank_lock
from workers import keep_torchao_out

if __name__ == "__main__":  # before torch is imported: a rank must not outlive torchrun, not even while it starts
    die_with_parent()
    hold_rank_lock(sys.argv[1])
    keep_torchao_out()

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ft_service.bases.cache_folder import Cache
from ft_service.data.token_options import TokenOptions
from ft_service.data.tokens.token_set import TokenSet
from ft_service.data.tokens.tokenize import load_tokenizer
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.checkpoints import newest_checkpoint, set_damaged_aside, step_of
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Outcome, OutcomeKind
from ft_service.rundir.evaluations import evaluated_steps
from ft_service.rundir.fence import Fence
from ft_service.spec import JobSpec
from workers.base.agreement import from_first
from workers.base.load import adapters, load
from workers.data.sharing import Limits
from workers.data.token_sets import job_samples, remove_own
from workers.job import origins
from workers.job.parent_adapter import adopt
from workers.job.settled import settle_on_ranks, settled_options
from workers.job.training_state import JobState
from workers.model.activation_checkpointing import checkpoint_activations
from workers.model.build import BuiltModel, balance_note, build, token_rows
from workers.model.compiling import compile_layers
from workers.output import checkpoint
from workers.output.event_files import FOLDER, EventFile
from workers.output.export import publish, use_best
from workers.output.probes import measure
from workers.output.report import Reporter
from workers.output.saver import WITH_ADAPTERS, Saver
from workers.ranks import fencing
from workers.ranks.runtime import COMPUTE_DTYPE, Runtime, enter, leave, report_failure, with_spec
from workers.ranks.sharding import make_mesh, shard
from workers.training.answers import Evaluator
from workers.training.guards import AdapterWatch, check_gathered_weights, check_ids
from workers.training.loop import Schedule, Trainer
from workers.training.objective import Objective, Preference, Supervised, supervised
from workers.training.packing import settle_limits
from workers.training.questions import ends_of, questions_of, questions_of_prompts
from workers.training.reference import INDEX as REFERENCE
from workers.training.reference import compute_reference, find_reference, key_of_reference
from workers.training.served import Comparison
from workers.training.stop import StopRequest


def main(run: RunDir, attempt: int) -> int:
    """Run one attempt on this rank; the process's exit code."""
    try:
        fence = Fence(run, attempt)
        fencing.watch(fence)  # first: a rank may wait for the others for ever
        runtime = enter(run, attempt, fence)
        event_file = _event_file(runtime) if runtime.rank == 0 and runtime.spec.tensorboard else None
        with Reporter(run, attempt, active=runtime.rank == 0, fence=fence, event_file=event_file) as reporter:
            outcome = train(runtime, reporter)
        if runtime.rank == 0:
            Attempt(run, attempt).write_outcome(outcome)
        dist.barrier()
    except BaseException as error:  # whatever it is, the user must hear of it
        report_failure(run, attempt, error)
        return 1
    return 0


def _event_file(runtime: Runtime) -> EventFile:
    """For TensorBoard, of this attempt."""
    start = runtime.start
    done = step_of(start.checkpoint) if start.checkpoint else 0
    return EventFile(runtime.run.path(FOLDER), f"attempt-{start.attempt}", first_step=done + 1)


def train(runtime: Runtime, reporter: Reporter) -> Outcome:
    """Build, load, resume, train, publish. The order matters; each step says why it stands where it does."""
    stop = StopRequest(runtime)
    train_set, valid_set = _data(runtime, reporter)  # first: the cheapest way to find out that a job cannot run
    settled = settle_on_ranks(runtime.spec, runtime.device, train_set)
    spec, runtime = settled.spec, with_spec(runtime, settled.spec)
    for sentence in settled.news:
        reporter.message(sentence)

    cache = Cache.from_environment(os.environ)
    built = construct(spec, runtime.mesh, runtime.device, warn=lambda text: reporter.message(text, "warn"), cache=cache)
    note = balance_note(spec.model.path)
    if note is not None:
        reporter.message(note)
    if built.products is not None:
        reporter.message(built.products)
    for level, text in built.loaded.messages() if built.loaded else ():
        reporter.message(text, level)
    check_gathered_weights(built.peft_model, runtime.compute_dtype)
    # A resumed attempt has its adapter from its own checkpoint, and needs the parent only for what is lost of its beginning.
    resumes = runtime.start.checkpoint is not None
    kept = [key for key, used in ((REFERENCE, spec.dpo), (evaluated_steps(runtime.run).get(0, ""), spec.evaluation)) if used]
    needs_parent = not resumes or not all(runtime.run.path(key).is_file() for key in kept)
    adopted = adopt(built.peft_model, spec.parent) if spec.parent and from_first(needs_parent) else None
    if adopted is not None and not resumes:
        reporter.message(f"The adapter is that of {adopted.tuned_name}, step {adopted.step}; the optimizer begins anew.")
    # A job goes on only on the base that it began with.
    for text in origins.record(runtime.run, spec, built, train_set, valid_set, adopted):
        reporter.message(text, "warn")
    job = JobState(dict(adapters(built.peft_model)), spec.training)  # on the final parameters: loading replaced them
    built.peft_model.train()
    limits = settle_limits(built.peft_model, spec, runtime.device, warn=lambda text: reporter.message(text, "warn"))
    objectives = _objectives(runtime, built, train_set, valid_set, limits, reporter, stop)  # before the adapter changes
    if objectives is None:
        reporter.message("Stopped before the first step, while reference log-probabilities were computed.")
        return Outcome(kind=OutcomeKind.STOPPED, checkpoint=runtime.start.checkpoint)
    train_data, valid_data = objectives
    schedule = Schedule.of(spec, len(train_data))
    evaluator = _evaluator(runtime, built, valid_set if len(valid_set) else train_set, limits, reporter, stop)
    if evaluator is not None and not evaluator.begin():
        reporter.message("Stopped before the first step, while the model was asked the prompts of the evaluation.")
        return Outcome(kind=OutcomeKind.STOPPED, checkpoint=runtime.start.checkpoint)
    _resume(runtime, reporter, job, schedule)
    config = built.peft_model.peft_config["default"] if os.environ.get(WITH_ADAPTERS) else None
    saver = Saver(runtime, reporter, config)
    watch = AdapterWatch(job.parameters, warn=lambda text: reporter.message(text, "warn"))
    parts = (runtime, built.peft_model, job, train_data, valid_data, schedule, reporter, stop, saver, watch, limits)
    stopped_at = Trainer(*parts, evaluator=evaluator).fit()
    if stopped_at is not None:
        reporter.message(f"Stopped at step {job.step}; checkpoint {stopped_at} is complete.")
        return Outcome(kind=OutcomeKind.STOPPED, checkpoint=stopped_at)
    if job.step < schedule.total_steps:
        waited = job.validations.without_progress
        reporter.message(f"Validation loss has made no progress {waited} times: training ends at step {job.step}.")
    steps = job.step
    chosen = use_best(runtime.run, spec, job)
    # Here it was asked already, unless it was stopped over it or the best step is another one.
    if evaluator is not None and evaluator.at(job.step, last=True) is None:
        last = from_first(newest_checkpoint(runtime.run))
        reporter.message(f"Stopped after step {steps}, while the model was asked the prompts of the evaluation.")
        return Outcome(kind=OutcomeKind.STOPPED, checkpoint=last)
    reporter.message("The last step is done; the adapter is being written, and read again to compare.")
    reporter.flush()  # the metrics table is made from the events
    probed = valid_set if len(valid_set) else train_set
    probes = measure(built.peft_model, probed, runtime.device)
    served = Comparison(runtime, built, valid_data, limits, reporter, evaluator, partial(_anew, runtime)).measured(job.step)
    publish(runtime.run, runtime.fence, spec, built, job, chosen, probes, served)
    if runtime.rank == 0:
        remove_own(runtime.run)
    which = "" if job.step == steps else f" of step {job.step}, with the lowest validation loss,"
    reporter.message(f"Training is complete after {steps} steps; the adapter{which} is written.")
    return Outcome(kind=OutcomeKind.SUCCEEDED)


def _objectives(
    runtime: Runtime,
    built: BuiltModel,
    train: TokenSet,
    valid: TokenSet,
    limits: Limits,
    reporter: Reporter,
    stop: StopRequest,
) -> tuple[Objective, Objective] | None:
    """Training and validation data with what the loss is taken of. None: the job was stopped meanwhile."""
    options = runtime.spec.dpo
    if options is None:
        return supervised(train, runtime.spec, packed=limits.packed), Supervised(valid)
    key = key_of_reference(runtime.run, runtime.spec, train, valid)
    found = find_reference(runtime.run, key, train, valid)
    if found is None:
        parts = (runtime, built.peft_model, key, train, valid, limits)
        found = compute_reference(*parts, tell=reporter.message, stops=stop.agreed)
    if found is None:
        return None
    return Preference(train, found.training, options), Preference(valid, found.validation, options)


def _evaluator(
    runtime: Runtime, built: BuiltModel, samples: TokenSet, limits: Limits, reporter: Reporter, stop: StopRequest
) -> Evaluator | None:
    """The prompts of the job: its own, or the first samples, each up to its last answer; of each pair the preferred one."""
    spec = runtime.spec
    if spec.evaluation is None:
        return None
    options = TokenOptions.of(spec)
    tokenizer = load_tokenizer(spec.model.path, options.chat_template)
    chosen = [samples[i] for i in range(0, len(samples), 1 if spec.dpo is None else 2)[: spec.evaluation.count]]
    learned = questions_of(chosen, tokenizer, options)
    asked = questions_of_prompts(spec.evaluation.given, tokenizer, options) or learned
    parts = (runtime, built.peft_model, asked, tokenizer, spec.evaluation, reporter, stop.agreed)
    return Evaluator(*parts, packed=limits.packed, ends=ends_of(learned, tokenizer))


def construct(
    spec: JobSpec, mesh: DeviceMesh, device: torch.device, warn: Callable[[str], None], cache: Cache | None = None
) -> BuiltModel:
    """The model of a job, sharded over the mesh and loaded. Called by all ranks together.

    `warn`: called with a sentence for each fallback. `cache`: of quantised bases.
    """
    options = spec.distributed
    compute_dtype = COMPUTE_DTYPE[spec.precision.compute]
    built = build(spec, device)  # on meta: formats and adapters are in place before any memory is taken
    checkpoint_activations(built.layers, options.checkpointing, spec.lora.r, compiled=options.compile is True)
    if options.compile is True:
        compile_layers(built.layers, warn)  # before sharding: FSDP2's hooks, and so the collectives, stay outside
    # Still on meta: the largest allocation that a rank ever makes is one of its own shards.
    shard(built.peft_model, built.layers, mesh, options, compute_dtype)
    # Each rank reads and quantises its own rows, which needs the shards' shapes.
    loaded = load(
        built.peft_model,
        spec.model.path,
        seed=spec.seed,
        compute_dtype=compute_dtype,
        device=device,
        offload=options.offload,
        cache=cache,
    )
    return replace(built, loaded=loaded)


def _anew(runtime: Runtime, spec: JobSpec) -> BuiltModel:
    """The model of another spec, sharded over all ranks."""
    mesh = make_mesh(runtime.device.type, runtime.world, 1)
    return construct(spec, mesh, runtime.device, warn=lambda text: None)


def _data(runtime: Runtime, reporter: Reporter) -> tuple[TokenSet, TokenSet]:
    """Training and validation samples. What the files hold was reported before: whoever starts a job has its data examined."""
    spec = runtime.spec
    training, validation = job_samples(runtime.run, spec, warn=lambda text: reporter.message(text, "warn"))
    rows = token_rows(spec.model.path)
    if rows is not None:
        check_ids(training, rows)
        check_ids(validation, rows)
    return training, validation


def _set_damaged_aside(runtime: Runtime, reporter: Reporter) -> None:
    """Report the damaged checkpoints that were passed over for the one that this attempt begins with."""
    begins = runtime.start.checkpoint or "the first step"
    runtime.fence.check()
    for name, faults in set_damaged_aside(runtime.run, runtime.start).items():
        reporter.message(
            f"Checkpoint {name} is damaged ({'; '.join(faults)}) and not used: training begins with {begins}.", "warn"
        )


def _resume(runtime: Runtime, reporter: Reporter, job: JobState, schedule: Schedule) -> None:
    if runtime.rank == 0:
        _set_damaged_aside(runtime, reporter)
    where = f"on {runtime.world} rank{'s' if runtime.world > 1 else ''} ({runtime.device.type})"
    if runtime.start.checkpoint is None:
        reporter.begin(f"Training starts {where}: {schedule.total_steps} steps.", settled_options(runtime.spec))
        return
    checkpoint.restore(job, runtime.run, runtime.start.checkpoint, runtime.spec)
    text = f"Training resumes {where} after step {job.step} of {schedule.total_steps}."
    reporter.begin(text, settled_options(runtime.spec))


if __name__ == "__main__":
    leave(main(RunDir(sys.argv[1]), int(sys.argv[2])))
