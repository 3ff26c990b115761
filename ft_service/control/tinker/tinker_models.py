"""Models of Tinker clients: each is a job without data files, whose client runs the training loop
by commands.

A command is a file of the job's run directory before its request is answered, so that a server that
is killed then loses none, and a repeated request finds it. A model that waits for its client for a
while is paused; its next command resumes it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ft_service.bases.description import Description
from ft_service.control.admission.job_admission import AdmissionContext, new_job, read_request
from ft_service.errors import ConflictError, LimitError, NotFoundError, SpecError
from ft_service.host.loops import Interval, every, log_errors
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import TERMINAL, Job
from ft_service.jobs.user_actions import Verb
from ft_service.meters import Meters
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Desired
from ft_service.settings import Settings
from ft_service.spec import LoraOptions
from ft_service.spec.request import parse_client_loop
from ft_service.spec.yaml_loader import read_yaml_setting
from ft_service.storage.locations import Places
from ft_service.store.records import NewEvent, Principal, TenantLimits
from ft_service.store.sql import Store
from ft_service.tinker.bodies import LoadWeights, LoraConfig
from ft_service.tinker.commands import Command, CommandLog, CommandResult
from ft_service.tinker.names import WeightsPath, check_model_id, job_id_of, session_of
from ft_service.tinker.saved_weights import (
    OPTIONS,
    SavedWeights,
    count_saved,
    delete_sampler,
    delete_saved,
    forget_options,
    options_of,
    sampler_key,
    saved_bytes,
    saved_key,
    with_options,
)

log = logging.getLogger(__name__)

MODEL_KEY = "tinker_model"
SESSION_KEY = "tinker_session"
"""Keys of a job's metadata: its model id, and its session."""
LORA_ALPHA = 32
"""Tinker's lora_alpha, whatever the rank (its documentation's `LoRA primer`)."""
DEFAULT_LENGTH = 8192
"""Longest sequence of a model, unless the base's context is shorter."""
MOST_SAVED = 4096
"""Limit of a model's saved weights, with those without a name of the last hour."""
IDLE_LOOK_SECONDS = 2.0
EXPIRE_SECONDS = 900.0
"""Interval at which saved weights whose time is over are removed, though nobody asks for them."""
COUNT_SECONDS = 60.0
"""Interval at which the bytes of models are counted, in projects that have a limit of bytes."""
UNUSED_SECONDS = 3600.0
"""Time after which weights that were saved without a name, and are not sampled from, are removed;
and answered samples.
"""
_OPTIONS = {"precision", "lora", "training", "distributed", "checkpoint"}
NO_HEAD = (
    "train_unembed: the output head gets no adapter. The loss is computed inside the frozen head, "
    "some tokens' logits at a "
    "time, so that the logits of all tokens are never held; the adapters of the layers below it "
    "are trained."
)


@dataclass(frozen=True)
class NewModel:
    """A model that a client creates."""

    model_id: str
    base: str
    """Name of the base, or an alias."""
    lora: LoraConfig | LoraOptions
    """What the client asks for, or the adapter of the weights with which it begins."""
    metadata: Mapping[str, str] | None = None
    load: Mapping[str, Any] | None = None
    """Options of the command that loads the weights with which it begins (`loads`); None: it begins
    with new ones.
    """


def create_model(new: NewModel, context: AdmissionContext, places: Places) -> Job:
    """Create the job of a model, and its first command, unless they are there.

    Raises as `create_job`.
    """
    job_id = job_id_of(new.model_id)
    job = _found(context.store, context.principal, job_id)
    if job is None:
        body, request = parse_client_loop(_body(new, context))
        parsed = replace(read_request(body, request, context), job_id=job_id)
        stored = new_job(parsed, context)
        if isinstance(new.lora, LoraConfig) and new.lora.train_unembed:
            stored = replace(stored, told=[*stored.told, NewEvent(level="info", message=NO_HEAD)])
        try:
            [job] = context.store.jobs.create_jobs([stored])
        except ConflictError:  # a request that came at the same time
            job = context.store.jobs.get_job(context.principal.project_id, job_id)
    _put(
        job,
        Command(0, "create_model", {"model_id": new.model_id, "load": new.load}),
        context.store,
        places,
    )
    return job


def _found(store: Store, principal: Principal, job_id: str) -> Job | None:
    try:
        return store.jobs.get_job(principal.project_id, job_id)
    except NotFoundError:
        return None


