"""Models of Tinker clients: their creation, their commands, and the results that clients ask
for.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from api.http.bodies import ArrivingBody, BodyTooLargeError
from api.http.dependencies import JsonBody, Services, Svc
from api.http.threads import in_thread
from api.http.tinker_auth import TinkerCaller, tinker_router
from ft_service.bases.origin import portable_name
from ft_service.control.tinker import tinker_models
from ft_service.control.tinker.tinker_models import NewModel, find_model
from ft_service.errors import FtError, NotFoundError, SpecError
from ft_service.jobs.states import Job, State
from ft_service.settings import Settings
from ft_service.store.records import Principal
from ft_service.store.tinker import TinkerSampler
from ft_service.tinker.bodies import (
    Body,
    CreateModel,
    LoadWeights,
    OfModel,
    OptimStep,
    RetrieveFuture,
    Save,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
    WeightsInfo,
)
from ft_service.tinker.commands import Command, CommandResult
from ft_service.tinker.loss_wire import HEAD_BYTES, LossHead, refuse_parts_beyond
from ft_service.tinker.names import (
    WeightsPath,
    check_name,
    model_id,
    parse_request_id,
    request_id,
    sampler_id,
    session_of,
)

router = tinker_router()

PROTOBUF = "application/x-protobuf"
MOST_CALL_BYTES = 32 * 1024**2
"""Largest body of forward_backward; the client cuts its calls at 5 MB."""
HELD_SECONDS = 25.0
"""Time for which a request for a result waits for it; the client asks again then."""

_COMMANDS: Mapping[str, type[Body]] = {
    "optim_step": OptimStep,
    "save_weights": SaveWeights,
    "save_weights_for_sampler": SaveForSampler,
    "save_weights_external": SaveExternal,
    "load_weights": LoadWeights,
}
"""Command, as its path ends → its body."""


def _future(owner: str, seq: int) -> dict[str, Any]:
    return {"request_id": request_id(owner, seq), "model_id": owner}


@router.post("/create_model")
def create_model(body: JsonBody, caller: TinkerCaller, services: Svc) -> dict[str, Any]:
    """Create a job whose client runs the training loop. A repeated request finds the same one."""
    given = CreateModel.parse(body)
    session = services.store.tinker.open_session(caller.project_id, given.session_id)
    model = model_id(session.id, given.model_seq_id)
    new = NewModel(model, given.base_model, given.lora_config, _metadata(given.user_metadata))
    tinker_models.create_model(new, services.admission(caller), services.places)
    return _future(model, 0)


def _metadata(given: dict[str, Any] | None) -> dict[str, str]:
    """A client's metadata as a job's, which are texts."""
    return {
        name: value if isinstance(value, str) else repr(value)[:512]
        for name, value in (given or {}).items()
    }


@router.post("/get_info")
def get_info(body: JsonBody, caller: TinkerCaller, services: Svc) -> dict[str, Any]:
    job = find_model(services.store, caller.project_id, OfModel.parse(body).model_id)
    spec = job.spec
    data = {
        "model_name": spec.model.name,
        "tokenizer_id": portable_name(Path(spec.model.path), spec.model.name),
    }
    return {
        "type": "get_info",
        "model_id": job.request["metadata"][tinker_models.MODEL_KEY],
        "model_data": data,
        "model_name": spec.model.name,
        "is_lora": True,
        "lora_rank": spec.lora.r,
    }


@router.post("/forward_backward")
async def forward_backward(request: Request, caller: TinkerCaller, services: Svc) -> Response:
    """Store a call of forward or forward_backward; the ranks check its data.

    One that is too large is stored as refused.
    """
    body = ArrivingBody(request, MOST_CALL_BYTES)
    try:
        head = LossHead.of(await body.beginning(HEAD_BYTES))
        job = await in_thread(_expected, head, body.size, caller, services)
    except FtError:
        await body.drain()
        raise
    try:
        async with body.whole() as held:
            await in_thread(_accept_loss, job, head.seq_id, held, caller, services)
    except BodyTooLargeError:
        text = f"The call is larger than {MOST_CALL_BYTES:,} bytes: send fewer data at once."
        command = Command(head.seq_id, "refused", {"error": text})
        await in_thread(tinker_models.accept, job, command, services.store, services.places)
    return JSONResponse(_future(head.model_id, head.seq_id))


def _expected(head: LossHead, size: int, caller: Principal, services: Services) -> Job:
    """The model of a call that may be stored.

    Raises SpecError, NotFoundError and LimitError before its body is read.
    """
    _check_seq(head.seq_id)
    job = find_model(services.store, caller.project_id, head.model_id)
    tinker_models.refuse_command(job, head.seq_id, size, services.store, services.places)
    return job


def _accept_loss(
    job: Job, seq: int, body: bytearray, caller: Principal, services: Services
) -> None:
    try:
        refuse_parts_beyond(body)
        command = Command(seq, "forward_backward", body=body)
    except SpecError as error:
        command = Command(seq, "refused", {"error": error.message})
    tinker_models.count_command(job, command, caller.limits, services.store, services.places)
    tinker_models.accept(job, command, services.store, services.places)


def _check_seq(seq: int) -> None:
    if not 1 <= seq <= 999_999_999:
        raise SpecError(f"seq_id = {seq}: 1 to 999,999,999 are possible.", param="seq_id")


def _accept(body: Any, op: str, caller: Principal, services: Services) -> dict[str, Any]:
    """Store a command. One whose options are wrong is stored as refused: its number must not be
    missing.
    """
    given = body if isinstance(body, dict) else {}
    model = given.get("model_id")
    seq = given.get("seq_id")
    if not isinstance(model, str) or not isinstance(seq, int) or isinstance(seq, bool):
        _COMMANDS[op].parse(body)
        raise SpecError("model_id and seq_id are needed.", param="seq_id")
    _check_seq(seq)
    job = find_model(services.store, caller.project_id, model)
    tinker_models.refuse_command(job, seq, 0, services.store, services.places)
    try:
        command = Command(
            seq, op, _options(_COMMANDS[op].parse(body), job, model, seq, caller, services)
        )
    except (SpecError, NotFoundError) as error:
        command = Command(seq, "refused", {"error": error.message})
    tinker_models.accept(job, command, services.store, services.places)
    return _future(model, seq)


def _options(
    given: Body, job: Job, model: str, seq: int, caller: Principal, services: Services
) -> dict[str, Any]:
    match given:
        case OptimStep():
            return given.adam_params.model_dump(include=set(type(given.adam_params).model_fields))
        case SaveWeights():
            path = WeightsPath(model, "weights", check_name(given.path or f"command-{seq}"))
            return {**_saved_as(given, path, job, caller, services), "overwrite": given.overwrite}
        case SaveForSampler():
            return _for_sampler(given, job, model, seq, caller, services)
        case LoadWeights():
            return tinker_models.loads(given, caller, services.store, services.places)[1]
        case _:
            raise SpecError(
                "External weights are not here: `ft download JOB` and save_weights_for_sampler "
                "give the adapter."
            )


def _for_sampler(
    given: SaveForSampler, job: Job, model: str, seq: int, caller: Principal, services: Services
) -> dict[str, Any]:
    if given.kind != "snapshot":
        text = (
            f"kind = {given.kind[:40]!r}: weights that change while they are sampled from are "
            "not here. Use 'snapshot'."
        )
        raise SpecError(text, param="kind")
    path = WeightsPath(model, "sampler_weights", check_name(given.path or f"command-{seq}"))
    options = _saved_as(given, path, job, caller, services)
    if given.path is None:
        if given.sampling_session_seq_id is None:
            raise SpecError("path or sampling_session_seq_id is needed.", param="path")
        services.refuse_samples(of_weights=True)
        own = sampler_id(session_of(model), given.sampling_session_seq_id)
        sampler = TinkerSampler(
            id=own,
            project_id=caller.project_id,
            session_id=session_of(own),
            base=job.spec.model.name,
            model_path=str(path),
            owns_weights=True,
        )
        services.store.tinker.put_sampler(sampler)
        options["sampling_session_id"] = own
    return options


def _saved_as(
    given: Save, path: WeightsPath, job: Job, caller: Principal, services: Services
) -> dict[str, Any]:
    """Options of a command that saves weights. Raises SpecError if there are too many."""
    tinker_models.refuse_weights_beyond(job, caller.limits, services.store, services.places)
    told = given.model_dump(include={"ttl_seconds", "user_metadata"}, exclude_none=True)
    return {"name": path.name, "path": str(path), **told}


@router.post("/optim_step")
@router.post("/save_weights")
@router.post("/save_weights_for_sampler")
@router.post("/save_weights_external")
def accept_command(
    request: Request, body: JsonBody, caller: TinkerCaller, services: Svc
) -> dict[str, Any]:
    return _accept(body, request.url.path.rpartition("/")[2], caller, services)


@router.post("/load_weights")
def load_weights(body: JsonBody, caller: TinkerCaller, services: Svc) -> dict[str, Any]:
    """Load saved weights into a model, or create a model that begins with them."""
    if isinstance(body, dict) and body.get("session_id") is None:
        return _accept(body, "load_weights", caller, services)
    given = LoadWeights.parse(body)
    if given.session_id is None or given.model_seq_id is None:
        raise SpecError(
            "session_id and model_seq_id, or model_id and seq_id, are needed.", param="session_id"
        )
    session = services.store.tinker.open_session(caller.project_id, given.session_id)
    source, load = tinker_models.loads(given, caller, services.store, services.places)
    model = model_id(session.id, given.model_seq_id)
    base = given.base_model or source.spec.model.name
    new = NewModel(model, base, source.spec.lora, _metadata(given.user_metadata), load)
    tinker_models.create_model(new, services.admission(caller), services.places)
    return _future(model, 0)


@router.post("/weights_info")
def weights_info(body: JsonBody, caller: TinkerCaller, services: Svc) -> dict[str, Any]:
    path = WeightsPath.parse(WeightsInfo.parse(body).tinker_path)
    job, _ = tinker_models.find_weights(path, caller, services.store, services.places)
    return {"base_model": job.spec.model.name, "is_lora": True, "lora_rank": job.spec.lora.r}


@router.post("/retrieve_future")
async def retrieve_future(body: JsonBody, caller: TinkerCaller, services: Svc) -> Response:
    """The result of a request, waited for a while; status 408 with the queue's state while it is
    not there.
    """
    asked = RetrieveFuture.parse(body).request_id
    owner, is_sample, seq = parse_request_id(asked)
    with services.sample_answers.request(caller.key_id):
        if is_sample:
            return await _sample_result(asked, caller, services)
        job = await in_thread(find_model, services.store, caller.project_id, owner)
        result = await in_thread(tinker_models.result_of, job, seq, services.places)
        if result is None:
            await services.sample_answers.commands.wait(
                job.id, services.places.run(job.id), seq, HELD_SECONDS
            )
            job = await in_thread(find_model, services.store, caller.project_id, owner)
            result = await in_thread(tinker_models.result_of, job, seq, services.places)
        return _try_again(asked, job) if result is None else _answer(result, services.settings)


def _answer(result: CommandResult, settings: Settings) -> Response:
    return (
        Response(result.body, media_type=PROTOBUF)
        if result.body
        else _told(result.document, settings)
    )


def _told(document: Mapping[str, Any], settings: Settings) -> Response:
    """A result that is no protobuf, without the paths of this host's folders."""
    error = document.get("error")
    told = {"error": settings.without_paths(error)} if isinstance(error, str) else {}
    return JSONResponse({**document, **told})


def _try_again(asked: str, job: Job) -> Response:
    runs = job.state is State.RUNNING
    reason = job.pending or {
        State.PAUSED: "The model is paused: ft resume, or the page, lets it go on.",
        State.QUEUED: "The model waits in the queue for slots.",
    }.get(job.state)
    state = {"queue_state": "active" if runs else "paused_capacity", "queue_state_reason": reason}
    return JSONResponse({"type": "try_again", "request_id": asked, **state}, status_code=408)


async def _sample_result(asked: str, caller: Principal, services: Services) -> Response:
    await in_thread(services.store.tinker.get_sample, caller.project_id, asked)
    if not await services.sample_answers.wait(asked, HELD_SECONDS):
        return JSONResponse(
            {"type": "try_again", "request_id": asked, "queue_state": "active"}, status_code=408
        )
    sample = await in_thread(services.store.tinker.get_sample, caller.project_id, asked)
    if sample.answer is not None:
        return Response(sample.answer, media_type=PROTOBUF)
    error = sample.error or {"error": "It was not answered.", "category": "server"}
    return _told(error, services.settings)
