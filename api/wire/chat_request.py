"""Chat completion requests in OpenAI's format, and the orders for the preview's process made from
them. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError

from ft_service.bases.description import ImageFacts
from ft_service.data.chat_line import parse_conversation
from ft_service.data.image_part import TYPES, LineImages, as_json
from ft_service.data.line_errors import OF_FILES, LineError
from ft_service.errors import SpecError
from ft_service.spec import Number, Strict, spec_error

PREVIEW_LACKS = (
    "the preview does not have it; an inference server has (FT_INFERENCE_URL). Leave it out"
)
Refused = Mapping[str, tuple[tuple[Any, ...], str]]
M = TypeVar("M", bound=Strict)
_REFUSED: Refused = {
    "functions": ((), "is the older word for tools: send tools"),
    "function_call": ((), "is the older word for tool_choice: send tools"),
    "tool_choice": (
        ("auto", "none"),
        "only auto and none are known: nothing here forces a call. Leave it out",
    ),
    "response_format": (({"type": "text"},), PREVIEW_LACKS),
    "logit_bias": (({},), PREVIEW_LACKS),
    "presence_penalty": ((0,), PREVIEW_LACKS),
    "frequency_penalty": ((0,), PREVIEW_LACKS),
    "modalities": ((["text"],), "only text is answered. Leave it out"),
    "audio": ((), "only text is answered. Leave it out"),
    "prediction": ((), PREVIEW_LACKS),
    "reasoning_effort": ((), PREVIEW_LACKS),
    "verbosity": ((), PREVIEW_LACKS),
    "web_search_options": ((), PREVIEW_LACKS),
    "store": ((False,), "answers are not kept here. Leave it out"),
}
"""Unsupported fields of OpenAI's API: values without effect, and the message for any other
value.
"""
NAMES_ONLY = (
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "service_tier",
)
"""Fields of OpenAI's API about the client or the price, which change no answer."""


StopText = Annotated[str, Field(max_length=1000)]
"""A text at which an answer ends. Each token of an answer is compared with it."""


class StreamOptions(Strict):
    """Options of a streamed answer."""

    include_usage: bool = False
    """Send a last chunk with the number of tokens."""
    include_obfuscation: bool = False
    """Ignored: only the caller sees the lengths of chunks."""


class Streamed(Strict):
    """Fields of a body whose answer may be sent as events."""

    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def counts_usage(self) -> bool:
        """Whether the last event of a stream says how many tokens there are."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatCompletion(Streamed):
    """Body of a chat completion for the preview."""

    model: str
    messages: Annotated[list[Any], Field(min_length=1, max_length=10_000)]
    tools: Annotated[list[Any], Field(max_length=128)] = Field(default_factory=list)
    tool_choice: Literal["auto", "none"] = "auto"
    """none: the prompt does not contain the tools."""
    parallel_tool_calls: bool = True
    """false: only the first of several calls is returned."""
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """Limit of tokens of one answer. None: 2048, or what fits into the base's context."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """The older name of max_completion_tokens."""
    temperature: Annotated[Number, Field(ge=0, le=2)] = 1.0
    """0: always the most probable token."""
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    """Sample only from the most probable tokens that together have this probability."""
    stop: StopText | Annotated[list[StopText], Field(max_length=4)] = ""
    """The answer ends before any of these."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """Seed of sampling: the same seed gives the same tokens."""
    n: Annotated[int, Field(ge=1, le=4)] = 1
    """Number of answers."""
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Needs logprobs."""
    processor: bool = False
    """Not in OpenAI's API. Answer on the CPU, at low priority, while training has every slot."""

    @property
    def shows_images(self) -> bool:
        """Whether messages have parts that are images."""
        return any(part.get("type") in TYPES for _, part in parts_of(self.messages))

    def order(self, adapter: str | None, images: ImageFacts | None = None) -> dict[str, Any]:
        """The order for the preview's process (workers/serving/engine.py).

        `adapter`: a PEFT folder; None: the base alone. `images`: facts of the base's towers, which
        a request that `shows_images` needs.

        Raises SpecError for messages or tools that cannot be used.
        """
        try:
            messages, tools, shown = parse_conversation(self.messages, self.tools)
        except LineError as error:
            reason = error.reason.removesuffix(OF_FILES)
            raise SpecError(f"{error.field}: {reason}.", param=error.field.split(".")[0]) from None
        return {
            **({} if images is None else {"images": _ordered(shown, images)}),
            "messages": messages,
            "tools": tools if self.tool_choice == "auto" else [],
            "adapter": adapter,
            "n": self.n,
            "max_tokens": self.max_completion_tokens or self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stop": [
                stop for stop in ([self.stop] if isinstance(self.stop, str) else self.stop) if stop
            ],
            "seed": None if self.seed is None else self.seed % 2**63,
            "top_logprobs": (self.top_logprobs or 0) if self.logprobs else None,
            "parallel_tool_calls": self.parallel_tool_calls,
        }


def parts_of(messages: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The parts of messages as a body has them, with their places."""
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        for at, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict):
                yield f"messages.{number}.content.{at}", part


def urls_of(messages: Any) -> Iterator[tuple[str, str]]:
    """The URLs of images, films and sound in messages as a body has them, with their places."""
    for place, part in parts_of(messages):
        for name, value in part.items():
            url = value.get("url") if isinstance(value, dict) else value
            if isinstance(url, str) and (name.endswith("url") or name in TYPES):
                yield f"{place}.{name}", url


def _ordered(shown: LineImages, facts: ImageFacts) -> dict[str, Any]:
    """Pictures of an order, as workers/serving/pictures.py reads them."""
    places = zip(shown.pictures, shown.places, strict=True)
    return {
        "facts": asdict(facts),
        "pictures": [{**as_json(picture), "place": place} for picture, place in places],
    }


def parse_chat_completion(body: Mapping[str, Any]) -> ChatCompletion:
    """Parse a body; a null field counts as missing.

    Raises SpecError naming the field, its value and the limit.
    """
    parsed = parse_fields(body, ChatCompletion, _REFUSED)
    _refuse_together(parsed)
    return parsed


def parse_fields(body: Mapping[str, Any], of: type[M], refused: Refused) -> M:
    """Parse the fields of a body that change its answer; a null one counts as missing.

    `refused`: unsupported fields of OpenAI's API: values without effect, and the message for any
    other value. Raises SpecError naming the field, its value and the limit.
    """
    given = {
        name: value for name, value in body.items() if value is not None and name not in NAMES_ONLY
    }
    for name, (harmless, why) in refused.items():
        if name in given and given[name] not in harmless:
            raise SpecError(f"{name}: {why}.", param=name, code="unsupported_parameter")
    known = {
        name: value
        for name, value in given.items()
        if name not in refused or name in of.model_fields
    }
    try:
        return of.model_validate(known)
    except ValidationError as error:
        raise spec_error(error, of) from None


def _refuse_together(parsed: ChatCompletion) -> None:
    both = parsed.max_tokens is not None and parsed.max_completion_tokens is not None
    if both and parsed.max_tokens != parsed.max_completion_tokens:
        raise SpecError(
            "max_tokens and max_completion_tokens differ: keep one.", param="max_tokens"
        )
    if parsed.top_logprobs is not None and not parsed.logprobs:
        raise SpecError("top_logprobs needs logprobs: true.", param="top_logprobs")
    refuse_stream_options(parsed)


def refuse_stream_options(parsed: Streamed) -> None:
    """Raise SpecError for options of a stream where none is asked for."""
    if parsed.stream_options is not None and not parsed.stream:
        raise SpecError("stream_options needs stream: true.", param="stream_options")
