"""Rendering of records as text, and the spans of that text which the model learns to write.

A learned answer follows exactly the text with which the model will be asked for it: the messages
before it, rendered with the template's generation prompt. It is the answer as the template writes
it at the end of a conversation, up to and including the token at which generation stops. A sample's
text ends with its last learned answer; later messages are not used.

Some templates write an answer differently from what follows their generation prompt (Gemma 4 closes
a channel of thoughts there, DeepSeek R1 opens a thought). Then the last learned answer is appended
to its prompt, which is always possible. An earlier answer is part of the last answer's prompt. It
is learned there if it is the same, from its prompt to its end, as where the conversation ends with
it (answer_markers.py). Else it is learned in a sample of its own: once more follows, Qwen3 leaves
thoughts out, Qwen3.5's thoughts are not opened, and gpt-oss ends an answer with another token. The
fewest samples are made: each learns its last answer and those right before it that fit.

Bare text (a document, or a prompt with its completion) is not rendered by a chat template. It
begins with the token that the tokenizer puts before every text, if there is one, and ends with the
end-of-text token, which is learned, and added unless the text has it: a model that never learns it
never stops.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from ft_service.data.line_errors import LineError
from ft_service.data.sample_kinds import Conversation, GradedPrompt, PromptCompletion, Text, Tool
from ft_service.data.token_options import DEFAULT, TokenOptions
from ft_service.data.tokenizer_files import stops_of
from ft_service.data.tokens.answer_markers import (
    CLOSE,
    MARKUP,
    Alone,
    ApartError,
    MarkedConversation,
    Message,
    Span,
    Template,
    ThoughtError,
    UnmarkableError,
    thought_and_answer,
)
from ft_service.data.tokens.chat_template import ChatTemplate, writes_name
from ft_service.errors import SpecError
from ft_service.spec import TrainOn
from ft_service.spec.template_variables import with_variables


class Rendered(NamedTuple):
    """A sample's text."""

    text: str
    spans: list[Span]
    """The character spans of the answers to learn."""
    source: Conversation
    """The part of the conversation that the sample is of: up to the last answer that it learns,
    with weights of these.
    """


RENDERING = 9
"""Version of the conversations that chat_line.py and formats/normalize.py make of a record, and of
the tokens and targets that this module, answer_markers.py, boundary_tokens.py and tokenize.py make
of these; increase it when they change.
"""
EXACT_ANSWERS = 16
"""First answers of a conversation whose prompts are rendered in any case."""
MOST_CHARACTERS = 64 * 1024**2
"""Characters of the samples of one conversation together, where it is more than one."""
_PARTS = ("think", "tool_call", "tool_calls", "tool_response", "arg_value", "function")
_WITHIN_TURNS = frozenset(f"<{slash}{part}>" for part in _PARTS for slash in ("", "/"))
"""Tokens that begin or end a part of a turn."""
_ANSWERED = "ft_answered"
_FOLLOWS = "ft_follows"
_ASKED = {"role": "user", "content": "ft_question"}
_SWITCHES = ("enable_thinking", "thinking", "keep_thinking", "preserve_thinking")
"""Variables with which published templates turn thoughts on."""


