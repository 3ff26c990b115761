"""Records as tokens, with a mask of the learned ones, and checks of each sample before anything is
learned from it.

The workers and the process that examines files (examine.py) share this module, so it does not
import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from ft_service.data.data_file import TWO_ANSWERS, answers, for_method
from ft_service.data.formats.reading import open_data
from ft_service.data.line_errors import Fault, ImageError, LineError
from ft_service.data.sample_kinds import (
    Conversation,
    GradedPrompt,
    Pair,
    Picture,
    PromptCompletion,
    Record,
    Text,
    in_context,
    label_of,
)
from ft_service.data.token_options import DEFAULT, PixelBounds, TokenOptions
from ft_service.data.tokens.answer_markers import Span
from ft_service.data.tokens.base_tokenizer import load_tokenizer as load_tokenizer
from ft_service.data.tokens.boundary_tokens import Joined, as_prompted, require_prompted
from ft_service.data.tokens.image_fetch import ImageFetcher
from ft_service.data.tokens.image_processor import ImageProcessor
from ft_service.data.tokens.render import render, render_bare, render_prompt, turn_ends, writes_date
from ft_service.data.tokens.sample import ImageUse, Tokens
from ft_service.data.tokens.sample_limits import SampleLimits, TimeUp
from ft_service.data.tokens.token_set import TokenSet
from ft_service.data.tokens.training_set.split import Split, split_off
from ft_service.errors import DataError, SpecError
from ft_service.spec import DataFileRef
from ft_service.wording import counted

CHUNK_SAMPLES = 256
CHUNK_CHARACTERS = 512 * 1024
"""Text that is tokenised at once: enough to use all processors, and a bound on memory, since tokens
take about a hundred times as much as their text.
"""


CHUNK_IMAGE_BYTES = 32 * 1024**2
"""The same of encoded images, which wait for their tokens."""

_SHOWN = 40
_NO_ANSWER = (
    "is a text without an answer, of which a teacher and its student would read other parts: give "
    "prompts with completions, or chats"
)
_OTHER_ANSWER = (
    "behind method.distillation.with_context the base's tokenizer or chat template writes other "
    "tokens for its answers, so that teacher and student cannot be compared. End the context with "
    "a blank line, or leave the line out"
)
_SIGN = "the base's own sign for an image, which stands for images alone: write it otherwise"


class ImageText(NamedTuple):
    """What stands for a picture in a sample's text."""

    begin: int
    """Place of its first character."""
    end: int
    picture: Picture
    grown: int
    """Characters that it has more than the sign which the chat template wrote."""


class SampleText(NamedTuple):
    """A sample as text, and the character spans of it that are learned."""

    text: str
    spans: list[Span]
    source: Conversation | GradedPrompt | PromptCompletion | Text
    """The record, or the part of a conversation that the sample is of."""
    is_chat: bool
    """A chat template has written it, with an answer."""
    is_prompt: bool = False
    """It is a prompt to grade, of which nothing is learned."""
    images: tuple[ImageText, ...] = ()
    rendered: str = ""
    """The text as the chat template wrote it, where there are images."""

    def grown(self, spans: list[Span]) -> list[Span]:
        """Spans of `rendered` as spans of `text`; an image that begins within one is part of it."""
        return [(self._grown(first), self._grown(end)) for first, end in spans]

    def _grown(self, place: int) -> int:
        for image in self.images:
            place += image.grown if image.begin < place else 0
        return place


