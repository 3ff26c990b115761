"""Prompts of an evaluation as tokens, with the expected answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ft_service.data.answer_format import Answer, AnswerFormat, closing_of
from ft_service.data.chat_line import parse_conversation
from ft_service.data.line_errors import ImageError, LineError
from ft_service.data.template_process import TemplateProcess
from ft_service.data.token_options import PixelBounds, TokenOptions
from ft_service.data.tokenizer_files import stops_of
from ft_service.data.tokens.answer_ends import answer_ends, answer_format
from ft_service.data.tokens.chat_template import ChatTemplate
from ft_service.data.tokens.image_processor import ImageProcessor
from ft_service.data.tokens.render import bare_prompt
from ft_service.data.tokens.sample import ImageUse, Picture, Tokens
from ft_service.data.tokens.template_parser import turns_of
from ft_service.data.tokens.token_set import TokenSet
from ft_service.data.tokens.tokenize import load_tokenizer, with_pictures, with_uses
from ft_service.data.tool_call_parser import Write
from ft_service.errors import DataError
from ft_service.spec import JobSpec, Prompt
from ft_service.spec.evaluation import AskedImage, AskedMessage, AskedText

_PICTURE = "[image]"
ROLES = {"developer": "system"}
"""Role → the name that chat templates use for it."""


@dataclass(frozen=True)
class Question:
    """A prompt as tokens, with the expected answer."""

    ids: np.ndarray
    """int32 [tokens]."""
    prompt: str
    """The same as text, without special tokens."""
    reference: str | None
    """Expected answer (`Answer.whole`); None: unknown."""
    ends: frozenset[int] = frozenset()
    """The special token with which the model learns to end the expected answer, if there is one."""
    messages: list[dict[str, Any]] | None = None
    """The prompt as a conversation; None: it is plain text, or only its tokens are known."""
    item: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of the prompt's line, for templates of graders."""
    tools: bool = False
    """Whether the prompt may offer tools, so that answers may call them."""
    closing: str = ""
    """Text that closes the thought which the prompt opens; empty: it opens none."""
    images: tuple[ImageUse, ...] = ()
    """Its pictures, whose features the ranks have."""

    def read(self, tokens: Sequence[int], tokenizer: Any, answers: AnswerFormat) -> Answer:
        """An answer of these tokens."""
        text = tokenizer.decode(tokens, skip_special_tokens=False)
        return answers.read(text, tools=self.tools, closing=self.closing)


@dataclass(frozen=True)
class Asked:
    """The questions of a job, with how answers to them are written."""

    questions: list[Question]
    answers: AnswerFormat
    ends: frozenset[int]
    """Tokens that end an answer."""


def asked_of(spec: JobSpec, samples: Sequence[Tokens], tokenizer: Any) -> Asked:
    """A job's own prompts; without any, a question for each sample: its tokens before the last
    learned stretch, which is the expected answer. Raises DataError for a prompt that the template
    rejects.
    """
    options = TokenOptions.of(spec)
    day = options.day
    folder = Path(spec.model.path)
    with rendering(tokenizer) as process:
        write = _write(process, day) if process else None
        answers = answer_format(write, tokenizer)
        learned = [_question(sample, tokenizer, answers, write) for sample in samples]
        given = spec.evaluation.given if spec.evaluation is not None else ()
        own = [
            _question_of(number, prompt, tokenizer, write, options.pixels)
            for number, prompt in enumerate(given, 1)
        ]
        stops = answer_ends(write, tokenizer, folder) if write is not None else stops_of(folder)
    return Asked(own or learned, answers, stops | ends_of(learned, tokenizer))


def questions_of_prompts(
    prompts: Sequence[Prompt], tokenizer: Any, options: TokenOptions
) -> list[Question]:
    """Prompts, rendered as when the model is served: conversations with the chat template.

    Raises DataError for one that the template rejects.
    """
    with rendering(tokenizer) as process:
        write = _write(process, options.day) if process else None
        return [
            _question_of(number, prompt, tokenizer, write, options.pixels)
            for number, prompt in enumerate(prompts, 1)
        ]


def pictured_prompts(spec: JobSpec) -> TokenSet:
    """Those of a job's own prompts that show images, as samples, so that the features of their
    images are computed with the others. Raises DataError as `asked_of`.
    """
    given = spec.evaluation.given if spec.evaluation is not None else []
    if not any(prompt.shows_images for prompt in given):
        return TokenSet.of([])
    options = TokenOptions.of(spec)
    tokenizer = load_tokenizer(spec.model.path, options.chat_template)
    pictured = [own for own in questions_of_prompts(given, tokenizer, options) if own.images]
    return TokenSet.of(
        Tokens(own.ids, np.zeros(len(own.ids), np.bool_), images=own.images) for own in pictured
    )


class _Render(Write, Protocol):
    """A chat template."""

    def __call__(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None = None,
        *,
        prompt: bool = False,
        images: bool = False,
    ) -> str: ...


def _write(process: TemplateProcess, day: date) -> _Render:
    def write(
        messages: list[dict[str, Any]],
        tools: list[Any] | None = None,
        *,
        prompt: bool = False,
        images: bool = False,
    ) -> str:
        return process.write(messages, tools, day, prompt=prompt, images=images)

    return write


def rendering(tokenizer: Any) -> AbstractContextManager[TemplateProcess | None]:
    """Start a process that renders with the tokenizer's chat template; None: the tokenizer has no
    template.
    """
    template = ChatTemplate.of(tokenizer)
    return (
        closing(TemplateProcess(template.sources, template.special_tokens))
        if template
        else nullcontext()
    )


