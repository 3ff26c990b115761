"""Fields that are null in JSON lines and in Parquet alike: Arrow's leave, and those of the file's
author stay.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from ft_service.data.chat_line import parse_chat
from ft_service.data.formats.columns import Columns
from ft_service.data.formats.reading import open_data
from ft_service.data.null_fields import definition_without_null_fields
from ft_service.data.sample_kinds import Conversation, GradedPrompt, Pair, Record

WEATHER = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CONVERT = {
    "name": "convert",
    "parameters": {
        "type": "object",
        "properties": {
            "amount": {"type": "number"},
            "to": {"type": "string", "enum": ["EUR", "USD"]},
        },
        "required": ["amount"],
    },
}
ALIGNED_WEATHER = {
    "name": "weather",
    "description": None,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": None}, "amount": None, "to": None},
    },
}
ALIGNED_CONVERT = {
    "name": "convert",
    "description": None,
    "parameters": {
        "type": "object",
        "properties": {
            "city": None,
            "amount": {"type": "number", "enum": None},
            "to": {"type": "string", "enum": ["EUR", "USD"]},
        },
        "required": ["amount"],
    },
}


def tool(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": function}


def calling(name: str, arguments: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def records(
    path: Path, lines: list[dict[str, Any]], columns: Columns | None = None
) -> tuple[list[Record], list[Record]]:
    """The records of lines in JSON lines, and in Parquet."""
    (path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    parquet.write_table(pa.Table.from_pylist(lines), path / "a.parquet")
    found: list[list[Record]] = []
    for name in ("a.jsonl", "a.parquet"):
        with open_data(path / name, columns=Columns() if columns is None else columns) as reader:
            given = [record for _, record in reader]
        assert all(isinstance(record, Record) for record in given), given
        found.append([record for record in given if isinstance(record, Record)])
    return found[0], found[1]


def arguments(record: Record) -> list[Any]:
    assert isinstance(record, Conversation)
    return [
        call["function"]["arguments"]
        for message in record.messages
        for call in message.get("tool_calls", [])
    ]


def test_definitions_of_tools_lose_the_fields_that_arrow_adds(tmp_path: Path) -> None:
    lines = [
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "hello"},
            ],
            "tools": [tool(one)],
        }
        for one in (ALIGNED_WEATHER, ALIGNED_CONVERT)
    ]
    for found in records(tmp_path, lines):
        tools = [record.tools[0] for record in found if isinstance(record, Conversation)]
        assert tools == [tool(WEATHER), tool(CONVERT)]
    as_text = {"messages": lines[0]["messages"], "tools": json.dumps([tool(ALIGNED_WEATHER)])}
    assert parse_chat(as_text).tools == (tool(WEATHER),)


@pytest.mark.parametrize(
    ("name", "given", "stays"),
    [
        ("weather", {"city": "Rome", "amount": None, "to": None}, {"city": "Rome"}),
        ("convert", {"city": None, "amount": None, "to": None}, {"amount": None}),
        (
            "unknown",
            {"city": "Rome", "amount": None, "to": None},
            {"city": "Rome", "amount": None, "to": None},
        ),
    ],
)
def test_arguments_stay_null_where_their_definition_lets_them(
    name: str, given: dict[str, Any], stays: dict[str, Any], tmp_path: Path
) -> None:
    line = {
        "messages": [{"role": "user", "content": "hi"}, calling(name, given)],
        "tools": [tool(ALIGNED_WEATHER), tool(ALIGNED_CONVERT)],
    }
    for found in records(tmp_path, [line]):
        assert arguments(found[0]) == [stays]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": ["string", "null"]},
        {"type": "string", "nullable": True},
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"enum": ["a", None]},
        {"description": "anything"},
    ],
)
def test_a_schema_that_admits_null_keeps_it(schema: dict[str, Any], tmp_path: Path) -> None:
    function = {
        "name": "find",
        "parameters": {"type": "object", "properties": {"by": schema, "n": {"type": "integer"}}},
    }
    messages = [{"role": "user", "content": "hi"}, calling("find", {"by": None, "n": None})]
    lines = [{"messages": messages, "tools": json.dumps([tool(function)])}]
    for found in records(tmp_path, lines):
        assert arguments(found[0]) == [{"by": None}]
    with_default = schema | {"default": None}
    assert definition_without_null_fields({"a": with_default}) == {"a": with_default}
    assert definition_without_null_fields({"a": {"type": "string", "default": None}}) == {
        "a": {"type": "string"}
    }


def test_arguments_as_text_are_what_they_are(tmp_path: Path) -> None:
    line = {
        "messages": [
            {"role": "user", "content": "hi"},
            calling("weather", '{"city": null, "n": 1}'),
        ],
        "tools": [tool(WEATHER)],
    }
    for found in records(tmp_path, [line]):
        assert arguments(found[0]) == [{"city": None, "n": 1}]


def test_columns_and_fields_that_are_null_count_as_absent(tmp_path: Path) -> None:
    said = {"role": "user", "content": "hi", "tool_calls": None, "name": None}
    answer = {"role": "assistant", "content": "hello", "tool_calls": None, "name": None}
    chat = {"messages": [said, answer], "prompt": None, "completion": None, "tools": None}
    for found in records(tmp_path, [chat]):
        assert isinstance(found[0], Conversation)
    pair = {
        "input": {
            "messages": [said],
            "tools": [tool(ALIGNED_WEATHER)],
            "parallel_tool_calls": None,
        },
        "preferred_output": [answer],
        "non_preferred_output": [answer | {"content": "no"}],
    }
    for found in records(tmp_path, [pair]):
        assert isinstance(found[0], Pair)
        assert found[0].preferred.tools == (tool(WEATHER),)


def test_items_of_prompts_are_as_in_the_file(tmp_path: Path) -> None:
    prompt = {
        "messages": [{"role": "user", "content": "hi", "name": None}],
        "reference": {"a": None, "b": 1},
    }
    for found in records(tmp_path, [prompt], Columns(of_prompts=True)):
        assert isinstance(found[0], GradedPrompt)
        assert found[0].item == {"reference": {"a": None, "b": 1}}
