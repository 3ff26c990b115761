"""Every format in every container is the same records; what is wrong is named with its place."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
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
from ft_service.data.formats.folders import dataset_files
from ft_service.data.formats.reading import estimate_samples, open_data
from ft_service.data.formats.recognise import Container, Format, container_of, recognise
from ft_service.data.formats.writing import line_of
from ft_service.data.line_errors import Fault
from ft_service.data.records import Chat, Pair, PromptCompletion, Record, Text
from ft_service.errors import DataError

ROOT = Path(__file__).parents[4]
EXAMPLES = ROOT / "examples/data/formats"
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": 'Two plus "two"?\nSay, [é] {'}
ANSWER = {"role": "assistant", "content": "Four."}
WORSE = {"role": "assistant", "content": "Five."}
CHAT = Chat((USER, ANSWER), (0, 1))
PAIR = Pair(CHAT, Chat((USER, WORSE), (0, 1)))

SAME: dict[str, tuple[Format, dict[str, Any], Record]] = {
    "chat": (Format.CHAT, {"messages": [USER, ANSWER]}, CHAT),
    "bare": (Format.PROMPT_COMPLETION, {"prompt": "a", "completion": "b"}, PromptCompletion("a", "b")),
    "completed messages": (
        *(Format.PROMPT_COMPLETION, {"prompt": [USER, ANSWER, USER], "completion": [WORSE]}),
        Chat((USER, ANSWER, USER, WORSE), (0, 0, 0, 1)),
    ),
    "text": (Format.TEXT, {"text": "Once."}, Text("Once.")),
    "sharegpt": (
        Format.SHAREGPT,
        {"conversations": [{"from": "human", "value": USER["content"]}, {"from": "gpt", "value": "Four."}]},
        CHAT,
    ),
    "sharegpt with roles": (Format.SHAREGPT, {"conversations": [USER, ANSWER], "system": " "}, CHAT),
    "alpaca": (
        *(Format.ALPACA, {"instruction": "Add.", "input": "2, 2", "output": "4", "system": "Be brief."}),
        Chat((SYSTEM, {"role": "user", "content": "Add.\n\n2, 2"}, {"role": "assistant", "content": "4"}), (0, 0, 1)),
    ),
    "alpaca alone": (
        *(Format.ALPACA, {"instruction": "Add.", "input": "", "output": "4"}),
        Chat(({"role": "user", "content": "Add."}, {"role": "assistant", "content": "4"}), (0, 1)),
    ),
    "openai pairs": (
        Format.OPENAI_PAIRS,
        {"input": {"messages": [USER]}, "preferred_output": [ANSWER], "non_preferred_output": [WORSE]},
        PAIR,
    ),
    "older openai pairs": (
        Format.OPENAI_PAIRS,
        {"input": {"messages": [USER]}, "preferred_completion": [ANSWER], "non_preferred_completion": [WORSE]},
        PAIR,
    ),
    "trl pairs": (Format.TRL_PAIRS, {"prompt": [USER], "chosen": [ANSWER], "rejected": [WORSE]}, PAIR),
    "whole trl pairs": (Format.TRL_PAIRS, {"chosen": [USER, ANSWER], "rejected": [USER, WORSE]}, PAIR),
    "prompt written twice": (Format.TRL_PAIRS, {"prompt": "x", "chosen": [USER, ANSWER], "rejected": [USER, WORSE]}, PAIR),
}


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def array(rows: list[dict[str, Any]]) -> bytes:
    return b"\n " + json.dumps(rows, indent=2, ensure_ascii=False).encode() + b"\n"


def in_parquet(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist([*rows]), file, row_group_size=2)
    return file.getvalue()


def in_arrow(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    table = pa.Table.from_pylist([*rows])
    with pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    return file.getvalue()


def in_csv(rows: list[dict[str, Any]], delimiter: str = ",") -> bytes:
    file = io.StringIO()
    writer = csv.writer(file, delimiter=delimiter)
    writer.writerow(rows[0])
    for row in rows:
        writer.writerow([value if isinstance(value, str) else json.dumps(value) for value in row.values()])
    return b"\xef\xbb\xbf" + file.getvalue().encode()


CONTAINERS: dict[str, tuple[Container, Callable[[list[dict[str, Any]]], bytes]]] = {
    "lines": (Container.LINES, lines),
    "array": (Container.ARRAY, array),
    "parquet": (Container.PARQUET, in_parquet),
    "arrow": (Container.ARROW, in_arrow),
    "gzip": (Container.LINES, lambda rows: gzip.compress(lines(rows))),
    "zstd": (Container.ARRAY, lambda rows: zstandard.compress(array(rows))),
}
TABLES = {
    "csv": (Container.CSV, in_csv),
    "semicolons": (Container.CSV, lambda rows: in_csv(rows, ";")),
    "tabs, gzip": (Container.CSV, lambda rows: gzip.compress(in_csv(rows, "\t"))),
}
FLAT = ("chat", "bare", "text", "alpaca", "alpaca alone", "sharegpt with roles")
"""What a CSV can hold."""


def records(path: Path) -> list[Record | Fault]:
    with open_data(path) as reader:
        return [record for _, record in reader]


def write(folder: Path, content: bytes) -> Path:
    path = folder / "data"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("case", "container"),
    [*itertools.product(SAME, CONTAINERS), *itertools.product(FLAT, TABLES)],
)
def test_a_format_is_the_same_records_in_every_container(case: str, container: str, tmp_path: Path) -> None:
    format, row, expected = SAME[case]
    kind, make = {**CONTAINERS, **TABLES}[container]
    with open_data(write(tmp_path, make([row] * 5))) as reader:
        found = list(reader)
        assert found == [(number, expected) for number in range(1, 6)]
        assert (reader.shape.format, reader.shape.container) == (format, kind)
        assert reader.shape.unused == ()
        assert reader.share == 1.0 or container in ("parquet", "arrow")


@pytest.mark.parametrize("case", SAME)
def test_what_is_written_is_read_as_the_same(case: str, tmp_path: Path) -> None:
    expected = SAME[case][2]
    assert records(write(tmp_path, lines([line_of(expected)]))) == [expected]


def test_calls_of_tools_survive_being_written(tmp_path: Path) -> None:
    called = {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'}
    turns = [{"from": "human", "value": "2?"}, called, {"from": "observation", "value": "4"}, {"from": "gpt", "value": "4"}]
    (chat,) = records(write(tmp_path, lines([{"conversations": turns, "tools": []}])))
    assert isinstance(chat, Chat)
    assert chat.messages[1]["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]
    assert records(write(tmp_path, lines([line_of(chat)]))) == [chat]


def test_a_prompt_becomes_a_chat_when_that_is_asked_for() -> None:
    assert line_of(PromptCompletion("a", "b"), as_chat=True) == {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    }


@pytest.mark.parametrize("path", sorted(EXAMPLES.iterdir()), ids=lambda path: path.name)
def test_the_examples_hold_five_records_each(path: Path) -> None:
    report = check_lines(path)
    assert (report.examples, report.faults_total) == (5, 0)


@pytest.mark.parametrize("path", sorted(EXAMPLES.iterdir()), ids=lambda path: path.name)
def test_the_examples_are_converted_to_lines_of_the_same_records(path: Path, tmp_path: Path) -> None:
    with open_data(path) as reader:
        own = [record for _, record in reader]
    converted = write(tmp_path, lines([line_of(record) for record in own if not isinstance(record, Fault)]))
    with open_data(converted) as reader:
        assert [record for _, record in reader] == own


@pytest.mark.parametrize("make", [array, in_csv], ids=["array", "csv"])
def test_pieces_may_end_anywhere(
    make: Callable[[list[dict[str, Any]]], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within an escape, a string, a bracket."""
    path = write(tmp_path, make([{"messages": [USER, {"role": "assistant", "content": 'a\\"}],"'}]}] * 3))
    whole = records(path)
    assert not any(isinstance(record, Fault) for record in whole)
    for size in (1, 2, 3, 5, 7):
        monkeypatch.setattr(containers, "CHUNK_BYTES", size)
        assert records(path) == whole


