"""Texts of answers, apart from their tokens."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from ft_service.reinforcement import step_texts
from ft_service.reinforcement.step_records import (
    SampledAnswer,
    StepRecord,
    record_key,
    recorded_steps,
    write_record,
)
from ft_service.reinforcement.step_texts import (
    StepTexts,
    read_texts,
    remove_records,
    texts_key,
    write_texts,
)
from ft_service.rundir.directory import RunDir, UnreadableDocumentError
from tests.support.rollouts import answer, group, record


class CountedRunDir(RunDir):
    """One that counts the bytes of what is read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read_bytes = 0

    def get(self, key: str, most: int = 1) -> bytes | None:
        body = super().get(key, most)
        self.read_bytes += len(body or b"")
        return body


def ordinary(step: int, tokens: int = 256) -> StepRecord:
    """8 prompts of 8 answers."""
    random = Random(step)

    def one(number: int) -> SampledAnswer:
        drawn = [random.randrange(128_000) for _ in range(tokens)]
        return answer(
            drawn, 0.5, text=f"{number} " * 50, logprobs=[-random.random() for _ in drawn]
        )

    groups = [group(place, [one(number) for number in range(8)]) for place in range(8)]
    return record(step, groups, first_seq=1, validation=[group(0, [one(0)])])


def written(run: RunDir, *records: StepRecord) -> None:
    for one in records:
        write_record(run, one)
        write_texts(run, one)


def test_a_view_reads_texts_and_no_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = CountedRunDir(tmp_path)
    written(run, *(ordinary(step) for step in (1, 2, 3)))
    monkeypatch.setattr(
        step_texts, "record_lines", lambda *_: pytest.fail("a whole record is read")
    )
    texts = list(read_texts(run, (3, 2, 1), most=4))
    assert [own.head.step for own in texts] == [3, 2, 1]
    assert texts[0].model_dump_json() == StepTexts.of(ordinary(3)).first(4).model_dump_json()
    assert (texts[0].prompts_total, texts[0].validation_total, texts[0].mean_reward) == (8, 1, 0.5)
    assert [len(own.answers) for own in texts[0].prompts] == [4] * 4
    assert texts[0].prompts[1].answers[3].tokens == 256
    of_records = sum((run.size(record_key(step)) or 0) for step in (1, 2, 3))
    assert run.read_bytes < of_records / 50


def test_a_view_ends_early_once_it_has_parsed_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    written(run, *(ordinary(step) for step in range(1, 6)))
    per_step = sum(
        len(own.model_dump_json(exclude_none=True)) for own in StepTexts.of(ordinary(1)).prompts
    )
    monkeypatch.setattr(step_texts, "MOST_READ", 2 * per_step)
    assert [own.head.step for own in read_texts(run, (5, 4, 3, 2, 1), most=100)] == [5, 4]
    monkeypatch.setattr(step_texts, "MOST_READ", 1)
    assert [own.head.step for own in read_texts(run, (5, 4), most=100)] == [5], "one at least"


def test_of_long_texts_fewer_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path)
    monkeypatch.setattr(step_texts, "MOST_BYTES", 4000)
    long = group(0, [answer([1], 1.0, text="é" * 300)] * 9)
    written(
        run,
        record(
            1, [long] * 3, first_seq=1, validation=[group(0, [answer([1], 1.0, text="x" * 9999)])]
        ),
    )
    [texts] = read_texts(run, [1], most=100)
    assert [len(own.answers) for own in texts.prompts] == [2]
    assert (texts.prompts_total, len(texts.validation), texts.validation_total) == (3, 0, 1)


def test_records_without_texts_are_read_within_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one whose service was killed before the texts were written."""
    run = RunDir(tmp_path)
    write_record(run, ordinary(1))
    write_record(run, ordinary(2))
    found = [
        (own.head.step, len(own.prompts), own.prompts_total)
        for own in read_texts(run, (2, 7, 1), most=2)
    ]
    assert found == [(2, 2, 8), (1, 2, 8)]
    monkeypatch.setattr(step_texts, "MOST_READ", 90_000)
    assert list(read_texts(run, (2, 1), most=2)) == []


def test_the_newest_records_stay(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    written(run, *(record(step, [], first_seq=step) for step in (1, 2, 3, 1_000_000)))
    run.path("rollouts/other").write_text("")
    remove_records(run, 2)
    assert recorded_steps(run) == [3, 1_000_000]
    assert [run.has(texts_key(step)) for step in (1, 2, 3, 1_000_000)] == [False, False, True, True]


@pytest.mark.parametrize(
    "body", [b"", b"no zstd", b"\x28\xb5\x2f\xfd\x04\x00\x01\x00\x00", b"[]", b"{}"]
)
def test_another_file_is_none(tmp_path: Path, body: bytes) -> None:
    run = RunDir(tmp_path)
    run.put(texts_key(1), step_texts.compressed(body) if body in (b"[]", b"{}") else body)
    with pytest.raises(UnreadableDocumentError, match="it has no texts of a step"):
        list(read_texts(run, [1], 1))
