"""The requests that the engine answers, as they arrive: of conversations, of texts, and of tokens.

Projects share the engine's places: each request names its own. One that is `apart` has ended a
process before, or was beside one that has: it runs in forwards of its own, and it is told when the
engine is at it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from workers.serving.sampling import Sampling


@dataclass(frozen=True)
class ChatRequest:
    """Answers to a conversation (api/wire/chat_request.py makes it)."""

    id: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    adapter: str | None = None
    n: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    stop: list[str] = field(default_factory=list)
    seed: int | None = None
    top_logprobs: int | None = None
    probes: list[list[int]] = field(default_factory=list)
    """Tokens whose log-probabilities show that the adapter's model answers."""
    parallel_tool_calls: bool = True
    images: dict[str, Any] | None = None
    """The pictures of IMAGE in the messages, as ChatPictures reads them; None: there are none."""
    recorded: bool = False
    """Whether the prompt's tokens are reported, and at an answer's end all that were drawn, with
    their log-probabilities: for training on them.
    """
    logprobs_at: float = 1.0
    """The temperature of log-probabilities."""
    window: int | None = None
    """Tokens that prompt and answer may have together, whatever `max_tokens` is; None: as many as
    the base's context.
    """
    seen: list[list[int]] = field(default_factory=list)
    """Tokens of earlier prompts with their answers. A prompt whose text begins with the text of one
    begins with its tokens, which are no others only because text is tokenised again.
    """
    project: str = ""
    apart: bool = False

    @property
    def sampling(self) -> Sampling:
        return _sampling(self)


@dataclass(frozen=True)
class TextRequest:
    """Continuations of a text without a chat template (api/wire/completion_request.py makes it)."""

    id: str
    prompt: str | list[int]
    """Text, or its tokens."""
    max_tokens: int
    add_special_tokens: bool = True
    """Whether a text begins with the tokens with which the tokenizer begins texts."""
    adapter: str | None = None
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    stop: list[str] = field(default_factory=list)
    seed: int | None = None
    top_logprobs: int | None = None
    echo: bool = False
    """Whether the prompt is reported too, as tokens; with `top_logprobs`, with the
    log-probabilities of all but the first.
    """
    probes: list[list[int]] = field(default_factory=list)
    recorded: bool = False
    logprobs_at: float = 1.0
    window: int | None = None
    seen: list[list[int]] = field(default_factory=list)
    """These four as those of a conversation."""
    project: str = ""
    apart: bool = False
    tools: ClassVar[tuple[()]] = ()
    parallel_tool_calls: ClassVar[bool] = True

    @property
    def sampling(self) -> Sampling:
        return _sampling(self)


@dataclass(frozen=True)
class TokenRequest:
    """Continuations of a prompt of tokens (ft_service/tinker/sample_calls.py makes it)."""

    id: str
    prompt: list[int]
    adapter: str | None = None
    n: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_texts: list[str] = field(default_factory=list)
    stop_tokens: list[int] = field(default_factory=list)
    ends: bool = True
    """Whether the tokens that end the base's answers end a continuation too."""
    top_logprobs: int = 0
    scored: int = 0
    """Tokens at the prompt's end whose log-probabilities are reported, fewer than it has."""
    top_prompt_logprobs: int = 0
    texts: bool = False
    """Whether a continuation's text, with special tokens, is reported too, at its end."""
    logprobs_at: float = 1.0
    """The temperature of the log-probabilities that are reported, of the prompt's tokens too."""
    images: dict[str, Any] | None = None
    """The pictures of the prompt, as TokenPictures reads them; None: there are none."""
    probes: list[list[int]] = field(default_factory=list)
    project: str = ""
    apart: bool = False

    @property
    def sampling(self) -> Sampling:
        return Sampling(
            self.temperature, self.top_p, self.top_k, self.top_logprobs, self.logprobs_at
        )


def _sampling(request: ChatRequest | TextRequest) -> Sampling:
    """How answers are drawn whose tokens may be recorded, which needs their log-probabilities."""
    top = 0 if request.recorded and request.top_logprobs is None else request.top_logprobs
    return Sampling(
        request.temperature, request.top_p, top_logprobs=top, logprobs_at=request.logprobs_at
    )
