"""Chat completions that were kept by `store: true`, and what is said about them. A project sees its
own alone.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Query, Request
from pydantic import BaseModel, Field

from api.http.auth import Caller
from api.http.dependencies import After, Cursor, JsonBody, Svc, body_schema, parse_body
from api.http.metadata_filter import metadata_filter
from api.http.routing import keyed_router
from api.wire.chat_views import (
    ChatFeedback,
    ChatMessageView,
    ChatMetadata,
    ChatView,
    DeletedChatView,
    chat_view,
    message_views,
)
from api.wire.views import ListView, list_view, page_of
from ft_service.store.chats import ChatFilter

router = keyed_router("/v1/chat/completions", "inference")

OrderBy = Literal["asc", "desc"]


class ChatQuery(BaseModel):
    """Filters of a list of chats."""

    after: Cursor = None
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Annotated[OrderBy, Field(description="By time; asc: the oldest first.")] = "asc"
    model: Annotated[str | None, Field(description="Only answers of this model.")] = None
    metadata: Annotated[
        str | None,
        Field(
            description="`metadata[key]=value`: only chats with this pair. `metadata=null`: only "
            "chats without any."
        ),
    ] = None
    since: Annotated[
        float | None, Field(ge=0, description="Only chats from this time on, in seconds.")
    ] = None
    label: Annotated[bool | None, Field(description="Only chats whose answer has this label.")] = (
        None
    )
    include: Annotated[
        list[Literal["messages"]],
        Field(max_length=1, description="messages: with those of the requests."),
    ] = []


@router.get("", response_model=ListView[ChatView])
def list_chats(
    request: Request, caller: Caller, services: Svc, query: Annotated[ChatQuery, Query()]
) -> Any:
    """List the chats that are kept, the oldest first. Not in OpenAI's API: `since`, `label`, and
    `include=messages`. A page may have fewer than `limit`, as `has_more` says.
    """
    which = ChatFilter(
        model=query.model, since=query.since, label=query.label, pairs=metadata_filter(request)
    )
    page = services.store.chats.list_chats(
        caller.project_id,
        which,
        after=query.after,
        limit=query.limit,
        newest_first=query.order == "desc",
    )
    with_messages = "messages" in query.include
    views = [chat_view(chat, with_messages=with_messages) for chat in page.data]
    return list_view(views, page.has_more)


@router.get("/{chat_id}")
def retrieve(chat_id: str, caller: Caller, services: Svc) -> ChatView:
    return chat_view(services.store.chats.get_chat(caller.project_id, chat_id))


@router.get("/{chat_id}/messages", response_model=ListView[ChatMessageView])
def list_messages(
    chat_id: str,
    caller: Caller,
    services: Svc,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: OrderBy = "asc",
) -> Any:
    """List the messages of the request that a chat answers."""
    views = message_views(services.store.chats.get_chat(caller.project_id, chat_id))
    return page_of(views, after, limit, newest_first=order == "desc")


@router.post("/{chat_id}", openapi_extra=body_schema(ChatMetadata))
def update(chat_id: str, body: JsonBody, caller: Caller, services: Svc) -> ChatView:
    """Replace the metadata of a chat that is kept."""
    pairs = parse_body(body, ChatMetadata).metadata or None
    chats = services.store.chats
    return chat_view(chats.change_chat(caller.project_id, chat_id, {"pairs": pairs}))


@router.delete("/{chat_id}")
def delete(chat_id: str, caller: Caller, services: Svc) -> DeletedChatView:
    services.store.chats.delete_chat(caller.project_id, chat_id)
    return DeletedChatView(id=chat_id)


@router.post("/{chat_id}/feedback", openapi_extra=body_schema(ChatFeedback))
def give_feedback(chat_id: str, body: JsonBody, caller: Caller, services: Svc) -> ChatView:
    """Not in OpenAI's API. Say of a chat that is kept whether its answer is a good one, and what
    would be better; `ft data from-chats` makes data of it.
    """
    given = parse_body(body, ChatFeedback)
    chats = services.store.chats
    changes = given.changes(chats.get_chat(caller.project_id, chat_id))
    return chat_view(chats.change_chat(caller.project_id, chat_id, changes))
