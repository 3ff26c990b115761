"""Finds the answers in a rendered conversation by markers, for templates whose conversations do not
simply extend their prompts.

Markers are characters that occur nowhere else. They are inserted where a content ends, where a
reasoning begins and where a call's name ends. The rendered text without its markers must be the
text of the conversation without markers; then their positions show where each message is in the
text, and which messages the template leaves out.

The last answer of a conversation is appended to its prompt as inference renders it. The text after
the last marker before the answer is compared: that of the prompt
(`<|im_end|>\n<|im_start|>assistant\n<think>\n`) and that of the conversation
(`<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n`). They have a common beginning; the answer
follows it in the conversation, whatever follows it in the prompt. A thought that the prompt opens
and the template does not close is closed.

An earlier answer is part of the last answer's prompt, as the template writes it there. It fits
there if that text begins with the answer's own prompt and goes on with the answer as it is at the
end of a conversation. These are rendered for the first answers of each kind and for some of the
others; the other answers of a kind are taken to begin and end like these.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ft_service.data.answer_format import THOUGHTS
from ft_service.data.line_errors import LineError
from ft_service.data.sample_kinds import IMAGE

Span = tuple[int, int]
Message = dict[str, Any]

TRUSTED_AFTER = 2
"""Answers of a kind that are rendered and must agree before further ones are taken to begin or end
like them.
"""
_OPEN = "<think>"
CLOSE = "</think>"
MARKUP = r"<[^<>\n]{1,60}>|\[/?[A-Z_]{2,40}\]"
"""Text that looks like a special token; some bases do not declare theirs."""

Template = Callable[..., str]
"""The base's template with the tools of one conversation: `(messages, *, prompt=False)` → text.

Raises LineError.
"""
Ending = Callable[[str, Message], str]
"""Text after the words of the last message → the part of it that is learned."""
Alone = Callable[[int], tuple[str, str]]
"""Number of an answer → its prompt, and the answer as it is where the conversation ends with it.

Raises LineError.
"""


def thought_and_answer(message: Message) -> tuple[str, str]:
    """An assistant's reasoning and its answer, without surrounding white space; either may be
    empty.
    """
    reasoning = message.get("reasoning_content") or ""
    content = message["content"]
    if (thought := _thought(content)) is not None:
        reasoning = reasoning or content[slice(*thought)]
        content = content[thought[1] + len(CLOSE) :]
    return reasoning.strip(), content.strip()


def _thought(content: str) -> Span | None:
    """The span of a content's reasoning, without leading white space. None: it has no reasoning."""
    end = content.find(CLOSE)
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
class MarkPosition:
    """A marker: `e` at the end of the content, `r` at the beginning of the reasoning, `c0`, `c1` …
    after the name of a call.
    """

    message: int
    part: str


