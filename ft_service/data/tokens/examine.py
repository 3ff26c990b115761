"""The process that the service keeps beside it to examine data files for a base: lines at fault, or tokens to train on.

`python -m ft_service.data.tokens.examine PARENT FILE` reads one request a line and answers each with one line, before which
others may report progress (ft_service/data/examiner.py). Its current task stands in FILE, a descriptor
(ft_service/data/whereabouts.py). It ends with its parent, and when its input ends.
"""

from __future__ import annotations

import os
import sys
import time

from ft_service.host.lifetime import die_with_parent

if __name__ == "__main__":  # before anything slow
    die_with_parent(int(sys.argv[1]))
    # transformers imports torch wherever it finds it, and tokenizers do not need it: seconds, and a quarter of a gigabyte.
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

import numpy as np
from transformers import PreTrainedTokenizerBase

from ft_service.bases.cache_folder import Cache
from ft_service.data.data_file import (
    GIVE_UP_AFTER,
    REPLY,
    REQUEST,
    Counts,
    DataReport,
    ExamineReply,
    ExamineRequest,
    Findings,
    Param,
    ReadProgress,
    answers,
)
from ft_service.data.formats.reading import DataReader, open_data
from ft_service.data.formats.recognise import Format
from ft_service.data.line_errors import Fault
from ft_service.data.samples import Page, SamplePage, ShownSample
from ft_service.data.statistics import Measure, Statistics
from ft_service.data.token_folder import NOT_KEPT
from ft_service.data.token_options import DEFAULT, TokenOptions
from ft_service.data.tokens.chat_template import ChatTemplate
from ft_service.data.tokens.keeping import Recording, find, tokens_key, unkept
from ft_service.data.tokens.limits import SampleLimits, TimeUp, go_first, held_memory, limit_memory
from ft_service.data.tokens.render import writes_date
from ft_service.data.tokens.sample import Tokens
from ft_service.data.tokens.show import page_of
from ft_service.data.tokens.token_set import TokenSet
from ft_service.data.tokens.tokenize import load_tokenizer, nothing_to_learn, tokenize
from ft_service.data.tokens.training_set.measure import Part, measure
from ft_service.data.whereabouts import Task, Whereabouts
from ft_service.errors import DataError, SpecError
from ft_service.rundir.documents import ErrorInfo
from ft_service.spec import DataFileRef


def main() -> None:
    whereabouts = Whereabouts(int(sys.argv[2]))
    go_first()
    with _answers() as answers:

        def say(answer: ExamineReply) -> None:
            answers.write(REPLY.dump_json(answer) + b"\n")
            answers.flush()

        whereabouts.ready()
        held = held_memory()
        for line in sys.stdin.buffer:
            request = REQUEST.validate_json(line)
            limit_memory(held + request.memory_bytes)
            teller = Teller(request.progress_seconds, lambda progress: say(ExamineReply(progress=progress)))
            say(answer(request, teller, whereabouts))


class Teller:
    """Reports every few seconds how far a file has been read."""

    def __init__(self, seconds: float, tell: Callable[[ReadProgress], object]) -> None:
        self._seconds = seconds
        self._tell = tell
        self._due = time.monotonic() + seconds

    def at(self, lines: int, reader: DataReader) -> None:
        """Note that `lines` lines were examined. The file may have been read a little further."""
        if time.monotonic() >= self._due:
            self._tell(ReadProgress(lines, reader.share))
            self._due = time.monotonic() + self._seconds


def answer(request: ExamineRequest, teller: Teller, whereabouts: Whereabouts) -> ExamineReply:
    try:
        with whereabouts.at(Task.LOADING):
            tokenizer = _tokenizer(request.model_path, request.tokenizer, request.options.chat_template)
        with SampleLimits(whereabouts, request.render_seconds, request.memory_bytes) as limits:
            _require_usable_template(tokenizer, limits)
            if request.show is not None:
                return ExamineReply(page=_page(tokenizer, request, request.show, limits))
            if request.measure is not None:
                return ExamineReply(statistics=_measured(tokenizer, request, request.measure, teller, limits))
            key = tokens_key(request.model_path, request.sha256, request.options, pairs=request.pairs)
            keep = Keep(Path(request.tokens), key) if request.tokens else None
            data = open_data(Path(request.path), request.files, request.options.columns)
            asked = (tokenizer, data, request.sha256, request.max_length, teller, limits, keep, request.options)
            report = examine(*asked, pairs=request.pairs)
    except (SpecError, DataError) as error:
        return ExamineReply(error=ErrorInfo(code=error.code, message=error.message, param=error.param))
    return ExamineReply(report=report)