def render(
    tokenizer: PreTrainedTokenizerBase, sample: Conversation, options: TokenOptions = DEFAULT
) -> list[Rendered]:
    """The samples of a conversation: one, in linear time, if the template writes its messages one
    after the other; else as many as it takes to learn each answer behind its own prompt.

    Raises LineError if the base's chat template refuses the conversation or leaves out a part of it
    (an answer, a call, a message that is answered), and for samples that are too long together.
    """
    template = ChatTemplate.of(tokenizer)
    assert template is not None, "the caller checks"
    template = template.setting(sample.variables)
    _require_tools_in_template(template, sample.tools, calls=sample.calls_tools)
    messages = list(sample.messages)
    tools = list(sample.tools) or None
    if any(CLOSE in message["content"] for message in messages) and _doubles_thoughts(template):
        messages = [_with_thought_apart(message) for message in messages]
    write: Template = partial(
        template.write, tools=tools, day=options.day, images=bool(sample.images)
    )
    endings = _endings(tokenizer, template)
    if options.train_on == "everything":
        if sample.images:
            raise LineError(
                next(iter(sample.image_places), "messages"),
                "is an image, and training.train_on = 'everything' learns all tokens, in windows "
                "that would cut through images: leave it out, or learn the answers alone",
            )
        full = endings.ended(write(messages), messages[-1])
        return [Rendered(full, [(0, len(full))], sample)]
    learned = _learned(sample, options.train_on)
    _require_unnamed(template, messages, learned)
    samples: list[Rendered] = []
    behind = _Behind(write, messages, endings)
    while learned:
        try:
            text, spans = behind.at(learned[-1]).rendered(learned, behind.alone)
        except ThoughtError as error:
            if (switch := _thought_switch(tokenizer, template)) is None:
                raise
            way_out = f"Or have the template write it: chat_template_kwargs: {{{switch}: true}}"
            raise LineError(error.field, f"{error.reason}. {way_out}") from None
        own = learned[-len(spans) :]
        weights = tuple(int(index in own) for index in range(own[-1] + 1))
        source = replace(sample, messages=tuple(messages)).first(len(weights), weights)
        samples.insert(0, Rendered(text, spans, source))
        learned = learned[: -len(spans)]
        if len(samples) > 1 and sum(len(own.text) for own in samples) > MOST_CHARACTERS:
            raise LineError(
                "messages",
                f"makes samples of more than {MOST_CHARACTERS:,} characters: the base's chat "
                "template writes an answer "
                "otherwise once more follows, so that earlier ones are learned in samples of "
                "their own, which repeat what "
                "stands before them. Make shorter conversations of it, or learn the last answer "
                "alone (training.train_on = "
                "'last_assistant')",
            )
    return samples


def _with_thought_apart(message: Message) -> Message:
    if message["role"] != "assistant" or CLOSE not in message["content"]:
        return message
    thought, words = thought_and_answer(message)
    return {**message, "content": words, **({"reasoning_content": thought} if thought else {})}


@lru_cache(maxsize=32)
def _doubles_thoughts(template: ChatTemplate) -> bool:
    """True if the template writes a thought of its own before one that stands in the content (Kimi
    K2 Thinking: an empty one; DeepSeek V4: the end of one): models learn two of them.
    """
    thinks = {"role": "assistant", "content": f"<think>\n{_FOLLOWS}\n{CLOSE}\n\n{_ANSWERED}"}
    with contextlib.suppress(LineError):
        _, _, text = template.write([_ASKED, thinks], None, DEFAULT.day).partition(
            _ASKED["content"]
        )
        return text.partition(_ANSWERED)[0].count(CLOSE) > 1
    return False


@lru_cache(maxsize=32)
def _thought_switch(tokenizer: Any, template: ChatTemplate) -> str | None:
    """The variable by which the template writes reasoning; None: none that is known.

    It is tried.
    """
    messages = [_ASKED, {"role": "assistant", "content": _ANSWERED, "reasoning_content": _FOLLOWS}]
    for name in _SWITCHES:
        if name not in template.text:
            continue
        sources = {
            own: with_variables(text, {name: True}) for own, text in template.sources.items()
        }
        switched = ChatTemplate(sources, template.special_tokens)
        with contextlib.suppress(LineError):
            endings = Endings(tokenizer, switched)
            if (
                _FOLLOWS
                in _Answers(
                    partial(switched.write, tools=None, day=DEFAULT.day), messages, endings
                ).answer
            ):
                return name
    return None


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, sample: GradedPrompt, options: TokenOptions = DEFAULT
) -> str:
    """The text with which the model is asked for an answer to a prompt.

    Raises LineError as `render`, SpecError for a base without a chat template.
    """
    template = ChatTemplate.of(tokenizer)
    if template is None:
        raise SpecError(
            "The base's tokenizer has no chat template, so prompts cannot be written for it. Give "
            "chat_template.",
            param="chat_template",
        )
    template = template.setting(sample.variables)
    messages = list(sample.messages)
    _require_tools_in_template(
        template, sample.tools, calls=any("tool_calls" in message for message in messages)
    )
    return template.write(messages, list(sample.tools) or None, options.day, prompt=True)


