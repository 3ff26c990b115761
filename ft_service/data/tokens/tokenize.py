"""Records as tokens, with a mask of the learned ones, and checks of each sample before anything is
learned from it.

The workers and the process that examines files (examine.py) share this module, so it does not
import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ft_service.bases.base_files import (
    TOKENIZER_FILE,
    document_or_none,
    is_base_file,
    require_openable,
    shown,
    tokenizer_fault,
)
from ft_service.data.data_file import TWO_ANSWERS, answers
from ft_service.data.formats.reading import open_data
from ft_service.data.line_errors import Fault, LineError
from ft_service.data.sample_kinds import (
    Conversation,
    GradedPrompt,
    Pair,
    PromptCompletion,
    Record,
    Text,
)
from ft_service.data.token_options import DEFAULT, TokenOptions
from ft_service.data.tokens.answer_markers import Span
from ft_service.data.tokens.boundary_tokens import Joined, as_prompted, require_prompted
from ft_service.data.tokens.patches.auto_tokenizer import AutoTokenizer
from ft_service.data.tokens.render import render, render_bare, render_prompt, turn_ends, writes_date
from ft_service.data.tokens.sample import Tokens
from ft_service.data.tokens.sample_limits import SampleLimits, TimeUp
from ft_service.data.tokens.token_set import TokenSet
from ft_service.data.tokens.training_set.split import Split, split_off
from ft_service.errors import DataError, SpecError
from ft_service.spec import DataFileRef

CHUNK_SAMPLES = 256
CHUNK_CHARACTERS = 512 * 1024
"""Text that is tokenised at once: enough to use all processors, and a bound on memory, since tokens
take about a hundred times as much as their text.
"""


_SHOWN = 40


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

    def tokens(self, sample: SampleText, encoding: Encoding | Joined) -> Tokens:
        """The sample's tokens, if they may be learned. Raises LineError with the text at fault."""
        require_prompted(sample.text, sample.spans, encoding)
        tokens = _prompt(encoding) if sample.is_prompt else _masked(sample, encoding)
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
        return tokens

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


def load_tokenizer(model_path: str, chat_template: str = "") -> PreTrainedTokenizerBase:
    """The base's tokenizer.

    `chat_template`: used in place of its own template. Raises SpecError if it cannot be loaded, or
    is not a fast tokenizer. Templates are neither compiled nor rendered.
    """
    if not Path(
        model_path
    ).is_dir():  # else transformers takes it for a name on the hub, and its error is about that
        raise SpecError(
            f"The base is gone from {model_path}. Put it back.",
            param="model",
            code="model_unreadable",
        )
    folder = Path(model_path)
    require_openable(folder)
    fault = tokenizer_fault(path.name for path in folder.iterdir())
    if fault is not None:
        raise SpecError(f"The base cannot be trained on: {fault}.", param="model")
    tokenizer: Any = _tokenizer_of(folder)
    if not tokenizer.is_fast:
        raise SpecError(
            f"The base's tokenizer has no {TOKENIZER_FILE}, which is needed to find the "
            "assistant's tokens.",
            param="model",
        )
    if chat_template:
        tokenizer.chat_template = chat_template
    elif tokenizer.chat_template is None:
        tokenizer.chat_template = _template_of_processor(Path(model_path))
    return tokenizer


def _tokenizer_of(folder: Path) -> Any:
    """The tokenizer as transformers has it; where that would be code from the folder, the one in
    its tokenizer.json.
    """
    try:
        return AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # any class of error, depending on the files
        code = _code_of_tokenizer(folder)
        if code is None:
            raise SpecError(
                f"The base's tokenizer cannot be loaded: {error}", param="model"
            ) from error
        if not is_base_file(folder / TOKENIZER_FILE):
            raise SpecError(
                f"The base's tokenizer is code in its folder ({code}), which is never run, and "
                f"there is no {TOKENIZER_FILE} "
                "beside it. Put one into the folder that gives the publisher's tokens, or take "
                "another base.",
                param="model",
            ) from None
    try:
        return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        raise SpecError(
            f"The base's {TOKENIZER_FILE} cannot be loaded: {error}", param="model"
        ) from error


def _code_of_tokenizer(folder: Path) -> str | None:
    """The class in the folder's own code that its files name as their tokenizer; None: they name
    none.
    """
    for name in ("tokenizer_config.json", "config.json"):
        named = (document_or_none(folder / name) or {}).get("auto_map")
        named = named.get("AutoTokenizer") if isinstance(named, dict) else named
        classes = named if isinstance(named, list) else [named]
        found = next((one for one in classes if isinstance(one, str)), None)
        if found is not None:
            return shown(found)
    return None


def _template_of_processor(folder: Path) -> str | None:
    """The chat template in the processor's file, where multimodal bases have it and which
    tokenizers do not read.
    """
    template = (document_or_none(folder / "chat_template.json") or {}).get("chat_template")
    return template if isinstance(template, str) else None


def file_samples(
    tokenizer: PreTrainedTokenizerBase,
    file: DataFileRef,
    options: TokenOptions = DEFAULT,
    *,
    pairs: bool = False,
) -> Generator[Tokens]:
    """The uncut samples of a file. `pairs`: it holds pairs, of which each answer is a sample.

    Raises DataError if the file changed after submission, or has a line that cannot be trained on.
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
            tokenize(tokenizer, answers(reader) if pairs else reader, options=options)
        ) as found,
    ):
        for of_record in found:
            if isinstance(of_record, Fault):
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
        for _, of_record in groupby(samples, itemgetter(0)):
            found = [outcome for _, outcome in of_record]
            fault = next((outcome for outcome in found if isinstance(outcome, Fault)), None)
            tokens = [outcome for outcome in found if isinstance(outcome, Tokens)]
            yield fault or [
                *tokens[:1],
                *(replace(sample, continues=True) for sample in tokens[1:]),
            ]


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
            partial(_rendered, partial(as_texts, tokenizer, options)), records, limits
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
    characters = 0
    for number, record in records:
        rendered = record if isinstance(record, Fault) else render(number, record, limits)
        for sample in [rendered] if isinstance(rendered, Fault) else rendered:
            chunk.append((number, sample))
            characters += 0 if isinstance(sample, Fault) else len(sample.text)
            if len(chunk) == CHUNK_SAMPLES or characters >= CHUNK_CHARACTERS:
                yield chunk
                chunk = []
                characters = 0
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
    return [SampleText(*sample, is_chat=True) for sample in render(tokenizer, record, options)]


def _rendered(
    render: Callable[[Record], list[SampleText]],
    number: int,
    record: Record,
    limits: SampleLimits | None,
) -> list[SampleText] | Fault:
    def work() -> list[SampleText]:
        with limits.rendering(number) if limits is not None else nullcontext():
            return render(record)

    return _or_fault(work, number, limits, "chat template")


def _or_fault(
    work: Callable[[], Made], number: int, limits: SampleLimits | None, part: str
) -> Made | Fault:
    """The result of `work` on a line, or the line's fault.

    `part`: the part of the base that does the work, for messages.
    """
    try:
        return work()
    except LineError as error:
        return Fault(number, error.field, error.reason)
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