def test_columns_of_no_use_are_left_out_and_named(tmp_path: Path) -> None:
    row = {"id": 7, "text": "Once.", "source": "a"}
    for make in (lines, in_parquet, in_csv):
        report = check_lines(write(tmp_path, make([{name: str(value) for name, value in row.items()}] * 2)))
        assert (report.examples, report.unused) == (2, ("id", "source"))
    told = [message for _, message in report.messages("a.csv", 8)]
    assert told == ["a.csv: plain text (text) in CSV.", "a.csv: 2 columns are not of this format, and left out: id, source."]
    chats = [{"messages": [USER, ANSWER], "id": 7}, {"messages": [USER, ANSWER], "source": "a", "prompt": "x"}]
    report = check_lines(write(tmp_path, lines(chats)))
    assert (report.examples, report.unused) == (2, ("id", "source", "prompt")), "of every line"
    hostile = check_lines(write(tmp_path, lines([{"messages": [USER, ANSWER], **{"k" * 200 + str(n): 1 for n in range(99)}}])))
    assert len("".join(hostile.unused)) < 2000
    assert check_lines(write(tmp_path, in_parquet([{"messages": [USER, ANSWER], "id": 7}]))).unused == ("id",)


def test_a_file_has_one_format(tmp_path: Path) -> None:
    report = check_lines(write(tmp_path, lines([{"text": "a"}, {"prompt": "a", "completion": "b"}, {}])))
    assert [str(fault) for fault in report.faults] == [
        "line 2: is prompt and completion, and this file began as plain text (text): put each format into a file of its own",
        "line 3: text is required",
    ]


