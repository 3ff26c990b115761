"""Completions of rollouts, of chats and of texts: an agent's calls of the model that is being
trained, which are recorded token for token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials

from api.http.auth import authenticated, bearer
from api.http.dependencies import ChatBody, JsonBody, Services, Svc
from api.http.gone_clients import DISCONNECTED
from api.http.routing import keyed_router
from api.http.threads import work_for
from api.routes.inference import ANSWER, BODY, CHAT
from api.transfer import chat_answer, completion_answer
from api.wire.chat_request import ChatCompletion, parse_chat_completion
from api.wire.completion_request import Completion, parse_completion
from ft_service.agents.open_rollouts import (
    CLIENT_GONE,
    KEY_PREFIX,
    CallUnderWay,
    OpenRollout,
    is_over,
    when_served,
)
from ft_service.errors import FtError, SpecError

_SAMPLING = ("temperature", "top_p", "seed")
"""Parameters that the job decides."""


async def _opened(
    rollout_id: str,
    request: Request,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)],
    services: Svc,
) -> OpenRollout:
    """Return the rollout that a key opens.

    Raises AuthError for a key that opens none, NotFoundError for another key, also one of the API.
    """
    key = "" if credentials is None else credentials.credentials
    if not key.startswith(KEY_PREFIX):
        await authenticated(request, credentials, services)
        raise is_over(rollout_id)
    rollout = services.rollouts.find(rollout_id, key)
    work_for(rollout.project_id)
    return rollout


Opened = Annotated[OpenRollout, Depends(_opened)]

router = keyed_router("/v1/rollouts", "rollouts", checked_by=_opened)


@dataclass(frozen=True)
class _Asked:
    """A call as its body asks for it."""

    order: dict[str, Any]
    """For the preview's process."""
    messages: Sequence[Any] | None
    """None: it is a text."""
    fields: Completion | ChatCompletion
    answer: Callable[[Sequence[chat_answer.Part]], Response]

    @property
    def sampling(self) -> dict[str, Any]:
        """Parameters that it gives, and the job decides."""
        given = self.fields.model_fields_set
        return {name: getattr(self.fields, name) for name in _SAMPLING if name in given}


@router.post(
    f"/{{rollout_id}}{CHAT}",
    openapi_extra=BODY,
    response_class=StreamingResponse,
    responses=ANSWER,
)
async def create(request: Request, body: ChatBody, rollout: Opened, services: Svc) -> Response:
    """Not in OpenAI's API. Answer an agent by the weights that its rollout is sampled from, with
    the key that the rollout was begun with. `model` may be any; how answers are drawn is the job's.
    An answer is sent when it is whole, also as a stream. Calls beyond the environment's budget are
    refused with the codes `rollout_turns_used` and `rollout_tokens_used`.
    """
    return await _called(request, rollout, services, lambda: _chat(body))


@router.post(
    "/{rollout_id}/completions",
    openapi_extra=BODY,
    response_class=StreamingResponse,
    responses=ANSWER,
)
async def create_completion(
    request: Request, body: JsonBody, rollout: Opened, services: Svc
) -> Response:
    """Not in OpenAI's API. As chat completions, for an agent that renders its own prompts: a text,
    or its tokens. `return_token_ids` has the tokens that were read and drawn in the answer, by
    which the next prompt can begin with them.
    """
    return await _called(request, rollout, services, lambda: _text(body))


async def _called(
    request: Request, rollout: OpenRollout, services: Services, parse: Callable[[], _Asked]
) -> Response:
    """Answer a call and record it. Raises FtError, which is counted."""
    try:
        asked = parse()
        call = rollout.begin(asked.order, asked.messages, asked.sampling)
    except FtError as error:
        rollout.refuse(error.code)
        raise
    try:
        parts = await _answered(request, rollout, call, services)
        if parts is None:  # counted, since it has cost as much as one that was answered
            rollout.refuse(CLIENT_GONE)
            return Response(status_code=DISCONNECTED)
        rollout.end(call, parts)
    except FtError as error:
        rollout.refuse(error.code)
        raise
    finally:
        rollout.drop(call)
    return asked.answer(parts)


def _chat(body: Any) -> _Asked:
    """Raises SpecError."""
    completion = parse_chat_completion(_named(body))
    _require_one(completion.n)
    if completion.shows_images:
        raise SpecError(
            "messages: images are not learned from in a rollout. Leave them out.",
            param="messages",
            code="no_images",
        )
    answer = partial(chat_answer.whole, completion)
    return _Asked(completion.order(None), completion.messages, completion, answer)


def _text(body: Any) -> _Asked:
    """Raises SpecError."""
    completion = parse_completion(_named(body))
    _require_one(completion.n)
    if completion.echo:
        raise SpecError(
            "echo = true: a call of a rollout answers with what is sampled. Leave it out.",
            param="echo",
            code="unsupported_parameter",
        )
    prompt, *others = completion.prompts
    if others:
        raise SpecError(
            f"prompt: {len(completion.prompts)} prompts, and a call of a rollout has one. Send as "
            "many calls.",
            param="prompt",
        )
    return _Asked(
        completion.order(prompt, None),
        None,
        completion,
        lambda parts: completion_answer.whole(completion, [parts]),
    )


def _named(body: Any) -> dict[str, Any]:
    """A body with a model. Raises SpecError."""
    if not isinstance(body, dict):
        raise SpecError("The body must be an object.")
    return {**body, "model": body.get("model") or ""}


def _require_one(n: int) -> None:
    if n != 1:
        raise SpecError(
            f"n = {n}: a call of a rollout has one answer. Send as many calls.", param="n"
        )


async def _answered(
    request: Request, rollout: OpenRollout, call: CallUnderWay, services: Services
) -> Sequence[chat_answer.Part] | None:
    """Return all parts of the answer; None if the caller has disconnected.

    While the sampler has no place for it, the call waits, until the rollout is over. Raises
    FtError, NotFoundError if it is.
    """
    preview = services.preview
    assert preview is not None, "where rollouts are opened, the preview samples"
    model = rollout.model.model

    def submit(deliver: chat_answer.Deliver) -> chat_answer.Ticket:
        return preview.submit(
            model,
            call.order,
            call.told(deliver),
            project_id=rollout.project_id,
            on_processor=True,
        )

    return await when_served(rollout, lambda: chat_answer.parts_of(request, preview, submit))