def _body(new: NewModel, context: AdmissionContext) -> dict[str, Any]:
    """The create body of a model's job: what the client says, and the operator's options for all
    models.
    """
    model = context.catalogue.find(new.base)
    options = {
        name: dict(value) for name, value in read_options(context.settings.tinker_options).items()
    }
    base = context.catalogue.descriptions.description(Path(model.path))
    operator = options.pop("lora", {})
    if isinstance(new.lora, LoraOptions):
        lora = new.lora.model_dump(mode="json", exclude_unset=True)
    else:
        lora = {"lora_alpha": LORA_ALPHA, **operator, **_adapter(new.lora, base)}
    training = {
        "max_length": min(DEFAULT_LENGTH, base.dimensions.max_positions or DEFAULT_LENGTH),
        **options.pop("training", {}),
    }
    metadata = {
        **(new.metadata or {}),
        MODEL_KEY: new.model_id,
        SESSION_KEY: session_of(new.model_id),
    }
    body = {"model": new.base, "lora": lora, "training": training, "metadata": metadata, **options}
    seed = new.lora.seed if isinstance(new.lora, LoraConfig) else None
    return body if seed is None else {**body, "seed": seed % 2**31}


def _adapter(wanted: LoraConfig, base: Description) -> dict[str, Any]:
    """Options of the adapter that a client asks for. Raises SpecError for the output head alone."""
    if not (wanted.train_attn or wanted.train_mlp):
        text = (
            "lora_config: the output head alone cannot be trained here. Set train_attn or "
            "train_mlp to true."
        )
        raise SpecError(text, param="lora_config")
    if wanted.train_attn and wanted.train_mlp:
        return {"r": wanted.rank}
    modules = [
        weight.module
        for weight in base.linears
        if _mixes_tokens(weight.module) is wanted.train_attn
    ]
    return {"r": wanted.rank, "target_modules": modules}


def read_options(path: Path | None) -> dict[str, Any]:
    """The operator's options for all models.

    `path`: FT_TINKER_OPTIONS. Raises SpecError for a file that holds none.
    """
    if path is None:
        return {}
    options = read_yaml_setting("FT_TINKER_OPTIONS", path)
    wrong = sorted(set(options) - _OPTIONS) if isinstance(options, dict) else ["it is no mapping"]
    if wrong or not all(isinstance(value, dict) for value in options.values()):
        sections = f"the sections {', '.join(sorted(_OPTIONS))} are expected, each a mapping"
        text = (
            f"FT_TINKER_OPTIONS = {path}: {sections}, and there is: {', '.join(map(str, wrong))}."
        )
        raise SpecError(text, param="FT_TINKER_OPTIONS")
    try:
        parse_client_loop({"model": "any", **options})
    except SpecError as error:
        raise SpecError(
            f"FT_TINKER_OPTIONS = {path}: {error.message}", param="FT_TINKER_OPTIONS"
        ) from None
    return options


def _mixes_tokens(module: str) -> bool:
    """Whether a linear layer belongs to attention, by the name that published classes give it
    (self_attn, attention, attn).
    """
    return any("att" in part for part in module.lower().split("."))


def find_model(store: Store, project_id: str, model: str) -> Job:
    """The job of a model. Raises SpecError for an id that is none, NotFoundError if the project has
    no such model.
    """
    try:
        return store.jobs.get_job(project_id, job_id_of(check_model_id(model)))
    except NotFoundError:
        raise NotFoundError(
            f"There is no model {model} in this project.", param="model_id", code="model_not_found"
        ) from None


def accept(job: Job, command: Command, store: Store, places: Places) -> None:
    """Store a command of a model, unless its number has one, and have the model go on.

    Raises SpecError if it has ended.
    """
    if job.state in TERMINAL and not CommandLog(places.run(job.id)).has(command.seq):
        raise SpecError(ended_text(job), param="model_id", code="model_ended")
    _put(job, command, store, places)


def _put(job: Job, command: Command, store: Store, places: Places) -> None:
    """Store a command of a model, and resume the model if it was paused before the command could be
    seen: `pause_idle` looks for commands after it has paused, so that one of the two sees what the
    other has done.
    """
    CommandLog(places.run(job.id)).put(command)
    _resume_idle(store.jobs.get_job(job.project_id, job.id), store)


def _resume_idle(job: Job, store: Store) -> None:
    """Resume a model that waits for its client, unless its user has paused it."""
    if job.desired is Desired.PAUSE and job.reason is Reason.IDLE:
        store.jobs.request(job.project_id, job.id, Verb.RESUME)


