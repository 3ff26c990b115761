"""Chat completions that are kept, as OpenAI's API has them, and what is said about them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from api.wire.views import Deleted, Seconds, View
from ft_service.data.chat_line import parse_messages
from ft_service.data.line_errors import LineError
from ft_service.errors import SpecError
from ft_service.spec import Metadata, Strict
from ft_service.store.chats import StoredChat
from ft_service.wording import counted


class ChatMetadata(Strict):
    """Body of `POST /v1/chat/completions/{id}`."""

    metadata: Metadata | None
    """Up to 16 pairs, in place of the former ones; null: none."""


class ChatFeedback(Strict):
    """Body of `POST /v1/chat/completions/{id}/feedback`. What is left out stays as it is."""

    label: bool | None = None
    """Whether the answer is a good one; null: nobody says."""
    better: Annotated[str, Field(min_length=1)] | dict[str, Any] | None = None
    """A better answer: its text, or a message of the role assistant; null: there is none."""
    choice: Annotated[int, Field(ge=0)] = 0
    """Which of several answers label and better are about."""

    def changes(self, chat: StoredChat) -> dict[str, Any]:
        """What it changes of a chat. Raises SpecError."""
        if not self.model_fields_set:
            raise SpecError("feedback: give label, better or both.", param="label")
        answers = len(chat.answer.get("choices") or ())
        if self.choice >= answers:
            raise SpecError(
                f"choice = {self.choice}: the chat has {counted(answers, 'answer')}, numbered from "
                "0.",
                param="choice",
            )
        given = {name: getattr(self, name) for name in self.model_fields_set}
        if self.better is not None:
            given["better"] = _answer(self.better)
        return given


def _answer(better: str | dict[str, Any]) -> dict[str, Any]:
    """A better answer as a message. Raises SpecError for one that could not be learned."""
    message = {"role": "assistant", "content": better} if isinstance(better, str) else better
    if message.get("role") != "assistant":
        raise SpecError("better.role: must be 'assistant'.", param="better")
    try:
        parse_messages([message], "better")
    except LineError as error:
        place = error.field.replace("better.0", "better")
        raise SpecError(f"{place}: {error.reason}.", param="better") from None
    return message


class FeedbackView(View):
    """Not in OpenAI's API. What is said of an answer."""

    label: bool | None
    better: dict[str, Any] | None
    choice: int


class ChatView(View):
    """A chat completion that is kept."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: Seconds
    model: str
    choices: list[dict[str, Any]]
    usage: dict[str, Any] | None
    metadata: dict[str, str] | None
    tools: list[dict[str, Any]] | None

    expires_at: Seconds
    """When it is removed."""
    feedback: FeedbackView | None
    """null: nobody has said anything."""
    messages: list[dict[str, Any]] | None = None
    """Those of the request, in a list with `include=messages`."""


class ChatMessageView(View):
    """A message of a request."""

    id: str
    role: str
    content: str | None
    name: str | None = None
    content_parts: list[dict[str, Any]] | None = None
    """Of a message whose content is a list."""
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class DeletedChatView(Deleted):
    object: Literal["chat.completion.deleted"] = "chat.completion.deleted"


def chat_view(chat: StoredChat, *, with_messages: bool = False) -> ChatView:
    said = FeedbackView.of(chat)
    is_said = chat.label is not None or chat.better is not None
    return ChatView(
        id=chat.id,
        created=chat.created_at,  # pyright: ignore[reportArgumentType]
        model=chat.model,
        choices=chat.answer.get("choices") or [],
        usage=chat.answer.get("usage"),
        metadata=chat.pairs,
        tools=chat.tools,
        expires_at=chat.expires_at,  # pyright: ignore[reportArgumentType]
        feedback=said if is_said else None,
        messages=chat.messages if with_messages else None,
    )


def message_views(chat: StoredChat) -> list[ChatMessageView]:
    """The messages of a chat's request, with ids."""
    return [
        _message_view(f"{chat.id}-{number}", message)
        for number, message in enumerate(chat.messages)
    ]


def _message_view(message_id: str, message: dict[str, Any]) -> ChatMessageView:
    content = message.get("content")
    in_parts = isinstance(content, list)
    texts = [part.get("text", "") for part in content] if isinstance(content, list) else []
    return ChatMessageView(
        id=message_id,
        role=message.get("role", "user"),
        content="".join(texts) if in_parts else content,
        name=message.get("name"),
        content_parts=content if in_parts else None,
        tool_calls=message.get("tool_calls"),
        tool_call_id=message.get("tool_call_id"),
    )