class SampleCheck:
    """Checks of samples for one base.

    Each of these faults has ruined trainings without any message.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: TokenOptions) -> None:
        named: Any = tokenizer
        self._ends = turn_ends(tokenizer)
        self._begin: tuple[int | None, str | None] = named.bos_token_id, named.bos_token
        self._end: str | None = named.eos_token
        self._everything = options.train_on == "everything"
        self._labelled = options.columns.labels is True
        self._path = named.name_or_path
        self._pixels = options.pixels

    def tokens(self, sample: SampleText, encoding: Encoding | Joined) -> Tokens:
        """The sample's tokens, if they may be learned. Raises LineError with the text at fault."""
        require_prompted(sample.text, sample.spans, encoding)
        tokens = _prompt(encoding) if sample.is_prompt else _masked(sample, encoding)
        if sample.images:
            token_id = ImageProcessor.of(self._path, self._pixels).token_id
            tokens = with_uses(sample.images, encoding, tokens, token_id)
        self._require_one_begin(sample, tokens)
        if not tokens.target_count:
            raise LineError("", f"not one of its tokens is learned: {_shown(sample.text)}")
        if sample.is_chat:
            if not self._everything and tokens.targets[1:].all():
                raise LineError(
                    "",
                    "all of its tokens are learned, as if there were no prompt: "
                    f"{_shown(sample.text)}. If that is meant, "
                    "ask for training.train_on = 'everything'",
                )
            self._require_end_of_turn(sample)
        return replace(tokens, label=label_of(sample.source)) if self._labelled else tokens

    def _require_one_begin(self, sample: SampleText, tokens: Tokens) -> None:
        number, name = self._begin
        if number is not None and len(tokens.ids) > 1 and (tokens.ids[:2] == number).all():
            who = "chat template" if sample.is_chat else "tokenizer"
            raise LineError(
                "",
                f"begins with {name} twice: the base's {who} writes it before every text. Leave "
                "it out",
            )

    def _require_end_of_turn(self, sample: SampleText) -> None:
        if any(sample.text[first:end].rstrip().endswith(self._ends) for first, end in sample.spans):
            return
        learned = sample.text[slice(*sample.spans[-1])]
        own = f", or with the base's own {self._end}" if self._end else ""
        raise LineError(
            "",
            f"no end-of-turn token is learned: what is learned ends with {learned[-_SHOWN:]!r}, "
            "so the tuned model would not "
            "stop. Give a chat_template that ends answers with a special token of the base's "
            f"tokenizer{own}",
        )


def _shown(text: str) -> str:
    return repr(text if len(text) <= 2 * _SHOWN else f"{text[:_SHOWN]} … {text[-_SHOWN:]}")


Made = TypeVar("Made")
Kind = TypeVar("Kind", bound=Record)

Chunk = list[tuple[int, SampleText | Fault]]
"""Samples that are tokenised at once, with the numbers of their lines."""


def file_samples(
    tokenizer: PreTrainedTokenizerBase,
    file: DataFileRef,
    options: TokenOptions = DEFAULT,
    *,
    pairs: bool = False,
) -> Generator[Tokens]:
    """The uncut samples of a file. `pairs`: it holds pairs, of which each answer is a sample.

    Raises DataError if the file changed after submission, or has a line that cannot be trained on,
    unless it is skipped (data.images), of which too many are not looked for.
    """
    data = open_data(Path(file.path), file.files, options.columns)
    missing = next((path for path in data.paths if not path.is_file()), None)
    if missing is not None:
        raise DataError(f"{file.name}: the file is gone from {missing}.", code="file_missing")
    if data.digest() != file.sha256:
        raise DataError(
            f"{file.name}: the file has changed since the job was submitted.", code="file_changed"
        )
    with (
        data as reader,
        closing(
            tokenize(tokenizer, sources(tokenizer, reader, options, pairs=pairs), options=options)
        ) as found,
    ):
        for of_record in found:
            if isinstance(of_record, Fault):
                if of_record.of_image and not options.columns.strict_images:
                    continue
                raise DataError(f"{file.name}: {of_record.text(data.shape.word)}.")
            yield from of_record