def ends_of(questions: Sequence[Question], tokenizer: Any) -> set[int]:
    """Return the tokens that end an answer."""
    return {tokenizer.eos_token_id}.union(*(question.ends for question in questions)) - {None}


def text_of(tokens: Any, tokenizer: Any) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True).strip()


def last_stretch(targets: np.ndarray) -> tuple[int, int]:
    """Return [begin, end) of the last run of targets.

    There is at least one target after the first token.
    """
    places = np.flatnonzero(targets)
    end = int(places[-1]) + 1
    gaps = np.flatnonzero(np.diff(places) > 1)
    begin = int(places[gaps[-1] + 1] if len(gaps) else places[0])
    return max(begin, 1), end


def _question_of(
    number: int, prompt: Prompt, tokenizer: Any, write: _Render | None, pixels: PixelBounds
) -> Question:
    try:
        asked, text = _asked(prompt, tokenizer, write, pixels)
    except LineError as error:
        place = f" {error.field}:" if error.field else ""
        raise DataError(
            f"evaluation.prompts: prompt {number}:{place} {error.reason}.", code="invalid_prompt"
        ) from None
    if not len(asked.ids):
        raise DataError(f"evaluation.prompts: prompt {number} has no token.", code="invalid_prompt")
    return Question(
        asked.ids,
        text_of(_with_names(asked, tokenizer), tokenizer),
        prompt.reference,
        messages=None if prompt.messages is None else _shown_messages(prompt.messages),
        item=prompt.item,
        closing=closing_of(text),
        images=asked.images,
    )


def _asked(
    prompt: Prompt, tokenizer: Any, write: _Render | None, pixels: PixelBounds
) -> tuple[Tokens, str]:
    """A prompt's tokens, and its text as rendered. Raises LineError."""
    if prompt.messages is None:
        text = bare_prompt(tokenizer, prompt.prompt or "")
        return _tokens(text, tokenizer), text
    if write is None:
        raise LineError(
            "messages", "the base has no chat template: give chat_template, or bare text as prompt"
        )
    if not prompt.shows_images:
        text = write(_shown_messages(prompt.messages), prompt=True)
        return _tokens(text, tokenizer), text
    given = [message.model_dump(exclude_none=True) for message in prompt.messages]
    messages, _, shown = parse_conversation(given, [])
    text = write(messages, prompt=True, images=True)
    processor = ImageProcessor.of(tokenizer.name_or_path, pixels)
    written = ((own, _replacement(processor, own, at)) for own, at in shown.placed)
    whole, places = with_pictures(text, processor.image_token, written, len(shown.pictures))
    encoding = tokenizer([whole], add_special_tokens=False).encodings[0]
    return with_uses(places, encoding, _tokens(whole, tokenizer), processor.token_id), whole


def _tokens(text: str, tokenizer: Any) -> Tokens:
    ids = np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
    return Tokens(ids, np.zeros(len(ids), np.bool_))


def _replacement(processor: ImageProcessor, picture: Picture, place: str) -> str:
    try:
        return processor.replacement(picture)
    except ImageError as error:
        raise error.at(place) from None


def _shown_messages(messages: Sequence[AskedMessage]) -> list[dict[str, Any]]:
    """A prompt's messages as people read them, with a text in place of each picture."""
    return [
        {"role": ROLES.get(turn.role, turn.role), "content": _shown(turn.content)}
        for turn in messages
    ]


def _shown(content: str | Sequence[AskedText | AskedImage]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text if isinstance(part, AskedText) else _PICTURE for part in content)


def _question(
    sample: Tokens, tokenizer: Any, answers: AnswerFormat, write: Write | None
) -> Question:
    begin, end = last_stretch(sample.targets)
    before = sample.cut(begin)
    ids = before.ids
    learned, ends = without_end(sample.ids[begin:end].tolist(), tokenizer)
    shown = _with_names(before, tokenizer)
    messages = turns_of(shown, tokenizer, partial(write, prompt=True)) if write else None
    asked = Question(
        ids,
        text_of(shown, tokenizer),
        None,
        ends,
        messages,
        tools=answers.marks_calls,  # whether a prompt offers any cannot be told from its tokens
        closing=closing_of(tokenizer.decode(ids, skip_special_tokens=False)),
        images=before.images,
    )
    return replace(asked, reference=asked.read(learned, tokenizer, answers).whole)


def _with_names(prompt: Tokens, tokenizer: Any) -> list[int]:
    """The tokens of a prompt as people read it: with a text in place of what stands for a
    picture.
    """
    name = tokenizer(_PICTURE, add_special_tokens=False)["input_ids"]
    shown: list[int] = []
    end = 0
    for use in prompt.images:
        shown += [*prompt.ids[end : use.begin].tolist(), *name]
        end = use.end
    return [*shown, *prompt.ids[end:].tolist()]


def without_end(learned: list[int], tokenizer: Any) -> tuple[list[int], frozenset[int]]:
    """A learned answer without the special token that ends it, and that token, if there is one:
    others may stand within.
    """
    end = len(learned)
    while (
        end > 1 and not tokenizer.decode(learned[end - 1 : end], skip_special_tokens=False).strip()
    ):
        end -= 1
    if learned[end - 1] not in {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}:
        return learned, frozenset()
    return learned[: end - 1], frozenset(learned[end - 1 : end])
