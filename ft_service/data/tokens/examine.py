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

from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
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
    ReadProgress,
)
from ft_service.data.formats.reading import DataReader, open_data
from ft_service.data.line_errors import Fault
from ft_service.data.samples import Page, SamplePage, ShownSample
from ft_service.data.token_options import DEFAULT, TokenOptions
from ft_service.data.tokens.identity import tokens_key
from ft_service.data.tokens.keeping import Recording, find
from ft_service.data.tokens.limits import SampleLimits, TimeUp, go_first, held_memory, limit_memory
from ft_service.data.tokens.render import writes_date
from ft_service.data.tokens.sample import Tokens
from ft_service.data.tokens.show import page_of
from ft_service.data.tokens.token_set import TokenSet
from ft_service.data.tokens.tokenize import load_tokenizer, nothing_to_learn, tokenize
from ft_service.data.whereabouts import Task, Whereabouts
from ft_service.errors import SpecError
from ft_service.rundir.documents import ErrorInfo


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
        if request.show is not None:
            with SampleLimits(whereabouts, request.render_seconds, request.memory_bytes) as limits:
                return ExamineReply(page=_page(tokenizer, request, request.show, limits))
        key = tokens_key(request.model_path, request.sha256, request.options)
        keep = Keep(Path(request.tokens), key) if request.tokens else None
        with SampleLimits(whereabouts, request.render_seconds, request.memory_bytes) as limits:
            data = open_data(Path(request.path), request.files)
            report = examine(tokenizer, data, request.sha256, request.max_length, teller, limits, keep, request.options)
    except SpecError as error:
        return ExamineReply(error=ErrorInfo(code=error.code, message=error.message, param=error.param))
    return ExamineReply(report=report)


def _page(tokenizer: PreTrainedTokenizerBase, request: ExamineRequest, page: Page, limits: SampleLimits) -> SamplePage:
    data = open_data(Path(request.path), request.files)
    try:
        with limits.rendering(page.after + 1):
            return page_of(tokenizer, data, request.options, request.max_length, after=page.after, limit=page.limit)
    except (TimeUp, OSError) as error:
        took = f"what is behind {data.shape.word} {page.after} took longer than {limits.time} to read and to render"
        why = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else took
        return SamplePage((ShownSample(0, error=why),), False, data.shape.word, str(data.shape))


@dataclass(frozen=True)
class Keep:
    """The place of a file's tokens."""

    folder: Path
    key: str


def examine(
    tokenizer: PreTrainedTokenizerBase,
    data: DataReader,
    sha256: str,
    max_length: int,
    teller: Teller,
    limits: SampleLimits | None = None,
    keep: Keep | None = None,
    options: TokenOptions = DEFAULT,
) -> DataReport:
    """The report on a file, in memory bounded by a chunk of it. Raises OSError if it cannot be read.

    `limits`: of every sample. The rest of the file is not read once a few samples have exceeded them. `keep`: where the tokens
    go if no line is at fault, and are counted without making them anew; None: nowhere.
    """
    findings = Findings()
    if data.digest() != sha256:
        findings.fault(Fault(0, "", "the file has changed since it was uploaded"))
        return findings.report(data.shape)
    found = find(keep.folder, keep.key) if keep is not None else None
    if found is not None:
        data.look()
        findings.examples = len(found.samples)
        counts, exceeded = _counts_of(found.samples, max_length), 0
        found.entry.close()
    else:
        with _recording(keep, data) as recording:
            counts, exceeded = _read(tokenizer, data, max_length, teller, limits, findings, recording, options)
            if recording is not None and not findings.faults_total:
                recording.publish(dated=writes_date(tokenizer))
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
) -> tuple[Counts, int]:
    """Counts of all samples, and how many exceeded a limit. Faults go into `findings`, and end the recording."""
    counts, exceeded = Counts(), 0
    with data as reader, closing(tokenize(tokenizer, reader, limits, options)) as samples:
        for sample in samples:
            if isinstance(sample, Fault):
                findings.fault(sample)
                exceeded += sample.over_limit
                if recording is not None:
                    recording.stop()
            else:
                findings.examples += 1
                counts = _counted(counts, sample, max_length)
                if recording is not None:
                    recording.add(sample)
            teller.at(findings.examples + findings.faults_total, reader)
    return counts, exceeded


def _counts_of(samples: TokenSet, max_length: int) -> Counts:
    """The counts of samples that were tokenised before: what `_counted` makes of them, one after the other."""
    targets, kept = samples.targets_within(max_length), np.minimum(samples.lengths, max_length)
    lost = samples.lengths - kept
    return Counts(
        samples=int(np.count_nonzero(targets)),
        tokens=int(kept[targets > 0].sum()),
        targets=int(targets.sum()),
        longest=int(samples.lengths.max(initial=0)),
        cut=int(np.count_nonzero(lost)),
        lost_tokens=int(lost.sum()),
        dropped=int(np.count_nonzero(targets == 0)),
    )


def _counted(counts: Counts, sample: Tokens, max_length: int) -> Counts:
    kept = sample.cut(max_length)
    targets, lost = kept.target_count, len(sample.ids) - len(kept.ids)
    return Counts(
        samples=counts.samples + bool(targets),
        tokens=counts.tokens + (len(kept.ids) if targets else 0),
        targets=counts.targets + targets,
        longest=max(counts.longest, len(sample.ids)),
        cut=counts.cut + bool(lost),
        lost_tokens=counts.lost_tokens + lost,
        dropped=counts.dropped + (not targets),
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
