"""A conversation as text by the base's chat template, and the parts of that text which the assistant learns to write.

What is learned comes from rendering prefixes: what the template adds between "up to this answer, with the generation prompt"
and "including this answer" is what the model must learn to produce, its end-of-turn token included. That needs no support from
the template but that later turns do not rewrite earlier ones. Where they do, marks tell where the answers lie (marked.py).

Rendering two prefixes for every answer is quadratic. A long conversation is rendered once more, by a copy of the template that
notes where each message begins. Where a prefix ends, counted from there, is found by rendering for the first answers of every
kind, and taken over for the others of that kind after a look at the text; a few are rendered all the same, to see that this
holds. Where it does not, or the template has no loop over the messages, every prefix is rendered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Sequence
from datetime import date, datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from ft_service.data.line_errors import LineError
from ft_service.data.records import Chat
from ft_service.data.token_options import DEFAULT, TokenOptions
from ft_service.data.tokenizer_files import stops_of
from ft_service.data.tokens.marked import (
    TRUSTED_AFTER,
    MarkedConversation,
    Span,
    Template,
    UnmarkableError,
    thought_and_answer,
)
from ft_service.errors import SpecError
from ft_service.spec import TrainOn

Rendered = tuple[str, list[Span]]
"""A sample's text, and the character spans of the answers to learn."""

RENDERING = 3
"""Of this module, marked.py, straddling.py and tokenize.py: another number wherever they make other tokens or targets of a
conversation than before."""
EXACT_ANSWERS = 16
"""So many answers of a conversation, the first ones, have their prefixes rendered in any case."""
CLOCK = "strftime_now"
"""What templates call for today's date."""
_WITHIN_TURNS = frozenset({"</think>", "</tool_call>", "</tool_calls>", "</tool_response>", "</arg_value>", "</function>"})
"""Tokens that end a part of a turn."""
_ANSWERED, _FOLLOWS = "ft_answered", "ft_follows"
_NOTE = "ft_note"
"""What the copy of a template calls at each turn of a loop."""


class _RewrittenError(Exception):
    """The template writes a prefix of the conversation differently once more follows."""


def render(tokenizer: PreTrainedTokenizerBase, sample: Chat, options: TokenOptions = DEFAULT) -> Rendered:
    """Text and learned spans of a conversation, in time linear in it if the template writes its messages one after the other.

    Raises LineError for what the base's chat template does not take, or leaves out of an answer or a system prompt.
    """
    _require_tools_in_template(tokenizer, sample)
    messages, tools = list(sample.messages), list(sample.tools) or None
    _set_clock(tokenizer, tools, options.day)
    template: Template = partial(_template, tokenizer, tools)
    full = template(messages)
    if options.train_on == "everything":
        return _ended(tokenizer, messages, [len(messages) - 1], full, [(0, len(full))])
    learned = _learned(sample, options.train_on)

    def marked() -> MarkedConversation:
        added: Any = tokenizer.get_added_vocab  # pyright: ignore[reportAttributeAccessIssue] - fast ones have it
        return MarkedConversation(template, messages, full, tuple(added()))

    try:
        spans = _by_prefixes(tokenizer, tools, _Prefixes(template, messages, full), learned)
    except _RewrittenError:
        conversation = marked()
        conversation.require_kept(learned)
        return _ended(tokenizer, messages, learned, full, conversation.spans(learned, EXACT_ANSWERS))
    if not _all_is_there(messages, learned, full, spans):
        with contextlib.suppress(UnmarkableError):  # the template changes words, which is no leaving out
            marked().require_kept(learned)
    return _ended(tokenizer, messages, learned, full, spans)


def _ended(tokenizer: Any, messages: list[dict[str, Any]], learned: Sequence[int], full: str, spans: list[Span]) -> Rendered:
    """The text, and the learned spans with the token that begins the next turn, where nothing else ends an answer and the base
    stops by it (GLM's do). Behind the last answer the text gets one.
    """
    endings = turn_ends(tokenizer)
    if any(full[first:end].rstrip().endswith(endings) for first, end in spans):
        return full, spans
    extended: list[Span] = []
    for index, (first, end) in zip(learned, spans, strict=True):
        follows = _next_turn(tokenizer, _source(tokenizer), calls="tool_calls" in messages[index])
        if end == len(full):
            full += follows
        extended.append((first, end + len(follows) if follows and full.startswith(follows, end) else end))
    return full, extended


