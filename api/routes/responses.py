"""OpenAI's Responses API: a chat completion, asked for and answered in other words, and kept if its
caller says so.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from api.http.auth import Caller
from api.http.closing_response import ClosingResponse
from api.http.dependencies import After, ChatBody, Services, Svc, require_sendable
from api.http.routing import keyed_router
from api.http.threads import in_thread, parsed_in_turn
from api.routes import inference
from api.transfer.answer_chunks import chunks_of
from api.transfer.kept_chat import ChatKeeper, ChatToKeep, most_bytes, require_keeping
from api.wire.response_events import Event, ResponseEvents
from api.wire.response_request import EARLIER, SEND_ALL, Items, parse_response_request
from api.wire.response_views import (
    DeletedResponseView,
    ResponseItemView,
    ResponseView,
    item_views,
    items_after,
    items_to_keep,
    response_view,
)
from api.wire.views import ListView, page_of
from ft_service.data.line_errors import LineError, json_of
from ft_service.errors import FtError, NotFoundError, SpecError
from ft_service.settings import Settings
from ft_service.store.records import Principal
from ft_service.wording import kind, shown_value

router = keyed_router("/v1/responses", "inference")

_CUT_OFF = "The answer ended before it was whole, and is not kept. Try again."


@router.post(
    "",
    openapi_extra=inference.BODY,
    response_class=StreamingResponse,
    responses=inference.ANSWER,
)
async def create_response(
    request: Request, body: ChatBody, caller: Caller, services: Svc
) -> Response:
    """Answer a text or items (messages, calls of functions, their results) with a base or a tuned
    model; as events if `stream` is true. Models and servers are those of chat completions, which
    answer it. With `store` the response is kept, if the operator allows it (FT_STORED_CHATS_DAYS);
    without, nothing is. With `previous_response_id` the input is said after the whole conversation
    of a response that is kept; `instructions` are each request's own.
    """
    earlier = await _earlier(body, caller, services)
    asked = await parsed_in_turn(_read, body, earlier, services.settings)
    events = asked.events
    try:
        answered = await inference.create(request, asked.chat, caller, services)
    except SpecError as error:
        raise events.request.in_own_places(error, earlier) from None
    if answered.status_code != 200:
        return answered
    keeper = asked.to_keep and ChatKeeper(
        asked.to_keep, events.request.model, caller.project_id, services.settings, services.store
    )
    if isinstance(answered, ClosingResponse):
        told = _events(events, chunks_of(answered.body_iterator), keeper)
        return ClosingResponse(told, answered.close, media_type="text/event-stream")
    response = events.whole(json.loads(bytes(answered.body)))
    if keeper is not None:
        await keeper.keep(response)
    return JSONResponse(response)


@router.get("/{response_id}")
def retrieve(response_id: str, caller: Caller, services: Svc) -> ResponseView:
    """Show a response that is kept."""
    return response_view(services.store.chats.get_chat(caller.project_id, response_id, "response"))


@router.delete("/{response_id}")
def delete(response_id: str, caller: Caller, services: Svc) -> DeletedResponseView:
    """Remove a response that is kept. Responses that went on from it hold what was said before."""
    services.store.chats.delete_chat(caller.project_id, response_id, "response")
    return DeletedResponseView(id=response_id)


@router.get("/{response_id}/input_items", response_model=ListView[ResponseItemView])
def list_input_items(
    response_id: str,
    caller: Caller,
    services: Svc,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Any:
    """List the items that a response answers, of its whole conversation, the newest first."""
    kept = services.store.chats.get_chat(caller.project_id, response_id, "response")
    return page_of(item_views(kept), after, limit, newest_first=order == "desc")


@dataclass(frozen=True)
class _Asked:
    """A request that has been read."""

    events: ResponseEvents
    """Its answer, which has not begun."""
    chat: dict[str, Any]
    """The chat completion that gives it."""
    to_keep: ChatToKeep | None


async def _earlier(body: Any, caller: Principal, services: Services) -> Items:
    """Return the items of the conversation that a body goes on with. Raises SpecError."""
    name = body.get(EARLIER) if isinstance(body, dict) else None
    if not isinstance(name, str):
        return ()
    try:
        kept = await in_thread(services.store.chats.get_chat, caller.project_id, name, "response")
    except NotFoundError:
        raise SpecError(
            f"{EARLIER} = {shown_value(name)}: this project has kept no such response. Kept are "
            f"those with store: true, until FT_STORED_CHATS_DAYS are over. {SEND_ALL}.",
            param=EARLIER,
            code="previous_response_not_found",
        ) from None
    return items_after(kept)


def _read(body: Any, earlier: Items, settings: Settings) -> _Asked:
    """Read a body. Raises SpecError."""
    if not isinstance(body, dict):
        raise SpecError("The body must be an object with model and input.", param="input")
    asked = parse_response_request(body)
    events = ResponseEvents(asked, _metadata(body))
    if not earlier and not asked.store:
        return _Asked(events, asked.chat(), None)
    if asked.store:
        require_keeping(settings)
    chat = asked.chat(earlier)
    items = items_to_keep(asked, earlier)
    if earlier:
        require_sendable(items, EARLIER)
    return _Asked(events, chat, _to_keep(events, items, settings) if asked.store else None)


def _metadata(body: Mapping[str, Any]) -> dict[str, Any]:
    metadata = body.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise SpecError(f"metadata: must be an object, not {kind(metadata)}.", param="metadata")
    try:
        return json_of(metadata, "metadata")
    except LineError as error:
        raise SpecError(f"{error.field}: {error.reason}.", param="metadata") from None


def _to_keep(events: ResponseEvents, items: list[dict[str, Any]], settings: Settings) -> ChatToKeep:
    """Return what is kept of a request. Raises SpecError for too much."""
    most = most_bytes(settings)
    to_keep = ChatToKeep(events.id, items, None, None, most, kind="response")
    to_keep.size(events.response("in_progress"))
    return to_keep


async def _events(
    events: ResponseEvents, chunks: AsyncIterator[Mapping[str, Any]], keeper: ChatKeeper | None
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
    for event in events.end() if keeper is None else await _kept(events, keeper):
        yield _sent(event)


async def _kept(events: ResponseEvents, keeper: ChatKeeper) -> list[Event]:
    """Return the events after the last chunk, once the answer is kept."""
    if not events.is_whole:
        return events.fail(_CUT_OFF)
    *told, last = events.end()
    try:
        await keeper.keep(last["response"])
    except FtError as error:
        return [*told, *events.fail(error.message)]
    return [*told, last]


def _sent(event: Mapping[str, Any]) -> str:
    return f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n"
