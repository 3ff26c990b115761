"""Responses that are kept, as OpenAI's API has them, and the items of their conversations. Pure."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict

from api.wire.response_request import Items, ResponseRequest
from api.wire.views import Deleted, Seconds, View
from ft_service.ids import new_id
from ft_service.store.chats import StoredChat

_PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
}
"""Types of items → how their ids begin."""


class ResponseView(View):
    """A response that is kept, with the fields that its request was answered with."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"] = "response"
    status: str
    model: str
    output: list[dict[str, Any]]

    expires_at: Seconds
    """When it is removed."""


class ResponseItemView(View):
    """An item of a conversation, with the fields of its type."""

    model_config = ConfigDict(extra="allow")

    id: str
    type: str


class DeletedResponseView(Deleted):
    object: Literal["response"] = "response"


def response_view(kept: StoredChat) -> ResponseView:
    return ResponseView.model_validate({**kept.answer, "expires_at": kept.expires_at})


def item_views(kept: StoredChat) -> list[ResponseItemView]:
    """The items that a response answers, its whole conversation's."""
    return [ResponseItemView.model_validate(item) for item in kept.messages]


def items_after(kept: StoredChat) -> list[dict[str, Any]]:
    """The items of the conversation that goes on with a response: what it answers and its output,
    without log-probabilities.
    """
    return [*kept.messages, *(_as_said(item) for item in kept.answer["output"])]


def items_to_keep(request: ResponseRequest, earlier: Items) -> list[dict[str, Any]]:
    """The items of a request that has been read, after the earlier ones, each with a type and an id
    of its own.
    """
    given = request.input
    said = [{"role": "user", "content": given}] if isinstance(given, str) else given
    known = {item["id"] for item in earlier}
    kept = list(earlier)
    for item in said:
        kept.append(_with_id(item, known))
        known.add(kept[-1]["id"])
    return kept


def _with_id(item: dict[str, Any], known: set[str]) -> dict[str, Any]:
    type = item.get("type") or "message"
    own = item.get("id")
    is_own = isinstance(own, str) and own not in known
    named = {**item, "type": type, "id": own if is_own else new_id(_PREFIXES[type])}
    content = item.get("content")
    if type == "message" and isinstance(content, str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        named["content"] = [{"type": part, "text": content}]
    return named


def _as_said(item: dict[str, Any]) -> dict[str, Any]:
    if item["type"] != "message":
        return item
    return {**item, "content": [{**part, "logprobs": []} for part in item["content"]]}
