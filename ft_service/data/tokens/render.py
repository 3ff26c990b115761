"""A conversation as text by the base's chat template, and the parts of that text which the assistant learns to write.

The rule: what is learned of an answer stands behind the very text that the model is asked with, the messages before it and the
template's generation prompt; it is the answer as the template writes it where the conversation ends with it, and ends with the
token at which generation stops. The text of a sample ends there too, with its last learned answer: nothing behind it counts.

Where a template writes an answer otherwise than behind its generation prompt (Gemma 4 closes a channel of thoughts there,
DeepSeek R1 opens a thought), the answer is put behind the prompt: for the last learned answer that is always possible. An
earlier one lies in the prompt of the last as the template writes it there. Where that is not behind its own prompt, or ends
with another token, it is refused (marked.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ft_service.data.line_errors import LineError
from ft_service.data.records import Chat
from ft_service.data.token_options import DEFAULT, TokenOptions
from ft_service.data.tokenizer_files import stops_of
from ft_service.data.tokens.chat_template import ChatTemplate
from ft_service.data.tokens.marked import (
    MARKUP,
    MarkedConversation,
    Message,
    Span,
    Template,
    UnmarkableError,
    thought_and_answer,
)
from ft_service.spec import TrainOn

Rendered = tuple[str, list[Span]]
"""A sample's text, and the character spans of the answers to learn."""

RENDERING = 4
"""Of this module, marked.py, straddling.py and tokenize.py: another number wherever they make other tokens or targets of a
conversation than before."""
EXACT_ANSWERS = 16
"""So many answers of a conversation, the first ones, have their prompts rendered in any case."""
_PARTS = ("think", "tool_call", "tool_calls", "tool_response", "arg_value", "function")
_WITHIN_TURNS = frozenset(f"<{slash}{part}>" for part in _PARTS for slash in ("", "/"))
"""Tokens around a part of a turn."""
_ANSWERED, _FOLLOWS = "ft_answered", "ft_follows"


def render(tokenizer: PreTrainedTokenizerBase, sample: Chat, options: TokenOptions = DEFAULT) -> Rendered:
    """Text and learned spans of a conversation, in time linear in it if the template writes its messages one after the other.

    Raises LineError for what the base's chat template does not take, or leaves out of an answer, a call, a system prompt or
    what the answers go on from; and for an answer that would be learned behind another text than the model is asked with.
    """
    template = ChatTemplate.of(tokenizer)
    assert template is not None, "its caller looks"
    _require_tools_in_template(template, sample)
    messages, tools = list(sample.messages), list(sample.tools) or None
    write: Template = partial(template.write, tools=tools, day=options.day)
    endings = _endings(tokenizer, template)
    if options.train_on == "everything":
        full = endings.ended(write(messages), messages[-1])
        return full, [(0, len(full))]
    learned = _learned(sample, options.train_on)
    return _Answers(write, messages[: learned[-1] + 1], endings).rendered(learned)


