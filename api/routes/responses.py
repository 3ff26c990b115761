"""OpenAI's Responses API: a chat completion, asked for and answered in other words."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from api.http.auth import Caller
from api.http.closing_response import ClosingResponse
from api.http.dependencies import ChatBody, Svc
from api.http.routing import keyed_router
from api.http.threads import parsed_in_turn
from api.routes import inference
from api.transfer.answer_chunks import chunks_of
from api.wire.response_events import ResponseEvents
from api.wire.response_request import parse_response_request
from ft_service.errors import SpecError
from ft_service.wording import kind

router = keyed_router("/v1", "inference")


@router.post(
    "/responses",
    openapi_extra=inference.BODY,
    response_class=StreamingResponse,
    responses=inference.ANSWER,
)
async def create_response(
    request: Request, body: ChatBody, caller: Caller, services: Svc
) -> Response:
    """Answer a text or items (messages, calls of functions, their results) with a base or a tuned
    model; as events if `stream` is true. Models and servers are those of chat completions, which
    answer it. Nothing is kept: `store` is false, and a conversation goes on by sending its items
    again.
    """
    events, chat = await parsed_in_turn(_read, body)
    try:
        answered = await inference.create(request, chat, caller, services)
    except SpecError as error:
        raise events.request.in_own_places(error) from None
    if answered.status_code != 200:
        return answered
    if not isinstance(answered, ClosingResponse):
        return JSONResponse(events.whole(json.loads(bytes(answered.body))))
    chunks = chunks_of(answered.body_iterator)
    return ClosingResponse(_events(events, chunks), answered.close, media_type="text/event-stream")


def _read(body: Any) -> tuple[ResponseEvents, dict[str, Any]]:
    """Return an answer that has not begun, and the chat completion that gives it. Raises
    SpecError.
    """
    if not isinstance(body, dict):
        raise SpecError("The body must be an object with model and input.", param="input")
    asked = parse_response_request(body)
    metadata = body.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise SpecError(f"metadata: must be an object, not {kind(metadata)}.", param="metadata")
    return ResponseEvents(asked, metadata), asked.chat()


async def _events(
    events: ResponseEvents, chunks: AsyncIterator[Mapping[str, Any]]
) -> AsyncIterator[str]:
    for event in events.begin():
        yield _sent(event)
    async for chunk in chunks:
        if error := chunk.get("error"):
            for event in events.fail(error.get("message", "")):
                yield _sent(event)
            return
        for event in events.take(chunk):
            yield _sent(event)
    for event in events.end():
        yield _sent(event)


def _sent(event: Mapping[str, Any]) -> str:
    return f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n"