class Marks:
    """Markers for one conversation: two characters that it does not contain, with the message and
    the part between them.
    """

    def __init__(self, *texts: str) -> None:
        used = set().union(*map(set, texts))
        free = (chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in used)
        self._opening, self._closing = next(free), next(free)
        self._mark = re.compile(f"{self._opening}([0-9]+)([a-z][0-9]*){self._closing}")

    def into(self, index: int, message: Message, *, empty: bool) -> Message:
        """A message with its markers. `empty`: an empty content gets one too."""
        content = message["content"]
        calls = message.get("tool_calls")
        marked = dict(message)
        thought = _thought(content) if message["role"] == "assistant" else None
        if thought is not None and thought[0] < thought[1]:
            content = content[: thought[0]] + self._text(index, "r") + content[thought[0] :]
        if content.strip() or (empty and not calls):
            core = content.rstrip() or content
            marked["content"] = core + self._text(index, "e") + content[len(core) :]
        if reasoning := (message.get("reasoning_content") or ""):
            begin = _past_space(reasoning, 0)
            marked["reasoning_content"] = (
                reasoning[:begin] + self._text(index, "r") + reasoning[begin:]
            )
        if calls:
            marked["tool_calls"] = [
                self._into_call(index, number, call) for number, call in enumerate(calls)
            ]
        return marked

    def out(self, text: str) -> tuple[str, dict[MarkPosition, int]]:
        """A rendered text without its markers, and their positions in it, first to last."""
        pieces: list[str] = []
        places: dict[MarkPosition, int] = {}
        length = end = 0
        for mark in self._mark.finditer(text):
            pieces.append(text[end : mark.start()])
            length += mark.start() - end
            end = mark.end()
            place = MarkPosition(int(mark[1]), mark[2])
            if place.part.startswith("c") and place in places:
                continue  # a tool's message repeats the name of the call
            places.pop(place, None)  # the last occurrence decides the order
            places[place] = length
        return "".join([*pieces, text[end:]]), places

    def _into_call(self, index: int, number: int, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {
            **call,
            "function": {**function, "name": function["name"] + self._text(index, f"c{number}")},
        }

    def _text(self, index: int, part: str) -> str:
        return f"{self._opening}{index}{part}{self._closing}"


class UnmarkableError(LineError):
    """The template does not keep markers."""


class ThoughtError(LineError):
    """The template has no place for an answer's reasoning."""


class ApartError(LineError):
    """An earlier answer is not the one that the model is to give: the template writes it, or what
    stands before it, otherwise once more follows.
    """

    def __init__(self, index: int) -> None:
        super().__init__(
            f"messages.{index}",
            "is written otherwise by the base's chat template once more follows",
        )


class _KindsDifferError(Exception):
    """Answers of one kind do not begin or end in the same way."""


class MarkedConversation:
    """A conversation that ends with a learned answer, whose messages carry markers that its
    template keeps.
    """

    def __init__(
        self,
        write: Template,
        messages: list[Message],
        prompt: str,
        full: str,
        tokens: re.Pattern[str],
    ) -> None:
        """`prompt`: the text with which the model is asked for the answer; `full`: the text of the
        conversation. `tokens`: matches special tokens, within which text is never split. Raises
        UnmarkableError.
        """
        self._write = write
        self._messages = messages
        self._prompt = prompt
        self._full = full
        self._tokens = tokens
        self._marks = Marks(full, prompt, json.dumps(messages, ensure_ascii=False))
        marked = self._mark()
        if marked is None:
            raise UnmarkableError(
                "",
                "the base's chat template changes what it writes with the words of a message, so "
                "the answers cannot be found "
                "in the conversation's text. Split it into conversations with one answer each; if "
                "those are refused too, "
                "take a base whose template writes messages as they are",
            )
        self._marked_messages, self._roles, self._in_prompt, self._in_full = marked
        self._last_of = {place.message: place for place in self._in_prompt}
        self._parts_of: dict[int, list[tuple[str, int]]] = {}
        for place, at in self._in_prompt.items():
            self._parts_of.setdefault(place.message, []).append((place.part, at))

    def last_answer(self, ending: Ending) -> str:
        """The last answer, as it follows its prompt.

        Raises LineError if it is not found, or partly left out.
        """
        last = len(self._messages) - 1
        message = self._messages[last]
        thought, words = thought_and_answer(message)
        self._require_last()
        place = next((place for place in reversed(self._in_prompt) if place in self._in_full), None)
        at_prompt, at_full = (
            (self._in_prompt[place], self._in_full[place]) if place is not None else (0, 0)
        )
        prompt_end = self._prompt[at_prompt:]
        common = self._common_length(prompt_end, self._full[at_full:])
        if common < len(prompt_end) and not self._has_header(common, prompt_end, place):
            raise _not_found(last)
        begin = at_full + common
        own = [at for of, at in self._in_full.items() if of.message == last and of.part != "r"]
        words_begin = words_end = max(own, default=begin)
        if own and words and not message.get("tool_calls"):
            words_begin = words_end - len(words)
        elif own:
            words_begin = min(own) - (len(words) if words else 0)
        elif thought and MarkPosition(last, "r") in self._in_full:
            words_begin = words_end = self._in_full[MarkPosition(last, "r")] + len(thought)
        if not begin <= words_begin <= words_end:
            raise _not_found(last)
        head = self._full[begin:words_begin]
        rest = self._full[words_begin:words_end] + ending(self._full[words_end:], message)
        return _continuation(prompt_end, common, head, rest, thought, last)

    def spans(self, learned: Sequence[int], exact: int, alone: Alone) -> list[Span]:
        """The learned spans of earlier answers; the first `exact` are rendered in any case.

        Raises ApartError for an answer that does not fit, LineError.
        """
        controls = {learned[-1]} | {
            learned[len(learned) >> halvings] for halvings in range(1, len(learned).bit_length())
        }
        try:
            return self._spans(learned, controls | set(learned[:exact]), alone)
        except _KindsDifferError:
            return self._spans(learned, None, alone)

    def words(self) -> list[Span]:
        """The spans of contents and reasonings in the prompt, of all messages but the last."""
        spans: list[Span] = []
        for place, at in self._in_prompt.items():
            message = self._messages[place.message]
            thought, answer = thought_and_answer(message)
            if place.part == "e":
                words = answer if message["role"] == "assistant" else message["content"].strip()
                spans += self._words_before(at, words)
            elif place.part == "r":
                spans += [(at, at + len(thought))] if self._prompt.startswith(thought, at) else []
        return spans

    def _words_before(self, end: int, words: str) -> list[Span]:
        """The spans of a content that ends at a character of the prompt; between two of its
        pictures stand words of their own.
        """
        spans: list[Span] = []
        for part in reversed(words.split(IMAGE)):
            begin = self._prompt.rfind(part, 0, end) if IMAGE in words else end - len(part)
            if begin < 0 or not self._prompt.startswith(part, begin):
                return []
            spans += [(begin, begin + len(part))] if part or IMAGE not in words else []
            end = begin
        return spans[::-1]

    def require_kept(self) -> None:
        """Raise LineError if the template leaves out a call, or the content of a message that is
        not the assistant's.
        """
        for index, message in enumerate(self._messages[:-1]):
            self._require_calls(index, self._in_prompt, self._prompt)
            words = message["content"].strip()
            if message["role"] == "assistant" or message["role"] not in self._roles or not words:
                continue
            if MarkPosition(index, "e") not in self._in_prompt and words not in self._prompt:
                own = message["role"]
                way_out = (
                    "Write them into the user message that follows"
                    if own == "system"
                    else "Leave the message out"
                )
                raise LineError(
                    f"messages.{index}.content",
                    f"the base's chat template leaves this {own} message out, so its words would "
                    f"not be seen. {way_out}",
                )

    def _mark(
        self,
    ) -> (
        tuple[list[Message], frozenset[str], dict[MarkPosition, int], dict[MarkPosition, int]]
        | None
    ):
        """Messages with markers, the roles that have some, and the markers' positions in prompt and
        full text. None: the template does not keep markers, in whichever messages they are.
        """
        all_roles = frozenset(message["role"] for message in self._messages)
        for roles, empty in (
            (all_roles, True),
            (all_roles, False),
            (frozenset({"assistant"}), False),
        ):
            marked = [
                self._marks.into(index, message, empty=empty)
                if message["role"] in roles
                else message
                for index, message in enumerate(self._messages)
            ]
            try:
                prompt, in_prompt = self._marks.out(self._write(marked[:-1], prompt=True))
                if prompt != self._prompt:
                    continue
                full, in_full = self._marks.out(self._write(marked))
            except LineError:
                continue
            if full == self._full:
                return marked, roles, in_prompt, in_full
        return None

    def _require_last(self) -> None:
        """Raise LineError if the conversation lacks the last answer's words, its reasoning or a
        call.
        """
        last = len(self._messages) - 1
        thought, answer = thought_and_answer(self._messages[last])
        self._require_calls(last, self._in_full, self._full)
        if answer and MarkPosition(last, "e") not in self._in_full:
            raise self._left_out("text", answer)
        if thought and MarkPosition(last, "r") not in self._in_full and not _is_open(self._prompt):
            raise self._left_out("reasoning", thought)

    def _require_calls(self, index: int, places: dict[MarkPosition, int], text: str) -> None:
        """Raise LineError for a call of which the text has neither the name nor the id (Kimi's
        templates write the id).
        """
        for number, call in enumerate(self._messages[index].get("tool_calls") or ()):
            if MarkPosition(index, f"c{number}") not in places and not (
                call.get("id") and call["id"] in text
            ):
                raise LineError(
                    f"messages.{index}.tool_calls.{number}",
                    "the base's chat template leaves this call out. Where it writes one call an "
                    "answer, give each a message of "
                    "its own, followed by its result",
                )

    def _left_out(self, what: str, words: str) -> LineError:
        message = self._messages[-1]
        calls = " next to its tool calls" if what == "text" and message.get("tool_calls") else ""
        key = (
            "reasoning_content" if words in (message.get("reasoning_content") or "") else "content"
        )
        kind = ThoughtError if what == "reasoning" else LineError
        return kind(
            f"messages.{len(self._messages) - 1}.{key}",
            f"the base's chat template leaves the {what} of this answer out{calls}, so it would "
            "not be learned. Leave the "
            f"{what} out, or give this message weight 0",
        )

    def _has_header(self, common: int, prompt_end: str, place: MarkPosition | None) -> bool:
        """Return whether the common text of prompt and conversation goes beyond the end of the
        previous message.
        """
        text, places = self._marks.out(self._write(self._marked_messages[:-1]))
        before = (
            text[places[place] :]
            if place is not None and place in places
            else text
            if place is None
            else prompt_end
        )
        return common > self._common_length(prompt_end, before)

    def _spans(self, learned: Sequence[int], rendered: set[int] | None, alone: Alone) -> list[Span]:
        """The learned spans. `rendered`: the answers that are rendered in any case; None: all.

        Raises LineError, _KindsDifferError.
        """
        firsts: dict[int, int] = {}
        begins = _PositionsByKind(lambda index, known: self._begin(index, known, alone))
        ends = _PositionsByKind(lambda index, known: self._end(index, firsts[index], known, alone))
        spans: list[Span] = []
        for index in learned:
            before, own = (
                (self._kind(index - 1), self._kind(index)) if rendered is not None else (None, None)
            )
            must = rendered is None or index in rendered
            firsts[index] = begins.at(index, before, must)
            spans.append((firsts[index], ends.at(index, own, must)))
        return spans

    def _kind(self, index: int) -> Hashable | None:
        """The features of a message that decide which text follows it.

        None: the message has no marker.
        """
        if index not in self._last_of:
            return None
        message = self._messages[index]
        thought, answer = (
            thought_and_answer(message)
            if message["role"] == "assistant"
            else ("", message["content"].strip())
        )
        return (
            message["role"],
            bool(thought),
            bool(answer),
            len(message.get("tool_calls") or ()),
            self._last_of[index].part,
        )

    def _begin(self, index: int, known: str | None, alone: Alone) -> tuple[int, str | None]:
        """The answer's begin, and the text before it from the last marker on.

        `known`: that text of another answer of its kind; if it does not fit here, the begin is -1.
        Raises ApartError if the text does not begin with the answer's prompt.
        """
        before = self._last_of.get(index - 1)
        here = self._in_prompt[before] if before is not None else 0
        if known is not None:
            return (here + len(known) if self._prompt.startswith(known, here) else -1), known
        prompt, _ = alone(index)
        if not self._prompt.startswith(prompt):
            raise ApartError(index)
        return len(prompt), self._prompt[here : len(prompt)] if before is not None and here <= len(
            prompt
        ) else None

    def _end(
        self, index: int, begin: int, known: Edges | None, alone: Alone
    ) -> tuple[int, Edges | None]:
        """The end of an answer that begins at `begin`, and its edges; otherwise as `_begin`.

        Raises ApartError if the answer is another one at the end of a conversation.
        """
        last = self._last_of.get(index)
        words, after = (
            (self._words_begin(index), self._in_prompt[last]) if last is not None else (0, 0)
        )
        if known is not None:
            head, tail = known
            fits = (
                self._prompt.startswith(head, begin)
                and begin + len(head) == words
                and self._prompt.startswith(tail, after)
            )
            return (after + len(tail) if fits else -1), known
        _, answer = alone(index)
        if not answer or not self._prompt.startswith(answer, begin):
            raise ApartError(index)
        end = begin + len(answer)
        is_marked = last is not None and begin <= words <= after <= end
        return end, (self._prompt[begin:words], self._prompt[after:end]) if is_marked else None

    def _words_begin(self, index: int) -> int:
        """Where the first of a message's marked parts begins in the prompt."""
        message = self._messages[index]
        _, answer = (
            thought_and_answer(message)
            if message["role"] == "assistant"
            else ("", message["content"].strip())
        )
        before = {"r": 0, "e": len(answer)}
        before |= {
            f"c{place}": len(call["function"]["name"])
            for place, call in enumerate(message.get("tool_calls") or ())
        }
        return min(at - before[part] for part, at in self._parts_of[index])

    def _common_length(self, one: str, other: str) -> int:
        """The length of the common beginning of two texts, in characters, without a part of a
        special token at its end.
        """
        length = next(
            (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
            min(len(one), len(other)),
        )
        for text in (one, other):
            for token in self._tokens.finditer(text, 0, length + 64):
                if token.start() < length < token.end():
                    length = token.start()
        return length


Edges = tuple[str, str]
"""An answer's text before its first marked part, and that after its last."""
Known = TypeVar("Known")


class _PositionsByKind(Generic[Known]):
    """Begins or ends of answers, which are found by rendering until those of a kind agree."""

    def __init__(self, find: Callable[[int, Known | None], tuple[int, Known | None]]) -> None:
        self._find = find
        self._known: dict[Hashable, tuple[Known | None, int]] = {}

    def at(self, index: int, kind: Hashable | None, must: bool) -> int:
        """The position for an answer.

        `must`: it must be rendered. Raises _KindsDifferError if the result disagrees with other
        answers of its kind.
        """
        known, agreed = self._known.get(kind, (None, 0)) if kind is not None else (None, 0)
        trusted = known is not None and agreed >= TRUSTED_AFTER
        expected = self._find(index, known)[0] if trusted else -1
        if expected >= 0 and not must:
            return expected
        position, text = self._find(index, None)
        if expected not in (-1, position):
            raise _KindsDifferError
        if kind is not None and not trusted:
            self._known[kind] = (text, agreed + 1 if text == known else 1)
        return position


def _is_open(prompt: str) -> bool:
    """Return whether a prompt ends within a thought."""
    return any(prompt.rfind(opening) > prompt.rfind(closing) for opening, closing in THOUGHTS)


def _continuation(
    prompt_end: str, common: int, head: str, rest: str, thought: str, index: int
) -> str:
    """The answer as it follows its prompt.

    `prompt_end`: the prompt's text after the last marker; the conversation has its first `common`
    characters. `head`: the conversation's text between these and the answer's words; `rest`: the
    text from there on. Raises LineError for a thought that cannot be learned.
    """
    for opening, closing in THOUGHTS:
        if prompt_end.rfind(opening) > prompt_end.rfind(closing):
            if common < len(prompt_end) and head.lstrip().startswith(opening):
                head = head.lstrip().removeprefix(opening)
            if closing not in head:
                head = f"{thought}\n{closing}\n\n{head.lstrip()}"
            elif thought and head.lstrip().startswith(closing):  # the template writes an empty one
                head = f"{thought}{head.lstrip()}"
            elif thought and thought not in head:
                raise ThoughtError(
                    f"messages.{index}.reasoning_content",
                    "is left out by the base's chat template, so it would not be learned. Leave "
                    "the reasoning out, or give "
                    "this message weight 0",
                )
        elif thought and closing in prompt_end[common:]:
            raise ThoughtError(
                f"messages.{index}.reasoning_content",
                "would not be learned: the prompt with which the model is asked closes the "
                f"thought, {prompt_end[common:]!r}. "
                "Leave the reasoning out, or give a chat_template whose generation prompt leaves "
                "the thought to the answer",
            )
    return head + rest


def _not_found(index: int) -> LineError:
    return LineError(
        f"messages.{index}",
        "the base's chat template writes the messages before this answer differently once the "
        "answer follows, so that its "
        "begin or end cannot be found in the text. Give this message weight 0, or leave the line "
        "out",
    )