def load_dataset(
    tokenizer: PreTrainedTokenizerBase,
    file: DataFileRef,
    max_length: int,
    options: TokenOptions = DEFAULT,
    split: Split | None = None,
    *,
    pairs: bool = False,
) -> TokenSet:
    """The samples of a small file for training, in memory; with `split`, those set aside for
    validation. `pairs`: as in `file_samples`. Raises DataError as `file_samples` and `trainable`
    do.
    """
    with closing(file_samples(tokenizer, file, options, pairs=pairs)) as samples:
        token_set = TokenSet.of(samples, dated=writes_date(tokenizer))
    chosen = token_set if split is None else split_off(token_set, split, file.name)[1]
    return trainable(chosen, file, max_length, pairs=pairs)


def trainable(
    samples: TokenSet,
    file: DataFileRef,
    max_length: int,
    *,
    pairs: bool = False,
    alike: bool = False,
) -> TokenSet:
    """A file's samples, cut to `max_length` tokens, without those that have no target left; of
    pairs, without those of which an answer has none left, or whose answers are the same then unless
    `alike`. Raises DataError if no sample is left.
    """
    usable = samples.cut(max_length, pairs=pairs, alike=alike)
    if not len(usable):
        raise DataError(f"{file.name}: {nothing_to_learn(max_length, pairs=pairs)}.")
    return usable


def nothing_to_learn(max_length: int, *, pairs: bool = False) -> str:
    within = f"within training.max_length = {max_length} tokens"
    if pairs:
        return (
            f"no pair has two answers {within} that differ and have an assistant token each, so "
            "there is nothing to learn. "
            "Raise it if the answers differ after that, and else give others"
        )
    return f"no sample has an assistant token {within}"


def tokenize(
    tokenizer: PreTrainedTokenizerBase,
    records: Iterable[tuple[int, Record | Fault]],
    limits: SampleLimits | None = None,
    options: TokenOptions = DEFAULT,
) -> Generator[list[Tokens] | Fault]:
    """The samples of every record, or its fault: the given one, or one that rendering or a check
    finds. Records of the same number that follow each other are one.

    While one chunk is tokenised in a thread that does not hold the GIL, this thread renders the
    next one: do not use the tokenizer until the end. `limits`: exceeding them is a fault of the
    sample; after a few of these the iteration ends.
    """
    with closing(_samples(tokenizer, records, limits, options)) as samples:
        for number, of_record in groupby(samples, itemgetter(0)):
            found = [outcome for _, outcome in of_record]
            fault = next((outcome for outcome in found if isinstance(outcome, Fault)), None)
            tokens = [outcome for outcome in found if isinstance(outcome, Tokens)]
            if fault is None and options.context:
                beside = beside_teachers(tokens)
                tokens = beside or []
                fault = None if beside else Fault(number, "", _OTHER_ANSWER)
            yield fault or [
                *tokens[:1],
                *(replace(sample, continues=True) for sample in tokens[1:]),
            ]


def sources(
    tokenizer: PreTrainedTokenizerBase,
    records: Iterable[tuple[int, Record | Fault]],
    options: TokenOptions,
    *,
    pairs: bool,
) -> Iterator[tuple[int, Record | Fault]]:
    """What the samples of a file's records are made of: of pairs, both answers; with a context, the
    record and then the record behind it; else the record. `pairs`: samples belong together in twos.
    """
    if options.context:
        return _with_context(tokenizer, records, options)
    return answers(records) if pairs else iter(records)


def _with_context(
    tokenizer: PreTrainedTokenizerBase,
    records: Iterable[tuple[int, Record | Fault]],
    options: TokenOptions,
) -> Iterator[tuple[int, Record | Fault]]:
    for number, record in for_method(records, pairs=False):
        yield number, record
        if isinstance(record, Fault):
            continue
        if not isinstance(record, Conversation | PromptCompletion | GradedPrompt):
            yield number, Fault(number, "", _NO_ANSWER)
            continue
        with suppress(LineError):  # which the record alone raises too
            yield number, in_context(as_asked(tokenizer, options, record), options.context)


