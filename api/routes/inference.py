"""Chat completions, which scripts request after their job has succeeded.

The operator's inference server answers them if there is one, else the preview on this host. Without
either, the refusal says what to do instead.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal

import httpx2
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from api.http.auth import Caller
from api.http.azure_paths import deployment_of
from api.http.bodies import PICTURES
from api.http.closing_response import ClosingResponse
from api.http.dependencies import ChatBody, JsonBody, Services, Svc, server_sent
from api.http.gone_clients import DISCONNECTED
from api.http.routing import keyed_router
from api.http.threads import in_thread, parsed_in_turn, turn, work_for
from api.transfer import chat_answer, completion_answer
from api.transfer.kept_chat import ChatKeeper, ChatToKeep
from api.transfer.tar_stream import adapter_folder
from api.wire.chat_request import parse_chat_completion, urls_of
from api.wire.completion_request import parse_completion
from api.wire.error_views import error_body
from ft_service.bases.catalogue import Base
from ft_service.bases.description import ImageFacts, why_no_images
from ft_service.control.admission import tuned_models
from ft_service.data.image_limits import most_images
from ft_service.errors import NotFoundError, SpecError, UnavailableError
from ft_service.host.public_fetch import FetchError, require_public
from ft_service.serving import server_samples
from ft_service.serving.handoff import ends_of_handed_over
from ft_service.serving.preview import Deliver, PreviewModel, Ticket
from ft_service.settings import Settings
from ft_service.spec import SERVED_FORMS, JobSpec, is_tuned
from ft_service.spec.resolved import vllm_rank
from ft_service.store.records import Principal
from ft_service.wording import shown_value

log = logging.getLogger(__name__)

router = keyed_router("/v1", "inference")

_TIMEOUT = httpx2.Timeout(600.0, connect=5.0)
_LOOK_UP_SECONDS = 5.0
"""For the name of one URL in a message that goes on."""
_turn = count()
"""The next replica: requests go to the replicas in turn."""
_LATER = (408, 409, 425, 429, 500, 502, 503, 504)
"""Status codes of an inference server after which the same request may be answered."""
_PASSED_BACK = ("content-type", "retry-after", "retry-after-ms", "x-should-retry")
CHAT = "/chat/completions"
"""Route of conversations, here and on an inference server."""
ANSWER = server_sent()
"""`responses` of a route that answers with one object, or with events."""
ANSWER[200]["content"]["application/json"] = {"schema": {"type": "object"}}
BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
}
"""What a route says of a body that is an object."""


@router.post(CHAT, openapi_extra=BODY, response_class=StreamingResponse, responses=ANSWER)
async def create(request: Request, body: ChatBody, caller: Caller, services: Svc) -> Response:
    """Answer with a base, an alias, a tuned model or a checkpoint of one; as a stream if `stream`
    is true. Tuned models must be the project's own or granted to it. With FT_INFERENCE_URL, that
    server answers; else the preview of this host does (FT_PREVIEW). Training has priority: while it
    holds the slots, the answer is a 503 with `retry-after`, unless `processor` (not in OpenAI's
    API) is true: then the processor computes the answer, slowly. Messages of the role user may show
    images, as parts of type `image_url`, to models whose base learns from images. With `store` the
    chat is kept with its `metadata`, if the operator allows it (FT_STORED_CHATS_DAYS).
    """
    to_keep = await in_thread(ChatToKeep.of, body, services.settings)
    answered = await _answered(request, body, caller, services)
    if to_keep is None:
        return answered
    keeper = ChatKeeper(
        to_keep, body["model"], caller.project_id, services.settings, services.store
    )
    return await keeper.kept(answered)


async def _answered(request: Request, body: Any, caller: Principal, services: Services) -> Response:
    tuned = await _model_of(request, body, caller, services, CHAT)
    if isinstance(tuned, Response):
        return tuned
    assert services.preview is not None
    completion = parse_chat_completion(body)
    found = await _previewed(completion.model, tuned, services)
    if not completion.shows_images:
        order = completion.order(found.adapter)
        submit = partial(found.submit, services, order, caller.project_id, completion.processor)
        return await chat_answer.answer(request, completion, services.preview, submit)
    facts = await in_thread(_facts_of_images, Path(found.model.path), services)
    order = await parsed_in_turn(completion.order, found.adapter, facts)
    size = sum(len(own.get("data", "")) for own in order["images"]["pictures"])
    submit = partial(found.submit, services, order, caller.project_id, completion.processor)
    async with PICTURES.held(caller.project_id, cost=max(1, size), size=max(1, size)):
        return await chat_answer.answer(request, completion, services.preview, submit)


def _facts_of_images(folder: Path, services: Services) -> ImageFacts:
    """What is known of the towers of a base.

    Raises SpecError for one that sees no images here, UnavailableError while it is being described.
    """
    base = services.catalogue.descriptions.description(folder)
    if base.images is not None:
        return base.images
    raise SpecError(
        f"messages: the base sees no images here: {why_no_images(base)}. Leave them out, or take "
        "another base.",
        param="messages",
        code="no_images",
    )


@router.post("/completions", openapi_extra=BODY, response_class=StreamingResponse, responses=ANSWER)
async def create_completion(
    request: Request, body: JsonBody, caller: Caller, services: Svc
) -> Response:
    """Continue a text, or its tokens, without a chat template; `echo` and `logprobs` give the
    log-probabilities of a prompt, by which evaluation harnesses compare answers. Models and servers
    as for chat completions. The preview sends a stream when it is whole, and knows vLLM's
    `add_special_tokens` and `return_token_ids`.
    """
    tuned = await _model_of(request, body, caller, services, "/completions")
    if isinstance(tuned, Response):
        return tuned
    assert services.preview is not None
    completion = parse_completion(body)
    found = await _previewed(completion.model, tuned, services)

    def submit(prompt: str | list[int]) -> chat_answer.Submit:
        order = completion.order(prompt, found.adapter)
        return partial(found.submit, services, order, caller.project_id, completion.processor)

    return await completion_answer.answer(request, completion, services.preview, submit)


def require_answerable(body: dict[str, Any], caller: Principal, services: Services) -> None:
    """Raise FtError if nothing here would answer a chat completion with such a body, whichever
    process of the service is asked.
    """
    name = body["model"]
    tuned = tuned_models.find(name, caller, services.store) if is_tuned(name) else None
    if services.settings.inference_urls:
        if tuned is None:
            _refuse_adapter_path(name)
        return
    if not services.settings.previews:
        raise _not_served(tuned)
    parse_chat_completion(body)
    if tuned is None:
        _base_named(name, services)
    else:
        tuned_models.refuse_pruned(tuned, services.places)
        _refuse_rounded(tuned.job.spec)


async def asked(
    caller: Principal, body: Mapping[str, Any], *, services: Services
) -> Mapping[str, Any]:
    """Return the answer to a chat completion that the service asks for a project.

    Raises FtError: UnavailableError and LimitError if it may be answered later.
    """
    work_for(caller.project_id)
    own = {} if services.settings.inference_url else {"processor": True}
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "query_string": b""}
    answer = await create(Request(scope, _nothing_more), {**body, **own}, caller, services)
    if isinstance(answer, ClosingResponse):
        await answer.close()
        raise SpecError("The inference server answered with events.", code="inference_server_error")
    try:
        told = json.loads(bytes(answer.body))
    except ValueError:
        told = None
    if answer.status_code == 200 and isinstance(told, dict):
        return told
    error = told.get("error") if isinstance(told, dict) else None
    said = error.get("message") if isinstance(error, dict) else None
    message = f"The inference server answered {answer.status_code}: {str(said)[:500]}"
    if answer.status_code in _LATER:
        raise UnavailableError(message)
    raise SpecError(message, code="inference_server_error")


async def _nothing_more() -> Any:
    """Receive for a request whose caller stays."""
    await asyncio.Event().wait()


async def _model_of(
    request: Request, body: Any, caller: Principal, services: Services, path: str
) -> tuned_models.Tuned | Response | None:
    """Return the tuned model that the preview is to answer with, None for a base, or an inference
    server's answer.
    """
    name: Any = _named(body, deployment_of(request)) if isinstance(body, dict) else None
    if not isinstance(name, str):
        raise SpecError(
            "model is required: the name of a tuned model.",
            param="model",
            code="missing_required_parameter",
        )
    tuned = (
        await in_thread(tuned_models.find, name, caller, services.store) if is_tuned(name) else None
    )
    if services.settings.inference_url:
        if "processor" in body:
            message = (
                "processor: is for the preview, and an inference server answers here "
                "(FT_INFERENCE_URL). Leave it out."
            )
            raise SpecError(message, param="processor", code="unsupported_parameter")
        if path == CHAT:
            allow_private = services.settings.webhook_allow_private
            await in_thread(_refuse_private_urls, body, allow_private=allow_private)
        if tuned is None:
            _refuse_adapter_path(name)
        elif path == CHAT:
            body = await in_thread(_as_trained, body, tuned, services.settings.adapters)
        return await _proxied(request, services.settings, body, path)
    if tuned is not None:  # an inference server may still serve one that was pruned
        await in_thread(tuned_models.refuse_pruned, tuned, services.places)
    if services.preview is None:
        raise _not_served(tuned)
    return tuned


def _named(body: dict[str, Any], deployment: str | None) -> Any:
    """Return the model that a body names. One without gets the model of the path, if that names
    one. Raises SpecError if the two differ.
    """
    if deployment is None:
        return body.get("model")
    name = body.setdefault("model", deployment)
    if name != deployment:
        message = (
            f"model = {shown_value(name)}: the path names the deployment "
            f"{shown_value(deployment)}, and both are the name of a model here. Send the same."
        )
        raise SpecError(message, param="model", code="invalid_value")
    return name


def _as_trained(
    body: dict[str, Any], tuned: tuned_models.Tuned, adapters: Path | None
) -> dict[str, Any]:
    """The body with what an inference server would else take from the base: the chat template, if
    the job had its own, and the tokens at which answers end, if the base's files do not name all of
    them.
    """
    ends = ends_of_handed_over(adapters, tuned.name) if adapters is not None else []
    own = {"chat_template": tuned.job.spec.chat_template, "stop_token_ids": ends}
    return {**body, **{name: body.get(name) or value for name, value in own.items() if value}}


def _refuse_private_urls(body: dict[str, Any], *, allow_private: bool) -> None:
    """Raise SpecError for a URL by which a message would lead the inference server anywhere but to
    the public web.
    """
    found = [(place, url) for place, url in urls_of(body.get("messages")) if url[:5] != "data:"]
    if allow_private:
        return
    for number, (place, url) in enumerate(found):
        try:
            if number >= (most := most_images()):
                raise FetchError(f"is one of {len(found)} URLs, and {most} are possible")
            require_public(url, _LOOK_UP_SECONDS, allow_private=False)
        except FetchError as error:
            raise SpecError(
                f"{place}: {error.message}. Send what it holds, as data:image/png;base64,…",
                param="messages",
                code="private_address",
            ) from None


def _refuse_adapter_path(name: str) -> None:
    """Raise NotFoundError for the name of something else that leads an inference server to an
    adapter of this service.

    Servers take the name of an adapter for a path below FT_ADAPTERS: `./` and a tuned model's name
    finds that model too, whoever owns it.
    """
    if any(is_tuned(part) or part.startswith(server_samples.PREFIX) for part in name.split("/")):
        raise tuned_models.no_such(name)


async def _previewed(name: str, tuned: tuned_models.Tuned | None, services: Services) -> Previewed:
    """Find the model in the preview's terms, with the adapter in a folder."""
    if tuned is None:
        base = await in_thread(_base_named, name, services)
        return Previewed(PreviewModel(str(base.path)), None)
    _refuse_rounded(tuned.job.spec)
    if tuned.checkpoint is None:
        adapter = await in_thread(adapter_folder, tuned, services.places)
    else:
        adapter = await services.checkpoint_adapters.result(
            (tuned.job.id, tuned.checkpoint.name), partial(_made_in_turn, tuned, services)
        )
    spec = tuned.job.spec
    job = tuned.job if tuned.checkpoint is None else None
    return Previewed(
        PreviewModel(spec.model.path, spec.precision.model_dump(mode="json"), job), str(adapter)
    )


