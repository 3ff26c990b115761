"""Chat completions of rollouts: an agent's calls of the model that is being trained, which are
recorded token for token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import Depends, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials

from api.http.auth import authenticated, bearer
from api.http.dependencies import ChatBody, Services, Svc
from api.http.gone_clients import DISCONNECTED
from api.http.routing import keyed_router
from api.http.threads import work_for
from api.routes.inference import ANSWER, BODY
from api.transfer import chat_answer
from api.wire.chat_request import ChatCompletion, parse_chat_completion
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


@router.post(
    "/{rollout_id}/chat/completions",
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
    try:
        completion = _parsed(body)
        sampling = {
            name: getattr(completion, name)
            for name in _SAMPLING
            if name in completion.model_fields_set
        }
        call = rollout.begin(completion.order(None), completion.messages, sampling)
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
    return chat_answer.whole(completion, parts)


def _parsed(body: Any) -> ChatCompletion:
    """Raises SpecError."""
    if not isinstance(body, dict):
        raise SpecError("The body must be an object.")
    completion = parse_chat_completion({**body, "model": body.get("model") or ""})
    if completion.n != 1:
        raise SpecError(
            f"n = {completion.n}: a call of a rollout has one answer. Send as many calls.",
            param="n",
        )
    if completion.shows_images:
        raise SpecError(
            "messages: images are not learned from in a rollout. Leave them out.",
            param="messages",
            code="no_images",
        )
    return completion


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
            model, call.order, deliver, project_id=rollout.project_id, on_processor=True
        )

    return await when_served(rollout, lambda: chat_answer.parts_of(request, preview, submit))
