"""The helper process of the service that examines data files for a base: which lines are at fault,
and which tokens result.

`python -m ft_service.data.tokens.examine FILE` reads one request a line and writes one reply a
line; before it, further lines may report progress (ft_service/data/examiner.py). FILE is the
descriptor through which it shows its current task (ft_service/data/current_task.py). It ends at the
end of its input.
"""

from __future__ import annotations

import os
import sys
import time

from ft_service.host.quick_imports import begin_imports, end_imports

if __name__ == "__main__":  # before the slow imports
    begin_imports()
    # transformers imports torch if it is installed. Tokenizers do not need it, and it takes seconds
    # and 250 MB.
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]

import contextlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import ArrayLike
from transformers import PreTrainedTokenizerBase

from ft_service.bases.cache_folder import Cache
from ft_service.data.current_task import CurrentTask, Task
from ft_service.data.data_file import (
    REPLY,
    REQUEST,
    Counts,
    DataReport,
    ExamineReply,
    ExamineRequest,
    Findings,
    Param,
    ReadProgress,
)
from ft_service.data.file_comparison import FilesToCompare, compare_files
from ft_service.data.formats.detect_format import Format
from ft_service.data.formats.reading import DataReader, open_data
from ft_service.data.line_errors import Fault
from ft_service.data.record_comparison import most_records
from ft_service.data.sample_kinds import Record, is_unanswered, named_roles
from ft_service.data.sample_request import SamplePage, ShownSample
from ft_service.data.statistics import DataStatistics, Lines
from ft_service.data.token_folder import NOT_KEPT
from ft_service.data.tokens.chat_template import ChatTemplate, writes_name
from ft_service.data.tokens.render import writes_date
from ft_service.data.tokens.sample import Tokens
from ft_service.data.tokens.sample_limits import (
    GIVE_UP_AFTER,
    SampleLimits,
    TimeUp,
    held_memory,
    limit_memory,
)
from ft_service.data.tokens.sample_view import page_of
from ft_service.data.tokens.token_cache import Recording, find, tokens_key, unkept
from ft_service.data.tokens.token_set import TokenSet, line_numbers
from ft_service.data.tokens.tokenize import load_tokenizer, nothing_to_learn, sources, tokenize
from ft_service.data.tokens.training_set.token_statistics import RecordGroup, measure
from ft_service.errors import DataError, SpecError
from ft_service.rundir.documents import ErrorInfo
from ft_service.spec import DataFileRef


def main() -> None:
    current_task = CurrentTask(int(sys.argv[1]))
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # stdout is for replies alone: what libraries print goes to stderr

    def send(reply: ExamineReply) -> None:
        replies.write(REPLY.dump_json(reply) + b"\n")
        replies.flush()

    current_task.ready()
    held = held_memory()
    for line in sys.stdin.buffer:
        request = REQUEST.validate_json(line)
        limit_memory(held + request.memory_bytes)
        progress = ProgressReporter(
            request.progress_seconds, lambda progress: send(ExamineReply(progress=progress))
        )
        send(reply_to(request, progress, current_task))


class ProgressReporter:
    """Reports at intervals how much of a file has been read."""

    def __init__(self, seconds: float, report: Callable[[ReadProgress], object]) -> None:
        """`seconds`: from the beginning to the first report, and from one to the next."""
        self._seconds = seconds
        self._report = report
        self._due = time.monotonic() + seconds

    def update(self, lines: int, reader: DataReader) -> None:
        """Report that `lines` lines were examined, if a report is due.

        The file may have been read a little further.
        """
        if time.monotonic() >= self._due:
            self._report(ReadProgress(lines, reader.share))
            self._due = time.monotonic() + self._seconds


def reply_to(
    request: ExamineRequest, progress: ProgressReporter, current_task: CurrentTask
) -> ExamineReply:
    try:
        with current_task.at(Task.LOADING):
            tokenizer = _tokenizer(
                request.model_path, request.tokenizer, request.options.chat_template
            )
        with SampleLimits(current_task, request.render_seconds, request.memory_bytes) as limits:
            _require_usable_template(tokenizer, limits)
            examination = Examination(tokenizer, request, progress, limits)
            if request.show is not None:
                return ExamineReply(page=examination.page())
            if request.measure is not None:
                return ExamineReply(statistics=examination.statistics())
            return ExamineReply(report=examination.report(examination.destination()))
    except (SpecError, DataError) as error:
        return ExamineReply(
            error=ErrorInfo(code=error.code, message=error.message, param=error.param)
        )