def _require_usable_template(tokenizer: PreTrainedTokenizerBase, limits: SampleLimits) -> None:
    """Raises SpecError for a chat template that is not written as one, or exceeds a limit before there is a conversation."""
    template = ChatTemplate.of(tokenizer)
    if template is None:
        return
    try:
        with limits.rendering(0):
            template.require_usable()
    except (TimeUp, MemoryError) as error:
        limit = limits.time if isinstance(error, TimeUp) else f"{limits.memory} of memory"
        raise SpecError(f"chat_template: reading it takes more than {limit}.", param="chat_template") from None


def _page(tokenizer: PreTrainedTokenizerBase, request: ExamineRequest, page: Page, limits: SampleLimits) -> SamplePage:
    data = open_data(Path(request.path), request.files, request.options.columns)
    try:
        with limits.rendering(page.after + 1):
            return page_of(tokenizer, data, request.options, request.max_length, after=page.after, limit=page.limit)
    except (TimeUp, OSError) as error:
        took = f"what is behind {data.shape.word} {page.after} took longer than {limits.time} to read and to render"
        why = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else took
        return SamplePage((ShownSample(0, error=why),), False, data.shape.word, str(data.shape))


def _measured(
    tokenizer: PreTrainedTokenizerBase, request: ExamineRequest, asked: Measure, teller: Teller, limits: SampleLimits
) -> Statistics:
    """Raises DataError for a file that cannot be trained on."""
    with contextlib.ExitStack() as stack:

        def part(param: Param, file: DataFileRef) -> Part:
            samples, word = stack.enter_context(_kept(tokenizer, request, param, file, teller, limits))
            return Part(samples, word, file.name, pairs=request.pairs)

        training, file = part("training_file", asked.training_file), asked.validation_file
        return measure(asked, training, None if file is None else part("validation_file", file))


@contextlib.contextmanager
def _kept(
    tokenizer: PreTrainedTokenizerBase,
    request: ExamineRequest,
    param: Param,
    file: DataFileRef,
    teller: Teller,
    limits: SampleLimits,
) -> Iterator[tuple[TokenSet, str]]:
    """A file's samples, uncut, as they are kept or else made for as long as the block runs; and what a record is called."""
    data = open_data(Path(file.path), file.files, request.options.columns)
    data.look()
    key = tokens_key(request.model_path, file.sha256, request.options, pairs=request.pairs)
    found = find(Path(request.tokens), key) if request.tokens else None
    with contextlib.ExitStack() as stack:
        keep: Keep | None = None
        if found is None:
            keep = Keep(Path(request.tokens or stack.enter_context(TemporaryDirectory(prefix="ft-"))), key)
            asked = (
                tokenizer,
                open_data(Path(file.path), file.files, request.options.columns),
                file.sha256,
                request.max_length,
                teller,
                limits,
                keep,
            )
            error = examine(*asked, request.options, pairs=request.pairs).error(param, file.name)
            if error is not None:
                raise DataError(error.message, param=error.param, code=error.code)
            found = find(keep.folder, key)
        if found is None:
            assert keep is not None, "it was made without being found"
            raise DataError(f"{file.name}: {unkept(keep.folder, keep.error)}", param=param, code=NOT_KEPT)
        stack.callback(found.entry.close)
        yield found.samples, data.shape.word


@dataclass
class Keep:
    """The place of a file's tokens."""

    folder: Path
    key: str
    error: OSError | None = None
    """Why they are not there after the file was read; None: nothing was in the way."""


def examine(
    tokenizer: PreTrainedTokenizerBase,
    data: DataReader,
    sha256: str,
    max_length: int,
    teller: Teller,
    limits: SampleLimits | None = None,
    keep: Keep | None = None,
    options: TokenOptions = DEFAULT,
    *,
    pairs: bool = False,
) -> DataReport:
    """The report on a file, in memory bounded by a chunk of it. Raises OSError if it cannot be read.

    `limits`: of every sample. The rest of the file is not read once a few samples have exceeded them. `keep`: where the tokens
    go if no line is at fault, and are counted without making them anew; None: nowhere. `pairs`: lines hold pairs of answers.
    """
    findings = Findings()
    if data.digest() != sha256:
        findings.fault(Fault(0, "", "the file has changed since it was uploaded"))
        return findings.report(data.shape)
    found = find(keep.folder, keep.key) if keep is not None else None
    if found is not None:
        data.look()
        findings.examples = len(found.samples) // (2 if pairs else 1)
        counts, exceeded = _counts_of(found.samples, _kept_of(data, max_length, options, pairs=pairs), pairs=pairs), 0
        found.entry.close()
    else:
        with _recording(keep, data) as recording:
            read = (tokenizer, data, max_length, teller, limits, findings, recording, options)
            counts, exceeded = _read(*read, pairs=pairs)
            if recording is not None and not findings.faults_total:
                recording.publish(dated=writes_date(tokenizer))
        if keep is not None and recording is not None:
            keep.error = recording.error
    if findings.examples and not counts.samples and not findings.faults_total:
        findings.fault(Fault(0, "", nothing_to_learn(max_length)))
    return findings.report(data.shape, counts, unread=exceeded >= GIVE_UP_AFTER)


