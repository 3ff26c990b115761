"""Prompts of an evaluation as tokens, with the expected answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ft_service.data.line_errors import LineError
from ft_service.data.template_process import TemplateProcess
from ft_service.data.token_options import TokenOptions
from ft_service.data.tokens.chat_template import ChatTemplate
from ft_service.data.tokens.render import bare_prompt
from ft_service.data.tokens.sample import Tokens
from ft_service.data.tokens.template_parser import Write, turns_of
from ft_service.errors import DataError
from ft_service.spec import Prompt

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
    """Expected answer; None: unknown."""
    ends: frozenset[int] = frozenset()
    """Special tokens in the expected answer, with which the model learns to end it."""
    messages: list[dict[str, Any]] | None = None
    """The prompt as a conversation; None: it is plain text, or only its tokens are known."""
    item: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of the prompt's line, for templates of graders."""


def questions_of(samples: Sequence[Tokens], tokenizer: Any, options: TokenOptions) -> list[Question]:
    """Return a question for each sample: its tokens before the last learned stretch, which is the expected answer."""
    with _rendering(tokenizer) as process:
        write = (lambda messages: process.write(messages, None, options.day, prompt=True)) if process else None
        return [_question(sample, tokenizer, write) for sample in samples]


def questions_of_prompts(prompts: Sequence[Prompt], tokenizer: Any, options: TokenOptions) -> list[Question]:
    """Return a job's own prompts, rendered as when the model is served: conversations with the chat template. Raises DataError
    for a prompt that the template rejects."""
    with _rendering(tokenizer) as process:
        return [_question_of(number, prompt, tokenizer, options, process) for number, prompt in enumerate(prompts, 1)]


def _rendering(tokenizer: Any) -> AbstractContextManager[TemplateProcess | None]:
    """Start a process that renders with the tokenizer's chat template; None: the tokenizer has no template."""
    template = ChatTemplate.of(tokenizer)
    return closing(TemplateProcess(template.sources, template.special_tokens)) if template else nullcontext()


def ends_of(questions: Sequence[Question], tokenizer: Any) -> set[int]:
    """Return the tokens that end an answer."""
    return {tokenizer.eos_token_id}.union(*(question.ends for question in questions)) - {None}


def text_of(tokens: Any, tokenizer: Any) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True).strip()


def last_stretch(targets: np.ndarray) -> tuple[int, int]:
    """Return [begin, end) of the last run of targets. There is at least one target after the first token."""
    places = np.flatnonzero(targets)
    end = int(places[-1]) + 1
    gaps = np.flatnonzero(np.diff(places) > 1)
    begin = int(places[gaps[-1] + 1] if len(gaps) else places[0])
    return max(begin, 1), end


def _question_of(
    number: int, prompt: Prompt, tokenizer: Any, options: TokenOptions, process: TemplateProcess | None
) -> Question:
    messages = None
    if prompt.messages is not None:
        messages = [{"role": ROLES.get(turn.role, turn.role), "content": turn.content} for turn in prompt.messages]
    try:
        if messages is None:
            text = bare_prompt(tokenizer, prompt.prompt or "")
        elif process is None:
            raise LineError("messages", "the base has no chat template: give chat_template, or bare text as prompt")
        else:
            text = process.write(messages, None, options.day, prompt=True)
    except LineError as error:
        raise DataError(f"evaluation.prompts: prompt {number}: {error.reason}.", code="invalid_prompt") from None
    ids = np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
    if not len(ids):
        raise DataError(f"evaluation.prompts: prompt {number} has no token.", code="invalid_prompt")
    return Question(ids, text_of(ids, tokenizer), prompt.reference, messages=messages, item=prompt.item)


def _question(sample: Tokens, tokenizer: Any, write: Write | None) -> Question:
    begin, end = last_stretch(sample.targets)
    learned = sample.ids[begin:end]
    special = set(tokenizer.all_special_ids)
    return Question(
        ids=sample.ids[:begin],
        prompt=text_of(sample.ids[:begin], tokenizer),
        reference=text_of(learned, tokenizer),
        ends=frozenset(int(token) for token in learned if int(token) in special),
        messages=turns_of(sample.ids[:begin], tokenizer, write) if write else None,
    )
