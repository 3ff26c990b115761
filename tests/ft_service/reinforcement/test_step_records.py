"""Records as files."""

from __future__ import annotations

from pathlib import Path

import pytest

from ft_service.errors import DataError
from ft_service.reinforcement import step_records
from ft_service.reinforcement.step_records import (
    read_record,
    record_key,
    record_lines,
    recorded_steps,
    write_record,
)
from ft_service.rundir.directory import RunDir, UnreadableDocumentError
from tests.support.rollouts import answer, group, record


def test_a_record_is_read_as_it_was_written_and_never_replaced(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    groups = [group(3, [answer([1, 2], 0.5, text="é\u2028"), answer([4], None)])]
    valid = [group(0, [answer([9], 1.0, truncated=True)], ids=())]
    first = record(2, groups, first_seq=7, validation=valid)
    assert write_record(run, first)
    assert not write_record(run, record(2, [], first_seq=1))
    found = read_record(run, 2)
    assert found is not None
    assert found.model_dump_json() == first.model_dump_json()
    assert found.valid_mean_reward == 1.0
    assert read_record(run, 3) is None


def test_a_record_that_could_not_be_read_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    monkeypatch.setattr(step_records, "MOST_BYTES", 400)
    assert write_record(run, record(1, [group(0, [answer([1], 0.5)])], first_seq=1))
    assert read_record(run, 1) is not None
    with pytest.raises(DataError, match="The 2 answers of step 2 take"):
        write_record(run, record(2, [group(0, [answer([1] * 20, 0.5)] * 2)], first_seq=1))
    assert recorded_steps(run) == [1]


def test_a_reader_may_set_a_lower_limit(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_record(run, record(1, [group(0, [answer([1] * 99, 0.5)])], first_seq=1))
    lines = record_lines(run, 1, 4000) or []
    size = sum(map(len, lines)) + len(lines)
    assert [record_lines(run, 1, most) is None for most in (10, size - 1, size)] == [
        True,
        True,
        False,
    ]
    assert record_lines(run, 2, size) is None


@pytest.mark.parametrize("body", [b"", b"no zstd", b"\x28\xb5\x2f\xfd\x04\x00\x01\x00\x00"])
def test_another_file_is_none(tmp_path: Path, body: bytes) -> None:
    run = RunDir(tmp_path)
    run.put(record_key(1), body)
    with pytest.raises(UnreadableDocumentError, match="it is no record of a step"):
        read_record(run, 1)
