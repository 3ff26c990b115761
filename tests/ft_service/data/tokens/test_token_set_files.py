"""Tokens on the disk: those of the file, counted as if it were read again, whole or not there at
all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from ft_service.bases.cache_folder import Cache
from ft_service.data.data_file import DataReport, ExamineRequest, ReadProgress, check_lines
from ft_service.data.examiner import Examiner
from ft_service.data.statistics import Lines
from ft_service.data.token_folder import entries_of, remove_entries
from ft_service.data.token_options import TokenOptions
from ft_service.data.tokens.examine import Examination, ProgressReporter, TokenDestination
from ft_service.data.tokens.sample import Tokens
from ft_service.data.tokens.token_cache import Recording, find, tokens_key
from ft_service.data.tokens.token_set import TokenSet
from ft_service.data.tokens.token_set_files import TokenSetWriter, damage, open_token_set
from ft_service.data.tokens.tokenize import CHUNK_SAMPLES, beside_teachers, load_dataset
from ft_service.data.tokens.training_set.split import Split, split_off
from ft_service.data.tokens.training_set.token_statistics import RecordGroup
from ft_service.errors import DataError
from ft_service.rundir.directory import sha256_of
from ft_service.spec import DataFileRef
from tests.support.chat_templates import TEMPLATES
from tests.support.training.models import save_chats, save_tokenizer, spec_for

LINES = CHUNK_SAMPLES + 44
KEY = "ab.cd"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(base: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(base)


def chat(question: str, answer: str) -> str:
    return (
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": answer},
                ]
            }
        )
        + "\n"
    )


@pytest.fixture
def file(tmp_path: Path) -> DataFileRef:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(chat("a" * (n % 90), "ñ" * (n % 70 + 1)) for n in range(LINES)))
    return DataFileRef(name=path.name, path=str(path), sha256=sha256_of(path))


def tell_nothing(progress: ReadProgress) -> None:
    pytest.fail(f"told of {progress}")


def examined(tokenizer: Any, file: DataFileRef, max_length: int, folder: Path | None) -> DataReport:
    destination = TokenDestination(folder, KEY) if folder is not None else None
    request = ExamineRequest(file.path, file.sha256, "", "", max_length)
    return Examination(tokenizer, request, ProgressReporter(3600.0, tell_nothing)).report(
        destination
    )


def same(found: TokenSet, expected: TokenSet) -> bool:
    return found.digest == expected.digest and all(
        np.array_equal(a.ids, b.ids)
        and np.array_equal(a.targets, b.targets)
        and a.ids.dtype == b.ids.dtype
        for a, b in zip(found, expected, strict=True)
    )


def kept(folder: Path) -> TokenSet:
    found = find(folder, KEY)
    assert found is not None
    found.entry.close()
    return found.samples


@pytest.mark.parametrize("max_length", [40, 60, 200])
def test_what_is_kept_is_what_a_rank_would_make(
    max_length: int, tokenizer: PreTrainedTokenizerFast, file: DataFileRef, tmp_path: Path
) -> None:
    examined(tokenizer, file, 50, tmp_path / "tokens")
    samples = kept(tmp_path / "tokens")
    made = load_dataset(tokenizer, file, 10_000)
    assert same(samples, made)
    assert (len(samples), samples.largest_id, samples.dated) == (LINES, made.largest_id, False)
    assert samples.lengths.tolist() == made.lengths.tolist()
    assert same(samples.cut(max_length), load_dataset(tokenizer, file, max_length)), "kept uncut"


@pytest.mark.parametrize("max_length", [8, 40, 60, 200])
def test_the_same_is_reported_without_a_tokenizer(
    max_length: int, tokenizer: PreTrainedTokenizerFast, file: DataFileRef, tmp_path: Path
) -> None:
    examined(tokenizer, file, 50, tmp_path / "tokens")
    assert examined(None, file, max_length, tmp_path / "tokens") == examined(
        tokenizer, file, max_length, None
    )


@pytest.mark.parametrize("max_length", [40, 200])
def test_the_same_is_reported_of_pairs(
    max_length: int, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = tmp_path / "pairs.jsonl"
    folder = tmp_path / "tokens"
    answers = [("b", "c"), ("b" * 100 + "c", "b" * 100 + "d"), (" b", "b "), ("b" * 99, "c" * 99)]
    path.write_text(
        "".join(
            json.dumps({"prompt": "a", "chosen": one, "rejected": two}) + "\n"
            for one, two in answers
        )
    )
    request = ExamineRequest(str(path), sha256_of(path), "", "", max_length, pairs=True)
    trimming = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer)
    trimming.chat_template = str(tokenizer.chat_template).replace("m.content", "m.content | trim")
    tokenizers: tuple[Any, ...] = (trimming, None)
    first, again = (
        Examination(of, request, ProgressReporter(3600.0, tell_nothing)).report(
            TokenDestination(folder, KEY)
        )
        for of in tokenizers
    )
    assert again == first
    assert first.counts is not None
    assert first.counts.alike == (Lines(2, (2, 3)) if max_length == 40 else Lines(1, (3,)))


def test_each_sample_is_followed_by_what_its_teacher_reads(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    def say(role: str, content: str) -> dict[str, str]:
        return {"role": role, "content": content}

    asked = [say("user", "ask"), say("assistant", "one"), say("user", "more")]
    records = [
        {"messages": [*asked, say("assistant", "two")]},
        {"messages": [say("system", "own"), say("user", "ask"), say("assistant", "three")]},
        {"prompt": "bare ", "completion": "four"},
    ]
    path = tmp_path / "train.jsonl"
    context = TokenOptions(context="context: ")
    for lines, options in ((records[:2], context), (records[2:], context)):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        file = DataFileRef(name=path.name, path=str(path), sha256=sha256_of(path))
        samples = load_dataset(tokenizer, file, 10_000, options, pairs=True)
        alone = load_dataset(tokenizer, file, 10_000)
        assert len(samples) == 2 * len(lines)
        for number, own in enumerate(alone):
            student, teacher = samples[2 * number], samples[2 * number + 1]
            assert student.is_same(own)
            assert teacher.ids[teacher.targets].tolist() == own.ids[own.targets].tolist()
            text = tokenizer.decode(teacher.ids)
            assert text.count("context: ") == 1
            assert len(teacher.ids) > len(own.ids)
            if "messages" in lines[number] and number == 1:
                assert "context: \n\nown" in text
        request = ExamineRequest(
            file.path, file.sha256, "", "", 10_000, pairs=True, options=options
        )
        report = Examination(tokenizer, request, ProgressReporter(3600.0, tell_nothing)).report()
        assert report.counts is not None
        assert (report.counts.pairs, report.has_context) == (len(lines), True)


def test_a_record_that_cannot_be_taught_is_told_by_line(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"text": "a document"}) + "\n", encoding="utf-8")
    file = DataFileRef(name=path.name, path=str(path), sha256=sha256_of(path))
    with pytest.raises(DataError, match=r"line 1: is a text without an answer"):
        load_dataset(tokenizer, file, 100, TokenOptions(context="x"), pairs=True)
    answer = np.array([False, True])
    samples = [Tokens(np.array([1, last], np.int32), answer) for last in (2, 2, 2, 3)]
    assert beside_teachers([*samples[:2], *samples[1:3]]) == [samples[i] for i in (0, 1, 1, 2)]
    assert beside_teachers(samples) is None
    assert beside_teachers(samples[:3]) is None


def test_labels_are_kept_beside_the_targets_and_stay_with_their_samples(
    tmp_path: Path,
) -> None:
    targets = np.array([False, True])
    ids = [np.array([1, n], np.int32) for n in range(4)]
    labels = [True, False, False, True]
    samples = [Tokens(own, targets, label=label) for own, label in zip(ids, labels, strict=True)]
    plain = [Tokens(own, targets) for own in ids]
    with TokenSetWriter(tmp_path) as writer:
        for sample in samples:
            writer.add(sample)
        writer.finish(dated=False)
    found = open_token_set(tmp_path)
    assert found is not None
    assert found.labels is not None
    assert found.labels.tolist() == labels
    assert not any(sample.targets[0] for sample in found)
    assert [sample.label for sample in found.some(np.array([False, True, False, True]))] == [
        False,
        True,
    ]
    assert found.digest == TokenSet.of(samples).digest
    others = [replace(sample, label=not sample.label) for sample in samples]
    assert len({found.digest, TokenSet.of(plain).digest, TokenSet.of(others).digest}) == 3
    assert _ended(damage(tmp_path)) is None
    (tmp_path / "labels.bin").write_bytes(bytes([1, 1, 0, 1]))
    assert "another digest" in (_ended(damage(tmp_path)) or "")
    assert TokenSet.of(plain).labels is None


def _ended(reading: Generator[None, None, str | None]) -> str | None:
    while True:
        try:
            next(reading)
        except StopIteration as ended:
            return ended.value


def test_the_samples_of_a_conversation_are_told_and_stay_together(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """By a template that writes an answer otherwise once more follows."""
    path = tmp_path / "train.jsonl"
    folder = tmp_path / "tokens"
    turn = json.loads(chat("a", "b"))["messages"]
    path.write_text(
        "".join(
            json.dumps({"messages": turn[:-1] + [{**turn[1], "content": f"b{n}"}] + turn * (n % 3)})
            + "\n"
            for n in range(9)
        )
    )
    other = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, eos_token="<|im_end|>")
    other.chat_template = TEMPLATES["qwen3"]
    request = ExamineRequest(str(path), sha256_of(path), "", "", 512)
    tokenizers: tuple[Any, ...] = (other, None)
    first, again = (
        Examination(of, request, ProgressReporter(3600.0, tell_nothing)).report(
            TokenDestination(folder, KEY)
        )
        for of in tokenizers
    )
    assert again == first
    assert first.counts is not None
    assert (first.examples, first.counts.samples, first.counts.several) == (
        9,
        18,
        Lines(6, (2, 3, 5, 6, 8)),
    )
    assert any(
        "6 conversations (lines 2, 3, 5, 6, 8, …)" in sentence
        for _, sentence in first.messages("f", 512)
    )
    samples = kept(folder)
    assert samples.records.tolist() == [0, 1, 1, 2, 2, 2, 3, 4, 4, 5, 5, 5, 6, 7, 7, 8, 8, 8]
    training, validation = split_off(samples, Split(0.4, 3), "f")
    assert not set(training.records.tolist()) & set(validation.records.tolist())
    assert len(training) + len(validation) == len(samples)
    assert len(set(validation.records.tolist())) == 3
    group = RecordGroup(samples, "line", "f", pairs=False)
    found = group.measured(np.arange(9) == 5, 45)
    assert (found.samples, found.cut, found.duplicates) == (2, Lines(1, (6,)), Lines())


def test_nothing_is_kept_of_a_file_with_a_fault(
    tokenizer: PreTrainedTokenizerFast, file: DataFileRef, tmp_path: Path
) -> None:
    with Path(file.path).open("a") as lines:
        lines.write("{}\n")
    changed = file.model_copy(update={"sha256": sha256_of(Path(file.path))})
    report = examined(tokenizer, changed, 50, tmp_path / "tokens")
    assert (report.faults_total, report.examples) == (1, LINES)
    assert list((tmp_path / "tokens").iterdir()) == []


def test_a_folder_that_cannot_be_written_changes_no_report(
    tokenizer: PreTrainedTokenizerFast, file: DataFileRef, tmp_path: Path
) -> None:
    (tmp_path / "tokens").write_text("no folder")
    assert examined(tokenizer, file, 50, tmp_path / "tokens") == examined(tokenizer, file, 50, None)


def test_a_date_in_the_template_is_noted(base: Path, file: DataFileRef, tmp_path: Path) -> None:
    dated = PreTrainedTokenizerFast.from_pretrained(base)
    dated.chat_template = "{{ strftime_now('%Y') }}" + str(dated.chat_template)
    examined(dated, file, 50, tmp_path / "tokens")
    assert kept(tmp_path / "tokens").dated


def test_names_and_messages_without_effect_are_kept_with_the_tokens(
    tokenizer: PreTrainedTokenizerFast, file: DataFileRef, tmp_path: Path
) -> None:
    messages = [
        {"role": "user", "content": "a", "name": "Ann"},
        {"role": "assistant", "content": "b"},
    ]
    path = Path(file.path)
    asking = [*messages, {"role": "user", "content": "and c?"}]
    lines = [json.dumps({"messages": given}) + "\n" for given in (messages, asking)]
    path.write_text(chat("a", "b") + "".join(lines))
    file = file.model_copy(update={"sha256": sha256_of(path)})
    first = examined(tokenizer, file, 50, tmp_path / "tokens")
    assert first.unread_names == {"user": Lines(2, (2, 3))}
    assert first.unanswered == check_lines(path).unanswered == Lines(1, (3,)), (
        "its last message is of the user"
    )
    (told,) = (
        message
        for level, message in first.messages("a.jsonl", 50)
        if "after the last answer" in message
    )
    assert told.startswith("a.jsonl: 1 sample (line 3)")
    assert examined(None, file, 50, tmp_path / "tokens") == first


def test_an_index_of_an_earlier_release_is_read(
    tokenizer: PreTrainedTokenizerFast, file: DataFileRef, tmp_path: Path
) -> None:
    """Its seal is of the fields that there were."""
    examined(tokenizer, file, 50, tmp_path / "tokens")
    path = tmp_path / "tokens" / KEY / "index.json"
    fields = {
        name: value
        for name, value in json.loads(path.read_text()).items()
        if name not in ("seal", "unread_names", "unanswered")
    }
    seal = hashlib.sha256(json.dumps(fields, separators=(",", ":")).encode()).hexdigest()
    path.write_text(json.dumps({**fields, "seal": seal}))
    assert len(kept(tmp_path / "tokens")) == LINES


def truncate(entry: Path) -> None:
    path = entry / "ids.bin"
    path.write_bytes(path.read_bytes()[:-4])


def edit_index(entry: Path) -> None:
    path = entry / "index.json"
    path.write_text(path.read_text().replace('"largest_id": ', '"largest_id": 1'))


def mix_offsets(entry: Path) -> None:
    path = entry / "offsets.bin"
    offsets = np.fromfile(path, "<i8")
    offsets[[1, 2]] = offsets[[2, 1]]
    offsets.tofile(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "ids cut off": truncate,
    "another index": edit_index,
    "offsets out of order": mix_offsets,
    "no targets": lambda entry: (entry / "targets.bin").unlink(),
    "no index": lambda entry: (entry / "index.json").unlink(),
    "no lock": lambda entry: (entry / "lock").unlink(),
    "no JSON": lambda entry: (entry / "index.json").write_text("{"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_made_anew(
    damage: str, tokenizer: PreTrainedTokenizerFast, file: DataFileRef, tmp_path: Path
) -> None:
    report = examined(tokenizer, file, 50, tmp_path / "tokens")
    DAMAGES[damage](tmp_path / "tokens" / KEY)
    assert find(tmp_path / "tokens", KEY) is None
    assert examined(tokenizer, file, 50, tmp_path / "tokens") == report
    assert same(kept(tmp_path / "tokens"), load_dataset(tokenizer, file, 10_000))


def test_of_two_writers_one_is_first_and_nothing_is_left_over(
    tokenizer: PreTrainedTokenizerFast, file: DataFileRef, tmp_path: Path
) -> None:
    cache = Cache(tmp_path / "tokens")
    samples = load_dataset(tokenizer, file, 10_000)
    with (
        Recording(cache, KEY, 0) as first,
        Recording(cache, KEY, 0) as second,
        Recording(cache, KEY, 0) as third,
    ):
        for sample in samples:
            for recording in (first, second, third):
                recording.add(sample)
        second.publish(dated=False)
        inode = (cache.folder / KEY).stat().st_ino
        first.publish(dated=False)
    assert (first.error, second.error, third.error) == (None, None, None)
    assert [(path.name, path.stat().st_ino) for path in cache.folder.iterdir()] == [(KEY, inode)]
    assert same(kept(cache.folder), samples)


def test_no_samples_can_be_kept_too(tmp_path: Path) -> None:
    with Recording(Cache(tmp_path), KEY, 0) as recording:
        recording.publish(dated=False)
    samples = open_token_set(tmp_path / KEY)
    assert samples is not None
    assert (len(samples), samples.largest_id, samples.digest) == (0, -1, TokenSet.of([]).digest)


def test_the_process_keeps_them_and_counts_them_again(base: Path, tmp_path: Path) -> None:
    spec = spec_for(base, save_chats(tmp_path / "train.jsonl", 20))
    data = spec.data_files[0]
    folder = tmp_path / "tokens"
    path = Path(data.path)

    def report() -> object:
        with Examiner(tokens=folder) as examiner:
            return examiner.examine_file("training_file", data, path, spec, pytest.fail)

    first = report()
    (entry,) = entries_of(folder, data.sha256)
    assert entry.name == tokens_key(str(base), data.sha256)
    written = (entry / "ids.bin").stat().st_mtime_ns
    assert report() == first
    assert (entry / "ids.bin").stat().st_mtime_ns == written
    remove_entries(folder, "another")
    assert entry.is_dir()
    remove_entries(folder, data.sha256)
    assert entries_of(folder, data.sha256) == []