@lru_cache(maxsize=1)
def _tokenizer(model_path: str, digest: str, chat_template: str) -> PreTrainedTokenizerBase:
    """A base's tokenizer. `digest`: of its files, so that changed files are read again."""
    return load_tokenizer(model_path, chat_template)


def _require_usable_template(tokenizer: PreTrainedTokenizerBase, limits: SampleLimits) -> None:
    """Raise SpecError for a chat template with wrong syntax, or one that exceeds a limit before it
    renders a conversation.
    """
    template = ChatTemplate.of(tokenizer)
    if template is None:
        return
    try:
        with limits.rendering(0):
            template.require_usable()
    except (TimeUp, MemoryError) as error:
        limit = limits.time if isinstance(error, TimeUp) else f"{limits.memory} of memory"
        raise SpecError(
            f"chat_template: reading it takes more than {limit}.", param="chat_template"
        ) from None


@dataclass
class NotedRecords:
    """Records with names of participants, and those with messages after the last answer."""

    by_role: dict[str, Lines] = field(default_factory=dict)
    unanswered: Lines = field(default_factory=Lines)

    def noted(
        self, records: Iterable[tuple[int, Record | Fault]]
    ) -> Iterator[tuple[int, Record | Fault]]:
        """The given records, of which these are noted."""
        for number, record in records:
            for role in () if isinstance(record, Fault) else named_roles(record):
                self.by_role[role] = self.by_role.get(role, Lines()).with_line(number)
            if not isinstance(record, Fault) and is_unanswered(record):
                self.unanswered = self.unanswered.with_line(number)
            yield number, record


@dataclass
class TokenDestination:
    """An entry of a folder of token sets in which a file's tokens are kept."""

    folder: Path
    key: str
    error: OSError | None = None
    """The error that prevented storing the tokens. None: there was none so far."""