def _recording(keep: Keep | None, data: DataReader) -> AbstractContextManager[Recording | None]:
    return nullcontext() if keep is None else Recording(Cache(keep.folder), keep.key, data.size)


def _read(
    tokenizer: PreTrainedTokenizerBase,
    data: DataReader,
    max_length: int,
    teller: Teller,
    limits: SampleLimits | None,
    findings: Findings,
    recording: Recording | None,
    options: TokenOptions,
    *,
    pairs: bool,
) -> tuple[Counts, int]:
    """Counts of all samples, and how many exceeded a limit. Faults go into `findings`, and end the recording."""
    counts, exceeded = Counts(), 0
    widths: deque[int] = deque()
    with data as reader, contextlib.ExitStack() as stack:
        source = answers(reader, widths) if pairs else reader
        samples = stack.enter_context(closing(tokenize(tokenizer, source, limits, options)))
        for first in samples:
            of_line = [first, *islice(samples, widths.popleft() - 1)] if pairs else [first]
            fault = next((sample for sample in of_line if isinstance(sample, Fault)), None)
            if fault is not None:
                findings.fault(fault)
                exceeded += fault.over_limit
                if recording is not None:
                    recording.stop()
            else:
                own = [sample for sample in of_line if isinstance(sample, Tokens)]
                findings.examples += 1
                counts = _counted(counts, own, _kept_of(data, max_length, options, pairs=pairs))
                if recording is not None:
                    for sample in own:
                        recording.add(sample)
            teller.at(findings.examples + findings.faults_total, reader)
    return counts, exceeded


def _kept_of(data: DataReader, max_length: int, options: TokenOptions, *, pairs: bool) -> int:
    """Tokens that are kept of a sample: all of what is learned whole, in windows."""
    whole = not pairs and (data.shape.format is Format.TEXT or options.train_on == "everything")
    return sys.maxsize if whole else max_length


def _counts_of(samples: TokenSet, max_length: int, *, pairs: bool = False) -> Counts:
    """The counts of samples that were tokenised before: what `_counted` makes of them, one after the other."""
    targets, kept = samples.targets_within(max_length), np.minimum(samples.lengths, max_length)
    lost = samples.lengths - kept
    whole = (targets > 0).reshape(-1, 2 if pairs else 1).all(axis=1)
    used = whole.repeat(2) if pairs else whole
    return Counts(
        samples=int(np.count_nonzero(used)),
        pairs=int(np.count_nonzero(whole)) if pairs else 0,
        tokens=int(kept[used].sum()),
        targets=int(targets[used].sum()),
        longest=int(samples.lengths.max(initial=0)),
        cut=int(np.count_nonzero(lost)),
        lost_tokens=int(lost.sum()),
        dropped=int(np.count_nonzero(~whole)),
    )


def _counted(counts: Counts, samples: Sequence[Tokens], max_length: int) -> Counts:
    """The counts with one line more. `samples`: its own one, or the two of a pair, which are used together or not at all."""
    kept = [sample.cut(max_length) for sample in samples]
    lost = [len(sample.ids) - len(cut.ids) for sample, cut in zip(samples, kept, strict=True)]
    used = kept if all(cut.target_count for cut in kept) else []
    return Counts(
        samples=counts.samples + len(used),
        pairs=counts.pairs + (len(used) == 2),
        tokens=counts.tokens + sum(len(cut.ids) for cut in used),
        targets=counts.targets + sum(cut.target_count for cut in used),
        longest=max(counts.longest, *(len(sample.ids) for sample in samples)),
        cut=counts.cut + sum(map(bool, lost)),
        lost_tokens=counts.lost_tokens + sum(lost),
        dropped=counts.dropped + (not used),
    )


@lru_cache(maxsize=1)
def _tokenizer(model_path: str, digest: str, chat_template: str) -> PreTrainedTokenizerBase:
    """A base's tokenizer. `digest`: of its files, so that a replaced one is read again. `chat_template`: TokenOptions'."""
    return load_tokenizer(model_path, chat_template)


def _answers() -> BinaryIO:
    """Our output, for answers alone: what libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


if __name__ == "__main__":
    main()