def project_models(project_id: str, store: Store, session_id: str | None = None) -> Iterator[Job]:
    """The models of a project, or of a session, the newest first."""
    after = None
    metadata = None if session_id is None else {SESSION_KEY: session_id}
    while True:
        page = store.jobs.list_jobs(
            project_id, after=after, limit=100, metadata_key=MODEL_KEY, metadata=metadata
        )
        yield from (job for job in page.data if is_model(job))
        if not page.has_more:
            return
        after = page.data[-1].id


def finish_models(project_id: str, session_id: str, store: Store, places: Places) -> None:
    """Have the models of a session write their adapters and end, behind the commands that they can
    carry out: those behind a gap in the client's numbers wait for a request that does not come any
    more.
    """
    for job in project_models(project_id, store, session_id):
        if job.state in TERMINAL:
            continue
        commands = CommandLog(places.run(job.id))
        seq = commands.first_missing()
        last = commands.command(seq - 1) if seq else None
        if last is None or last.op != "finish":
            accept(job, Command(seq, "finish"), store, places)


def ended_text(job: Job) -> str:
    """Text for a client whose model takes no commands any more."""
    why = f": {job.error['message'].rstrip('.')}" if job.error else ""
    return (
        f"The model has ended ({job.state.value}){why}. Create another one; its saved weights can "
        "be loaded with "
        "create_training_client_from_state."
    )


def result_of(job: Job, seq: int, places: Places) -> CommandResult | None:
    """The result of a command; None: it is not there yet.

    Raises NotFoundError for a number without a command.
    """
    command_log = CommandLog(places.run(job.id))
    result = command_log.result(seq)
    if result is not None:
        return result
    if not command_log.has(seq):
        result = command_log.result(seq)  # both may have gone, or the command just now
        if result is None:
            raise NotFoundError(
                f"There is no request {seq} of this model, or its result was asked for too late.",
                code="no_request",
            )
        return result
    return CommandResult.failed(ended_text(job), by_user=False) if job.state in TERMINAL else None


def loads(
    given: LoadWeights, principal: Principal, store: Store, places: Places
) -> tuple[Job, dict[str, Any]]:
    """The job of saved weights, and the options of a command that loads them.

    Raises SpecError, NotFoundError.
    """
    path = WeightsPath.parse(given.path, "weights")
    job, saved = find_weights(path, principal, store, places)
    assert saved is not None
    folder = str(places.run(job.id).root)
    return job, {
        "path": str(path),
        "run_dir": folder,
        "checkpoint": saved.checkpoint,
        "optimizer": given.optimizer,
    }


def find_weights(
    path: WeightsPath, principal: Principal, store: Store, places: Places
) -> tuple[Job, SavedWeights | None]:
    """The job of saved weights, and what is known of them if they are to be trained on: the
    project's own, or published in its organization. Raises NotFoundError for others.
    """
    missing = NotFoundError(
        f"There are no saved weights {path} here.", param="path", code="weights_not_found"
    )
    job = _found(store, principal, job_id_of(path.model_id))
    is_own = job is not None
    job = job or store.jobs.job_of_organization(principal.organization, job_id_of(path.model_id))
    if job is None:
        raise missing
    run = places.run(job.id)
    if remove_expired(run, path) or not (is_own or options_of(run, path.checkpoint_id).public):
        raise missing
    if path.kind == "sampler_weights":
        if not run.path(sampler_key(path.name)).is_dir():
            raise missing
        return job, None
    saved = run.readable(saved_key(path.name), SavedWeights)
    if saved is None:
        raise missing
    return job, saved


def refuse_command(job: Job, seq: int, size: int, store: Store, places: Places) -> None:
    """Raise LimitError if no more commands of a model may be stored: too many wait, or its project
    keeps as many bytes as it may. `size`: bytes of data that it holds; 0: none.
    """
    commands = CommandLog(places.run(job.id))
    commands.refuse_ahead(seq, size)
    if size and not commands.has(seq):
        store.files.refuse_bytes(job.project_id, size, what="The call has")


def count_command(
    job: Job, command: Command, limits: TenantLimits, store: Store, places: Places
) -> None:
    """Count the bytes of a command that is to be stored for its project's limit.

    Raises LimitError.
    """
    if (
        limits.max_bytes is not None
        and command.body
        and not CommandLog(places.run(job.id)).has(command.seq)
    ):
        store.projects.add_model_bytes(job.project_id, len(command.body))