@dataclass(frozen=True)
class Examination:
    """The examination of a request's file with the base's tokenizer."""

    tokenizer: PreTrainedTokenizerBase
    request: ExamineRequest
    progress: ProgressReporter
    limits: SampleLimits | None = None
    """Limits for each sample.

    The rest of the file is not read once a few samples have exceeded them.
    """

    def destination(self) -> TokenDestination | None:
        """The place for the file's tokens. None: they are not kept."""
        request = self.request
        key = tokens_key(request.model_path, request.sha256, request.options, pairs=request.pairs)
        return TokenDestination(Path(request.tokens), key) if request.tokens else None

    def page(self) -> SamplePage:
        """The samples that the request asks for."""
        request = self.request
        page = self.request.show
        limits = self.limits
        data = self._open()
        assert page is not None
        assert limits is not None
        try:
            with limits.rendering(page.after + 1):
                return page_of(self.tokenizer, data, request.options, request.max_length, page)
        except TimeUp:
            reason = (
                f"what follows {data.shape.word} {page.after} took longer than {limits.time} "
                "to read and to render"
            )
        except OSError as error:
            reason = f"cannot be read: {error.strerror}"
        return SamplePage((ShownSample(0, error=reason),), False, data.shape.word, str(data.shape))

    def statistics(self) -> DataStatistics:
        """The statistics that the request asks for.

        Raises DataError for a file that cannot be trained on.
        """
        measured = self.request.measure
        assert measured is not None
        with contextlib.ExitStack() as stack:

            def group(param: Param, file: DataFileRef) -> RecordGroup:
                samples, word = stack.enter_context(self._token_set(param, file))
                return RecordGroup(samples, word, file.name, pairs=self.request.pairs)

            training = group("training_file", measured.training_file)
            validation = measured.validation_file
            found = measure(
                measured,
                training,
                None if validation is None else group("validation_file", validation),
            )
        asked = FilesToCompare(
            measured.training_file,
            None if measured.is_of_one_file else validation,
            measured.prompts,
            self.request.options.columns,
            self.request.pairs,
            most_records(self.request.memory_bytes),
        )
        return replace(found, comparison=compare_files(asked))

    @contextlib.contextmanager
    def _token_set(self, param: Param, file: DataFileRef) -> Iterator[tuple[TokenSet, str]]:
        """A file's uncut samples while the block runs, tokenised first unless they are kept; and
        the name of a record. Raises DataError.
        """
        with contextlib.ExitStack() as stack:
            folder = self.request.tokens or stack.enter_context(TemporaryDirectory(prefix="ft-"))
            request = replace(
                self.request, path=file.path, files=file.files, sha256=file.sha256, tokens=folder
            )
            examination = replace(self, request=request)
            destination = examination.destination()
            assert destination is not None
            found = find(destination.folder, destination.key)
            if found is None:
                error = examination.report(destination).error(param, file.name)
                if error is not None:
                    raise DataError(error.message, param=error.param, code=error.code)
                found = find(destination.folder, destination.key)
            if found is None:
                reason = unkept(destination.folder, destination.error)
                raise DataError(f"{file.name}: {reason}", param=param, code=NOT_KEPT)
            stack.callback(found.entry.close)
            data = examination._open()
            data.look()
            yield found.samples, data.shape.word

    def report(self, destination: TokenDestination | None = None) -> DataReport:
        """The report on the file, in memory bounded by a chunk of it and 12 bytes a sample.

        Raises OSError.

        `destination`: where the tokens are kept if no line is at fault, and counted if they are
        there already.
        """
        request = self.request
        data = self._open()
        findings = Findings(strict_images=request.options.columns.strict_images)
        if data.digest() != request.sha256:
            findings.fault(Fault(0, "", "the file has changed since it was uploaded"))
            return findings.report(data.shape)
        exceeded = 0
        noted = NotedRecords()
        found = find(destination.folder, destination.key) if destination is not None else None
        if found is not None:
            data.look()
            findings.examples = int(found.samples.records.max(initial=-1)) + 1
            skipped = found.samples.skipped
            limit = self._length_limit(data)
            alike = found.samples.alike(limit) if request.pairs else None
            kept = found.samples.lengths_within(limit)
            targets = found.samples.targets_within(limit)
            counts = _counts(found.samples.lengths, kept, targets, alike, skipped.lines)
            # Both samples of a pair show those of its prompt.
            findings.images = len(found.samples.uses) // (1 + request.pairs)
            if found.samples.labels is not None:
                _, first = np.unique(found.samples.records, return_index=True)
                findings.labels.update(found.samples.labels[first].tolist())
            image_tokens = int((found.samples.uses[:, 1] - found.samples.uses[:, 0]).sum())
            counts = replace(counts, image_tokens=image_tokens)
            if not request.pairs:
                records, made = np.unique(found.samples.records, return_counts=True)
                several = line_numbers(records[made > 1], skipped.lines)
                counts = replace(counts, several=Lines.of(several.tolist()))
            unread_names = found.samples.unread_names
            noted.unanswered = found.samples.unanswered
            found.entry.close()
        elif destination is None:
            counts, exceeded = self._tokenize(data, findings, noted, None)
            skipped = findings.skipped
            unread_names = self._unread(noted)
        else:
            with Recording(Cache(destination.folder), destination.key, data.size) as recording:
                counts, exceeded = self._tokenize(data, findings, noted, recording)
                skipped = findings.skipped
                unread_names = self._unread(noted)
                if not findings.faults_total:
                    dated = writes_date(self.tokenizer)
                    recording.publish(
                        dated=dated,
                        unread_names=unread_names,
                        unanswered=noted.unanswered,
                        skipped=skipped,
                    )
            destination.error = recording.error
        if counts.cut and request.options.columns.of_prompts and not findings.faults_total:
            read = ", as student and teacher read them," if request.options.context else ""
            text = (
                f"{counts.cut:,} of its prompts{read} have more than {request.max_length:,} tokens "
                "(training.max_length, less the "
                f"room for an answer); the longest has {counts.longest:,}. Raise "
                "training.max_length, or leave them out"
            )
            findings.fault(Fault(0, "", text))
        if findings.examples and not counts.samples and not findings.faults_total:
            findings.fault(Fault(0, "", nothing_to_learn(request.max_length, pairs=request.pairs)))
        report = findings.report(data.shape, counts, unread=exceeded >= GIVE_UP_AFTER)
        # Kept tokens do without a tokenizer: that the base has a template was told when they were
        # made.
        is_chat = self.tokenizer is not None and ChatTemplate.of(self.tokenizer) is not None
        joined = report.joined if is_chat else ()
        as_chats = bool(request.options.columns.apply_chat_template)
        return replace(
            report,
            joined=joined,
            as_chats=as_chats,
            unread_names=unread_names,
            unanswered=noted.unanswered,
            has_context=bool(request.options.context),
            skipped=skipped if report.may_skip is None else report.skipped,
            unused_bounds=bool(request.options.pixels) and not report.images,
        )

    def _unread(self, noted: NotedRecords) -> dict[str, Lines]:
        """The records with names that the chat template does not write, by role."""
        template = ChatTemplate.of(self.tokenizer) if noted.by_role else None
        if template is None:
            return {}
        try:
            with self.limits.rendering(0) if self.limits is not None else contextlib.nullcontext():
                return {
                    role: noted.by_role[role]
                    for role in sorted(noted.by_role)
                    if not writes_name(template, role)
                }
        except (TimeUp, MemoryError):
            return {}

    def _tokenize(
        self, data: DataReader, findings: Findings, noted: NotedRecords, recording: Recording | None
    ) -> tuple[Counts, int]:
        """Counts of all samples, and how many samples exceeded a limit.

        Faults go into `findings` and end the recording; records with names go into `noted`.
        """
        pairs = self.request.pairs
        options = self.request.options
        exceeded = 0
        image_tokens = 0
        # 12 bytes a sample, and one a pair
        lengths = array("i")
        kept = array("i")
        targets = array("i")
        alike = array("b")
        several = Lines()
        with data as reader, contextlib.ExitStack() as stack:
            records = noted.noted(reader)
            source = sources(self.tokenizer, records, options, pairs=pairs)
            for of_record in stack.enter_context(
                closing(tokenize(self.tokenizer, source, self.limits, options))
            ):
                if isinstance(of_record, Fault):
                    exceeded += of_record.over_limit
                    if findings.fault(of_record) and recording is not None:
                        recording.stop()
                else:
                    findings.examples += 1
                    cut: list[Tokens] = []
                    uses = sum(len(sample.images) for sample in of_record)
                    findings.images += uses // (1 + pairs)
                    if of_record[0].label is not None:
                        findings.labels[of_record[0].label] += 1
                    for sample in of_record:
                        cut.append(sample.cut(self._length_limit(data)))
                        lengths.append(len(sample.ids))
                        kept.append(len(cut[-1].ids))
                        image_tokens += sum(use.end - use.begin for use in sample.images)
                        targets.append(cut[-1].target_count)
                        if recording is not None:
                            recording.add(sample)
                    if not pairs and len(cut) > 1:
                        several = several.with_line(findings.records)
                    alike.append(pairs and cut[0].target_count > 0 and cut[0].is_same(cut[1]))
                self.progress.update(findings.records, reader)
        if exceeded < GIVE_UP_AFTER:
            findings.conclude()
        are_alike = np.asarray(alike, np.bool_) if pairs else None
        counts = _counts(lengths, kept, targets, are_alike, findings.skipped_lines)
        return replace(counts, several=several, image_tokens=image_tokens), exceeded

    def _open(self) -> DataReader:
        return open_data(Path(self.request.path), self.request.files, self.request.options.columns)

    def _length_limit(self, data: DataReader) -> int:
        """Tokens of a sample that are used.

        Samples that are learned whole are split into windows, so all their tokens are.
        """
        request = self.request
        is_whole = not request.pairs and (
            data.shape.format is Format.TEXT or request.options.train_on == "everything"
        )
        return sys.maxsize if is_whole else request.max_length


