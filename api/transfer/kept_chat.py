"""Chat completions and responses that their callers asked to keep (`store: true`): what is kept of
a request, and a chat's answer on the way to the client.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import Response
from fastapi.responses import JSONResponse

from api.http.closing_response import ClosingResponse
from api.http.dependencies import parse_body
from api.http.threads import in_thread
from api.transfer.answer_chunks import END, chunks_of
from api.wire.chat_views import ChatMetadata
from api.wire.error_views import error_body
from ft_service.data.chat_line import MAX_LINE_BYTES
from ft_service.errors import FtError, SpecError, UnavailableError
from ft_service.ids import new_id
from ft_service.logs import fields
from ft_service.settings import Settings
from ft_service.store.chats import ChatKind, StoredChat
from ft_service.store.sql import Store
from ft_service.wording import counted

log = logging.getLogger(__name__)

DAY_SECONDS = 86_400.0
LEAST_CHATS = 16
"""A chat takes at most this part of its project's room."""


def require_keeping(settings: Settings) -> None:
    """Raise SpecError if nothing is kept here."""
    if settings.stored_chats_days is None:
        message = (
            "store: chats and responses are not kept here; whoever runs the service allows it by "
            "FT_STORED_CHATS_DAYS. Leave it out."
        )
        raise SpecError(message, param="store", code="unsupported_parameter")


