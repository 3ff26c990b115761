"""Samples of a data file as answers: every token with its text and its role."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from ft_service.data.samples import Answer, Role, SamplePage, ShownSample


class TokenView(BaseModel):
    id: int
    text: str
    """As it stands in the sample: the texts of all tokens, one after the other, are the sample's. Empty where the token before
    shows the character that both are part of."""
    role: Role
    """learned: the model is trained to produce it; words: of a message or a prompt, only read; template: written by the chat
    template, only read; cut: behind training.max_length."""


class SampleView(BaseModel):
    object: Literal["fine_tuning.sample"] = "fine_tuning.sample"
    line: int
    """Number of the record in the file, from 1: a line, an element or a row. 0: the file cannot be read any further."""
    tokens: list[TokenView]
    learned: int
    """Tokens that are trained on."""
    total: int
    """Tokens, cut ones included."""
    cut_at: int | None
    """The first token that is cut; null: none is."""
    error: str | None
    """Why the record cannot be trained on; null: it can."""
    answer: Answer
    """Which one of a preference pair's two; empty: it is no pair."""


class SamplesView(BaseModel):
    object: Literal["list"] = "list"
    data: list[SampleView]
    has_more: bool
    """More records follow: ask for those `after` the last one's line."""
    format: str
    """The file's format and container, in words."""
    word: str
    """What one of its records is called."""


def samples_view(page: SamplePage) -> SamplesView:
    samples = [_sample(sample) for sample in page.samples]
    return SamplesView(data=samples, has_more=page.has_more, format=page.shape, word=page.word)


def _sample(sample: ShownSample) -> SampleView:
    return SampleView(
        line=sample.line,
        tokens=[TokenView(id=token.id, text=token.text, role=token.role) for token in sample.tokens],
        learned=sample.learned,
        total=sample.total,
        cut_at=sample.cut_at,
        error=sample.error,
        answer=sample.answer,
    )
