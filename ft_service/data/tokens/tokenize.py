"""Records to tokens: the tokenizer's own chat template (render.py) or bare text, and a mask over what is learned.

Workers, which train, and the process that only counts (examine.py) share this module, so nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, nullcontext
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ft_service.bases.base_files import document_or_none, require_openable
from ft_service.data.data_file import TWO_ANSWERS, answers
from ft_service.data.formats.reading import open_data
from ft_service.data.line_errors import Fault, LineError
from ft_service.data.records import Chat, Pair, Record
from ft_service.data.token_options import DEFAULT, TokenOptions
from ft_service.data.tokens.bare import render_bare
from ft_service.data.tokens.limits import SampleLimits, TimeUp
from ft_service.data.tokens.marked import Span
from ft_service.data.tokens.proof import Proof, SampleText
from ft_service.data.tokens.render import render, writes_date
from ft_service.data.tokens.sample import Tokens
from ft_service.data.tokens.straddling import Joined, as_prompted, require_prompted
from ft_service.data.tokens.token_set import TokenSet
from ft_service.data.tokens.training_set.split import Split, split_off
from ft_service.errors import DataError, SpecError
from ft_service.spec import DataFileRef

Chunk = list[tuple[int, SampleText | Fault]]
"""Samples that are tokenised at once, by the numbers of their lines."""

CHUNK_SAMPLES = 256
CHUNK_CHARACTERS = 512 * 1024
"""Text that is tokenised at once: enough to keep all processors busy, and a bound on memory, of which tokens take some hundred
times as much."""


def load_tokenizer(model_path: str, chat_template: str = "") -> PreTrainedTokenizerBase:
    """The base's tokenizer. `chat_template`: in place of its own, which it need not have. Raises SpecError if it cannot be
    loaded, or is not a fast one. Nothing is rendered, and no template is compiled."""
    if not Path(model_path).is_dir():  # else it is taken for a name on a hub, and the error is about that
        raise SpecError(f"The base is gone from {model_path}. Put it back.", param="model", code="model_unreadable")
    require_openable(Path(model_path))
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model_path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # it raises what its files make it raise
        raise SpecError(f"The base's tokenizer cannot be loaded: {error}", param="model") from error
    if not tokenizer.is_fast:
        raise SpecError(
            "The base's tokenizer has no tokenizer.json, which is needed to find the assistant's tokens.", param="model"
        )
    if chat_template:
        tokenizer.chat_template = chat_template
    elif tokenizer.chat_template is None:
        tokenizer.chat_template = _template_of_processor(Path(model_path))
    return tokenizer


def _template_of_processor(folder: Path) -> str | None:
    """The chat template where bases of several models keep it: with the processor, whose file tokenizers do not read."""
    template = (document_or_none(folder / "chat_template.json") or {}).get("chat_template")
    return template if isinstance(template, str) else None


def file_samples(
    tokenizer: PreTrainedTokenizerBase, file: DataFileRef, options: TokenOptions = DEFAULT, *, pairs: bool = False
) -> Generator[Tokens]:
    """The samples of a file, uncut, one after the other. `pairs`: it holds pairs, of which each answer is a sample.

    Raises DataError if the file changed since submission, or has a line that cannot be trained on.
    """
    data = open_data(Path(file.path), file.files, options.columns)
    gone = next((path for path in data.paths if not path.is_file()), None)
    if gone is not None:
        raise DataError(f"{file.name}: the file is gone from {gone}.", code="file_missing")
    if data.digest() != file.sha256:
        raise DataError(f"{file.name}: the file has changed since the job was submitted.", code="file_changed")
    with data as reader, closing(tokenize(tokenizer, answers(reader) if pairs else reader, options=options)) as samples:
        for sample in samples:
            if isinstance(sample, Fault):
                raise DataError(f"{file.name}: {sample.text(data.shape.word)}.")
            yield sample


def load_dataset(
    tokenizer: PreTrainedTokenizerBase,
    file: DataFileRef,
    max_length: int,
    options: TokenOptions = DEFAULT,
    split: Split | None = None,
    *,
    pairs: bool = False,
) -> TokenSet:
    """The samples of a small file, in memory, as training takes them; with `split` those that are set aside for validation.
    `pairs`: as of `file_samples`. Raises DataError as that and `trainable` do."""
    with closing(file_samples(tokenizer, file, options, pairs=pairs)) as samples:
        found = TokenSet.of(samples, dated=writes_date(tokenizer))
    chosen = found if split is None else split_off(found, split, file.name, pairs=pairs)[1]
    return trainable(chosen, file, max_length, pairs=pairs)


def trainable(samples: TokenSet, file: DataFileRef, max_length: int, *, pairs: bool = False) -> TokenSet:
    """A file's samples, cut to `max_length` tokens; those without a target are dropped, and so are pairs of which one answer is
    without. Raises DataError if none is left.
    """
    usable = samples.cut(max_length, pairs=pairs)
    if not len(usable):
        raise DataError(f"{file.name}: {nothing_to_learn(max_length)}.")
    return usable


def nothing_to_learn(max_length: int) -> str:
    return f"no sample has an assistant token within training.max_length = {max_length} tokens"


def tokenize(
    tokenizer: PreTrainedTokenizerBase,
    records: Iterable[tuple[int, Record | Fault]],
    limits: SampleLimits | None = None,
    options: TokenOptions = DEFAULT,
) -> Generator[Tokens | Fault]:
    """Tokens of every numbered record, or its fault: the one given, or one that the chat template finds.

    While one chunk becomes tokens, in a thread that needs no Python, this thread renders the next: leave the tokenizer alone
    until the end. `limits`: of a sample, whose excess is its fault too; after the first few of those the iteration ends.
    """
    proof = Proof(tokenizer, options)
    with ThreadPoolExecutor(1, "tokenize") as beside:
        ahead: tuple[Chunk, Future[list[Encoding | Joined]]] | None = None
        for chunk in _chunks(partial(_rendered, partial(as_text, tokenizer, options)), records, limits):
            begun = chunk, beside.submit(encode, tokenizer, chunk, limits)
            if ahead is not None:
                yield from _tokens(*ahead, limits, proof)
            ahead = begun
        if ahead is not None:
            yield from _tokens(*ahead, limits, proof)


def _chunks(
    render: Callable[[int, Record, SampleLimits | None], SampleText | Fault],
    records: Iterable[tuple[int, Record | Fault]],
    limits: SampleLimits | None,
) -> Iterator[Chunk]:
    chunk: Chunk = []
    characters = 0
    for number, record in records:
        rendered = record if isinstance(record, Fault) else render(number, record, limits)
        chunk.append((number, rendered))
        if isinstance(rendered, Fault):
            if limits is not None and rendered.over_limit and limits.exceeded():
                break
        else:
            characters += len(rendered.text)
        if len(chunk) == CHUNK_SAMPLES or characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    yield chunk


def as_text(tokenizer: PreTrainedTokenizerBase, options: TokenOptions, record: Record) -> SampleText:
    """A record's text and what is learned of it. Raises LineError, and SpecError for a base that cannot write it."""
    if isinstance(record, Pair):
        raise LineError("", TWO_ANSWERS)
    if not isinstance(record, Chat):
        return SampleText(*render_bare(tokenizer, record, options.train_on), is_chat=False)
    if tokenizer.chat_template is None:
        raise SpecError(
            "The base's tokenizer has no chat template, so conversations cannot be written for it. Give chat_template, "
            "or lines of bare text: prompt and completion, or text.",
            param="chat_template",
        )
    return SampleText(*render(tokenizer, record, options), is_chat=True)


