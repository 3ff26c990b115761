"""Answers found by marks in the messages, where a template writes a conversation otherwise than its prompts say at first sight.

Marks are characters that occur nowhere else, put where a content ends, where a reasoning begins and where a call's name ends.
Rendered, and taken out again, they must leave the very text; then they say where each message lies in it, and which the
template leaves out.

The last answer of a conversation is put behind its prompt as inference renders it. What the prompt writes behind the last mark
before it (`<|im_end|>\n<|im_start|>assistant\n<think>\n`) and what the conversation writes there
(`<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n`) agree at first: behind that lies the answer, whatever the prompt goes on
with. A thought that the prompt leaves open and the template does not close is closed.

An earlier answer lies in the prompt of the last as the template writes it there. It is learned where its own prompt is the
beginning of that text, and where it ends as it does when the conversation ends with it. Its own prompt is rendered for the
first answers of every kind, and for some of the others; between these, answers of one kind begin and end alike.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ft_service.data.line_errors import LineError

Span = tuple[int, int]
Message = dict[str, Any]

TRUSTED_AFTER = 2
"""Answers of a kind that are rendered, and must agree, before others of that kind are taken to begin or end alike."""
_OPEN, _CLOSE = "<think>", "</think>"
_THOUGHTS = (
    *((_OPEN, _CLOSE), ("[THINK]", "[/THINK]"), ("<thought>", "</thought>"), ("<seed:think>", "</seed:think>")),
    *(("<|START_THINKING|>", "<|END_THINKING|>"), ("<|channel>thought\n", "<channel|>")),
)
"""Text between which prompts and answers of published templates have a thought."""
MARKUP = r"<[^<>\n]{1,60}>|\[/?[A-Z_]{2,40}\]"
"""What a base that does not declare its special tokens may still mean as one."""
_CHOICE = (
    "Learn the last answer alone (training.train_on = 'last_assistant'), or give this message weight 0 and end a line of its "
    "own with it, as `ft data convert --each-answer` does for every answer"
)


class Template(Protocol):
    """The base's template, for one conversation's tools: messages as text. Raises LineError."""

    def __call__(self, messages: list[Message], *, prompt: bool = False) -> str: ...


Ending = Callable[[str, Message], str]
"""What is learned of the text that follows the words of the last message."""


def thought_and_answer(message: Message) -> tuple[str, str]:
    """An assistant's reasoning and its answer, without the space around; either may be empty."""
    reasoning, content = message.get("reasoning_content") or "", message["content"]
    if (thought := _thought(content)) is not None:
        reasoning, content = reasoning or content[slice(*thought)], content[thought[1] + len(_CLOSE) :]
    return reasoning.strip(), content.strip()


def _thought(content: str) -> Span | None:
    """Where a content's reasoning is, less the space before it. None: there is none."""
    end = content.find(_CLOSE)
    if end < 0:
        return None
    begin = _past_space(content, 0)
    if content.startswith(_OPEN, begin):
        begin = _past_space(content, begin + len(_OPEN))
    return min(begin, end), end


def _past_space(text: str, begin: int) -> int:
    rest = text[begin:]
    return begin + len(rest) - len(rest.lstrip())


@dataclass(frozen=True)
class Place:
    """A mark: `e` of the content's end, `r` of the reasoning's begin, `c0`, `c1` … of a call's name."""

    message: int
    part: str


class Marks:
    """Two characters that a conversation does not use, and what is written between them."""

    def __init__(self, *texts: str) -> None:
        used = set().union(*map(set, texts))
        free = (chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in used)
        self._opening, self._closing = next(free), next(free)
        self._mark = re.compile(f"{self._opening}([0-9]+)([a-z][0-9]*){self._closing}")

    def into(self, index: int, message: Message, *, empty: bool) -> Message:
        """A message with its marks. `empty`: into an empty content too."""
        content, calls = message["content"], message.get("tool_calls")
        marked = dict(message)
        thought = _thought(content) if message["role"] == "assistant" else None
        if thought is not None and thought[0] < thought[1]:
            content = content[: thought[0]] + self._text(index, "r") + content[thought[0] :]
        if content.strip() or (empty and not calls):
            core = content.rstrip() or content
            marked["content"] = core + self._text(index, "e") + content[len(core) :]
        if reasoning := (message.get("reasoning_content") or ""):
            begin = _past_space(reasoning, 0)
            marked["reasoning_content"] = reasoning[:begin] + self._text(index, "r") + reasoning[begin:]
        if calls:
            marked["tool_calls"] = [self._into_call(index, number, call) for number, call in enumerate(calls)]
        return marked

    def out(self, text: str) -> tuple[str, dict[Place, int]]:
        """A rendering without its marks, and where they were in it, first to last."""
        pieces: list[str] = []
        places: dict[Place, int] = {}
        length = end = 0
        for mark in self._mark.finditer(text):
            pieces.append(text[end : mark.start()])
            length += mark.start() - end
            end = mark.end()
            place = Place(int(mark[1]), mark[2])
            if place.part.startswith("c") and place in places:
                continue  # a tool's answer says again who was called
            places.pop(place, None)  # the order is that of the last time
            places[place] = length
        return "".join([*pieces, text[end:]]), places

    def _into_call(self, index: int, number: int, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "name": function["name"] + self._text(index, f"c{number}")}}

    def _text(self, index: int, part: str) -> str:
        return f"{self._opening}{index}{part}{self._closing}"


