"""An answer of OpenAI's Responses API, as one object or as events, made from the chunks of a chat
completion. Pure.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from api.wire.response_request import ResponseRequest
from ft_service.ids import new_id

Event = dict[str, Any]
_INCOMPLETE: Mapping[str, str] = {
    "length": "max_output_tokens",
    "content_filter": "content_filter",
}
"""Why a chat's answer ended → why a response is incomplete."""


@dataclass
class ResponseEvents:
    """The events of an answer.

    Args:
        request: The request that is answered.
        metadata: The request's own, which the answer repeats.

    Example:
        >>> events = ResponseEvents(request)
        >>> told = [*events.begin(), *events.take(chunk), *events.end()]
    """

    request: ResponseRequest
    metadata: Mapping[str, Any] = field(default_factory=dict)
    id: str = field(default_factory=lambda: new_id("resp_"))
    created_at: int = field(default_factory=lambda: int(time.time()))
    _output: list[dict[str, Any]] = field(default_factory=list)
    """Items, of which the last may be unfinished."""
    _is_open: bool = False
    """Whether the last item is unfinished."""
    _logprobs: list[dict[str, Any]] = field(default_factory=list)
    """Of the message that is unfinished."""
    _call: int | None = None
    """Number, in the chat, of the call that is unfinished."""
    _finish: str | None = None
    _usage: dict[str, Any] | None = None
    _told: int = 0
    """Number of events so far."""

    def begin(self) -> list[Event]:
        """Return the events before the first chunk."""
        started = self.response("in_progress")
        return [
            self._event("created", response=started),
            self._event("in_progress", response=started),
        ]

    def take(self, chunk: Mapping[str, Any]) -> list[Event]:
        """Return the events of a chunk, as of `chat.completion.chunk`."""
        if chunk.get("usage"):
            self._usage = _usage(chunk["usage"])
        told: list[Event] = []
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            thought = delta.get("reasoning_content") or delta.get("reasoning")
            if thought:
                told += self._think(thought)
            logprobs = (choice.get("logprobs") or {}).get("content") or []
            if delta.get("content") or logprobs:
                told += self._say(delta.get("content") or "", logprobs)
            for call in delta.get("tool_calls") or ():
                told += self._go_on_with_call(call)
            self._finish = choice.get("finish_reason") or self._finish
        return told

    def end(self) -> list[Event]:
        """Return the events after the last chunk."""
        status = "incomplete" if self._finish in _INCOMPLETE else "completed"
        told = self._close(status)
        if not self._output:
            told = [*self._say("", []), *self._close(status)]
        return [*told, self._event(status, response=self.response(status))]

    @property
    def is_whole(self) -> bool:
        """Whether the chat has said why its answer ended."""
        return self._finish is not None

    def fail(self, message: str) -> list[Event]:
        """Return the events of an answer that broke off."""
        told = self._close("incomplete")
        failed = {**self.response("failed"), "error": {"code": "server_error", "message": message}}
        return [*told, self._event("failed", response=failed)]

    def whole(self, completion: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer as one object, from a `chat.completion`."""
        choices = [
            {**choice, "delta": choice["message"]} for choice in completion.get("choices", ())
        ]
        self.take({**completion, "choices": choices})
        return self.end()[-1]["response"]

    def _think(self, text: str) -> list[Event]:
        told = self._open("reasoning")
        self._output[-1]["content"][0]["text"] += text
        return [*told, self._event("reasoning_text.delta", **self._place(), delta=text)]

    def _say(self, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        told = self._open("message")
        self._output[-1]["content"][0]["text"] += text
        self._logprobs += logprobs
        delta = self._event("output_text.delta", **self._place(), delta=text, logprobs=logprobs)
        return [*told, delta]

    def _go_on_with_call(self, call: Mapping[str, Any]) -> list[Event]:
        number = call.get("index", None)
        function = call.get("function") or {}
        is_new = not self._is_open or self._call is None or number != self._call or number is None
        told: list[Event] = []
        if is_new:
            told = self._close("completed")
            told += self._open("function_call", call.get("id"), function.get("name"))
            self._call = number if number is not None else -1
        arguments = function.get("arguments") or ""
        self._output[-1]["arguments"] += arguments
        if arguments:
            place = self._place(in_content=False)
            told.append(self._event("function_call_arguments.delta", **place, delta=arguments))
        return told

    def _open(self, type: str, call_id: str | None = None, name: str | None = None) -> list[Event]:
        """Return the events with which an item begins; none if the last one is of this type and
        unfinished.
        """
        if self._is_open and self._output[-1]["type"] == type != "function_call":
            return []
        told = self._close("completed")
        item: dict[str, Any] = {"type": type, "status": "in_progress"}
        match type:
            case "message":
                item |= {"id": new_id("msg_"), "role": "assistant", "content": []}
            case "reasoning":
                item |= {"id": new_id("rs_"), "summary": [], "content": []}
            case _:
                item |= {"id": new_id("fc_"), "call_id": call_id or new_id("call_")}
                item |= {"name": name or "", "arguments": ""}
        self._output.append(item)
        self._is_open = True
        place = {"output_index": len(self._output) - 1}
        # The item as it is now: it goes on being filled.
        told.append(self._event("output_item.added", **place, item=_copied(item)))
        if type != "function_call":
            part = _part(type)
            item["content"].append(part)
            told.append(self._event("content_part.added", **self._place(), part=dict(part)))
        return told

    def _close(self, status: str) -> list[Event]:
        """Return the events with which the last item ends; none if it has."""
        if not self._is_open:
            return []
        item = self._output[-1]
        item["status"] = status
        self._is_open = False
        self._call = None
        told: list[Event] = []
        if item["type"] == "function_call":
            ended = {"name": item["name"], "arguments": item["arguments"]}
            place = self._place(in_content=False)
            told.append(self._event("function_call_arguments.done", **place, **ended))
        else:
            part = item["content"][0]
            if item["type"] == "message":
                part["logprobs"], self._logprobs = self._logprobs, []
                ended = {"text": part["text"], "logprobs": part["logprobs"]}
                told.append(self._event("output_text.done", **self._place(), **ended))
            else:
                told.append(self._event("reasoning_text.done", **self._place(), text=part["text"]))
            told.append(self._event("content_part.done", **self._place(), part=part))
        place = {"output_index": len(self._output) - 1}
        return [*told, self._event("output_item.done", **place, item=item)]

    def _place(self, *, in_content: bool = True) -> dict[str, Any]:
        place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        return {**place, "content_index": 0} if in_content else place

    def _event(self, kind: str, /, **content: Any) -> Event:
        event = {"type": f"response.{kind}", "sequence_number": self._told, **content}
        self._told += 1
        return event

    def response(self, status: str) -> dict[str, Any]:
        """Return the answer as it is now."""
        request = self.request
        reason = _INCOMPLETE.get(self._finish or "") if status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": reason} if reason else None,
            "model": request.model,
            "output": list(self._output),
            "usage": self._usage,
            "instructions": request.instructions,
            "metadata": dict(self.metadata),
            "tools": request.tools,
            "tool_choice": request.tool_choice,
            "parallel_tool_calls": request.parallel_tool_calls,
            "max_output_tokens": request.max_output_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_logprobs": request.top_logprobs or 0,
            "text": {"format": {"type": "text"}},
            "reasoning": {"effort": None, "summary": None},
            "truncation": "disabled",
            "background": False,
            "store": request.store,
            "previous_response_id": request.previous_response_id,
        }


def _part(type: str) -> dict[str, Any]:
    if type == "message":
        return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": ""}


def _copied(item: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, list) else value for name, value in item.items()}


def _usage(chat: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat's usage in the words of a response. What the server that answered did not count
    is 0: tokens of its cache, and those of thoughts, which are among the output's.
    """
    cached = (chat.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    thoughts = (chat.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    return {
        "input_tokens": chat.get("prompt_tokens", 0),
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": chat.get("completion_tokens", 0),
        "output_tokens_details": {"reasoning_tokens": thoughts},
        "total_tokens": chat.get("total_tokens", 0),
    }