def beside_teachers(samples: list[Tokens]) -> list[Tokens] | None:
    """A record's samples, each followed by the same as its teacher reads it.

    `samples`: first those of the record, and then those of the record behind its context. None: the
    two do not learn the same tokens.
    """
    half = len(samples) // 2
    made = list(zip(samples[:half], samples[half:], strict=False))
    same = len(samples) == 2 * half and all(
        np.array_equal(own.ids[1:][own.targets[1:]], other.ids[1:][other.targets[1:]])
        for own, other in made
    )
    if not same:
        return None
    return [sample for pair in made for sample in pair]


def _samples(
    tokenizer: PreTrainedTokenizerBase,
    records: Iterable[tuple[int, Record | Fault]],
    limits: SampleLimits | None,
    options: TokenOptions,
) -> Generator[tuple[int, Tokens | Fault]]:
    check = SampleCheck(tokenizer, options)
    with ThreadPoolExecutor(1, "tokenize") as pool:
        previous: tuple[Chunk, Future[list[Encoding | Joined]]] | None = None
        for chunk in _chunks(
            partial(
                _rendered,
                partial(as_texts, tokenizer, options),
                partial(ImageProcessor.of, tokenizer.name_or_path, options.pixels),
                ImageFetcher().fetched,
            ),
            records,
            limits,
        ):
            started = chunk, pool.submit(encode, tokenizer, chunk, limits)
            if previous is not None:
                yield from _tokens(*previous, limits, check)
            previous = started
        if previous is not None:
            yield from _tokens(*previous, limits, check)


def _chunks(
    render: Callable[[int, Record, SampleLimits | None], list[SampleText] | Fault],
    records: Iterable[tuple[int, Record | Fault]],
    limits: SampleLimits | None,
) -> Iterator[Chunk]:
    chunk: Chunk = []
    characters = images = 0
    for number, record in records:
        rendered = record if isinstance(record, Fault) else render(number, record, limits)
        for sample in [rendered] if isinstance(rendered, Fault) else rendered:
            chunk.append((number, sample))
            if not isinstance(sample, Fault):
                characters += len(sample.text)
                images += sum(len(image.picture.data) for image in sample.images)
            if (
                len(chunk) == CHUNK_SAMPLES
                or characters >= CHUNK_CHARACTERS
                or images >= CHUNK_IMAGE_BYTES
            ):
                yield chunk
                chunk = []
                characters = images = 0
        if (
            isinstance(rendered, Fault)
            and limits is not None
            and rendered.over_limit
            and limits.exceeded()
        ):
            break
    yield chunk


def as_asked(
    tokenizer: PreTrainedTokenizerBase, options: TokenOptions, record: Kind
) -> Kind | Conversation:
    """The record, or the conversation that data.apply_chat_template makes of a prompt with a
    completion. Raises LineError for an empty prompt, which is no message.
    """
    applied = options.columns.apply_chat_template
    if not isinstance(record, PromptCompletion) or not applied:
        return record
    is_chat = bool(record.prompt.strip()) and tokenizer.chat_template is not None
    if applied is True and not record.prompt.strip():
        raise LineError(
            "prompt",
            "is empty, and data.apply_chat_template = true makes the user's message of it: write "
            "what is asked, or give auto, "
            "by which such records stay bare text",
        )
    return record.as_chat if is_chat or applied is True else record


def as_texts(
    tokenizer: PreTrainedTokenizerBase, options: TokenOptions, record: Record
) -> list[SampleText]:
    """The samples of a record. Raises LineError, and SpecError for a base that cannot write it."""
    record = as_asked(tokenizer, options, record)
    if isinstance(record, Pair):
        raise LineError("", TWO_ANSWERS)
    if isinstance(record, GradedPrompt):
        text = render_prompt(tokenizer, record, options)
        return [SampleText(text, [(0, len(text))], record, is_chat=False, is_prompt=True)]
    if not isinstance(record, Conversation):
        return [
            SampleText(*render_bare(tokenizer, record, options.train_on), record, is_chat=False)
        ]
    if tokenizer.chat_template is None:
        raise SpecError(
            "The base's tokenizer has no chat template, so conversations cannot be written for "
            "it. Give chat_template, "
            "or lines of bare text: prompt and completion, or text.",
            param="chat_template",
        )
    return [
        _with_images(tokenizer, SampleText(*sample, is_chat=True), options.pixels)
        if sample.source.images
        else SampleText(*sample, is_chat=True)
        for sample in render(tokenizer, record, options)
    ]


