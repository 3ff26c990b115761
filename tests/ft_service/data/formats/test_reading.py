"""Every format in every container is the same records; what is wrong is named with its place."""

from __future__ import annotations

import gzip
import itertools
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import zstandard

from ft_service.data.chat_line import MAX_LINE_BYTES
from ft_service.data.data_file import check_lines
from ft_service.data.formats import containers
from ft_service.data.formats.reading import estimate_samples, open_data
from ft_service.data.line_errors import Fault
from tests.support.data_formats import (
    ANSWER,
    CONTAINERS,
    EXAMPLES,
    FLAT,
    SAME,
    TABLES,
    USER,
    array,
    good,
    in_arrow,
    in_csv,
    in_parquet,
    lines,
    records,
    write,
)

"""What a CSV can hold."""


@pytest.mark.parametrize(
    ("case", "container"),
    [*itertools.product(SAME, CONTAINERS), *itertools.product(FLAT, TABLES)],
)
def test_a_format_is_the_same_records_in_every_container(
    case: str, container: str, tmp_path: Path
) -> None:
    format, row, expected = SAME[case]
    kind, make = {**CONTAINERS, **TABLES}[container]
    with open_data(write(tmp_path, make([row] * 5))) as reader:
        found = list(reader)
        assert found == [(number, expected) for number in range(1, 6)]
        assert (reader.shape.format, reader.shape.container) == (format, kind)
        assert reader.shape.unused == ()
        assert reader.share == 1.0 or container in ("parquet", "arrow")


@pytest.mark.parametrize("path", sorted(EXAMPLES.iterdir()), ids=lambda path: path.name)
def test_the_examples_hold_five_records_each(path: Path) -> None:
    report = check_lines(path)
    assert (report.examples, report.faults_total) == (5, 0)


