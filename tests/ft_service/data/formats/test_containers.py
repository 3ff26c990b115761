"""A hundred files that cannot be trained on: each is reported with its place and reason, and
without a traceback.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import zstandard

from ft_service.data.chat_line import MAX_LINE_BYTES
from ft_service.data.data_file import check_lines

USER = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "4"}
FINE = {"messages": [USER, ANSWER]}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
PAIR = {
    "input": {"messages": [USER]},
    "preferred_output": [ANSWER],
    "non_preferred_output": [{**ANSWER, "content": "5"}],
}


def lines(*objects: Any) -> bytes:
    """JSON lines; bytes are a line as they are."""
    return b"".join(
        (own if isinstance(own, bytes) else json.dumps(own).encode()) + b"\n" for own in objects
    )


def chat(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), **more}


def table(columns: Mapping[str, Any]) -> bytes:
    file = io.BytesIO()
    parquet.write_table(pa.table(dict(columns)), file)
    return file.getvalue()


def arrow(columns: Mapping[str, Any], *, as_stream: bool = False) -> bytes:
    own = pa.table(dict(columns))
    file = io.BytesIO()
    with (pa.ipc.new_stream if as_stream else pa.ipc.new_file)(file, own.schema) as writer:
        writer.write_table(own)
    return file.getvalue()


def in_two_columns() -> bytes:
    file = io.BytesIO()
    parquet.write_table(
        pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), file
    )
    return file.getvalue()


GOOD = lines(FINE, FINE)
COLUMNS = {"prompt": ["a", "b"], "completion": ["c", "d"]}
DEEP = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
MANY_DIGITS = b'{"messages": [{"role": "user", "content": ' + b"9" * 5000 + b"}]}"


def damaged(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :]


def of_role(role: Any) -> dict[str, Any]:
    return chat({"role": role, "content": "x"}, ANSWER)


CONTAINERS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "the file holds no examples"),
    "blank lines": (b"\n\n \n", "the file holds no examples"),
    "a mark alone": (b"\xef\xbb\xbf", "line 1: is blank"),
    "an empty array": (b"[]", "the file holds no examples"),
    "an open array": (b"[", "the JSON array does not end"),
    "half an array": (json.dumps([FINE, FINE]).encode()[:-4], "the JSON array does not end"),
    "two arrays": (
        b"[%s][%s]" % (json.dumps(FINE).encode(), json.dumps(FINE).encode()),
        "something follows the end",
    ),
    "a comma too many": (
        b"[%s,]" % json.dumps(FINE).encode(),
        "element 2: is empty: there is a comma too many",
    ),
    "an array of text": (b'["a"]', "element 1: must be a JSON object with messages, not a string"),
    "an array of arrays": (
        b"[[]]",
        "element 1: must be a JSON object with messages, not an empty list",
    ),
    "an object over lines": (
        json.dumps(FINE, indent=1).encode(),
        "its first object goes on in the second line: write one object to a line",
    ),
    "half a line": (GOOD[:-9], "line 2: is not JSON"),
    "two objects a line": (
        lines(json.dumps(FINE).encode() * 2),
        "line 1: is not JSON: something follows the object at character",
    ),
    "a blank line between": (
        lines(FINE, b"", FINE),
        "line 2: is blank; blank lines may only stand at the end",
    ),
    "a line too long": (b'{"text": "' + b"x" * MAX_LINE_BYTES + b'"}', "line 1: is longer than"),
    "an element too long": (
        b'[{"text": "' + b"x" * MAX_LINE_BYTES + b'"}]',
        "element 1: is longer than",
    ),
    "nested too deeply": (DEEP, "line 1: is not usable JSON: nested too deeply"),
    "a number of 5000 digits": (MANY_DIGITS, "line 1: is not usable JSON"),
    "a mark before the second line": (GOOD + b"\xef\xbb\xbf" + GOOD, "line 3: is not JSON"),
    "utf-16": (GOOD.decode().encode("utf-16"), "it is encoded as UTF-16: save it as UTF-8"),
    "utf-16 without a mark": (
        GOOD.decode().encode("utf-16-le"),
        "it is encoded as UTF-16: save it as UTF-8",
    ),
    "utf-16 of other bytes": (
        GOOD.decode().encode("utf-16-be"),
        "it is encoded as UTF-16: save it as UTF-8",
    ),
    "utf-16 in gzip": (
        gzip.compress(GOOD.decode().encode("utf-16")),
        "it is encoded as UTF-16: save it as UTF-8",
    ),
    "utf-32": (GOOD.decode().encode("utf-32"), "it is encoded as UTF-32: save it as UTF-8"),
    "latin-1": (lines('{"text": "é"}'.encode("latin-1")), "line 1: is not UTF-8"),
    "windows-1252": (lines('{"text": "“x”"}'.encode("cp1252")), "line 1: is not UTF-8"),
    "half a character": (lines(FINE) + '{"text": "é"}'.encode()[:-3], "line 2: "),
    "zero bytes": (b"\0" * 64, "line 1: "),
    "noise": (bytes(range(128, 256)) * 4, "line 1: "),
    "a picture": (
        b"\x89PNG\r\n\x1a\n" + bytes(range(64)),
        "line 1: is not UTF-8: byte 0x89 at position 1",
    ),
    "a zip archive": (
        b"PK\x03\x04" + bytes(60),
        "it is an Excel workbook or a ZIP archive: export CSV UTF-8 from Excel",
    ),
    "bzip2": (bz2.compress(GOOD), "it is compressed by bzip2: give it as it is"),
    "xz": (lzma.compress(GOOD), "it is compressed by xz: give it as it is"),
    "a web page": (b"<!doctype html>\n<html></html>\n", "it is a web page"),
    "yaml": (b"messages:\n- role: user\n", "it is plain text, which is not JSON"),
    "python": (
        b"{'messages': []}\n",
        "line 1: is not JSON: a single quote at character 2, where JSON has double quotes",
    ),
    "python's words": (
        b'{"messages": None}\n',
        "line 1: is not JSON: None at character 14, which is null in JSON",
    ),
    "typographic quotes": (
        lines("{“messages”: []}".encode()),
        "line 1: is not JSON: “ at character 2, where JSON has straight",
    ),
    "commas between lines": (
        GOOD[:-1] + b",\n" + GOOD,
        "line 2: is not JSON: a comma at character 91, after the object",
    ),
    "a comma before a bracket": (
        b'{"messages": [],}\n',
        "line 1: is not JSON: a comma before the bracket at character 1",
    ),
    "a line within a string": (
        b'{"text": "a\tb"}\n',
        "line 1: is not JSON: '\\t' within a string at character 12: write it as \\t",
    ),
    "a single backslash": (
        b'{"text": "C:\\data"}\n',
        "line 1: is not JSON: a single backslash at character 13: write it as \\\\",
    ),
    "half a string": (
        b'{"text": "a\n',
        "line 1: is not JSON: the string that begins at character 10 does not end",
    ),
    "half an object": (
        b'{"text": "a"\n',
        "line 1: is not JSON: it ends early, at character 13: is it cut off?",
    ),
    "lines in cells": (
        lines(b'"{""text"": ""a""}"'),
        'line 1: is not JSON: it is quoted like a cell of CSV, with "" for each "',
    ),
    "cut gzip": (gzip.compress(GOOD)[:-9], "its gzip data is damaged"),
    "a gzip header alone": (gzip.compress(GOOD)[:9], "its gzip data is damaged"),
    "gzip with another sum": (damaged(gzip.compress(GOOD), -6), "its gzip data is damaged"),
    "gzip with noise behind": (gzip.compress(GOOD) + b"noise", "its gzip data is damaged"),
    "gzip of nothing": (gzip.compress(b""), "the file holds no examples"),
    "gzip twice": (gzip.compress(gzip.compress(GOOD)), "line 1: is not UTF-8"),
    "cut zstd": (zstandard.compress(GOOD * 500)[:-20], ""),
    "a zstd header alone": (zstandard.compress(GOOD)[:5], ""),
    "damaged zstd": (
        damaged(zstandard.ZstdCompressor(write_checksum=True).compress(GOOD), -2),
        "its zstd data is damaged",
    ),
    "zstd of nothing": (zstandard.compress(b""), "the file holds no examples"),
    "cut parquet": (table(COLUMNS)[:-9], "Parquet cannot be read after row 0"),
    "parquet's sign alone": (b"PAR1", "Parquet cannot be read after row 0"),
    "parquet with another footer": (
        damaged(table(COLUMNS), -8),
        "Parquet cannot be read after row",
    ),
    "parquet in gzip": (
        gzip.compress(table(COLUMNS)),
        "it is Parquet within gzip: give the Parquet file as it is",
    ),
    "parquet without rows": (
        table({"text": pa.array([], pa.string())}),
        "the file holds no examples",
    ),
    "parquet of no format": (
        table({"question": ["a"], "reply": ["b"]}),
        "row 1: is of no known format",
    ),
    "parquet with numbers": (
        table({"text": [1, 2]}),
        "2 rows (1, 2): text must be a string, not a number",
    ),
    "parquet with nothing": (table({"text": ["a", None]}), "row 2: "),
    "parquet with bytes": (table({"text": [b"a"]}), "row 1: text must be a string"),
    "parquet with times": (
        table({"text": pa.array([0], pa.timestamp("s"))}),
        "row 1: text must be a string",
    ),
    "parquet with lists": (table({"text": [["a"]]}), "row 1: text must be a string, not a list"),
    "parquet with maps": (
        table({"messages": pa.array([[("role", "user")]], pa.map_(pa.string(), pa.string()))}),
        "row 1: messages.0 must be an object with role and content, not",
    ),
    "parquet with no number": (
        table({"text": [float("nan")]}),
        "row 1: text must be a string, not a number",
    ),
    "cut arrow": (arrow(COLUMNS)[:-90], "Arrow cannot be read after row"),
    "a cut stream": (arrow(COLUMNS, as_stream=True)[:-90], "Arrow cannot be read after row"),
    "arrow's sign alone": (b"ARROW1\0\0", "Arrow cannot be read after row 0"),
    "a header alone": (b"prompt,completion\n", "the file holds no examples"),
    "a row too short": (
        b"prompt,completion\na,b\nc\n",
        "row 2: has 1 cells, and the header has 2 columns",
    ),
    "rows of other widths": (
        b"prompt,completion\na,b\nc\nd,e,f\n",
        "2 rows (2, 3): has 1 cells, and the header has 2 columns (row 2; the others likewise)",
    ),
    "a row too long": (
        b"prompt,completion\na,b,c\n",
        "row 1: has 3 cells, and the header has 2 columns",
    ),
    "an open quote": (b'prompt,completion\na,"b\n', "row 1 is not CSV"),
    "text behind a quote": (b'prompt,completion\na,"b"c\n', "row 1 is not CSV"),
    "an empty cell": (b"prompt,completion\na,\n", "row 1: completion is empty"),
    "csv in latin-1": (
        "text\né\n".encode("latin-1"),
        "row 1: text is not UTF-8: byte 0xe9 at character 1",
    ),
    "a column twice": (b"text,text\na,b\n", "two columns are called text: keep one"),
    "parquet with a column twice": (in_two_columns(), "two columns are called text: keep one"),
    "csv with text for json": (
        b"messages\nhello\n",
        "row 1: messages is not JSON: Expecting value at character 1",
    ),
    "csv with half of json": (b'messages\n"[{""role"": "\n', "row 1: messages is not JSON"),
    "a semicolon for a comma": (
        b"prompt;completion\na,b\n",
        "row 1: has 1 cells, and the header has 2 columns",
    ),
    "a table of no format": (
        b"question,answer\na,b\n",
        "row 1: is of no known format: it is CSV, and its columns are 'question', 'answer'. Known",
    ),
    "a table whose first row is short data": (
        b"hello,world\ngood morning,all\n",
        "row 1: is of no known format: it is CSV, and its columns are 'hello', 'world'. "
        "If its first row is data, put a row of names before it. Known are",
    ),
}

RECORDS: dict[str, tuple[Any, str]] = {
    "null": (None, "must be a JSON object with messages, not null"),
    "a number": (4, "must be a JSON object with messages, not a number"),
    "no key": ({}, "messages is required"),
    "a key twice": (
        b'{"messages": [], "messages": []}',
        "has the key 'messages' twice in an object: keep one",
    ),
    "a role twice": (
        b'{"messages": [{"role": "user", "role": "assistant", "content": "x"}]}',
        "has the key 'role' twice in an object: keep one",
    ),
    "keys of no format": ({"question": "a", "reply": "b"}, "messages is required"),
    "messages that are text": (
        {"messages": "hello"},
        "messages must be a list with at least one message, not a string",
    ),
    "no message": (chat(), "messages must be a list with at least one message, not an empty list"),
    "a message that is text": (
        chat("hello"),
        "messages.0 must be an object with role and content, not a string",
    ),
    "a message without a role": (chat({"content": "x"}), "messages.0.role is required"),
    "an unknown role": (of_role("robot"), "messages.0.role must be one of system"),
    "a role that is a number": (of_role(1), "messages.0.role must be one of system"),
    "a role that is a list": (of_role([]), "messages.0.role must be one of system"),
    "no content": (chat({"role": "user"}), "messages.0.content is required"),
    "content that is null": (
        chat({"role": "user", "content": None}),
        "messages.0.content must be a string, not null",
    ),
    "content that is no number": (
        b'{"messages": [{"role": "user", "content": NaN}]}',
        "messages.0.content must be a string",
    ),
    "half a surrogate pair": (
        b'{"messages": [{"role": "user", "content": "a\\ud800"}]}',
        "messages.0.content holds half of a surrogate pair at character 2",
    ),
    "a picture": (
        chat(
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, ANSWER
        ),
        "messages.0.content.0.image_url.url is the path 'x', and the service has no such",
    ),
    "a sound": (
        chat(
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]},
            ANSWER,
        ),
        "messages.0.content.1.type is 'input_audio', and only parts of type 'text' are taken",
    ),
    "a part that is text": (
        chat({"role": "user", "content": ["a"]}, ANSWER),
        'messages.0.content.0 must be {"type": "text", "text": …}, not a string',
    ),
    "an audio answer": (
        chat(USER, {**ANSWER, "audio": {"id": "x"}}),
        "messages.1.audio cannot be trained on: only text can",
    ),
    "a refusal": (
        chat(USER, {**ANSWER, "refusal": "no"}),
        "messages.1.refusal cannot be trained on: write it as content",
    ),
    "an unknown key of a message": (
        chat(USER, {**ANSWER, "mood": 1}),
        "messages.1.mood is not a known key",
    ),
    "a weight of a half": (
        chat(USER, {**ANSWER, "weight": 0.5}),
        "messages.1.weight must be 0 or 1, not 0.5",
    ),
    "a weight of a user": (
        chat({**USER, "weight": 1}, ANSWER),
        "messages.0.weight is only for assistant messages",
    ),
    "nothing but weight 0": (
        chat(USER, {**ANSWER, "weight": 0}),
        "messages every assistant message has weight 0",
    ),
    "no assistant": (
        chat(USER),
        "messages holds no assistant message, so there is nothing to train on",
    ),
    "two thoughts": (
        chat(USER, {"role": "assistant", "content": "<think>a</think>4", "reasoning_content": "b"}),
        "messages.1.reasoning_content is given too where the content has a </think>: keep one",
    ),
    "a thought of a user": (
        chat({**USER, "thinking": "x"}, ANSWER),
        "messages.0.thinking is only for messages of the role assistant",
    ),
    "calls that are none": (
        chat(USER, {"role": "assistant", "content": None, "tool_calls": []}),
        "messages.1.tool_calls must hold at least one call",
    ),
    "arguments that are no json": (
        chat(
            USER,
            {
                "role": "assistant",
                "tool_calls": [{**CALL, "function": {"name": "add", "arguments": "{a"}}],
            },
        ),
        "messages.1.tool_calls.0.function.arguments is not JSON: Expecting property name",
    ),
    "an answer to no call": (
        chat(USER, {"role": "tool", "content": "4", "tool_call_id": "c9"}, ANSWER),
        "messages.1.tool_call_id 'c9' is the id of no call before it",
    ),
    "tools that are text": (chat(USER, ANSWER, tools="add"), "tools must be a list, not a string"),
    "a tool without a name": (
        chat(USER, ANSWER, tools=[{"type": "function", "function": {}}]),
        "tools.0.function.name is required",
    ),
    "a pair in a chat file": (PAIR, "is OpenAI preference pairs"),
    "alpaca in a chat file": ({"instruction": "a", "output": "b"}, "is Alpaca"),
    "text in a chat file": ({"text": "a"}, "is plain text"),
}
"""Second lines of files whose first is a chat."""

OTHERS: dict[str, tuple[Any, str]] = {
    "of no format": (
        {"question": "a", "reply": "b"},
        "is of no known format: its keys are 'question', 'reply'",
    ),
    "an unknown speaker": (
        {"conversations": [{"from": "dog", "value": "x"}]},
        "conversations.0.from must be one of human",
    ),
    "a turn without words": (
        {"conversations": [{"from": "human"}]},
        "conversations.0.value is required",
    ),
    "nothing to answer": (
        {"instruction": " ", "output": "x"},
        "instruction is empty, and so is the input",
    ),
    "no output": (
        {"instruction": "x", "output": " "},
        "output is empty, so there is nothing to train on",
    ),
    "an empty completion": (
        {"prompt": "x", "completion": ""},
        "completion is empty, so there is nothing to train on",
    ),
    "text and messages": (
        {"prompt": "x", "completion": [ANSWER]},
        "completion is a list and the prompt a string",
    ),
    "an empty document": ({"text": "\n"}, "text is empty, so there is nothing to train on"),
    "answers that are the same": (
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        "chosen and rejected are the same, so that neither can be preferred",
    ),
    "a pair without a prompt": (
        {"chosen": "a", "rejected": "b"},
        "prompt is required where chosen and rejected are texts",
    ),
    "a pair without another answer": (
        {"input": {"messages": [USER]}, "preferred_output": [ANSWER]},
        "non_preferred_output is required",
    ),
}
"""Files of one line."""

FILES: dict[str, tuple[bytes, str]] = {
    **CONTAINERS,
    **{
        f"{name}, in line 2": (lines(FINE, own), f"line 2: {reason}" if reason else "line 2: ")
        for name, (own, reason) in RECORDS.items()
    },
    **{
        f"{name}, alone": (lines(own), f"line 1: {reason}")
        for name, (own, reason) in OTHERS.items()
    },
}


def told_of(folder: Path, content: bytes) -> str:
    path = folder / "a.jsonl"
    path.write_bytes(content)
    report = check_lines(path)
    error = report.error("training_file", path.name)
    assert error is not None, "it is taken"
    return error.message


def test_there_are_a_hundred() -> None:
    assert len(FILES) >= 100
    assert len({content for content, _ in FILES.values()}) == len(FILES)


@pytest.mark.parametrize("name", FILES)
def test_a_malformed_file_is_told_with_its_place_and_reason(name: str, tmp_path: Path) -> None:
    content, expected = FILES[name]
    message = told_of(tmp_path, content)
    told = [line.removeprefix("a.jsonl: ") for line in message.splitlines()]
    assert any(line.startswith(expected) for line in told), message
    assert message.startswith("a.jsonl: ")
    assert len(message) < 700, "no more than can be read"
    assert "Traceback" not in message


FIRST: dict[str, Callable[[], bytes]] = {
    "crlf": lambda: GOOD.replace(b"\n", b"\r\n"),
    "no end of the last line": lambda: GOOD[:-1],
    "blank lines at the end": lambda: GOOD + b"\n\n",
    "csv with a mark": lambda: b"\xef\xbb\xbfprompt,completion\na,b\n",
    "csv with quotes": lambda: b'prompt,completion\n"a, ""b""\nc",d\n',
    "csv with crlf": lambda: b"prompt,completion\r\na,b\r\n",
    "an array with a mark": lambda: b"\xef\xbb\xbf[%s]" % json.dumps(FINE).encode(),
    "two members of gzip": lambda: gzip.compress(GOOD) + gzip.compress(GOOD),
}
"""What looks odd and is none the worse."""


@pytest.mark.parametrize("name", FIRST)
def test_what_only_looks_odd_is_taken(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(FIRST[name]())
    report = check_lines(path)
    assert (report.faults_total, report.examples > 0) == (0, True), report.faults