@lru_cache(maxsize=8)
def turn_ends(tokenizer: Any) -> tuple[str, ...]:
    """The tokens by which a turn may end: those that a tokenizer splits no text into, but for the ends of parts of a turn."""
    return tuple(({*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens} - _WITHIN_TURNS) - {""})


@lru_cache(maxsize=8)
def _next_turn(tokenizer: Any, source: str, *, calls: bool) -> str:
    """The token that the turn behind an answer begins with; empty: the template begins it with none. `source`: the template's,
    which may have been replaced. `calls`: the answer calls a tool.
    """
    call = {"id": "ftcallone", "type": "function", "function": {"name": _ANSWERED, "arguments": {}}}
    answer = {"role": "assistant", "content": ""} | ({"tool_calls": [call]} if calls else {"content": _ANSWERED})
    after = (
        {"role": "tool", "tool_call_id": "ftcallone", "content": _FOLLOWS} if calls else {"role": "user", "content": _FOLLOWS}
    )
    try:
        text = _template(tokenizer, None, [{"role": "user", "content": "ft_question"}, answer, after])
    except LineError:
        return ""
    _, found, rest = text.partition(_ANSWERED)
    between, followed, _ = rest.partition(_FOLLOWS)
    places = {between.find(token): token for token in turn_ends(tokenizer) if token in between}
    if not (found and followed and places):
        return ""
    token = places[min(places)]
    return token if tokenizer.convert_tokens_to_ids(token) in stops_of(Path(tokenizer.name_or_path)) else ""


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], options: TokenOptions = DEFAULT) -> str:
    """A conversation up to where the assistant answers. Raises LineError for what the base's chat template does not take."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise LineError("messages", "the base has no chat template: give chat_template, or bare text as prompt")
    _set_clock(tokenizer, None, options.day)
    return _template(tokenizer, None, messages, add_generation_prompt=True)


def words_of(tokenizer: PreTrainedTokenizerBase, sample: Chat, full: str, options: TokenOptions) -> list[Span]:
    """The parts of a conversation's text that are words of its messages; the rest is the template's. Where the template keeps
    no marks they are looked for, one after the other.
    """
    messages, tools = list(sample.messages), list(sample.tools) or None
    _set_clock(tokenizer, tools, options.day)
    added: Any = tokenizer.get_added_vocab  # pyright: ignore[reportAttributeAccessIssue] - fast ones have it
    try:
        return MarkedConversation(partial(_template, tokenizer, tools), messages, full, tuple(added())).words()
    except UnmarkableError:
        spans: list[Span] = []
        end = 0
        for words in (part for message in messages for part in thought_and_answer(message) if part):
            if (begin := full.find(words, end)) >= 0:
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


def _set_clock(tokenizer: Any, tools: list[Any] | None, day: date) -> None:
    """Have the template find the date of this day, at midnight, wherever it asks for today's. What is given to a template as a
    variable may not be a function, so this is a global of the one that is compiled and kept.
    """
    if writes_date(tokenizer):
        compiled: Any = chat_template_utils._compile_jinja_template(  # pyright: ignore[reportPrivateUsage]
            tokenizer.get_chat_template(None, tools)
        )
        compiled.environment.globals[CLOCK] = datetime(day.year, day.month, day.day).strftime


def _all_is_there(messages: list[dict[str, Any]], learned: list[int], full: str, spans: list[Span]) -> bool:
    """Whether the text has the words of all system messages and learned answers; words changed a little count as missing."""
    for index, (first, end) in zip(learned, spans, strict=True):
        if any(full.find(words, first, end) < 0 for words in thought_and_answer(messages[index])):
            return False
    return all(message["content"].strip() in full for message in messages if message["role"] == "system")


def _by_prefixes(tokenizer: Any, tools: list[Any] | None, exact: _Prefixes, learned: list[int]) -> list[Span]:
    """The learned spans, where each prefix is written as in the whole. Raises _RewrittenError where one is not."""
    begins = _beginnings(tokenizer, tools, exact.messages, exact.full) if len(learned) > EXACT_ANSWERS else None
    spans = None if begins is None else _alike(exact, learned, begins)
    return spans if spans is not None else [exact.span(index) for index in learned]


class _Prefixes:
    """The prefixes of one conversation."""

    def __init__(self, template: Template, messages: list[dict[str, Any]], full: str) -> None:
        self._template = template
        self.messages = messages
        self.full = full

    def span(self, index: int) -> Span:
        """The learned span of a message. Raises _RewrittenError if a prefix is not written as in the whole."""
        before = self._template(self.messages[:index], add_generation_prompt=True)
        last = index == len(self.messages) - 1
        until = self.full if last else self._template(self.messages[: index + 1])
        if not (until.startswith(before) and self.full.startswith(until)):
            raise _RewrittenError
        return len(before), len(until)


def _alike(exact: _Prefixes, learned: Sequence[int], begins: Sequence[int]) -> list[Span] | None:
    """The spans of the learned messages. None: answers of one kind differ. Raises as `span` does.

    `begins`: where each message begins in the text, and the end of the text.
    """
    known: dict[Hashable, tuple[Span, str, str]] = {}
    agreed: dict[Hashable, int] = {}
    controls = {learned[-1]} | {learned[len(learned) >> halvings] for halvings in range(1, len(learned).bit_length())}
    spans: list[Span] = []
    for count, index in enumerate(learned):
        kind = _kind(exact, index, begins)
        trusted = kind is not None and agreed.get(kind, 0) >= TRUSTED_AFTER
        expected = _expected(exact.full, index, begins, *known[kind]) if trusted else None
        if expected is not None and count >= EXACT_ANSWERS and index not in controls:
            spans.append(expected)
            continue
        first, end = span = exact.span(index)
        spans.append(span)
        if trusted and span != expected:
            return None
        if kind is not None and not trusted:
            here, after = begins[index], begins[index + 1]
            mark = ((first - here, end - after), exact.full[here:first], exact.full[after:end])
            agreed[kind] = agreed.get(kind, 0) + 1 if known.get(kind) == mark else 1
            known[kind] = mark
    return spans


def _expected(full: str, index: int, begins: Sequence[int], offsets: Span, prompt: str, end: str) -> Span | None:
    """The span of a message if it is one of its kind. None: the text says otherwise."""
    here, after = begins[index], begins[index + 1]
    if full.startswith(prompt, here) and full.startswith(end, after):
        return here + offsets[0], after + offsets[1]
    return None


def _kind(exact: _Prefixes, index: int, begins: Sequence[int]) -> Hashable | None:
    """The features that two answers share if their prefixes end alike: the text around them and the message before.

    None: the first message, or the last, whose end is the whole text's.
    """
    if index == 0 or index == len(exact.messages) - 1:
        return None
    return _shape(exact, index - 1, begins), _shape(exact, index, begins)


def _shape(exact: _Prefixes, index: int, begins: Sequence[int]) -> Hashable:
    """The text around a message's content; all of its text if the content is not part of it."""
    message, piece = exact.messages[index], exact.full[begins[index] : begins[index + 1]]
    content = message["content"].strip()
    if calls := message.get("tool_calls"):
        return message["role"], len(calls), bool(content)
    head, inside, tail = piece.partition(content) if content else (piece, "", "")
    return message["role"], head, bool(inside), tail