class _Behind:
    """The answers of a conversation, each at the end of what stands before it."""

    def __init__(self, write: Template, messages: list[Message], endings: Endings) -> None:
        self.at = lru_cache(maxsize=8)(
            lambda index: _Answers(write, messages[: index + 1], endings)
        )
        """Number of an answer → the conversation that ends with it."""

    def alone(self, index: int) -> tuple[str, str]:
        """An answer's prompt, and the answer. Raises LineError."""
        own = self.at(index)
        return own.prompt, own.answer


class _Answers:
    """The learned answers of a conversation that ends with the last of them."""

    def __init__(self, write: Template, messages: list[Message], endings: Endings) -> None:
        self._write = write
        self._messages = messages
        self._endings = endings
        self.prompt = write(messages[:-1], prompt=True)
        self._full = write(messages)
        self._marked: MarkedConversation | None = None

    @cached_property
    def answer(self) -> str:
        """The last answer, as it follows its prompt. Raises LineError."""
        answer = self._simple_answer()
        if answer is None or not self._is_prompt_complete():
            try:
                return self._with_markers().last_answer(self._endings.ending)
            except UnmarkableError:
                if answer is None:
                    raise
        return answer

    def rendered(self, learned: Sequence[int], alone: Alone) -> tuple[str, list[Span]]:
        """Text, and the learned spans of the last answer and of those right before it that fit.

        `learned`: numbers of the learned messages; the last one is the conversation's. Raises
        LineError.
        """
        text = self.prompt + self.answer
        spans = self._nearest_spans(learned[-2:-1], alone)
        if spans and len(learned) > 2:  # in most templates all fit, or not even the one before
            try:
                spans = self._earlier_spans(learned[:-1], alone)
            except ApartError:
                spans = self._nearest_spans(learned[:-1], alone)
        return text, [*spans, (len(self.prompt), len(text))]

    def _earlier_spans(self, learned: Sequence[int], alone: Alone) -> list[Span]:
        """The spans of all earlier answers. Raises ApartError if one does not fit, LineError."""
        if len(learned) < EXACT_ANSWERS or not self._is_markable():
            return [self._exact_span(index, alone) for index in learned]
        return self._with_markers().spans(learned, EXACT_ANSWERS, alone)

    def _nearest_spans(self, learned: Sequence[int], alone: Alone) -> list[Span]:
        spans: list[Span] = []
        with contextlib.suppress(ApartError):
            for index in reversed(learned):
                spans.insert(0, self._exact_span(index, alone))
        return spans

    def _exact_span(self, index: int, alone: Alone) -> Span:
        prompt, answer = alone(index)
        if not self.prompt.startswith(prompt) or not self.prompt.startswith(answer, len(prompt)):
            raise ApartError(index)
        return len(prompt), len(prompt) + len(answer)

    def _simple_answer(self) -> str | None:
        """The answer, if the conversation is its prompt, its words and the usual ending.

        None: it is not.
        """
        message = self._messages[-1]
        prompt = self.prompt
        full = self._full
        thought, words = thought_and_answer(message)
        usual = self._endings.usual
        if usual is None or not words or message.get("tool_calls"):
            return None
        tail, ending = usual
        end = len(full) - len(tail)
        if not (
            full.startswith(prompt)
            and full.endswith(words + tail)
            and end - len(words) >= len(prompt)
        ):
            return None
        if thought and full.find(thought, len(prompt), end - len(words)) < 0:
            return None
        return full[len(prompt) : end] + ending

    def _is_prompt_complete(self) -> bool:
        """Return whether the prompt has the exact words of all messages in their order.

        False if there are calls.
        """
        place = 0
        for message in self._messages[:-1]:
            words = message["content"].strip() if message["role"] != "assistant" else ""
            place = self.prompt.find(words, place)
            if place < 0 or message.get("tool_calls"):
                return False
            place += len(words)
        return True

    def _with_markers(self) -> MarkedConversation:
        """The conversation with markers.

        Raises UnmarkableError, and LineError if the template leaves out a message.
        """
        if self._marked is None:
            self._marked = MarkedConversation(
                self._write, self._messages, self.prompt, self._full, self._endings.tokens
            )
            self._marked.require_kept()
        return self._marked

    def _is_markable(self) -> bool:
        try:
            self._with_markers()
        except UnmarkableError:
            return False
        return True


