"""Samples as the model sees them: every token with its text and its role.

The texts of a sample's tokens, joined, are the sample's text: characters between two tokens belong
to the second one, and of several tokens that encode one character, the first one has its text. What
stands for an image is shown as one token, with the image's size and its number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from itertools import islice

import numpy as np
from transformers import PreTrainedTokenizerBase

from ft_service.data.formats.reading import DataReader
from ft_service.data.line_errors import Fault, LineError
from ft_service.data.sample_kinds import (
    Conversation,
    GradedPrompt,
    Pair,
    PromptCompletion,
    Record,
    Text,
    label_of,
)
from ft_service.data.sample_request import Answer, RecordRange, SamplePage, ShownSample, ShownToken
from ft_service.data.token_options import TokenOptions
from ft_service.data.tokens.answer_markers import Span
from ft_service.data.tokens.image_fetch import ImageFetcher
from ft_service.data.tokens.image_processor import size_of
from ft_service.data.tokens.render import words_of
from ft_service.data.tokens.sample import ImageUse
from ft_service.data.tokens.tokenize import SampleCheck, SampleText, as_texts, encode
from ft_service.wording import counted

MOST_CHARACTERS = 1024**2
"""Characters of a sample that is shown, at most.

A longer one takes the time of the whole page, and gigabytes.
"""

_ANSWERS: Mapping[bool | None, Answer] = {None: "", True: "good", False: "bad"}
"""A record's label → what is shown of it."""
Shown = Conversation | PromptCompletion | Text | GradedPrompt
"""A record that is no pair."""


def page_of(
    tokenizer: PreTrainedTokenizerBase,
    data: DataReader,
    options: TokenOptions,
    max_length: int,
    page: RecordRange,
) -> SamplePage:
    """A page of a file's records as samples.

    Reads the file from its beginning. Raises OSError, SpecError.
    """
    shown: list[ShownSample] = []
    with data, closing(iter(data)) as records:
        following = (
            (number, record) for number, record in records if number > page.after or not number
        )
        for number, record in islice(following, page.limit):
            shown += _shown(tokenizer, number, record, options, max_length)
        more = next(following, None) is not None
    return SamplePage(tuple(shown), more, data.shape.word, str(data.shape))


def _shown(
    tokenizer: PreTrainedTokenizerBase,
    number: int,
    record: Record | Fault,
    options: TokenOptions,
    max_length: int,
) -> Iterator[ShownSample]:
    if isinstance(record, Fault):
        yield ShownSample(number, error=f"{record.field} {record.reason}".strip())
        return
    parts: dict[Answer, Shown]
    parts = (
        {"preferred": record.preferred, "rejected": record.rejected}
        if isinstance(record, Pair)
        else {_ANSWERS[label_of(record)]: record}
    )
    for answer, part in parts.items():
        try:
            if isinstance(part, Conversation):
                part = ImageFetcher().fetched(part)
            for sample in as_texts(tokenizer, options, part):
                yield _sample(tokenizer, number, sample, options, max_length, answer)
        except LineError as error:
            yield ShownSample(number, error=f"{error.field} {error.reason}".strip(), answer=answer)


def _sample(
    tokenizer: PreTrainedTokenizerBase,
    number: int,
    sample: SampleText,
    options: TokenOptions,
    max_length: int,
    answer: Answer,
) -> ShownSample:
    """A sample with the text and role of every token. Raises LineError."""
    text = sample.text
    record = sample.source
    written = sample.rendered or text
    if len(written) > MOST_CHARACTERS:
        raise LineError(
            "",
            f"has {len(written):,} characters, and samples of at most {MOST_CHARACTERS:,} are shown",
        )
    (encoding,) = encode(tokenizer, [(number, sample)], None)
    tokens = SampleCheck(tokenizer, options).tokens(sample, encoding)
    # Such samples are split into windows, and not cut.
    whole = tokens.target_count >= len(tokens.ids) - 1
    max_length = max(max_length, len(tokens.ids)) if whole and not answer else max_length
    words = (
        sample.grown(words_of(tokenizer, record, written, options))
        if isinstance(record, Conversation)
        else _bare_words(record, text)
    )
    inside = _starts_within(encoding.offsets, words)
    shown: list[ShownToken] = []
    kept = tokens.cut(max_length)
    images = {use.begin: use for use in tokens.images}
    end = image_end = 0
    for place, (token, (_, until)) in enumerate(zip(encoding.ids, encoding.offsets, strict=True)):
        until = max(until, end)
        is_cut = place >= len(kept.ids)
        if (image := images.get(place)) is not None:
            image_end = image.end
            shown.append(ShownToken(int(token), _of_image(image), "cut" if is_cut else "words"))
        elif place >= image_end:
            read = "words" if inside[place] else "template"
            learned = tokens.targets[place] and not sample.is_prompt
            role = "cut" if is_cut else "learned" if learned else read
            shown.append(ShownToken(int(token), text[end:until], role))
        end = until
    total = len(tokens.ids)
    cut_at = len(kept.ids) if total > len(kept.ids) else None
    return ShownSample(number, tuple(shown), kept.target_count, total, cut_at, answer=answer)


def _of_image(use: ImageUse) -> str:
    width, height = size_of(use.picture)
    return f"[image {width}x{height}, {counted(use.end - use.begin, 'token')}]"


def _bare_words(record: PromptCompletion | Text | GradedPrompt, text: str) -> list[Span]:
    """The spans of a record's own text, in its order."""
    if isinstance(record, GradedPrompt):
        contents = (message.get("content") for message in record.messages)
        parts = [
            words for content in contents if isinstance(content, str) and (words := content.strip())
        ]
    else:
        parts = [record.text if isinstance(record, Text) else record.prompt]
    spans: list[Span] = []
    end = 0
    for words in parts:
        if (begin := text.find(words, end)) >= 0:
            end = begin + len(words)
            spans.append((begin, end))
    return spans


def _starts_within(offsets: list[Span], spans: list[Span]) -> np.ndarray:
    """A mask, bool [tokens]: whether each token begins in one of the spans."""
    starts = np.array([first for first, _ in offsets], dtype=np.int64)
    inside = np.zeros(len(starts), dtype=np.bool_)
    for first, end in spans:
        inside |= (starts >= first) & (starts < end)
    return inside