def _beginnings(tokenizer: Any, tools: list[Any] | None, messages: list[dict[str, Any]], full: str) -> list[int] | None:
    """Where each message begins in the text, and the end of the text. None: the template does not tell."""
    own = [dict(message) for message in messages]
    order = {id(message): index for index, message in enumerate(own)}
    length = 0
    noted: dict[int, dict[int, int]] = {}

    def note(loop: int, item: object) -> str:
        if (index := order.get(id(item))) is not None:
            noted.setdefault(loop, {})[index] = length
        return ""

    given = {**tokenizer.special_tokens_map, "messages": own, "tools": tools, "documents": None, _NOTE: note}
    pieces: list[str] = []
    try:
        for piece in _noting(tokenizer.get_chat_template(None, tools)).generate(**given, add_generation_prompt=False):
            pieces.append(piece)
            length += len(piece)
    except MemoryError:
        raise
    except Exception:  # it is no more than a help
        return None
    if "".join(pieces) != full or not noted:
        return None
    main = max(noted.values(), key=lambda begins: max(begins.values()) - min(begins.values()))
    return _filled(main, len(messages), len(full))


def _filled(noted: dict[int, int], messages: int, length: int) -> list[int] | None:
    """Beginnings for all messages: one that the loop skips, such as a system message that goes into the next, begins with the
    next.
    """
    begins = [length] * (messages + 1)
    for index in reversed(range(messages)):
        begins[index] = noted.get(index, begins[index + 1])
        if begins[index] > begins[index + 1]:
            return None
    return begins