def _with_images(tokenizer: Any, sample: SampleText, pixels: PixelBounds) -> SampleText:
    """A sample in which what its base's processor writes for each picture stands in place of the
    chat template's sign. Raises LineError, and SpecError for a base that reads no images.
    """
    record = sample.source
    assert isinstance(record, Conversation)
    processor = ImageProcessor.of(tokenizer.name_or_path, pixels)
    places = record.image_places or ("messages",) * len(record.images)

    def written() -> Iterator[tuple[Picture, str]]:
        for picture, place in zip(record.images, places, strict=True):
            try:
                yield picture, processor.replacement(picture)
            except ImageError as error:
                raise error.at(place) from None

    made, images = with_pictures(sample.text, processor.image_token, written(), len(record.images))
    grown = sample._replace(text=made, images=images, rendered=sample.text)
    return grown._replace(spans=grown.grown(sample.spans))


def with_pictures(
    text: str, image_token: str, written: Iterable[tuple[Picture, str]], count: int
) -> tuple[str, tuple[ImageText, ...]]:
    """A text with what stands for pictures in place of the chat template's sign, and the places.

    `written`: `count` pictures in their order, and what stands for each. Raises LineError.
    """
    pieces = text.split(image_token)
    if len(pieces) <= count:
        raise LineError(
            "messages",
            f"has {counted(count, 'image')}, of which the base's chat template writes "
            f"{len(pieces) - 1}: it leaves images out. Give a chat_template that writes parts of "
            "type image, or leave the line out",
        )
    if len(pieces) - 1 > count:
        raise LineError("messages", f"holds {_SIGN}")
    made = pieces[0]
    images: list[ImageText] = []
    for (picture, own), piece in zip(written, pieces[1:], strict=True):
        begin = len(made)
        images.append(ImageText(begin, begin + len(own), picture, len(own) - len(image_token)))
        made += own + piece
    return made, tuple(images)


def _rendered(
    render: Callable[[Record], list[SampleText]],
    load: Callable[[], object],
    fetch: Callable[[Conversation], Conversation],
    number: int,
    record: Record,
    limits: SampleLimits | None,
) -> list[SampleText] | Fault:
    part = "chat template"
    if isinstance(record, Conversation) and record.images:
        part += " or image processor"
        load()  # without the sample's limits
        fetched = _or_fault(partial(fetch, record), number, None, part)
        if isinstance(fetched, Fault):
            return fetched
        record = fetched

    def work() -> list[SampleText]:
        with limits.rendering(number) if limits is not None else nullcontext():
            return render(record)

    return _or_fault(work, number, limits, part)


def _or_fault(
    work: Callable[[], Made], number: int, limits: SampleLimits | None, part: str
) -> Made | Fault:
    """The result of `work` on a line, or the line's fault.

    `part`: the part of the base that does the work, for messages.
    """
    try:
        return work()
    except LineError as error:
        return Fault.of(number, error)
    except TimeUp:
        assert limits is not None
        return Fault(
            number, "", f"the base's {part} took longer than {limits.time}", over_limit=True
        )
    except MemoryError:
        if limits is None:
            raise
    if limits.wait_for_encoding():  # the tokenizer was using the memory
        return _or_fault(work, number, limits, part)
    return Fault(
        number, "", f"the base's {part} needed more than {limits.memory} of memory", over_limit=True
    )