class _Answers:
    """The learned answers of one conversation, which ends with the last of them."""

    def __init__(self, write: Template, messages: list[Message], endings: Endings) -> None:
        self._write, self._messages, self._endings = write, messages, endings
        self._prompt = write(messages[:-1], prompt=True)
        self._full = write(messages)
        self._kept: MarkedConversation | None = None

    def rendered(self, learned: Sequence[int]) -> Rendered:
        """Raises LineError."""
        last = len(self._messages) - 1
        answer = self._plainly(last, self._prompt, self._full)
        if answer is None or not self._is_all_there():
            try:
                answer = self._marked().last_answer(self._endings.ending)
            except UnmarkableError:
                if answer is None:
                    raise
        text = self._prompt + answer
        spans = [*self._earlier(learned[:-1], text), (len(self._prompt), len(text))]
        return text, spans

    def _earlier(self, learned: Sequence[int], text: str) -> list[Span]:
        spans: list[Span] = []
        if len(learned) < EXACT_ANSWERS or not self._is_markable():
            for index in learned:
                prompt = self._write(self._messages[:index], prompt=True)
                answer = self._plainly(index, prompt, self._write(self._messages[: index + 1]))
                if answer is None or not text.startswith(prompt + answer):
                    break
                spans.append((len(prompt), len(prompt) + len(answer)))
        if len(spans) == len(learned):
            return spans
        conversation = self._marked()
        conversation.require_answers(learned)
        return conversation.spans(learned, EXACT_ANSWERS, self._endings.ending)

    def _plainly(self, index: int, prompt: str, full: str) -> str | None:
        """An answer where the conversation ends with it, as long as that is plain to see. None: it is not."""
        thought, words = thought_and_answer(self._messages[index])
        usual = self._endings.usual
        if usual is None or not words or self._messages[index].get("tool_calls"):
            return None
        tail, ending = usual
        end = len(full) - len(tail)
        if not (full.startswith(prompt) and full.endswith(words + tail) and end - len(words) >= len(prompt)):
            return None
        if thought and full.find(thought, len(prompt), end - len(words)) < 0:
            return None
        return full[len(prompt) : end] + ending

    def _is_all_there(self) -> bool:
        """Whether the prompt has the words of all messages, one after the other; words changed a little count as missing, and
        calls are not looked for."""
        place = 0
        for message in self._messages[:-1]:
            words = message["content"].strip() if message["role"] != "assistant" else ""
            place = self._prompt.find(words, place)
            if place < 0 or message.get("tool_calls"):
                return False
            place += len(words)
        return True

    def _marked(self) -> MarkedConversation:
        """Raises UnmarkableError, and LineError for what the template leaves out."""
        if self._kept is None:
            self._kept = MarkedConversation(self._write, self._messages, self._prompt, self._full, self._endings.tokens)
            self._kept.require_kept()
        return self._kept

    def _is_markable(self) -> bool:
        try:
            self._marked()
        except UnmarkableError:
            return False
        return True


class Endings:
    """The ways in which answers end by one tokenizer and chat template."""

    def __init__(self, tokenizer: Any, template: ChatTemplate) -> None:
        self._write: Template = partial(template.write, tools=None, day=DEFAULT.day)
        self._turns = turn_ends(tokenizer)
        self._base_stops = stops_of(Path(tokenizer.name_or_path))
        stops = {tokenizer.eos_token_id, *self._base_stops} - {None}
        self._stops = frozenset(tokenizer.convert_ids_to_tokens(sorted(stops)))
        added = tuple(tokenizer.get_added_vocab())
        self.tokens = _tokens_in_text(added)
        """What matches special tokens in a text, and what looks like one."""
        self._ids = tokenizer.convert_tokens_to_ids
        self._followed = lru_cache(maxsize=2)(self._next_turn)
        self.usual = self._usual()
        """What the template writes behind an answer's words where the conversation ends with it, and what is learned of that.
        None: it writes no such conversation."""

    def ending(self, tail: str, message: Message) -> str:
        """What is learned of the text that follows an answer's words: up to the token at which generation stops, or else up to
        the one that ends the turn. `tail`: of a conversation that ends with this message."""
        matches = list(self.tokens.finditer(tail))
        ends: list[re.Match[str]] = []
        begin = len(tail)
        for match in reversed(matches):
            if tail[match.end() : begin].strip():
                break
            ends.insert(0, match)
            begin = match.start()
        stop = next((match for match in ends if match[0] in self._stops), None)
        if stop is None:
            stop = next((match for match in reversed(ends) if match[0] not in _WITHIN_TURNS), None)
        return self.ended(tail if stop is None else tail[: stop.end()], message)

    def ended(self, text: str, message: Message) -> str:
        """A text, with the token that begins the next turn where nothing else ends it and the base stops by that (GLM's do)."""
        return text if text.rstrip().endswith(self._turns) else text + self._followed(calls="tool_calls" in message)

    def _usual(self) -> tuple[str, str] | None:
        answer = {"role": "assistant", "content": _ANSWERED}
        try:
            text = self._write([{"role": "user", "content": "ft_question"}, answer])
        except LineError:
            return None
        _, found, tail = text.rpartition(_ANSWERED)
        return (tail, self.ending(tail, answer)) if found else None

    def _next_turn(self, *, calls: bool) -> str:
        """The token that the turn behind an answer begins with; empty: none at which the base stops. `calls`: the answer calls
        a tool."""
        call = {"id": "ftcallone", "type": "function", "function": {"name": _ANSWERED, "arguments": {}}}
        answer = {"role": "assistant", "content": ""} | ({"tool_calls": [call]} if calls else {"content": _ANSWERED})
        after = (
            {"role": "tool", "tool_call_id": "ftcallone", "content": _FOLLOWS}
            if calls
            else {"role": "user", "content": _FOLLOWS}
        )
        try:
            text = self._write([{"role": "user", "content": "ft_question"}, answer, after])
        except LineError:
            return ""
        _, found, rest = text.partition(_ANSWERED)
        between, followed, _ = rest.partition(_FOLLOWS)
        places = {between.find(token): token for token in self._turns if token in between}
        if not (found and followed and places):
            return ""
        token = places[min(places)]
        return token if self._ids(token) in self._base_stops else ""