def refuse_weights_beyond(job: Job, limits: TenantLimits, store: Store, places: Places) -> None:
    """Raise SpecError if no more weights of a model may be saved: it has as many as it may have, or
    its project keeps as many bytes.
    """
    count = count_saved(places.run(job.id))
    if count >= MOST_SAVED:
        text = (
            f"The model has {count} saved weights, as many as it may have. Delete some "
            "(delete_checkpoint)."
        )
        raise SpecError(text, param="path", code="too_many_weights")
    if limits.max_bytes is None:
        return
    count_bytes(job.project_id, store, places)
    try:
        store.files.refuse_bytes(job.project_id, 1, what="Saved weights have more than")
    except LimitError as error:
        raise SpecError(error.message, param="path", code=error.code) from None


def count_bytes(project_id: str, store: Store, places: Places) -> None:
    """Count the saved weights and the commands of a project's models for its limit of bytes."""
    runs = [places.run(job.id) for job in project_models(project_id, store)]
    store.projects.note_model_bytes(
        project_id, sum(saved_bytes(run) + CommandLog(run).bytes() for run in runs)
    )


def remove_expired(run: RunDir, path: WeightsPath) -> bool:
    """Remove saved weights if their time is over.

    Returns whether it is. `path`: in the run directory, whatever its model.
    """
    expires_at = options_of(run, path.checkpoint_id).expires_at
    is_over = expires_at is not None and expires_at <= time.time()
    if is_over:
        delete_weights(run, path)
    return is_over


def remove_all_expired(runs_dir: Path, places: Places) -> None:
    """Remove the saved weights of all models whose time is over: they take disk, and count for
    their project's limit.
    """
    for folder in runs_dir.glob(f"ftjob-*/{OPTIONS}"):
        job_id = folder.parent.name
        with log_errors(f"removing expired weights of {job_id}"):
            run = places.run(job_id)
            for kind, name in with_options(run):
                remove_expired(run, WeightsPath(job_id, kind, name))


def delete_weights(run: RunDir, path: WeightsPath) -> None:
    """Remove saved weights, if there are any, with their options."""
    (delete_saved if path.kind == "weights" else delete_sampler)(run, path.name)
    forget_options(run, path.checkpoint_id)


def is_model(job: Job) -> bool:
    """Whether a job is a client's model; anybody may give a job the metadata of one."""
    return not job.stored_spec.has_training_data and MODEL_KEY in (
        job.request.get("metadata") or {}
    )


def run(settings: Settings, store: Store, meters: Meters, stop: threading.Event) -> None:
    """Pause models that wait for their clients, and remove what no client asks for any more, until
    `stop` is set.
    """
    places = Places.of(settings)
    expiry = Interval(EXPIRE_SECONDS)
    count = Interval(COUNT_SECONDS)

    def look() -> None:
        pause_idle(store, places, settings.tinker_idle_seconds)
        remove_unused(store, places)
        if expiry.is_due:
            expiry.restart()
            remove_all_expired(settings.runs_dir, places)
        if count.is_due:
            count.restart()
            for project_id in store.projects.limited_by_bytes():
                with log_errors(f"counting the bytes of the models of {project_id}"):
                    count_bytes(project_id, store, places)

    every(IDLE_LOOK_SECONDS, look, stop, "looking after Tinker's models")


def pause_idle(store: Store, places: Places, seconds: float) -> None:
    """Pause the models that have done all that their clients said, and wait for more for so
    long.
    """
    for job in filter(is_model, store.jobs.running_with(MODEL_KEY)):
        with log_errors(f"pausing the model {job.id}"):
            commands = CommandLog(places.run(job.id))
            if not commands.has_unanswered() and commands.last_used() < time.time() - seconds:
                log.info("a model waits for its client and is paused", extra={"job_id": job.id})
                paused = store.jobs.request(job.project_id, job.id, Verb.PAUSE, reason=Reason.IDLE)
                if (
                    commands.has_unanswered()
                ):  # which came meanwhile, and whose request may have seen the model run (`_put`)
                    _resume_idle(paused, store)


def remove_unused(store: Store, places: Places) -> None:
    """Remove samples that were answered long ago, sessions and samplers that are not used any more,
    and weights that were saved for one of these.
    """
    store.tinker.forget_samples(UNUSED_SECONDS)
    store.tinker.forget_unused()
    for sampler in store.tinker.unused_samplers(UNUSED_SECONDS):
        with log_errors(f"removing the weights of the sampler {sampler.id}"):
            path = WeightsPath.parse(sampler.model_path or "")
            delete_sampler(places.run(job_id_of(path.model_id)), path.name)
            store.tinker.delete_sampler(sampler.id)
