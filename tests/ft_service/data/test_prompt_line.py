"""Files of prompts to grade, in every container."""

from __future__ import annotations

import csv
import io
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from ft_service.data.formats.columns import Columns
from ft_service.data.formats.reading import open_data
from ft_service.data.line_errors import Fault, LineError
from ft_service.data.prompt_line import parse_prompt
from ft_service.data.sample_kinds import GradedPrompt

USER = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "4"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
ROWS: list[dict[str, Any]] = [
    {"messages": [USER], "reference_answer": "4", "level": 2},
    {
        "messages": [{"role": "developer", "content": "Be brief."}, USER],
        "reference_answer": "four",
        "level": 3,
    },
]


def prompts(path: Path, **columns: str) -> list[GradedPrompt | Fault]:
    with open_data(path, columns=Columns(tuple(columns.items()), of_prompts=True)) as reader:
        return [prompt for _, prompt in reader if isinstance(prompt, GradedPrompt | Fault)]


def test_a_line_is_a_conversation_to_answer_with_tools_and_an_item() -> None:
    line = {
        "messages": [
            USER,
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "4"},
        ]
    }
    found = parse_prompt(
        {**line, "tools": [TOOL], "parallel_tool_calls": True, "a": {"b": [1]}, "text": "x"}
    )
    assert [message["role"] for message in found.messages] == ["user", "assistant", "tool"]
    assert (found.tools, found.item) == ((TOOL,), {"a": {"b": [1]}, "text": "x"})


def test_participants_may_have_names() -> None:
    assert parse_prompt({"messages": [USER | {"name": "Ann"}]}).messages == (
        USER | {"name": "Ann"},
    )


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_every_container_keeps_its_other_columns(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"data.{kind}"
    if kind == "parquet":
        parquet.write_table(pa.Table.from_pylist(ROWS), path)
    elif kind == "csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, ROWS[0])
        writer.writeheader()
        writer.writerows([{**row, "messages": json.dumps(row["messages"])} for row in ROWS])
        path.write_text(text.getvalue())
    else:
        path.write_text(
            json.dumps(ROWS) if kind == "json" else "".join(json.dumps(row) + "\n" for row in ROWS)
        )
    first, second = prompts(path)
    assert isinstance(first, GradedPrompt)
    assert isinstance(second, GradedPrompt)
    assert first.item == {"reference_answer": "4", "level": "2" if kind == "csv" else 2}
    assert [message["role"] for message in second.messages] == ["system", "user"]


def test_what_a_table_holds_and_json_does_not_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    parquet.write_table(
        pa.Table.from_pylist([{**ROWS[0], "asked": datetime(2026, 1, 2, tzinfo=UTC)}]), path
    )
    (fault,) = prompts(path)
    assert isinstance(fault, Fault)
    assert (fault.field, fault.reason) == (
        "asked",
        "cannot be written as JSON: Object of type datetime is not JSON serializable. Make it "
        "text or a number, or leave it "
        "out",
    )


def test_columns_may_have_other_names(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"chat": [USER], "answer": "4"}))
    assert prompts(path, messages="chat") == [GradedPrompt((USER,), (), {"answer": "4"})]


@pytest.mark.parametrize(
    ("line", "field", "said"),
    [
        (
            {"messages": [USER, ANSWER]},
            "messages",
            "must end with a message that the model answers",
        ),
        ({"messages": []}, "messages", "at least one message"),
        ({"reference_answer": "4"}, "messages", "is required"),
        ({"prompt": "x", "completion": "y"}, "completion", "is of method: {type: supervised}"),
        ({"prompt": "x", "chosen": "y", "rejected": "z"}, "chosen", "is of method: {type: dpo}"),
        ({"messages": [{**ANSWER, "weight": 0}, USER]}, "messages.0.weight", "leave it out"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages.0.role", "must be one of"),
        (
            {"messages": [USER, {"role": "tool", "tool_call_id": "c", "content": ""}]},
            "messages.1.tool_call_id",
            "no call",
        ),
        ({"messages": [USER], "tools": [{"type": "x"}]}, "tools.0.type", "must be 'function'"),
        ({"messages": [USER], "\ud800": 1}, "a key", "surrogate"),
        (
            {"messages": [USER], "answer": {"a": ["\ud83d"]}},
            "answer",
            "holds half of a surrogate pair",
        ),
        (
            {"messages": [USER], "functions": [{"name": "f", "description": "\ud83d"}]},
            "functions.0",
            "surrogate",
        ),
    ],
)
def test_a_line_that_is_no_prompt_says_why(
    line: Any, field: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(LineError) as error:
        parse_prompt(line)
    assert (error.value.field, said in error.value.reason) == (field, True), error.value
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + json.dumps(line) + "\n" + json.dumps(ROWS[1]))
    first, fault, last = prompts(path)
    assert isinstance(fault, Fault)
    assert (fault.line, fault.field) == (2, field)
    assert isinstance(first, GradedPrompt)
    assert isinstance(last, GradedPrompt)
