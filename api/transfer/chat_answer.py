"""The preview's answers in OpenAI's shapes: one object, or server-sent events while they are
made.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from api.http.closing_response import ClosingResponse
from api.http.gone_clients import DISCONNECTED
from api.http.threads import in_thread
from api.wire.chat_request import ChatCompletion
from api.wire.error_views import error_body
from ft_service.ids import new_id
from ft_service.serving.preview import Deliver, Preview, Ticket
from ft_service.settings import Settings

GONE_POLL_SECONDS = 1.0
"""Interval of the check whether the caller of an answer that has not begun is still connected."""

DONE = "data: [DONE]\n\n"
"""Event that ends a stream."""

Submit = Callable[[Deliver], Ticket]
Part = dict[str, Any]


async def answer(
    request: Request, completion: ChatCompletion, preview: Preview, submit: Submit
) -> Response:
    """Return the answer to a request.

    Raises the FtError that it ends with, unless a stream has begun.

    `submit`: sends the request to the preview. It is cancelled if the caller disconnects.
    """
    parts: asyncio.Queue[Part] = asyncio.Queue()
    ticket = await in_thread(submit, _into(parts))
    shape = _Shape(completion)
    streams = False
    try:
        while shape.completion_tokens is None:
            part = await _next(parts, request)
            if part is None:
                return Response(status_code=DISCONNECTED)
            shape.take(part)
            if completion.stream:  # the first part has come, so there will be an answer
                streams = True

                async def close() -> None:
                    preview.cancel(ticket)

                events = _events(request.app.state.services.settings, shape, parts)
                return ClosingResponse(events, close, media_type="text/event-stream")
        return JSONResponse(shape.whole())
    finally:
        if not streams:
            preview.cancel(ticket)


def whole(completion: ChatCompletion, parts: Sequence[Part]) -> Response:
    """Return the answer to a request whose parts have all come: one object, or server-sent events
    at once.
    """
    shape = _Shape(completion)
    if not completion.stream:
        for part in parts:
            shape.take(part)
        return JSONResponse(shape.whole())
    begins = [shape.chunk(0, {"role": "assistant", "content": ""})]
    chunks = [chunk for part in parts for chunk in _counted(shape, part)]
    return all_events([*begins, *chunks])


def all_events(bodies: Sequence[dict[str, Any]]) -> Response:
    """Return a stream whose events are all there."""
    events = "".join(map(_event, bodies)) + DONE
    return Response(events, media_type="text/event-stream")


def _counted(shape: _Shape, part: Part) -> list[dict[str, Any]]:
    """Return the chunks of a part, of which the first one says how long the prompt is."""
    if part["kind"] == "begun":
        shape.take(part)
    return shape.chunks(part)


async def parts_of(request: Request, preview: Preview, submit: Submit) -> list[Part] | None:
    """Return all parts of an answer, the last of which is `done`; None if the caller has
    disconnected. Raises the FtError that the answer ends with.
    """
    queued: asyncio.Queue[Part] = asyncio.Queue()
    ticket = await in_thread(submit, _into(queued))
    parts: list[Part] = []
    try:
        while not parts or parts[-1]["kind"] != "done":
            part = await _next(queued, request)
            if part is None:
                return None
            parts.append(part)
        return parts
    finally:
        preview.cancel(ticket)


def _into(parts: asyncio.Queue[Part]) -> Deliver:
    """Return a function that puts a part into a queue of this loop, from any thread."""
    loop = asyncio.get_running_loop()

    def deliver(part: Part) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(parts.put_nowait, part)

    return deliver


async def _next(parts: asyncio.Queue[Part], request: Request) -> Part | None:
    """Return the next part; None if the caller has disconnected.

    Raises the error in a part that holds one.
    """
    while True:
        try:
            part = await asyncio.wait_for(parts.get(), GONE_POLL_SECONDS)
        except TimeoutError:
            if await request.is_disconnected():
                return None
            continue
        if part["kind"] == "error":
            raise part["error"]
        return part


async def _events(
    settings: Settings, shape: _Shape, parts: asyncio.Queue[Part]
) -> AsyncIterator[str]:
    """Yield server-sent events.

    An error is an event of its own, after which the stream ends without `[DONE]`.
    """
    for index in range(shape.request.n):
        yield _event(shape.chunk(index, {"role": "assistant", "content": ""}))
    while True:
        part = await parts.get()
        if part["kind"] == "error":
            yield _event(error_body(settings, part["error"]))
            return
        for chunk in shape.chunks(part):
            yield _event(chunk)
        if part["kind"] == "done":
            yield DONE
            return


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


@dataclass
class _Shape:
    """One answer in OpenAI's format, built from the preview's parts."""

    request: ChatCompletion
    id: str = field(default_factory=lambda: new_id("chatcmpl-"))
    created: int = field(default_factory=lambda: int(time.time()))
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    """None until the answer is complete."""
    _texts: dict[int, str] = field(default_factory=dict)
    _reasonings: dict[int, str] = field(default_factory=dict)
    _logprobs: dict[int, list[Any]] = field(default_factory=dict)
    _ends: dict[int, Part] = field(default_factory=dict)

    def take(self, part: Part) -> None:
        """Add a part to an answer that is sent as one object."""
        match part["kind"]:
            case "begun":
                self.prompt_tokens = part["prompt_tokens"]
            case "text":
                self._texts[part["index"]] = self._texts.get(part["index"], "") + part["text"]
                self._reasonings[part["index"]] = self._reasonings.get(
                    part["index"], ""
                ) + part.get("reasoning", "")
                self._logprobs.setdefault(part["index"], []).extend(part.get("logprobs", ()))
            case "end":
                self._ends[part["index"]] = part
            case "done":
                self.completion_tokens = part["completion_tokens"]

    def whole(self) -> dict[str, Any]:
        choices = []
        for index in range(self.request.n):
            end = self._ends[index]
            message: dict[str, Any] = {
                "role": "assistant",
                "content": self._texts.get(index, ""),
                "refusal": None,
            }
            if reasoning := self._reasonings.get(index):
                message["reasoning_content"] = reasoning
            if end["calls"]:
                message["content"] = message["content"] or None
                message["tool_calls"] = [_call(call) for call in end["calls"]]
            logprobs = (
                {"content": self._logprobs.get(index, []), "refusal": None}
                if self.request.logprobs
                else None
            )
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": logprobs,
                    "finish_reason": end["reason"],
                }
            )
        return {**self._head("chat.completion"), "choices": choices, "usage": self._usage()}

    def chunks(self, part: Part) -> list[dict[str, Any]]:
        """Return the chunks of a stream for a part."""
        match part["kind"]:
            case "text":
                logprobs = (
                    {"content": part.get("logprobs", []), "refusal": None}
                    if self.request.logprobs
                    else None
                )
                said = {"reasoning_content": part.get("reasoning"), "content": part["text"]}
                delta = {name: words for name, words in said.items() if words} or {"content": ""}
                return [self.chunk(part["index"], delta, logprobs=logprobs)]
            case "end":
                calls = [
                    {"index": number, **_call(call)} for number, call in enumerate(part["calls"])
                ]
                called = [self.chunk(part["index"], {"tool_calls": calls})] if calls else []
                return [*called, self.chunk(part["index"], {}, finish_reason=part["reason"])]
            case "done" if self.request.counts_usage:
                self.completion_tokens = part["completion_tokens"]
                return [
                    {**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage()}
                ]
        return []

    def chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        usage = {"usage": None} if self.request.counts_usage else {}
        return {**self._head("chat.completion.chunk"), "choices": [choice], **usage}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.request.model}

    def _usage(self) -> dict[str, int]:
        completion = self.completion_tokens or 0
        total = self.prompt_tokens + completion
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": total,
        }


def _call(call: dict[str, Any]) -> dict[str, Any]:
    return {"id": new_id("call_"), "type": "function", "function": call}
