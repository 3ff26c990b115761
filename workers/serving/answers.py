"""Reports of the tokens of one answer: text and tool calls in a conversation, else tokens and log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from workers.serving.answer_text import AnswerText
from workers.serving.chat_tokens import Chats, ChatTokenizer, PlainTokenizer
from workers.serving.requests import ChatRequest, TextRequest, TokenRequest
from workers.serving.sampling import Choice

TOLD_TOKENS = 256
"""Tokens of a continuation that are reported together, so that no message is long."""

Say = Callable[[dict[str, Any]], None]


class Answer(Protocol):
    """One answer of a request while its tokens are drawn."""

    def push(self, choice: Choice) -> bool:
        """Take the next token. Whether it ends the answer."""
        ...

    def end(self, reason: str) -> None:
        """Report the rest, and the reason of the end: "stop" or "length"."""
        ...


@dataclass
class ChatAnswer:
    """An answer in a conversation, or the continuation of a text, reported as text as soon as that is certain."""

    request: ChatRequest | TextRequest
    index: int
    chat: ChatTokenizer | PlainTokenizer
    text: AnswerText
    say: Say
    unsaid: list[dict[str, Any]] = field(default_factory=list)
    """Log-probabilities of tokens whose text is kept back."""

    @classmethod
    def of(cls, request: ChatRequest | TextRequest, index: int, chat: ChatTokenizer | PlainTokenizer, say: Say) -> ChatAnswer:
        calls = chat.calls if request.tools else None
        prefix = calls.prefix if calls else None
        text = AnswerText(chat.tokenizer, request.stop, prefix, keep_special=calls is not None)
        return cls(request, index, chat, text, say)

    def push(self, choice: Choice) -> bool:
        ends = choice.token in self.chat.ends
        if choice.logprob is not None and (not ends or isinstance(self.request, TextRequest)):
            # The token that ends a text counts among its log-probabilities, as with vLLM: harnesses drop what they asked for.
            self.unsaid.append(_shown(self.chat, choice))
        if ends:
            return True
        self._tell(self.text.push(choice.token))
        return self.text.stopped

    def end(self, reason: str) -> None:
        rest = self.text.end()
        calls: list[dict[str, Any]] = []
        if self.request.tools and self.chat.calls is not None:
            found = self.chat.calls.parse(self.text.whole)
            if found is not None:
                reason, calls = "tool_calls", found[1] if self.request.parallel_tool_calls else found[1][:1]
                rest = ""
        self._tell(rest, last=True)
        self.say({"id": self.request.id, "kind": "end", "index": self.index, "reason": reason, "calls": calls})

    def _tell(self, text: str, *, last: bool = False) -> None:
        if not text and not (last and self.unsaid):
            return
        said: dict[str, Any] = {"id": self.request.id, "kind": "text", "index": self.index, "text": text}
        if self.request.top_logprobs is not None:
            said["logprobs"], self.unsaid = self.unsaid, []
        self.say(said)


@dataclass
class TokenAnswer:
    """A continuation, reported as tokens with their log-probabilities.

    The token that ends it is one of them, also where it completes a text to stop at: training on what was sampled needs every
    token that was drawn, and a conversation that goes on needs the one that ends a turn.
    """

    request: TokenRequest
    index: int
    ends: frozenset[int]
    text: AnswerText | None
    """Text in which to look for those to stop at, special tokens included; None: there are none."""
    say: Say
    decode: Callable[[list[int]], str] | None = None
    """Text of all tokens but the one that ends it; None: it is not asked for."""
    unsaid: list[Choice] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, request: TokenRequest, index: int, chats: Chats, say: Say) -> TokenAnswer:
        ends = frozenset(request.stop_tokens) | (chats.ends if request.ends else frozenset())
        text = AnswerText(chats.tokenizer, request.stop_texts, None, keep_special=True) if request.stop_texts else None
        return cls(request, index, ends, text, say, chats.tokenizer.decode if request.texts else None)

    def push(self, choice: Choice) -> bool:
        self.unsaid.append(choice)
        if self.decode is not None and choice.token not in self.ends:
            self.drawn.append(choice.token)
        if len(self.unsaid) == TOLD_TOKENS:
            self._tell()
        if self.text is not None:
            self.text.push(choice.token)
        return choice.token in self.ends or (self.text is not None and self.text.stopped)

    def end(self, reason: str) -> None:
        if self.unsaid:
            self._tell()
        text = {} if self.decode is None else {"text": self.decode(self.drawn)}
        self.say({"id": self.request.id, "kind": "end", "index": self.index, "reason": reason, **text})

    def _tell(self) -> None:
        said: dict[str, Any] = {"id": self.request.id, "kind": "tokens", "index": self.index}
        said["tokens"] = [choice.token for choice in self.unsaid]
        said["logprobs"] = [choice.logprob for choice in self.unsaid]
        if self.request.top_logprobs:
            said["top"] = [choice.top for choice in self.unsaid]
        self.unsaid = []
        self.say(said)


def _shown(chat: ChatTokenizer | PlainTokenizer, choice: Choice) -> dict[str, Any]:
    top = [{**chat.token(token), "logprob": logprob} for token, logprob in choice.top]
    return {**chat.token(choice.token), "logprob": choice.logprob, "top_logprobs": top}