def test_what_is_of_no_known_format_is_told_with_its_keys(tmp_path: Path) -> None:
    (fault,) = check_lines(write(tmp_path, lines([{"question": "a", "reply": "b"}]))).faults
    assert fault.reason.startswith("is of no known format: its keys are 'question', 'reply'. Known are OpenAI")


def test_a_table_of_no_known_format_is_told_with_its_columns(tmp_path: Path) -> None:
    for head in (b"question,reply\na,b\n", b'\xef\xbb\xbfquestion;reply\n"a;\nb";c\n', b"question\treply\na\tb\n"):
        (fault,) = check_lines(write(tmp_path, head)).faults
        assert "it is CSV, and its columns are 'question', 'reply'" in fault.reason
        assert fault.reason.endswith("data: {instruction: question, output: reply} makes conversations of them")
    (other,) = check_lines(write(tmp_path, b"Prompt,Completion\na,b\n")).faults
    assert other.reason.endswith("data: {prompt: Prompt, completion: Completion}")
    for text in (b"Hello, world\nThis is a text, which has commas, and more\n", b"one\ntwo\n", b'"a","b"\n', b"x\n"):
        assert container_of(text) is Container.LINES, text
    assert container_of(b"instruction;output\na;b\n") is Container.CSV
    assert recognise(["input", "preferred_output", "messages"]) is Format.OPENAI_PAIRS
    assert recognise(["prompt", "chosen", "rejected", "messages"]) is Format.TRL_PAIRS
    assert recognise(["prompt", "prompt_id", "messages"]) is Format.CHAT


def good(count: int = 2) -> list[dict[str, Any]]:
    return [{"messages": [USER, ANSWER]}] * count