class UnmarkableError(LineError):
    """The template does not keep marks."""


class _DiffersError(Exception):
    """Answers of one kind do not begin or end alike."""


class MarkedConversation:
    """A conversation that ends with a learned answer, whose messages carry marks that its template keeps."""

    def __init__(self, write: Template, messages: list[Message], prompt: str, full: str, tokens: re.Pattern[str]) -> None:
        """`prompt`, `full`: the text up to the answer as the model is asked for it, and with it. `tokens`: what text is never
        cut within. Raises UnmarkableError."""
        self._write, self._messages = write, messages
        self._prompt, self._full, self._tokens = prompt, full, tokens
        self._marks = Marks(full, prompt, json.dumps(messages, ensure_ascii=False))
        found = self._marked()
        if found is None:
            raise UnmarkableError(
                "",
                "the base's chat template changes what it writes with the words of a message, so the answers cannot be found "
                "in the conversation's text. Split it into conversations with one answer each; if those are refused too, "
                "take a base whose template writes messages as they are",
            )
        self._carrying, self._roles, self._in_prompt, self._in_full = found
        self._last_of: dict[int, Place] = {}
        for place in self._in_prompt:
            self._last_of[place.message] = place

    def last_answer(self, ending: Ending) -> str:
        """The last answer, to stand behind its prompt. Raises LineError if it is not found, or left out in part."""
        last = len(self._messages) - 1
        message = self._messages[last]
        thought, words = thought_and_answer(message)
        self._require(last, self._in_full, self._full)
        place = next((place for place in reversed(self._in_prompt) if place in self._in_full), None)
        at_prompt, at_full = (self._in_prompt[place], self._in_full[place]) if place is not None else (0, 0)
        asked, written = self._prompt[at_prompt:], self._full[at_full:]
        agreed = self._shared(asked, written)
        if agreed < len(asked) and not self._is_headed(agreed, asked, place):
            raise _not_found(last)
        begin = at_full + agreed
        own = [at for of, at in self._in_full.items() if of.message == last and of.part != "r"]
        words_begin = words_end = max(own, default=begin)
        if own and words and not message.get("tool_calls"):
            words_begin = words_end - len(words)
        elif own:
            words_begin = min(own) - (len(words) if words else 0)
        elif thought and Place(last, "r") in self._in_full:
            words_begin = words_end = self._in_full[Place(last, "r")] + len(thought)
        if not begin <= words_begin <= words_end:
            raise _not_found(last)
        head = self._full[begin:words_begin]
        rest = self._full[words_begin:words_end] + ending(self._full[words_end:], message)
        return _opened(asked, agreed, head, rest, thought, last)

    def spans(self, learned: Sequence[int], exact: int, ending: Ending) -> list[Span]:
        """The learned spans of earlier answers, the first `exact` of them by rendering in any case. Raises LineError for one
        that does not stand behind its own prompt, or ends otherwise than by itself."""
        if not learned:
            return []
        controls = {learned[-1]} | {learned[len(learned) >> halvings] for halvings in range(1, len(learned).bit_length())}
        try:
            return self._spans(learned, controls | set(learned[:exact]), ending)
        except _DiffersError:
            return self._spans(learned, None, ending)

    def words(self) -> list[Span]:
        """Where the words of the messages before the last lie in the prompt: contents and reasonings."""
        spans: list[Span] = []
        for place, at in self._in_prompt.items():
            message = self._messages[place.message]
            thought, answer = thought_and_answer(message)
            if place.part == "e":
                words = answer if message["role"] == "assistant" else message["content"].strip()
                begin = at - len(words)
                spans += [(begin, at)] if self._prompt.startswith(words, begin) else []
            elif place.part == "r":
                spans += [(at, at + len(thought))] if self._prompt.startswith(thought, at) else []
        return spans

    def require_kept(self) -> None:
        """Raises LineError for a message before the last answer that the template leaves out: of an assistant a call, of
        others the content."""
        for index, message in enumerate(self._messages[:-1]):
            self._require_calls(index, self._in_prompt, self._prompt)
            words = message["content"].strip()
            if message["role"] == "assistant" or message["role"] not in self._roles or not words:
                continue
            if Place(index, "e") not in self._in_prompt and words not in self._prompt:
                own = message["role"]
                way_out = "Write them into the user message that follows" if own == "system" else "Leave the message out"
                raise LineError(
                    f"messages.{index}.content",
                    f"the base's chat template leaves this {own} message out, so its words would not be seen. {way_out}",
                )

    def require_answers(self, learned: Sequence[int]) -> None:
        """Raises LineError for an earlier learned answer that the template leaves out in part."""
        for index in learned:
            self._require(index, self._in_prompt, self._prompt)

    def _marked(self) -> tuple[list[Message], frozenset[str], dict[Place, int], dict[Place, int]] | None:
        everyone = frozenset(message["role"] for message in self._messages)
        for roles, empty in ((everyone, True), (everyone, False), (frozenset({"assistant"}), False)):
            carrying = [
                self._marks.into(index, message, empty=empty) if message["role"] in roles else message
                for index, message in enumerate(self._messages)
            ]
            try:
                prompt, in_prompt = self._marks.out(self._write(carrying[:-1], prompt=True))
                if prompt != self._prompt:
                    continue
                full, in_full = self._marks.out(self._write(carrying))
            except LineError:
                continue
            if full == self._full:
                return carrying, roles, in_prompt, in_full
        return None

    def _require(self, index: int, places: dict[Place, int], text: str) -> None:
        """Raises LineError for an answer of which the text has not the words, the reasoning or a call."""
        thought, answer = thought_and_answer(self._messages[index])
        self._require_calls(index, places, text)
        if answer and Place(index, "e") not in places:
            raise self._left_out(index, "text", Place(index, "e"), answer, "Leave the text out")
        if thought and Place(index, "r") not in places and not (places is self._in_full and _is_open(self._prompt)):
            raise self._left_out(index, "reasoning", Place(index, "r"), thought, "Leave the reasoning out")

    def _require_calls(self, index: int, places: dict[Place, int], text: str) -> None:
        """Raises LineError for a call of which the text has neither the name nor, as Kimi's, the id."""
        for number, call in enumerate(self._messages[index].get("tool_calls") or ()):
            if Place(index, f"c{number}") not in places and not (call.get("id") and call["id"] in text):
                raise LineError(
                    f"messages.{index}.tool_calls.{number}",
                    "the base's chat template leaves this call out. Where it writes one call an answer, give each a message of "
                    "its own, followed by its result",
                )

    def _left_out(self, index: int, what: str, place: Place, words: str, way_out: str) -> LineError:
        beside = " beside its tool calls" if what == "text" and self._messages[index].get("tool_calls") else ""
        _, alone = self._marks.out(self._write(self._carrying[: index + 1]))
        if place in alone and index < len(self._messages) - 1:
            reason = (
                f"the base's chat template leaves the {what} of this answer out once more follows, so it would not be learned. "
                f"{way_out}. Or: {_CHOICE[0].lower()}{_CHOICE[1:]}"
            )
        else:
            reason = (
                f"the base's chat template leaves the {what} of this answer out{beside}, so it would not be learned. "
                f"{way_out}, or give this message weight 0"
            )
        key = "reasoning_content" if words in (self._messages[index].get("reasoning_content") or "") else "content"
        return LineError(f"messages.{index}.{key}", reason)

    def _is_headed(self, agreed: int, asked: str, place: Place | None) -> bool:
        """Whether prompt and conversation agree in more than what ends the message before."""
        messages = self._carrying[:-1]
        text, places = self._marks.out(self._write(messages))
        before = text[places[place] :] if place is not None and place in places else text if place is None else asked
        return agreed > self._shared(asked, before)

    def _spans(self, learned: Sequence[int], rendered: set[int] | None, ending: Ending) -> list[Span]:
        """`rendered`: the answers whose prompts and ends are rendered in any case; None: all."""
        begins, ends = _Alike(self._begin), _Alike(lambda index, known: self._end(index, known, ending))
        spans: list[Span] = []
        for index in learned:
            before, own = (self._kind(index - 1), self._kind(index)) if rendered is not None else (None, None)
            must = rendered is None or index in rendered
            first, end = begins.at(index, before, must), ends.at(index, own, must)
            if end <= first:
                raise _not_found(index)
            spans.append((first, end))
        return spans

    def _kind(self, index: int) -> Hashable | None:
        """The features of messages after which text goes on alike. None: no mark to go by."""
        if index not in self._last_of:
            return None
        message = self._messages[index]
        thought, answer = thought_and_answer(message) if message["role"] == "assistant" else ("", message["content"].strip())
        return message["role"], bool(thought), bool(answer), len(message.get("tool_calls") or ()), self._last_of[index].part

    def _begin(self, index: int, known: str | None) -> tuple[int, str | None]:
        """Where the answer begins, and what the prompt writes after the last mark. `known`: that of another of its kind; the
        begin is -1 if it does not fit. Raises LineError where its prompt is not the beginning of the text.
        """
        if known is not None:
            here = self._in_prompt[self._last_of[index - 1]]
            return (here + len(known) if self._prompt.startswith(known, here) else -1), known
        text, places = self._marks.out(self._write(self._carrying[:index], prompt=True))
        if not self._prompt.startswith(text):
            raise LineError(
                f"messages.{index}",
                "the model is asked for this answer behind another text than the conversation has there: once more follows, "
                f"the base's chat template writes what stands before the answer differently. {_CHOICE}",
            )
        place = next(reversed(places), None)
        return len(text), text[places[place] :] if place is not None and place == self._last_of.get(index - 1) else None

    def _end(self, index: int, known: str | None, ending: Ending) -> tuple[int, str | None]:
        """Where the answer ends, and what is learned of the text after its last mark; as `_begin`."""
        if known is not None:
            here = self._in_prompt[self._last_of[index]]
            return (here + len(known) if self._prompt.startswith(known, here) else -1), known
        text, places = self._marks.out(self._write(self._carrying[: index + 1]))
        place = next(reversed(places), None)
        if place is None or place not in self._in_prompt:
            raise _not_found(index)
        end, here = ending(text[places[place] :], self._messages[index]), self._in_prompt[place]
        if not self._prompt.startswith(end, here):
            raise LineError(
                f"messages.{index}",
                f"ends with {end[-40:]!r} where it is the last answer, as generation does, and otherwise once more follows, so "
                f"that a model which learned that would not stop. {_CHOICE}",
            )
        return here + len(end), end if place == self._last_of.get(index) else None

    def _shared(self, one: str, other: str) -> int:
        """How much two texts have in common from their beginning, in characters; no special token is cut."""
        length = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        for text in (one, other):
            for token in self._tokens.finditer(text, 0, length + 64):
                if token.start() < length < token.end():
                    length = token.start()
        return length


