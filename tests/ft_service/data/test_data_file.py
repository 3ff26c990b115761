from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

from ft_service.data.chat_line import MAX_LINE_BYTES
from ft_service.data.data_file import check_lines
from ft_service.data.line_errors import Fault

GOOD = json.dumps(
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
).encode()


def write(folder: Path, body: bytes) -> Path:
    path = folder / "data.jsonl"
    path.write_bytes(body)
    return path


def test_good_lines_are_counted_with_any_line_end_and_blank_lines_at_the_end(
    tmp_path: Path,
) -> None:
    report = check_lines(write(tmp_path, GOOD + b"\n" + GOOD + b"\r\n" + GOOD + b"\n\n  \n"))

    assert (report.examples, report.faults_total) == (3, 0)
    assert report.error("training_file", "data.jsonl") is None


def test_every_faulty_line_is_named_with_its_number(tmp_path: Path) -> None:
    body = b"\n".join([GOOD, b"", b"\xff\xfe", b"{}", GOOD])

    report = check_lines(write(tmp_path, body))

    assert report.examples == 2
    assert [fault.line for fault in report.faults] == [2, 3, 4]
    assert "0xff at position 1" in report.faults[1].reason
    assert report.faults[2] == Fault(4, "messages", "is required")


def test_a_byte_order_mark_is_left_out(tmp_path: Path) -> None:
    report = check_lines(write(tmp_path, b"\xef\xbb\xbf" + GOOD))

    assert (report.faults_total, report.examples) == (0, 1)


def test_the_error_names_file_lines_and_reasons_and_counts_the_rest(tmp_path: Path) -> None:
    report = check_lines(write(tmp_path, b"\n".join([b"{}"] * 30 + [GOOD])))
    error = report.error("validation_file", "mine.jsonl")

    assert (len(report.faults), report.faults_total) == (20, 30)
    assert error is not None
    assert (error.code, error.param) == ("invalid_validation_file", "validation_file")
    assert error.message == (
        "mine.jsonl: 30 of 31 lines cannot be trained on.\n30 lines (1, 2, 3, 4, 5, …): messages "
        "is required"
    )


def test_faults_are_told_once_for_each_reason_with_their_lines(tmp_path: Path) -> None:
    def chat(*roles: str) -> bytes:
        return json.dumps({"messages": [{"role": role, "content": "x"} for role in roles]}).encode()

    lines = [
        chat("usr", "assistant"),
        b'{"a',
        chat("user", "usr"),
        GOOD,
        b'{"ab',
        b'{"prompt": "a", "completion": "b"}',
    ]
    report = check_lines(write(tmp_path, b"\n".join(lines)))
    known = "must be one of system, developer, user, assistant, tool, function, not 'usr'"
    assert report.fault_text("f").splitlines()[1:] == [
        f"2 lines (1, 3): messages.*.role {known}",
        "2 lines (2, 5): is not JSON: the string that begins at character 2 does not end: is it "
        "cut off?",
        "line 6: is prompt and completion, and this file began as OpenAI chat (messages): "
        "put each format into a file of its own",
    ]


def test_many_reasons_are_counted_together(tmp_path: Path) -> None:
    lines = [json.dumps({f"{a}{b}": 1}).encode() for a in "abcdefghijkl" for b in "mnopqrstuvwx"]
    report = check_lines(write(tmp_path, b"\n".join(lines)))
    assert len(report.groups) == 100
    assert report.fault_text("f").splitlines()[21:] == ["and 124 more"]


def test_an_empty_file_is_a_fault(tmp_path: Path) -> None:
    for body in (b"", b"\n\n"):
        error = check_lines(write(tmp_path, body)).error("training_file", "empty.jsonl")

        assert error is not None
        assert error.code == "invalid_training_file"
        assert error.message == "empty.jsonl: the file holds no examples."


def test_a_line_that_is_too_long_is_skipped_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    with path.open("wb") as file:
        for _ in range(6):
            file.write(b"x" * MAX_LINE_BYTES)
        file.write(b"\n" + GOOD + b"\n" + b" " * (MAX_LINE_BYTES - len(GOOD)) + GOOD + b"\n")
    tracemalloc.start()
    report = check_lines(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert report.examples == 2
    assert [fault.line for fault in report.faults] == [1]
    assert "longer than" in report.faults[0].reason
    assert peak < 5 * MAX_LINE_BYTES