async def _made_in_turn(tuned: tuned_models.Tuned, services: Services) -> Path:
    async with turn("making"):
        return await in_thread(adapter_folder, tuned, services.places)


def _base_named(name: str, services: Services) -> Base:
    """Raises NotFoundError."""
    try:
        return services.catalogue.find(name)
    except SpecError as error:
        raise NotFoundError(error.message, param="model", code="model_not_found") from None


def _refuse_rounded(spec: JobSpec) -> None:
    """Raise SpecError for a tuned model that is served rounded: the preview puts adapters on the
    base without rounding the sum.
    """
    form = spec.precision.served_as
    if form is not None:
        raise SpecError(
            f"The tuned model was trained to be served in {form} (precision.served_as), to which "
            f"the preview does not round base and adapter: merge it ({SERVED_FORMS[form].how}), "
            "and serve the merged model.",
            param="model",
            code="model_not_served",
        )


@dataclass(frozen=True)
class Previewed:
    """A model for the preview."""

    model: PreviewModel
    adapter: str | None
    """Folder of the adapter; None: the base alone."""

    def submit(
        self,
        services: Services,
        order: dict[str, Any],
        project_id: str,
        on_processor: bool,
        deliver: Deliver,
    ) -> Ticket:
        assert services.preview is not None
        return services.preview.submit(
            self.model, order, deliver, project_id=project_id, on_processor=on_processor
        )