@pytest.mark.parametrize(
    ("content", "place"),
    [
        pytest.param(array(good())[:-5], "the JSON array does not end", id="cut array"),
        pytest.param(array(good()) + b"{}", "something follows the end of the JSON array", id="after the array"),
        pytest.param(b"[" + lines(good(1)) + b",]", "element 2: is empty: there is a comma too many", id="comma"),
        pytest.param(b"[1]", "element 1: must be a JSON object", id="numbers"),
        pytest.param(b"[]", "the file holds no examples", id="empty array"),
        pytest.param(b'[{"messages": ' + b'"' + b"x" * (MAX_LINE_BYTES + 9) + b'"}]', "element 1: is longer than", id="long"),
        pytest.param(in_parquet(good())[:-9], "Parquet cannot be read after row 0", id="cut parquet"),
        pytest.param(b"PAR1" + b"\0" * 90 + b"PAR1", "Parquet cannot be read after row 0", id="no parquet"),
        pytest.param(in_arrow(good())[:-90], "Arrow cannot be read after row", id="cut arrow"),
        pytest.param(
            gzip.compress(in_parquet(good())), "it is Parquet within gzip: give the Parquet file", id="parquet in gzip"
        ),
        pytest.param(gzip.compress(lines(good()))[:-9], "its gzip data is damaged", id="cut gzip"),
        pytest.param(zstandard.compress(lines(good()))[:9], "", id="cut zstd"),
        pytest.param(b"text\n\xff\n", "row 1: text is not UTF-8: byte 0xff at character 1", id="no utf-8"),
        pytest.param(b"prompt,completion\na,b\nc\n", "row 2: has 1 cells, and the header has 2 columns", id="ragged"),
        pytest.param(b'text\na\n"b', "row 2 is no CSV", id="open quote"),
        pytest.param(b"messages\nhello\n", "row 1: messages is not JSON", id="no json"),
        pytest.param(b"text,text2\n,b\n", "row 1: text is empty", id="empty cell"),
    ],
)
def test_what_cannot_be_read_is_told_with_its_place(content: bytes, place: str, tmp_path: Path) -> None:
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
    parquet.write_table(pa.table({"text": text, "other": text}), path, compression="none", use_dictionary=False)
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


class TestFolders:
    def test_one_that_datasets_saved(self, tmp_path: Path) -> None:
        for number in (1, 0):
            (tmp_path / f"data-{number}.arrow").write_bytes(in_arrow([{"text": f"{number}"}] * 2))
        state = {"_data_files": [{"filename": "data-0.arrow"}, {"filename": "data-1.arrow"}]}
        (tmp_path / "state.json").write_text(json.dumps(state))
        files = dataset_files(tmp_path, "train")
        assert files == ("data-0.arrow", "data-1.arrow")
        with open_data(tmp_path, files) as reader:
            assert list(reader) == [(1, Text("0")), (2, Text("0")), (3, Text("1")), (4, Text("1"))]
        assert open_data(tmp_path, files).digest() != open_data(tmp_path, files[::-1]).digest()

    def test_one_as_the_hub_keeps_it(self, tmp_path: Path) -> None:
        (tmp_path / "data").mkdir()
        for name in ("train-00001-of-00002", "train-00000-of-00002", "test-00000-of-00001"):
            (tmp_path / f"data/{name}.parquet").write_bytes(in_parquet(good()))
        (tmp_path / "README.md").write_text("# data")
        expected = ("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet")
        assert dataset_files(tmp_path, "train") == expected
        assert dataset_files(tmp_path, "test") == ("data/test-00000-of-00001.parquet",)
        with pytest.raises(DataError, match=r"has the splits test, train, and none is called validation"):
            dataset_files(tmp_path, "validation")

    def test_several_splits_that_datasets_saved(self, tmp_path: Path) -> None:
        (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
        (tmp_path / "train").mkdir()
        (tmp_path / "train/a.arrow").write_bytes(in_arrow(good()))
        (tmp_path / "train/state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
        assert dataset_files(tmp_path, "train") == ("train/a.arrow",)
        (tmp_path / "train/state.json").write_text('{"_data_files": [{"filename": "../a.arrow"}]}')
        with pytest.raises(DataError, match="which the folder does not hold"):
            dataset_files(tmp_path, "train")


@pytest.mark.parametrize("path", sorted(EXAMPLES.iterdir()), ids=lambda path: path.name)
def test_records_of_any_container_are_counted_and_beyond_that_estimated(path: Path) -> None:
    assert estimate_samples(path, most=6) == 5
    assert estimate_samples(path, most=2) >= 2


def test_what_is_not_counted_is_estimated_by_the_share_of_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "many.csv"
    path.write_text("prompt,completion\n" + 'ask,"an answer\nof two lines"\n' * 100_000)
    assert estimate_samples(path, most=50_000) == pytest.approx(100_000, rel=0.2)