@pytest.mark.parametrize("make", [array, in_csv], ids=["array", "csv"])
def test_pieces_may_end_anywhere(
    make: Callable[[list[dict[str, Any]]], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within an escape, a string, a bracket."""
    path = write(
        tmp_path, make([{"messages": [USER, {"role": "assistant", "content": 'a\\"}],"'}]}] * 3)
    )
    whole = records(path)
    assert not any(isinstance(record, Fault) for record in whole)
    for size in (1, 2, 3, 5, 7):
        monkeypatch.setattr(containers, "CHUNK_BYTES", size)
        assert records(path) == whole


def test_columns_of_no_use_are_left_out_and_named(tmp_path: Path) -> None:
    rows = [{"id": "7", "text": text, "source": "a"} for text in ("Once.", "Twice.")]
    for make in (lines, in_parquet, in_csv):
        report = check_lines(write(tmp_path, make(rows)))
        assert (report.examples, report.unused) == (2, ("id", "source"))
    told = [message for _, message in report.messages("a.csv", 8)]
    assert told == [
        "a.csv: plain text (text) in CSV.",
        "a.csv: 2 columns are not of this format, and left out: id, source.",
    ]
    chats = [
        {"messages": [USER, ANSWER], "id": 7},
        {"messages": [USER, ANSWER], "source": "a", "prompt": "x"},
    ]
    report = check_lines(write(tmp_path, lines(chats)))
    assert (report.examples, report.unused) == (2, ("id", "source", "prompt")), "of every line"
    hostile = check_lines(
        write(
            tmp_path,
            lines([{"messages": [USER, ANSWER], **{"k" * 200 + str(n): 1 for n in range(99)}}]),
        )
    )
    assert len("".join(hostile.unused)) < 2000
    assert check_lines(
        write(tmp_path, in_parquet([{"messages": [USER, ANSWER], "id": 7}]))
    ).unused == ("id",)


def test_bad_answers_of_unpaired_preferences_are_refused(tmp_path: Path) -> None:
    """TRL's format of KTO. The label is left out, so that only good answers may be there."""
    rows = [{"prompt": "a", "completion": "b", "label": label} for label in (True, False)]
    for make in (lines, in_parquet):
        report = check_lines(write(tmp_path, make(rows)))
        assert (report.examples, report.unused) == (1, ("label",))
        assert [(fault.line, fault.field) for fault in report.faults] == [(2, "label")]
    numbers = [{"prompt": "a", "completion": "b", "label": 0}]
    assert not check_lines(write(tmp_path, lines(numbers))).faults, "a class of a classification"


def test_a_file_has_one_format(tmp_path: Path) -> None:
    report = check_lines(
        write(tmp_path, lines([{"text": "a"}, {"prompt": "a", "completion": "b"}, {}]))
    )
    assert [str(fault) for fault in report.faults] == [
        "line 2: is prompt and completion, and this file began as plain text (text): put each "
        "format into a file of its own",
        "line 3: text is required",
    ]


def test_what_is_of_no_known_format_is_told_with_its_keys(tmp_path: Path) -> None:
    (fault,) = check_lines(write(tmp_path, lines([{"question": "a", "reply": "b"}]))).faults
    assert fault.reason.startswith(
        "is of no known format: its keys are 'question', 'reply'. Known are OpenAI"
    )


def test_a_table_of_no_known_format_is_told_with_its_columns(tmp_path: Path) -> None:
    for head in (
        b"question,reply\na,b\n",
        b'\xef\xbb\xbfquestion;reply\n"a;\nb";c\n',
        b"question\treply\na\tb\n",
    ):
        (fault,) = check_lines(write(tmp_path, head)).faults
        assert "it is CSV, and its columns are 'question', 'reply'" in fault.reason
        assert fault.reason.endswith(
            "data: {instruction: question, output: reply} makes conversations of them"
        )
    (dolly,) = check_lines(write(tmp_path, b"instruction,context,response\na,b,c\n")).faults
    assert "data: {instruction: instruction, input: context, output: response}" in dolly.reason
    (other,) = check_lines(write(tmp_path, b"Prompt,Completion\na,b\n")).faults
    assert other.reason.endswith("data: {prompt: Prompt, completion: Completion}")


@pytest.mark.parametrize(
    ("content", "place"),
    [
        pytest.param(array(good())[:-5], "the JSON array does not end", id="cut array"),
        pytest.param(
            array(good()) + b"{}",
            "something follows the end of the JSON array",
            id="after the array",
        ),
        pytest.param(
            b"[" + lines(good(1)) + b",]",
            "element 2: is empty: there is a comma too many",
            id="comma",
        ),
        pytest.param(b"[1]", "element 1: must be a JSON object", id="numbers"),
        pytest.param(b"[]", "the file holds no examples", id="empty array"),
        pytest.param(
            b'[{"messages": ' + b'"' + b"x" * (MAX_LINE_BYTES + 9) + b'"}]',
            "element 1: is longer than",
            id="long",
        ),
        pytest.param(
            in_parquet(good())[:-9], "Parquet cannot be read after row 0", id="cut parquet"
        ),
        pytest.param(
            b"PAR1" + b"\0" * 90 + b"PAR1", "Parquet cannot be read after row 0", id="no parquet"
        ),
        pytest.param(in_arrow(good())[:-90], "Arrow cannot be read after row", id="cut arrow"),
        pytest.param(
            gzip.compress(in_parquet(good())),
            "it is Parquet within gzip: give the Parquet file",
            id="parquet in gzip",
        ),
        pytest.param(gzip.compress(lines(good()))[:-9], "its gzip data is damaged", id="cut gzip"),
        pytest.param(zstandard.compress(lines(good()))[:9], "", id="cut zstd"),
        pytest.param(
            b"text\n\xff\n", "row 1: text is not UTF-8: byte 0xff at character 1", id="no utf-8"
        ),
        pytest.param(
            b"prompt,completion\na,b\nc\n",
            "row 2: has 1 cells, and the header has 2 columns",
            id="ragged",
        ),
        pytest.param(b'text\na\n"b', "row 2 is not CSV", id="open quote"),
        pytest.param(b"messages\nhello\n", "row 1: messages is not JSON", id="no json"),
        pytest.param(b"text,text2\n,b\n", "row 1: text is empty", id="empty cell"),
    ],
)
def test_what_cannot_be_read_is_told_with_its_place(
    content: bytes, place: str, tmp_path: Path
) -> None:
    report = check_lines(write(tmp_path, content))
    error = report.error("training_file", "a")
    assert error is not None
    assert any(line.removeprefix("a: ").startswith(place) for line in error.message.splitlines())


def test_nothing_expands_beyond_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "LEAST_EXPANDED", 1024)
    bomb = gzip.compress(b" " * 10**7)
    (fault,) = check_lines(write(tmp_path, bomb)).faults
    assert "expands to more than 500 times its size" in fault.reason


def test_a_large_parquet_file_is_read_in_bounded_memory(tmp_path: Path) -> None:
    """One row group of 60 MB, and Python's own memory while it is read."""
    path = tmp_path / "large.parquet"
    text = [f"word {number} " * 300 for number in range(20_000)]
    parquet.write_table(
        pa.table({"text": text, "other": text}), path, compression="none", use_dictionary=False
    )
    del text
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    with open_data(path) as reader:
        most = 0
        count = 0
        for _ in reader:
            count += 1
            most = max(most, pa.total_allocated_bytes() - before)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 20_000
    assert path.stat().st_size > 60_000_000
    assert max(most, peak) < 24 * 1024**2


@pytest.mark.parametrize("path", sorted(EXAMPLES.iterdir()), ids=lambda path: path.name)
def test_records_of_any_container_are_counted_and_beyond_that_estimated(path: Path) -> None:
    assert estimate_samples(path, most=6) == 5
    assert estimate_samples(path, most=2) >= 2


def test_what_is_not_counted_is_estimated_by_the_share_of_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "many.csv"
    path.write_text("prompt,completion\n" + 'ask,"an answer\nof two lines"\n' * 100_000)
    assert estimate_samples(path, most=50_000) == pytest.approx(100_000, rel=0.2)