class Endings:
    """The ways in which answers end with one tokenizer and chat template."""

    def __init__(self, tokenizer: Any, template: ChatTemplate) -> None:
        self._write: Template = partial(template.write, tools=None, day=DEFAULT.day)
        self._turns = turn_ends(tokenizer)
        self._base_stops = stops_of(Path(tokenizer.name_or_path))
        stops = {tokenizer.eos_token_id, *self._base_stops} - {None}
        self._stops = frozenset(tokenizer.convert_ids_to_tokens(sorted(stops)))
        added = tuple(tokenizer.get_added_vocab())
        self.tokens = _tokens_in_text(added)
        """Matches special tokens, and text that looks like them."""
        self._ids = tokenizer.convert_tokens_to_ids
        self._followed = lru_cache(maxsize=2)(self._next_turn)
        self.usual = self._usual()
        """The template's text after the words of a conversation's last answer, and the learned part
        of that text. None: the template refuses such a conversation.
        """

    def ending(self, tail: str, message: Message) -> str:
        """The learned part of the text after an answer's words: up to the token at which generation
        stops, else up to the token that ends the turn. `tail`: the text after the words where the
        conversation ends with this message.
        """
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
        """A text; if no token ends its turn, with the token of the next turn's beginning at which
        the base stops (as GLM's do).
        """
        return (
            text
            if text.rstrip().endswith(self._turns)
            else text + self._followed(calls="tool_calls" in message)
        )

    def _usual(self) -> tuple[str, str] | None:
        answer = {"role": "assistant", "content": _ANSWERED}
        try:
            text = self._write([_ASKED, answer])
        except LineError:
            return None
        _, match, tail = text.rpartition(_ANSWERED)
        return (tail, self.ending(tail, answer)) if match else None

    def _next_turn(self, *, calls: bool) -> str:
        """The token with which the turn after an answer begins, if the base stops at it; else
        empty. `calls`: the answer calls a tool.
        """
        call = {
            "id": "ftcallone",
            "type": "function",
            "function": {"name": _ANSWERED, "arguments": {}},
        }
        answer = {"role": "assistant", "content": ""} | (
            {"tool_calls": [call]} if calls else {"content": _ANSWERED}
        )
        after = {"role": "tool", "tool_call_id": "ftcallone"} if calls else {"role": "user"}
        try:
            text = self._write([_ASKED, answer, {**after, "content": _FOLLOWS}])
        except LineError:
            return ""
        _, match, rest = text.partition(_ANSWERED)
        between, followed, _ = rest.partition(_FOLLOWS)
        places = {between.find(token): token for token in self._turns if token in between}
        if not (match and followed and places):
            return ""
        token = places[min(places)]
        return token if self._ids(token) in self._base_stops else ""


@lru_cache(maxsize=8)
def _endings(tokenizer: Any, template: ChatTemplate) -> Endings:
    return Endings(tokenizer, template)


@lru_cache(maxsize=8)
def turn_ends(tokenizer: Any) -> tuple[str, ...]:
    """The tokens that may end a turn: all special and added tokens but those around parts of a
    turn.
    """
    return tuple(
        ({*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens} - _WITHIN_TURNS) - {""}
    )


@lru_cache(maxsize=8)
def _tokens_in_text(added: tuple[str, ...]) -> re.Pattern[str]:
    others = sorted(
        (token for token in added if token and not re.fullmatch(MARKUP, token)),
        key=len,
        reverse=True,
    )
    return re.compile("|".join([*map(re.escape, others), MARKUP]))


