"""Reports of the tokens of one answer: text, reasoning and tool calls in a conversation, else
tokens and log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ft_service.data.answer_format import closing_of
from ft_service.data.answer_stream import AnswerStream
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
    """An answer in a conversation, or the continuation of a text, reported as text as soon as that
    is certain.
    """

    request: ChatRequest | TextRequest
    index: int
    chat: ChatTokenizer | PlainTokenizer
    text: AnswerText
    say: Say
    parts: AnswerStream | None = None
    """Takes the text apart; None: all of it is text."""
    unsaid: list[dict[str, Any]] = field(default_factory=list)
    """Log-probabilities of tokens whose text is kept back."""
    drawn: list[Choice] = field(default_factory=list)
    """All tokens, where they are recorded."""
    prompt: str = ""
    """The text that a recorded answer follows."""

    @classmethod
    def of(
        cls, request: ChatRequest, index: int, chat: ChatTokenizer, prompt: str, say: Say
    ) -> ChatAnswer:
        """An answer to a conversation. `prompt`: the conversation's text."""
        text = AnswerText(chat.tokenizer, request.stop, keep_special=True)
        parts = AnswerStream(chat.answers, tools=bool(request.tools), closing=closing_of(prompt))
        answer = cls(request, index, chat, text, say, parts)
        answer.prompt = prompt if request.recorded else ""
        return answer

    @classmethod
    def of_text(
        cls, request: TextRequest, index: int, plain: PlainTokenizer, prompt: str, say: Say
    ) -> ChatAnswer:
        """The continuation of a text. `prompt`: that text, with special tokens."""
        answer = cls(request, index, plain, AnswerText(plain.tokenizer, request.stop), say)
        answer.prompt = prompt
        return answer

    def push(self, choice: Choice) -> bool:
        ends = choice.token in self.chat.ends
        if self.request.recorded:
            self.drawn.append(choice)
        if self.request.top_logprobs is not None and (
            not ends or isinstance(self.request, TextRequest)
        ):
            # The token that ends a text counts among its log-probabilities, as with vLLM: harnesses
            # drop what they asked for.
            self.unsaid.append(_shown(self.chat, choice))
        if ends:
            return True
        text = self.text.push(choice.token)
        self._tell(*(self.parts.push(text) if self.parts else (text, "")))
        return self.text.stopped

    def end(self, reason: str) -> None:
        text = self.text.end()
        record = self._record(reason)
        reasoning = ""
        calls: list[dict[str, Any]] = []
        if self.parts is not None:
            said, thought = self.parts.push(text)
            text, reasoning, whole = self.parts.end()
            text = said + text
            reasoning = thought + reasoning
            if whole.calls:
                given = [dict(call) for call in whole.calls]
                reason = "tool_calls"
                calls = given if self.request.parallel_tool_calls else given[:1]
        self._tell(text, reasoning, last=True)
        self.say(
            {
                "id": self.request.id,
                "kind": "end",
                "index": self.index,
                "reason": reason,
                "calls": calls,
                **record,
            }
        )

    def _record(self, reason: str) -> dict[str, Any]:
        """All tokens that were drawn, the one that ends the answer included, if they are asked for,
        and the texts of what they were drawn behind and of themselves, with special tokens.
        """
        if not self.request.recorded:
            return {}
        tokens = [choice.token for choice in self.drawn]
        return {
            "tokens": tokens,
            "logprobs": [choice.logprob for choice in self.drawn],
            "truncated": reason == "length",
            "prompt_text": self.prompt,
            "drawn_text": self.chat.tokenizer.decode(tokens),
        }

    def _tell(self, text: str, reasoning: str, *, last: bool = False) -> None:
        if not text and not reasoning and not (last and self.unsaid):
            return
        said: dict[str, Any] = {
            "id": self.request.id,
            "kind": "text",
            "index": self.index,
            "text": text,
        }
        if reasoning:
            said["reasoning"] = reasoning
        if self.request.top_logprobs is not None:
            said["logprobs"], self.unsaid = self.unsaid, []
        self.say(said)


@dataclass
class TokenAnswer:
    """A continuation, reported as tokens with their log-probabilities.

    The token that ends it is one of them, also where it completes a text to stop at: training on
    what was sampled needs every token that was drawn, and a conversation that goes on needs the one
    that ends a turn.
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
        text = (
            AnswerText(chats.tokenizer, request.stop_texts, keep_special=True)
            if request.stop_texts
            else None
        )
        return cls(
            request, index, ends, text, say, chats.tokenizer.decode if request.texts else None
        )

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
        self.say(
            {"id": self.request.id, "kind": "end", "index": self.index, "reason": reason, **text}
        )

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