def most_bytes(settings: Settings) -> int:
    """Bytes that one chat may have with its answer."""
    return min(MAX_LINE_BYTES, settings.stored_chats_bytes // LEAST_CHATS)


@dataclass(frozen=True)
class ChatToKeep:
    """A request whose answer is to be kept."""

    id: str
    messages: list[Any]
    tools: list[Any] | None
    metadata: dict[str, str] | None
    most: int
    """Bytes that it may have with its answer."""
    kind: ChatKind = "chat"

    @classmethod
    def of(cls, body: Any, settings: Settings) -> ChatToKeep | None:
        """What a chat completion's body asks to keep; None: nothing. Takes `store`, and the
        metadata of what is kept, out of the body: they change no answer.

        Raises SpecError if it cannot be kept.
        """
        if not isinstance(body, dict) or body.get("store") is not True:
            return None
        require_keeping(settings)
        messages = body.get("messages")
        tools = body.get("tools")
        kept = cls(
            new_id("chatcmpl-"),
            messages if isinstance(messages, list) else [],
            tools if isinstance(tools, list) and tools else None,
            parse_body({"metadata": body.get("metadata")}, ChatMetadata).metadata or None,
            most_bytes(settings),
        )
        kept.size({})
        del body["store"]
        body.pop("metadata", None)
        return kept

    def size(self, answer: Mapping[str, Any]) -> int:
        """Bytes of the chat with an answer. Raises SpecError if they are too many."""
        parts = (self.messages, self.tools, answer)
        written = (json.dumps(part, ensure_ascii=False) for part in parts)
        size = sum(len(text.encode(errors="surrogatepass")) for text in written)
        if size > self.most:
            raise SpecError(
                f"store: the {self.kind} has {size:,} bytes, and one that is kept has at most "
                f"{self.most:,}. Leave store out, or send less.",
                param="store",
                code="too_large",
            )
        return size


@dataclass(frozen=True)
class ChatKeeper:
    """Keeps the answer to one request."""

    chat: ChatToKeep
    model: str
    project_id: str
    settings: Settings
    store: Store

    async def kept(self, answered: Response) -> Response:
        """The answer with the id under which it is kept, once it is: of a stream, the last event
        comes after that. An answer that is none, or not whole, is passed on. Raises SpecError,
        UnavailableError if it could not be kept, but a stream then ends with the error.
        """
        if answered.status_code != 200:
            return answered
        if isinstance(answered, ClosingResponse):
            events = self._events(answered.body_iterator)
            return ClosingResponse(events, answered.close, media_type="text/event-stream")
        answer = {**_object(bytes(answered.body)), "id": self.chat.id}
        await self.keep(answer)
        return JSONResponse(answer)

    async def _events(self, parts: Any) -> AsyncIterator[str]:
        answer = ChunkedAnswer()
        failed = False
        async for chunk in chunks_of(parts):
            failed = failed or "error" in chunk
            sent = chunk if "error" in chunk else {**chunk, "id": self.chat.id}
            answer.take(sent)
            yield _event(sent)
        if failed or not answer.is_whole:
            return
        try:
            await self.keep(answer.whole())
        except FtError as error:
            yield _event(error_body(self.settings, error))
            return
        yield f"data: {END}\n\n"

    async def keep(self, answer: dict[str, Any]) -> None:
        """Keep a whole answer. Raises SpecError, UnavailableError."""
        await in_thread(self._keep, answer)

    def _keep(self, answer: dict[str, Any]) -> None:
        chat = self.chat
        assert self.settings.stored_chats_days is not None, "else the request was refused"
        stored = StoredChat(
            id=chat.id,
            project_id=self.project_id,
            model=self.model,
            messages=chat.messages,
            tools=chat.tools,
            answer=answer,
            pairs=chat.metadata,
            bytes=chat.size(answer),
            kind=chat.kind,
        )
        removed = self.store.chats.add_chat(
            stored,
            seconds=self.settings.stored_chats_days * DAY_SECONDS,
            room=self.settings.stored_chats_bytes,
        )
        if removed:
            log.info(
                "%s of project %s went: FT_STORED_CHATS_BYTES is full",
                counted(removed, "kept chat"),
                self.project_id,
                extra=fields(project_id=self.project_id, chats=removed),
            )


@dataclass
class ChunkedAnswer:
    """A chat completion put together from the chunks of its stream."""

    head: dict[str, Any] = field(default_factory=dict)
    usage: Any = None
    choices: dict[int, dict[str, Any]] = field(default_factory=dict)

    def take(self, chunk: Mapping[str, Any]) -> None:
        named = ("id", "created", "model", "system_fingerprint", "service_tier")
        self.head |= {name: chunk[name] for name in named if name in chunk}
        self.usage = chunk.get("usage") or self.usage
        for part in chunk.get("choices") or ():
            self._take_choice(part)

    def _take_choice(self, part: Mapping[str, Any]) -> None:
        index = part.get("index", 0)
        message: dict[str, Any] = {"role": "assistant", "content": None}
        empty = {"index": index, "message": message, "logprobs": None, "finish_reason": None}
        choice = self.choices.setdefault(index, empty)
        _add_delta(choice["message"], part.get("delta") or {})
        choice["finish_reason"] = part.get("finish_reason") or choice["finish_reason"]
        if found := part.get("logprobs"):
            known = choice["logprobs"] or {"content": [], "refusal": None}
            content = [*(known["content"] or ()), *(found.get("content") or ())]
            choice["logprobs"] = {**known, "content": content}

    @property
    def is_whole(self) -> bool:
        """Whether every choice has ended."""
        return bool(self.choices) and all(
            choice["finish_reason"] is not None for choice in self.choices.values()
        )

    def whole(self) -> dict[str, Any]:
        choices = [self.choices[index] for index in sorted(self.choices)]
        usage = {"usage": self.usage} if self.usage else {}
        return {**self.head, "object": "chat.completion", "choices": choices, **usage}


def _add_delta(message: dict[str, Any], delta: Mapping[str, Any]) -> None:
    """Add a delta to a message: texts grow, and calls by their index."""
    for name, value in delta.items():
        if name == "tool_calls":
            for part in value or ():
                _add_call(message.setdefault("tool_calls", []), part)
        elif name != "role" and value is not None:
            known = message.get(name)
            both = isinstance(known, str) and isinstance(value, str)
            message[name] = f"{known}{value}" if both else value


def _add_call(calls: list[dict[str, Any]], part: Mapping[str, Any]) -> None:
    place = part.get("index", len(calls))
    if place >= len(calls):
        function = {"name": "", "arguments": ""}
        calls.append({"id": "", "type": "function", "function": function})
    call = calls[min(place, len(calls) - 1)]
    call["id"] = part.get("id") or call["id"]
    for name, text in (part.get("function") or {}).items():
        if name in ("name", "arguments") and text:
            call["function"][name] += text


def _object(body: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(body)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise UnavailableError("The inference server's answer is no JSON object.")
    return answer


def _event(body: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