class _Alike:
    """Beginnings or ends, which are found by rendering until those of a kind agree."""

    def __init__(self, find: Callable[[int, str | None], tuple[int, str | None]]) -> None:
        self._find = find
        self._known: dict[Hashable, tuple[str | None, int]] = {}

    def at(self, index: int, kind: Hashable | None, must: bool) -> int:
        """`must`: by rendering. Raises _DiffersError if that disagrees with what was taken for others of its kind."""
        known, agreed = self._known.get(kind, (None, 0)) if kind is not None else (None, 0)
        trusted = known is not None and agreed >= TRUSTED_AFTER
        expected = self._find(index, known)[0] if trusted else -1
        if expected >= 0 and not must:
            return expected
        found, made = self._find(index, None)
        if expected not in (-1, found):
            raise _DiffersError
        if kind is not None and not trusted:
            self._known[kind] = (made, agreed + 1 if made == known else 1)
        return found


def _is_open(prompt: str) -> bool:
    """Whether a prompt ends within a thought."""
    return any(prompt.rfind(opening) > prompt.rfind(closing) for opening, closing in _THOUGHTS)


def _opened(asked: str, agreed: int, head: str, rest: str, thought: str, index: int) -> str:
    """An answer as it goes on from its prompt. `asked`: the prompt's end, of which the conversation has the first `agreed`
    characters. `head`, `rest`: the conversation's text behind these, before the answer's words and from there. Raises LineError
    for a thought that cannot be learned.
    """
    for opening, closing in _THOUGHTS:
        if asked.rfind(opening) > asked.rfind(closing):
            if agreed < len(asked) and head.lstrip().startswith(opening):
                head = head.lstrip().removeprefix(opening)
            if closing not in head:
                head = f"{thought}\n{closing}\n\n{head.lstrip()}"
            elif thought and thought not in head:
                raise LineError(
                    f"messages.{index}.reasoning_content",
                    "is left out by the base's chat template, so it would not be learned. Leave the reasoning out, or give "
                    "this message weight 0",
                )
        elif thought and closing in asked[agreed:]:
            raise LineError(
                f"messages.{index}.reasoning_content",
                f"would not be learned: the prompt that the model is asked with closes the thought, {asked[agreed:]!r}. Leave "
                "the reasoning out, or give a chat_template whose generation prompt leaves the thought to the answer",
            )
    return head + rest


def _not_found(index: int) -> LineError:
    return LineError(
        f"messages.{index}",
        "the base's chat template writes the conversation up to this answer differently with it and without it, so that where "
        f"the answer begins or ends is not found in the text. {_CHOICE}",
    )