def _counts(
    lengths: ArrayLike,
    kept: ArrayLike,
    targets: ArrayLike,
    alike: np.ndarray | None,
    skipped: Sequence[int],
) -> Counts:
    """The counts of samples.

    `lengths`: integers [samples], their tokens; `kept`: those after the cut; `targets`: integers
    [samples], the targets among these; `alike`: bool [pairs], TokenSet.alike, or None if these are
    no pairs. The two samples of a pair are used together or not at all. `skipped`: numbers of the
    file's lines that are no samples.
    """
    lengths = np.asarray(lengths)
    kept = np.asarray(kept)
    targets = np.asarray(targets)
    lost = lengths - kept
    together = 1 if alike is None else 2
    with_targets = (targets > 0).reshape(-1, together).all(axis=1)
    used_records = with_targets if alike is None else with_targets & ~alike
    used = used_records.repeat(together)
    return Counts(
        samples=int(np.count_nonzero(used)),
        pairs=0 if alike is None else int(np.count_nonzero(used_records)),
        tokens=int(kept[used].sum()),
        targets=int(targets[used].sum()),
        longest=int(lengths.max(initial=0)),
        cut=int(np.count_nonzero(lost)),
        lost_tokens=int(lost.sum()),
        dropped=int(np.count_nonzero(~with_targets)),
        alike=Lines()
        if alike is None
        else Lines.of(line_numbers(np.flatnonzero(alike), skipped).tolist()),
    )


if __name__ == "__main__":
    end_imports()
    main()
