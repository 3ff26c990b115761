"""Prompts of an evaluation as tokens, with the expected answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ft_service.data.answer_format import Answer, AnswerFormat, closing_of
from ft_service.data.line_errors import LineError
from ft_service.data.template_process import TemplateProcess
from ft_service.data.token_options import TokenOptions
from ft_service.data.tokenizer_files import stops_of
from ft_service.data.tokens.answer_ends import answer_ends, answer_format
from ft_service.data.tokens.chat_template import ChatTemplate
from ft_service.data.tokens.render import bare_prompt
from ft_service.data.tokens.sample import Tokens
from ft_service.data.tokens.template_parser import turns_of
from ft_service.data.tool_call_parser import Write
from ft_service.errors import DataError
from ft_service.spec import JobSpec, Prompt

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
    day = TokenOptions.of(spec).day
    folder = Path(spec.model.path)
    with _rendering(tokenizer) as process:
        write = _write(process, day) if process else None
        answers = answer_format(write, tokenizer)
        learned = [_question(sample, tokenizer, answers, write) for sample in samples]
        given = spec.evaluation.given if spec.evaluation is not None else ()
        own = [
            _question_of(number, prompt, tokenizer, write) for number, prompt in enumerate(given, 1)
        ]
        stops = answer_ends(write, tokenizer, folder) if write is not None else stops_of(folder)
    return Asked(own or learned, answers, stops | ends_of(learned, tokenizer))


def questions_of_prompts(
    prompts: Sequence[Prompt], tokenizer: Any, options: TokenOptions
) -> list[Question]:
    """Prompts, rendered as when the model is served: conversations with the chat template.

    Raises DataError for one that the template rejects.
    """
    with _rendering(tokenizer) as process:
        write = _write(process, options.day) if process else None
        return [
            _question_of(number, prompt, tokenizer, write)
            for number, prompt in enumerate(prompts, 1)
        ]


def _write(process: TemplateProcess, day: date) -> Write:
    def write(
        messages: list[dict[str, Any]], tools: list[Any] | None = None, *, prompt: bool = False
    ) -> str:
        return process.write(messages, tools, day, prompt=prompt)

    return write


def _rendering(tokenizer: Any) -> AbstractContextManager[TemplateProcess | None]:
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


def _question_of(number: int, prompt: Prompt, tokenizer: Any, write: Write | None) -> Question:
    messages = None
    if prompt.messages is not None:
        messages = [
            {"role": ROLES.get(turn.role, turn.role), "content": turn.content}
            for turn in prompt.messages
        ]
    try:
        if messages is None:
            text = bare_prompt(tokenizer, prompt.prompt or "")
        elif write is None:
            raise LineError(
                "messages",
                "the base has no chat template: give chat_template, or bare text as prompt",
            )
        else:
            text = write(messages, prompt=True)
    except LineError as error:
        raise DataError(
            f"evaluation.prompts: prompt {number}: {error.reason}.", code="invalid_prompt"
        ) from None
    ids = np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
    if not len(ids):
        raise DataError(f"evaluation.prompts: prompt {number} has no token.", code="invalid_prompt")
    shown = text_of(ids, tokenizer)
    closing = closing_of(text)
    return Question(
        ids, shown, prompt.reference, messages=messages, item=prompt.item, closing=closing
    )


def _question(
    sample: Tokens, tokenizer: Any, answers: AnswerFormat, write: Write | None
) -> Question:
    begin, end = last_stretch(sample.targets)
    ids = sample.ids[:begin]
    learned, ends = _without_end(sample.ids[begin:end].tolist(), tokenizer)
    messages = turns_of(ids, tokenizer, partial(write, prompt=True)) if write else None
    asked = Question(
        ids,
        text_of(ids, tokenizer),
        None,
        ends,
        messages,
        tools=answers.marks_calls,  # whether a prompt offers any cannot be told from its tokens
        closing=closing_of(tokenizer.decode(ids, skip_special_tokens=False)),
    )
    return replace(asked, reference=asked.read(learned, tokenizer, answers).whole)


def _without_end(learned: list[int], tokenizer: Any) -> tuple[list[int], frozenset[int]]:
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
