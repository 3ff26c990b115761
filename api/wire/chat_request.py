"""Chat completion requests in OpenAI's format, and the orders for the preview's process made from
them. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError

from ft_service.data.chat_line import parse_conversation
from ft_service.data.line_errors import LineError
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


class ChatCompletion(Strict):
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
    stream: bool = False
    stream_options: StreamOptions | None = None
    processor: bool = False
    """Not in OpenAI's API. Answer on the CPU, at low priority, while training has every slot."""

    def order(self, adapter: str | None) -> dict[str, Any]:
        """The order for the preview's process (workers/serving/engine.py).

        `adapter`: a PEFT folder; None: the base alone.

        Raises SpecError for messages or tools that cannot be used.
        """
        try:
            messages, tools = parse_conversation(self.messages, self.tools)
        except LineError as error:
            raise SpecError(
                f"{error.field}: {error.reason}.", param=error.field.split(".")[0]
            ) from None
        return {
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
    if parsed.stream_options is not None and not parsed.stream:
        raise SpecError("stream_options needs stream: true.", param="stream_options")