@lru_cache(maxsize=8)
def _endings(tokenizer: Any, template: ChatTemplate) -> Endings:
    return Endings(tokenizer, template)


@lru_cache(maxsize=8)
def turn_ends(tokenizer: Any) -> tuple[str, ...]:
    """The tokens by which a turn may end: those that a tokenizer splits no text into, but for the ends of parts of a turn."""
    return tuple(({*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens} - _WITHIN_TURNS) - {""})


@lru_cache(maxsize=8)
def _tokens_in_text(added: tuple[str, ...]) -> re.Pattern[str]:
    looks = re.compile(MARKUP)
    others = sorted((token for token in added if token and not looks.fullmatch(token)), key=len, reverse=True)
    return re.compile("|".join([*map(re.escape, others), MARKUP]))


def words_of(tokenizer: PreTrainedTokenizerBase, sample: Chat, text: str, options: TokenOptions) -> list[Span]:
    """The parts of a conversation's text that are words of its messages; the rest is the template's. Where the template keeps
    no marks they are looked for, one after the other.
    """
    template = ChatTemplate.of(tokenizer)
    assert template is not None, "it has written the text"
    messages, tools = list(sample.messages), list(sample.tools) or None
    write: Template = partial(template.write, tools=tools, day=options.day)
    if options.train_on != "everything":
        messages = messages[: _learned(sample, options.train_on)[-1] + 1]
        try:
            prompt, full = write(messages[:-1], prompt=True), write(messages)
            return MarkedConversation(write, messages, prompt, full, _endings(tokenizer, template).tokens).words()
        except UnmarkableError:
            pass
    spans: list[Span] = []
    end = 0
    for words in (part for message in messages for part in thought_and_answer(message) if part):
        if (begin := text.find(words, end)) >= 0:
            end = begin + len(words)
            spans.append((begin, end))
    return spans


def _learned(sample: Chat, train_on: TrainOn) -> list[int]:
    """The messages that are learned. Raises LineError if there is none."""
    answers = [index for index, message in enumerate(sample.messages) if message["role"] == "assistant"]
    wanted = answers[-1:] if train_on == "last_assistant" else answers
    learned = [index for index in wanted if sample.weights[index]]
    if not learned:
        raise LineError(
            f"messages.{wanted[0]}.weight" if wanted else "messages",
            "is 0 for the last answer, the only one that training.train_on = 'last_assistant' learns",
        )
    return learned


def writes_date(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template may write the date."""
    template = ChatTemplate.of(tokenizer)
    return template is not None and template.writes_date


def _require_tools_in_template(template: ChatTemplate, sample: Chat) -> None:
    """Refuse tools that the template would leave out: the model would learn to call tools that it was not told of."""
    for used, word, what in (
        (bool(sample.tools), "tools", "definitions of tools"),
        (sample.calls_tools, "tool_calls", "calls"),
    ):
        if used and word not in template.text:
            raise LineError(
                "",
                f"the base's chat template has no place for {what}, so they would be left out. Train on a base whose template "
                "knows tools, or leave the line out",
            )