@lru_cache(maxsize=4)
def _noting(source: str) -> jinja2.Template:
    """A copy of a template that calls `ft_note(number of the loop, item)` at the beginning of each turn of each loop."""
    compile_template: Any = chat_template_utils._compile_jinja_template  # pyright: ignore[reportPrivateUsage]
    environment: jinja2.Environment = compile_template(source).environment
    tree = environment.parse(source)
    for number, loop in enumerate(tree.find_all(nodes.For)):
        if isinstance(loop.target, nodes.Name):
            called = [nodes.Const(number), nodes.Name(loop.target.name, "load")]
            loop.body.insert(0, nodes.Output([nodes.Call(nodes.Name(_NOTE, "load"), called, [], None, None)]))
    tree.set_environment(environment)
    tree.set_lineno(1)
    return jinja2.Template.from_code(environment, environment.compile(tree), environment.make_globals(None))


def require_usable(chat_template: str) -> None:
    """Raises SpecError for a template that is not written as one."""
    try:
        chat_template_utils._compile_jinja_template(chat_template)  # pyright: ignore[reportPrivateUsage]
    except jinja2.TemplateSyntaxError as error:
        raise SpecError(f"chat_template: line {error.lineno}: {error.message}.", param="chat_template") from None


def writes_date(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template may write the date."""
    return CLOCK in _source(tokenizer)


def _source(tokenizer: PreTrainedTokenizerBase) -> str:
    given: Any = tokenizer.chat_template or ""
    return given if isinstance(given, str) else " ".join(given.values())


def _require_tools_in_template(tokenizer: PreTrainedTokenizerBase, sample: Chat) -> None:
    """Refuse tools that the template would leave out: the model would learn to call tools that it was not told of."""
    source = _source(tokenizer)
    for used, word, what in (
        (bool(sample.tools), "tools", "definitions of tools"),
        (sample.calls_tools, "tool_calls", "calls"),
    ):
        if used and word not in source:
            raise LineError(
                "",
                f"the base's chat template has no place for {what}, so they would be left out. Train on a base whose template "
                "knows tools, or leave the line out",
            )


def as_named(source: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with reasonings also in the field `thinking`, for templates that look for it there. `source`: the template's."""
    if "thinking" not in source or "reasoning_content" in source:
        return messages
    return [
        {**message, "thinking": message["reasoning_content"]} if "reasoning_content" in message else message
        for message in messages
    ]


def _template(
    tokenizer: PreTrainedTokenizerBase, tools: list[Any] | None, messages: list[Any], add_generation_prompt: bool = False
) -> str:
    messages = as_named(_source(tokenizer), messages)
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt)
    except (ImportError, MemoryError):  # no word of the template's
        raise
    except Exception as error:  # templates raise what they like, to refuse roles and orders
        raise LineError("", f"the base's chat template refuses this conversation: {error}") from error
    assert isinstance(text, str)
    return text
