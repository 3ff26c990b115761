"""Requests of OpenAI's Responses API, and the chat completion that each asks for. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from api.wire.chat_request import PREVIEW_LACKS, Refused, StreamOptions, parse_fields
from ft_service.data.chat_line import parse_conversation
from ft_service.data.line_errors import OF_FILES, LineError, required, text_of
from ft_service.errors import SpecError
from ft_service.spec import Number, Strict
from ft_service.wording import kind, shown_value

LOGPROBS = "message.output_text.logprobs"
"""What `include` names for log-probabilities."""
SEND_ALL = (
    "Send what was said so far in input: the earlier items, and each answer's output as it came"
)
EARLIER = "previous_response_id"
"""The field that names what a request goes on with, and the place of what is wrong there."""
Items = Sequence[Any]
"""Items of a conversation, as they came."""
_TEXT_ONLY = "only text is answered: no JSON schemas. Leave it out, and ask for JSON in words"
_REFUSED: Refused = {
    "conversation": (
        (),
        "conversations are not kept here; a response that was asked for with store: true is, and "
        "its id is a previous_response_id. Leave it out",
    ),
    "prompt": ((), "there are no stored prompts here. Send instructions and input"),
    "background": ((False,), "an answer is made while its caller waits. Leave it out"),
    "text": (({}, {"format": {"type": "text"}}), _TEXT_ONLY),
    "reasoning": (({},), "a model thinks as it was trained to. Leave it out"),
    "truncation": (("disabled",), "a conversation is never shortened here. Leave it out"),
    "max_tool_calls": ((), "it limits OpenAI's own tools, and there are none here. Leave it out"),
    "context_management": (([],), "a conversation is never shortened here. Leave it out"),
    "moderation": ((), "nothing is moderated here. Leave it out"),
    "presence_penalty": ((0,), PREVIEW_LACKS),
    "frequency_penalty": ((0,), PREVIEW_LACKS),
}
"""Unsupported fields of OpenAI's API: values without effect, and the message for any other
value.
"""
_PARTS: Mapping[str, str] = {"input_text": "text", "output_text": "text", "text": "text"}
"""Types of a message's parts → that of a chat's."""


class ResponseRequest(Strict):
    """Body of `POST /v1/responses`."""

    model: str
    input: str | Annotated[list[Any], Field(min_length=1, max_length=10_000)]
    """What the user says, or items: messages, calls of functions and what these gave, thoughts."""
    instructions: str | None = None
    """The system's message, before the others."""
    tools: Annotated[list[Any], Field(max_length=128)] = Field(default_factory=list)
    """Functions that the model may call."""
    tool_choice: Literal["auto", "none"] = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    """Limit of tokens, thoughts and calls included. None: as for chat completions."""
    temperature: Annotated[Number, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Needs `include` with `message.output_text.logprobs`."""
    include: list[Literal["message.output_text.logprobs"]] = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions | None = None
    store: bool = False
    """Keep the answer, so that it can be found and gone on with; here not the default."""
    previous_response_id: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """A response that was kept, after whose conversation `input` is said."""
    processor: bool = False
    """Not in OpenAI's API, as for chat completions."""

    def chat(self, earlier: Items = ()) -> dict[str, Any]:
        """Return the body of the chat completion that this request asks for.

        `earlier`: items of the conversation that it goes on with. Raises SpecError for items or
        tools that cannot be used, by their place in this request.
        """
        conversation = _Conversation.of(self, earlier)
        tools = [_tool(tool, f"tools.{number}") for number, tool in enumerate(self.tools)]
        try:
            parse_conversation(conversation.messages, tools)
        except LineError as error:
            reason = error.reason.removesuffix(OF_FILES)
            raise _fault(conversation.place_of(error.field), reason) from None
        body: dict[str, Any] = {
            "model": self.model,
            "messages": conversation.messages,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
        }
        if tools:
            body["tools"] = tools
            body["tool_choice"] = self.tool_choice
            body["parallel_tool_calls"] = self.parallel_tool_calls
        if self.max_output_tokens is not None:
            body["max_completion_tokens"] = self.max_output_tokens
        if self.include:
            body["logprobs"] = True
            body["top_logprobs"] = self.top_logprobs or 0
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        if self.processor:
            body["processor"] = True
        return body

    def in_own_places(self, error: SpecError, earlier: Items = ()) -> SpecError:
        """Return a refusal of the chat completion with the place in this request."""
        place, colon, reason = error.message.partition(": ")
        if not colon or not place.startswith("messages"):
            return error
        own = _Conversation.of(self, earlier).place_of(place) if "." in place else "input"
        return SpecError(f"{own}: {reason}", param=own.split(".")[0], code=error.code)


def parse_response_request(body: Mapping[str, Any]) -> ResponseRequest:
    """Parse a body; a null field counts as missing.

    Raises SpecError naming the field, its value and the limit.
    """
    given = {name: _without_nulls(value) for name, value in body.items()}
    parsed = parse_fields(given, ResponseRequest, _REFUSED)
    if parsed.top_logprobs and not parsed.include:
        raise SpecError(f"top_logprobs needs include: [{LOGPROBS!r}].", param="top_logprobs")
    if parsed.stream_options is not None and not parsed.stream:
        raise SpecError("stream_options needs stream: true.", param="stream_options")
    return parsed


def _without_nulls(value: Any) -> Any:
    """Return an object without its null fields, as clients send for what was not set."""
    if not isinstance(value, dict):
        return value
    return {name: inner for name, inner in value.items() if inner is not None}


def _fault(place: str, reason: str) -> SpecError:
    return SpecError(f"{place}: {reason}.", param=place.split(".")[0])


@dataclass
class _Conversation:
    """Items as the messages of a chat. What an assistant said in a row, thoughts and calls
    included, is one message.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    """Place of each message's first item in the request."""

    @classmethod
    def of(cls, request: ResponseRequest, earlier: Items) -> _Conversation:
        made = cls()
        if request.instructions is not None:
            made.add({"role": "system", "content": request.instructions}, "instructions")
        for item in earlier:
            made.take_sent(item, EARLIER)
        if isinstance(request.input, str):
            made.add({"role": "user", "content": request.input}, "input")
            return made
        for number, item in enumerate(request.input):
            made.take_sent(item, f"input.{number}")
        return made

    def take_sent(self, item: Any, place: str) -> None:
        """Add an item as it came. Raises SpecError."""
        if not isinstance(item, dict):
            raise _fault(place, f"must be an object, not {kind(item)}")
        try:
            self.take(_without_nulls(item), place)
        except LineError as error:
            raise _fault(error.field, error.reason) from None

    def add(self, message: dict[str, Any], place: str) -> None:
        self.messages.append(message)
        self.places.append(place)

    def take(self, item: Mapping[str, Any], place: str) -> None:
        """Add an item. Raises LineError."""
        default = "message" if "role" in item else None
        type = item.get("type", default)
        takes = _TAKEN.get(type) if isinstance(type, str) else None
        if takes is None:
            known = ", ".join(_TAKEN)
            raise LineError(
                f"{place}.type", f"is {shown_value(type)}, and items here are of {known}"
            )
        takes(self, item, place)

    def message(self, item: Mapping[str, Any], place: str) -> None:
        role = required(item, "role", f"{place}.")
        content = required(item, "content", f"{place}.")
        if isinstance(content, list):
            content = [
                _part(part, f"{place}.content.{number}") for number, part in enumerate(content)
            ]
        if role == "assistant" and (turn := self._turn("content", place)) is not None:
            turn["content"] = content
        else:
            self.add({"role": role, "content": content}, place)

    def call(self, item: Mapping[str, Any], place: str) -> None:
        function = {
            "name": required(item, "name", f"{place}."),
            "arguments": required(item, "arguments", f"{place}."),
        }
        call_id = required(item, "call_id", f"{place}.")
        turn = self._turn(None, place)
        if turn is None:
            turn = {"role": "assistant", "content": None}
            self.add(turn, place)
        turn.setdefault("content", None)
        turn.setdefault("tool_calls", []).append(
            {"id": call_id, "type": "function", "function": function}
        )

    def result(self, item: Mapping[str, Any], place: str) -> None:
        output = required(item, "output", f"{place}.")
        if isinstance(output, list):
            output = [_part(part, f"{place}.output.{number}") for number, part in enumerate(output)]
        call_id = required(item, "call_id", f"{place}.")
        self.add({"role": "tool", "tool_call_id": call_id, "content": output}, place)

    def thought(self, item: Mapping[str, Any], place: str) -> None:
        parts = item.get("content") or []
        if item.get("encrypted_content") is not None and not parts:
            raise LineError(
                f"{place}.encrypted_content",
                "is of another service, which alone can read it. Leave the item out",
            )
        texts = [
            text_of(part.get("text"), f"{place}.content.{number}.text")
            for number, part in enumerate(parts)
            if isinstance(part, dict)
        ]
        if texts:
            self.add({"role": "assistant", "reasoning_content": "\n".join(texts)}, place)

    def _turn(self, without: str | None, place: str) -> dict[str, Any] | None:
        """Return the assistant's message that an item goes on with; None: it begins another.

        `without`: what that message may not have yet, with which another one begins.
        """
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant":
            return None
        return None if without is not None and without in last else last

    def place_of(self, fault: str) -> str:
        """Return the place in the request of a fault in the messages, dotted, or in the tools."""
        whose, _, rest = fault.partition(".")
        if whose != "messages":
            return fault.replace(".function", "", 1)
        number, _, inner = rest.partition(".")
        place = self.places[int(number)]
        is_message = inner.startswith(("content", "role")) and place.startswith("input.")
        return f"{place}.{inner}" if is_message else place


_Take = Callable[[_Conversation, Mapping[str, Any], str], None]
_TAKEN: Mapping[str, _Take] = {
    "message": _Conversation.message,
    "function_call": _Conversation.call,
    "function_call_output": _Conversation.result,
    "reasoning": _Conversation.thought,
}
"""Types of items, and what takes them in."""


def _part(part: Any, place: str) -> dict[str, Any]:
    """Return a message's part as a chat has it. Raises LineError."""
    if not isinstance(part, dict):
        raise LineError(place, f"must be an object with type and text, not {kind(part)}")
    part = _without_nulls(part)
    type = required(part, "type", f"{place}.")
    if type in _PARTS:
        return {"type": "text", "text": text_of(part.get("text"), f"{place}.text")}
    if type == "refusal":
        return {"type": "text", "text": text_of(part.get("refusal"), f"{place}.refusal")}
    if type == "input_image" and "image_url" in part:
        detail = {"detail": part["detail"]} if "detail" in part else {}
        return {"type": "image_url", "image_url": {"url": part["image_url"], **detail}}
    raise LineError(
        f"{place}.type",
        f"is {shown_value(type)}, and parts here are input_text, output_text, and input_image with "
        "an image_url: no files and no sound. Leave the part out",
    )


def _tool(tool: Any, place: str) -> dict[str, Any]:
    """Return the definition of a function as a chat has it. Raises SpecError."""
    if not isinstance(tool, dict):
        raise _fault(place, f"must be an object with type and name, not {kind(tool)}")
    if tool.get("type") != "function":
        raise _fault(
            f"{place}.type",
            f"is {shown_value(tool.get('type'))}, and only function is known: OpenAI's own tools "
            "run at OpenAI",
        )
    return {
        "type": "function",
        "function": {name: value for name, value in tool.items() if name != "type"},
    }
