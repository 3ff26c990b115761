"""A chat completion request in OpenAI's words, and what the preview's process is asked for. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from ft_service.data.chat_line import parse_conversation
from ft_service.data.line_errors import LineError
from ft_service.errors import SpecError
from ft_service.spec import Number, Strict, spec_error

_PREVIEW = "the preview does not have it; an inference server has (FT_INFERENCE_URL). Leave it out"
_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "functions": ((), "is the older word for tools: send tools"),
    "function_call": ((), "is the older word for tool_choice: send tools"),
    "tool_choice": (("auto", "none"), "only auto and none are known: nothing here forces a call. Leave it out"),
    "response_format": (({"type": "text"},), _PREVIEW),
    "logit_bias": (({},), _PREVIEW),
    "presence_penalty": ((0,), _PREVIEW),
    "frequency_penalty": ((0,), _PREVIEW),
    "modalities": ((["text"],), "only text is answered. Leave it out"),
    "audio": ((), "only text is answered. Leave it out"),
    "prediction": ((), _PREVIEW),
    "reasoning_effort": ((), _PREVIEW),
    "verbosity": ((), _PREVIEW),
    "web_search_options": ((), _PREVIEW),
    "store": ((False,), "answers are not kept here. Leave it out"),
}
"""Fields of OpenAI's that ask for what is not done here: values that ask for nothing, and what is said of any other."""
NAMES_ONLY = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier")
"""Fields of OpenAI's that say who asks, or what it may cost: they change no answer, here or there."""


class StreamOptions(Strict):
    """How a streamed answer is sent."""

    include_usage: bool = False
    """A last chunk with the tokens that were used."""
    include_obfuscation: bool = False
    """Of no use here: lengths of chunks tell nothing to anybody but the caller."""


class ChatCompletion(Strict):
    """The body of a chat completion, as the preview takes it."""

    model: str
    messages: Annotated[list[Any], Field(min_length=1, max_length=10_000)]
    tools: Annotated[list[Any], Field(max_length=128)] = Field(default_factory=list)
    tool_choice: Literal["auto", "none"] = "auto"
    """none: the model is not told of the tools."""
    parallel_tool_calls: bool = True
    """false: of several calls only the first is given."""
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens of one answer at most. None: 2048, or what the base's context has room for."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """The older word for max_completion_tokens."""
    temperature: Annotated[Number, Field(ge=0, le=2)] = 1.0
    """0: always the likeliest token."""
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    """Only the likeliest tokens, whose shares make up so much, are drawn from."""
    stop: str | Annotated[list[str], Field(max_length=4)] = ""
    """The answer ends before any of these."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """With the same seed the same tokens are drawn."""
    n: Annotated[int, Field(ge=1, le=4)] = 1
    """Answers."""
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Needs logprobs."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    processor: bool = False
    """Not in OpenAI's API. Answer on the processor, with what training leaves of it, while training has every slot."""

    def order(self, adapter: str | None) -> dict[str, Any]:
        """What the preview's process is asked for (workers/serving/engine.py). `adapter`: a PEFT folder; None: the base alone.

        Raises SpecError for messages or tools that cannot be used.
        """
        try:
            messages, tools = parse_conversation(self.messages, self.tools)
        except LineError as error:
            raise SpecError(f"{error.field}: {error.reason}.", param=error.field.split(".")[0]) from None
        return {
            "messages": messages,
            "tools": tools if self.tool_choice == "auto" else [],
            "adapter": adapter,
            "n": self.n,
            "max_tokens": self.max_completion_tokens or self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stop": [stop for stop in ([self.stop] if isinstance(self.stop, str) else self.stop) if stop],
            "seed": None if self.seed is None else self.seed % 2**63,
            "top_logprobs": (self.top_logprobs or 0) if self.logprobs else None,
            "parallel_tool_calls": self.parallel_tool_calls,
        }


def parse_chat_completion(body: Mapping[str, Any]) -> ChatCompletion:
    """A body. Raises SpecError naming the field, its value and the limit; a field that is null is one that is not there."""
    given = {name: value for name, value in body.items() if value is not None and name not in NAMES_ONLY}
    for name, (harmless, why) in _REFUSED.items():
        if name in given and given[name] not in harmless:
            raise SpecError(f"{name}: {why}.", param=name, code="unsupported_parameter")
    known = {name: value for name, value in given.items() if name not in _REFUSED or name in ChatCompletion.model_fields}
    try:
        parsed = ChatCompletion.model_validate(known)
    except ValidationError as error:
        raise spec_error(error, ChatCompletion) from None
    _refuse_together(parsed)
    return parsed


def _refuse_together(parsed: ChatCompletion) -> None:
    both = parsed.max_tokens is not None and parsed.max_completion_tokens is not None
    if both and parsed.max_tokens != parsed.max_completion_tokens:
        raise SpecError("max_tokens and max_completion_tokens differ: keep one.", param="max_tokens")
    if parsed.top_logprobs is not None and not parsed.logprobs:
        raise SpecError("top_logprobs needs logprobs: true.", param="top_logprobs")
    if parsed.stream_options is not None and not parsed.stream:
        raise SpecError("stream_options needs stream: true.", param="stream_options")