class InferenceView(BaseModel):
    """The program that answers chat completions here."""

    object: Literal["inference"] = "inference"
    answered_by: Literal["preview", "inference_server"] | None
    """preview: a process of this host, to try models; inference_server: the operator's; null:
    none.
    """
    reason: str | None
    """Why none does; null: one does."""


@router.get("/inference")
async def retrieve(services: Svc) -> InferenceView:
    """Not in OpenAI's API. The program that answers chat completions here, or why none does."""
    if services.settings.inference_url:
        return InferenceView(answered_by="inference_server", reason=None)
    if services.preview is not None:
        return InferenceView(answered_by="preview", reason=None)
    return InferenceView(answered_by=None, reason=_why_none(services.settings))


def _why_none(settings: Settings) -> str:
    if settings.preview == "off":
        return (
            "The preview is turned off (FT_PREVIEW = off), and no inference server is set "
            "(FT_INFERENCE_URL)."
        )
    if settings.launcher != "local":
        return (
            "Jobs run in a cluster, where the service has no preview; FT_INFERENCE_URL names a "
            "server that answers."
        )
    return (
        "This process serves the API alone; the preview runs with `ft serve`, and "
        "FT_INFERENCE_URL names another server."
    )


def _not_served(tuned: tuned_models.Tuned | None) -> NotFoundError:
    if tuned is None:
        message = (
            "This service trains models and does not serve them: send chat completions to "
            "an inference server."
        )
    else:
        lora = tuned.job.known_spec.lora
        message = (
            f"{tuned.name} is trained and not served here. Download its adapter with "
            f"GET /v1/fine_tuning/jobs/{tuned.job.id}/adapter (or `ft download {tuned.job.id}`) "
            "and serve it on its base, for "
            f"example with vLLM, where BASE is the folder of {tuned.base}: vllm serve BASE "
            "--enable-lora --max-lora-rank "
            f"{vllm_rank(lora.r, *lora.rank_pattern.values())} --lora-modules '{tuned.name}={tuned.job.id}'"
        )
    return NotFoundError(message, param="model", code="model_not_served")