def _rendered(
    render: Callable[[Record], SampleText], number: int, record: Record, limits: SampleLimits | None
) -> SampleText | Fault:
    try:
        if limits is None:
            return render(record)
        with limits.rendering(number):
            return render(record)
    except LineError as error:
        return Fault(number, error.field, error.reason)
    except TimeUp:
        assert limits is not None
        return Fault(number, "", f"the base's chat template took longer than {limits.time}", over_limit=True)
    except MemoryError:
        if limits is None:
            raise
    if limits.wait_for_encoding():  # other samples had the memory
        return _rendered(render, number, record, limits)
    return Fault(number, "", f"the base's chat template needed more than {limits.memory} of memory", over_limit=True)


def encode(tokenizer: PreTrainedTokenizerBase, chunk: Chunk, limits: SampleLimits | None) -> list[Encoding | Joined]:
    """Tokens of the rendered samples of a chunk."""
    samples = [rendered for _, rendered in chunk if not isinstance(rendered, Fault)]
    texts = [sample.text for sample in samples]
    options: dict[str, Any] = {"add_special_tokens": False, "return_attention_mask": False, "return_token_type_ids": False}
    if not texts:
        return []
    with limits.encoding(*_lines(chunk)) if limits is not None else nullcontext():
        encodings = tokenizer(texts, **options).encodings or []
        return [
            as_prompted(tokenizer, sample.text, sample.spans, encoding)
            for sample, encoding in zip(samples, encodings, strict=True)
        ]


def _lines(chunk: Chunk) -> tuple[int, int]:
    """The first and the last line of a chunk that were rendered."""
    rendered = [number for number, outcome in chunk if not isinstance(outcome, Fault)]
    return rendered[0], rendered[-1]


def _tokens(
    chunk: Chunk, encoded: Future[list[Encoding | Joined]], limits: SampleLimits | None, proof: Proof
) -> Iterator[Tokens | Fault]:
    error = encoded.exception()
    if error is not None and limits is None:
        raise error
    if error is not None:  # an error of the tokenizer's own code is no Exception
        first, last = _lines(chunk)
        yield Fault(first, "", f"the base's tokenizer fails: {error or type(error).__name__}", last_line=last)
        yield from (outcome for _, outcome in chunk if isinstance(outcome, Fault))
        return
    encodings = iter(encoded.result())
    for number, outcome in chunk:
        yield outcome if isinstance(outcome, Fault) else proven(number, outcome, next(encodings), limits, proof)


def proven(
    number: int, sample: SampleText, encoding: Encoding | Joined, limits: SampleLimits | None, proof: Proof
) -> Tokens | Fault:
    """A sample's tokens, or why they may not be learned."""
    try:
        require_prompted(sample.text, sample.spans, encoding)
        return proof.require(sample, _masked(sample, encoding))
    except LineError as error:
        return Fault(number, error.field, error.reason)
    except MemoryError:
        if limits is None:
            raise
    if limits.wait_for_encoding():
        return proven(number, sample, encoding, limits, proof)
    return Fault(number, "", f"the base's tokenizer needed more than {limits.memory} of memory", over_limit=True)


def _masked(sample: SampleText, encoding: Encoding | Joined) -> Tokens:
    starts = np.fromiter(map(itemgetter(0), encoding.offsets), np.int64, len(encoding))
    return Tokens(np.asarray(encoding.ids, dtype=np.int32), _inside(starts, sample.spans, len(sample.text)))


def _inside(starts: np.ndarray, spans: list[Span], length: int) -> np.ndarray:
    """Mask of the tokens that begin inside one of the spans. `starts` [tokens]: character offset of each token's beginning in a
    text of `length` characters.
    """
    edges = np.zeros(length + 1, dtype=np.int64)
    for first, end in spans:
        edges[first] += 1
        edges[end] -= 1
    return (np.cumsum(edges) > 0)[starts]