def words_of(
    tokenizer: PreTrainedTokenizerBase, sample: Conversation, text: str, options: TokenOptions
) -> list[Span]:
    """The spans of a conversation's text that are words of its messages; the rest is the
    template's. If the template does not keep markers, the words are searched in the text in their
    order.
    """
    template = ChatTemplate.of(tokenizer)
    assert template is not None, "it has rendered the text"
    template = template.setting(sample.variables)
    messages = list(sample.messages)
    tools = list(sample.tools) or None
    write: Template = partial(
        template.write, tools=tools, day=options.day, images=bool(sample.images)
    )
    if options.train_on != "everything":
        messages = messages[: _learned(sample, options.train_on)[-1] + 1]
        try:
            prompt = write(messages[:-1], prompt=True)
            full = write(messages)
            return MarkedConversation(
                write, messages, prompt, full, _endings(tokenizer, template).tokens
            ).words()
        except UnmarkableError:
            pass
    spans: list[Span] = []
    end = 0
    for words in (part for message in messages for part in thought_and_answer(message) if part):
        if (begin := text.find(words, end)) >= 0:
            end = begin + len(words)
            spans.append((begin, end))
    return spans


def _learned(sample: Conversation, train_on: TrainOn) -> list[int]:
    """The numbers of the learned messages. Raises LineError if there are none."""
    answers = [
        index for index, message in enumerate(sample.messages) if message["role"] == "assistant"
    ]
    candidates = answers[-1:] if train_on == "last_assistant" else answers
    learned = [index for index in candidates if sample.weights[index]]
    if not learned:
        raise LineError(
            f"messages.{candidates[0]}.weight" if candidates else "messages",
            "is 0 for the last answer, the only one that training.train_on = 'last_assistant' "
            "learns",
        )
    return learned


def writes_date(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template may write the date."""
    template = ChatTemplate.of(tokenizer)
    return template is not None and template.writes_date


def _require_tools_in_template(
    template: ChatTemplate, tools: Sequence[Tool], *, calls: bool
) -> None:
    """Raise LineError for tools that the template would leave out: the model would learn to call
    tools that it does not see.
    """
    for used, word, name in (
        (bool(tools), "tools", "definitions of tools"),
        (calls, "tool_calls", "calls"),
    ):
        if used and word not in template.text:
            raise LineError(
                "",
                f"the base's chat template has no place for {name}, so they would be left out. "
                "Train on a base whose template "
                "knows tools, or leave the line out",
            )


def _require_unnamed(
    template: ChatTemplate, messages: Sequence[Message], learned: Sequence[int]
) -> None:
    """Raise LineError for a learned answer with a name that the template would write: a prompt asks
    for an answer without.
    """
    named = next((index for index in learned if "name" in messages[index]), None)
    if named is not None and writes_name(template, "assistant"):
        raise LineError(
            f"messages.{named}.name",
            "is written before the answer by the base's chat template, and the prompt with which "
            "the model is asked for an "
            "answer has no name. Leave it out, or give this message weight 0",
        )


def render_bare(
    tokenizer: PreTrainedTokenizerBase, record: Text | PromptCompletion, train_on: str
) -> tuple[str, list[Span]]:
    """Text and learned spans of bare text.

    Raises LineError if the tokenizer has no end-of-text token, and for a document if only the last
    answer is to be learned.
    """
    begin, end = _ends(tokenizer)
    if not end:
        raise LineError(
            "",
            "the base's tokenizer names no end-of-text token (eos_token), so bare text could not "
            "be ended",
        )
    if isinstance(record, Text):
        if train_on == "last_assistant":
            raise LineError(
                "text",
                "has no answers, and training.train_on = 'last_assistant' learns the last one. "
                "Leave that out: a text is "
                "learned whole",
            )
        text = _ended(begin + record.text, end)
        return text, [(len(begin), len(text))]
    prompt = begin + record.prompt
    text = prompt + _ended(record.completion, end)
    return text, [(len(begin) if train_on == "everything" else len(prompt), len(text))]


def _ended(text: str, end: str) -> str:
    """The text with the token that ends it, once: many files have it already."""
    return text if text.endswith(end) else text + end


def bare_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    """The text of a prompt before its completion."""
    return _ends(tokenizer)[0] + prompt


@lru_cache(maxsize=4)
def _ends(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """The tokens that begin and end every text; empty: the tokenizer has none."""
    named: Any = tokenizer
    ids = named("").input_ids
    begins = bool(ids) and ids[0] == named.bos_token_id and named.bos_token_id is not None
    return (named.bos_token if begins else ""), named.eos_token or ""