async def _proxied(request: Request, settings: Settings, body: Any, path: str) -> Response:
    """Send a body to FT_INFERENCE_URL until there is an answer, or the caller has disconnected.

    Raises UnavailableError.
    """
    forwarded = asyncio.create_task(_forward_to_any(settings, body, path))
    try:
        while not forwarded.done():
            await asyncio.wait({forwarded}, timeout=chat_answer.GONE_POLL_SECONDS)
            if not forwarded.done() and await request.is_disconnected():
                return Response(status_code=DISCONNECTED)
        return forwarded.result()
    finally:
        if not forwarded.done():
            forwarded.cancel()
            with suppress(asyncio.CancelledError, UnavailableError):
                await forwarded


async def _forward_to_any(settings: Settings, body: Any, path: str) -> Response:
    """Send a body to a replica of FT_INFERENCE_URL with the server's key; the caller's key is never
    sent. If a replica does not answer, the next one gets the request. Raises UnavailableError.
    """
    urls = settings.inference_urls
    first = next(_turn) % len(urls)
    failure = UnavailableError("FT_INFERENCE_URL names no server.")
    for url in (*urls[first:], *urls[:first]):
        try:
            return await _forward(url + path, settings, body)
        except UnavailableError as error:
            failure = error
    raise failure


async def _forward(url: str, settings: Settings, body: Any) -> Response:
    """Return a server's answer, a stream as soon as it begins.

    Raises UnavailableError without a whole one.
    """
    headers = {"content-type": "application/json"}
    if settings.inference_api_key:
        headers["authorization"] = f"Bearer {settings.inference_api_key.get_secret_value()}"
    client = httpx2.AsyncClient(timeout=_TIMEOUT, trust_env=False)
    try:
        content = json.dumps(body)  # in ASCII: half a surrogate pair is no UTF-8
        request = client.build_request("POST", url, content=content, headers=headers)
        answer = await client.send(request, stream=True)
        streams = answer.headers.get("content-type", "").startswith("text/event-stream")
        whole = b"" if streams else await answer.aread()
    except BaseException as error:
        await client.aclose()
        if isinstance(error, httpx2.HTTPError):
            raise UnavailableError(
                f"The inference server (FT_INFERENCE_URL) does not answer: {error}."
            ) from error
        raise
    kept = {name: answer.headers[name] for name in _PASSED_BACK if name in answer.headers}
    if not streams:
        await client.aclose()
        return Response(whole, answer.status_code, kept)

    async def close() -> None:
        await answer.aclose()
        await client.aclose()

    events = _stream_of(answer, settings)
    return ClosingResponse(events, close, status_code=answer.status_code, headers=kept)


async def _stream_of(answer: httpx2.Response, settings: Settings) -> AsyncIterator[bytes]:
    """Yield a server's events.

    If it goes away between two of them, the last is an error; within one, that cannot be told, and
    HTTPError ends the connection.
    """
    end = b""
    try:
        async for part in answer.aiter_bytes():
            end = (end + part)[-4:]
            yield part
    except httpx2.HTTPError as error:
        if end and not end.replace(b"\r", b"").endswith(b"\n\n"):
            raise
        log.warning("an inference server's answer was cut off: %s", error)
        cut = UnavailableError(
            "The inference server (FT_INFERENCE_URL) went away before its answer was whole. Try "
            "again."
        )
        yield f"data: {json.dumps(error_body(settings, cut))}\n\n".encode()