def encode(
    tokenizer: PreTrainedTokenizerBase, chunk: Chunk, limits: SampleLimits | None
) -> list[Encoding | Joined]:
    """The tokens of a chunk's rendered samples."""
    samples = [rendered for _, rendered in chunk if not isinstance(rendered, Fault)]
    texts = [sample.text for sample in samples]
    options: dict[str, Any] = {
        "add_special_tokens": False,
        "return_attention_mask": False,
        "return_token_type_ids": False,
    }
    if not texts:
        return []
    with limits.encoding(*_lines(chunk)) if limits is not None else nullcontext():
        encodings = tokenizer(texts, **options).encodings or []
        return [
            as_prompted(tokenizer, sample.text, sample.spans, encoding)
            for sample, encoding in zip(samples, encodings, strict=True)
        ]


def _lines(chunk: Chunk) -> tuple[int, int]:
    """The first and the last rendered line of a chunk."""
    rendered = [number for number, outcome in chunk if not isinstance(outcome, Fault)]
    return rendered[0], rendered[-1]


def _tokens(
    chunk: Chunk,
    encoded: Future[list[Encoding | Joined]],
    limits: SampleLimits | None,
    check: SampleCheck,
) -> Iterator[tuple[int, Tokens | Fault]]:
    error = encoded.exception()
    if error is not None and limits is None:
        raise error
    if error is not None:  # an error of the tokenizer's Rust code is not an Exception
        first, last = _lines(chunk)
        yield (
            first,
            Fault(
                first,
                "",
                f"the base's tokenizer fails: {error or type(error).__name__}",
                last_line=last,
            ),
        )
        yield from ((number, outcome) for number, outcome in chunk if isinstance(outcome, Fault))
        return
    encodings = iter(encoded.result())
    for number, outcome in chunk:
        if isinstance(outcome, Fault):
            yield number, outcome
        else:
            yield (
                number,
                _or_fault(
                    partial(check.tokens, outcome, next(encodings)), number, limits, "tokenizer"
                ),
            )


def _prompt(encoding: Encoding | Joined) -> Tokens:
    """A prompt's tokens. Its last one stands for the answer to come, since a sample without a
    target is left out.
    """
    ids = np.asarray(encoding.ids, dtype=np.int32)
    return Tokens(ids, np.arange(1, len(ids) + 1) == len(ids))


def _masked(sample: SampleText, encoding: Encoding | Joined) -> Tokens:
    starts = np.fromiter(map(itemgetter(0), encoding.offsets), np.int64, len(encoding))
    return Tokens(
        np.asarray(encoding.ids, dtype=np.int32), _inside(starts, sample.spans, len(sample.text))
    )


def with_uses(
    images: Sequence[ImageText], encoding: Encoding | Joined, tokens: Tokens, token_id: int
) -> Tokens:
    """The tokens with the places of their images. Raises LineError.

    `images`: where they are in the text. `token_id`: of placeholders.
    """
    starts, ends = np.asarray(encoding.offsets, np.int64).reshape(-1, 2).T
    uses = tuple(
        ImageUse(
            int(np.argmax(ends > image.begin)),
            len(starts) - int(np.argmax((starts < image.end)[::-1])),
            image.picture,
        )
        for image in images
    )
    held = tokens.ids == token_id
    for use in uses:
        if not held[use.begin : use.end].any():
            raise LineError(
                "",
                f"an image has no token {token_id}, whose embedding would be replaced: the "
                "base's tokenizer does not know its image processor's signs",
            )
        if tokens.targets[use.begin : use.end].any():
            raise LineError("", "an image would be learned, and models write text")
        held[use.begin : use.end] = False
    if held.any():
        raise LineError("", f"its words hold {_SIGN}")
    return replace(tokens, images=uses)


def _inside(starts: np.ndarray, spans: list[Span], length: int) -> np.ndarray:
    """A mask, bool [tokens]: whether each token begins in one of the spans.

    `starts`: int64 [tokens], the place of each token's first character in a text of `length`
    characters.
    """
    edges = np.zeros(length + 1, dtype=np.int64)
    for first, end in spans:
        edges[first] += 1
        edges[end] -= 1
    return (np.cumsum(edges) > 0)[starts]
