"""Records written as lines of OpenAI's formats."""

from __future__ import annotations

from pathlib import Path

import pytest

from ft_service.data.formats.reading import open_data
from ft_service.data.formats.writing import line_of
from ft_service.data.line_errors import Fault
from ft_service.data.sample_kinds import Conversation, PromptCompletion
from tests.support.data_formats import EXAMPLES, SAME, lines, records, write


@pytest.mark.parametrize("case", SAME)
def test_what_is_written_is_read_as_the_same(case: str, tmp_path: Path) -> None:
    expected = SAME[case][2]
    assert records(write(tmp_path, lines([line_of(expected)]))) == [expected]


def test_calls_of_tools_survive_being_written(tmp_path: Path) -> None:
    called = {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'}
    turns = [
        {"from": "human", "value": "2?"},
        called,
        {"from": "observation", "value": "4"},
        {"from": "gpt", "value": "4"},
    ]
    (chat,) = records(write(tmp_path, lines([{"conversations": turns, "tools": []}])))
    assert isinstance(chat, Conversation)
    assert chat.messages[1]["tool_calls"] == [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    ]
    assert records(write(tmp_path, lines([line_of(chat)]))) == [chat]


def test_no_call_without_an_id_is_lost_where_there_are_several(tmp_path: Path) -> None:
    """OpenAI's older form of calls without ids holds one call only."""
    calls = [
        {"type": "function", "function": {"name": "add", "arguments": {"a": number}}}
        for number in (1, 2)
    ]
    asked = {"role": "assistant", "content": "", "tool_calls": calls}
    results = [{"role": "tool", "name": "add", "content": text} for text in "12"]
    turns = (
        {"role": "user", "content": "1, 2?"},
        asked,
        *results,
        {"role": "assistant", "content": "3"},
    )
    chat = Conversation(turns, (0, 1, 0, 0, 1))
    assert records(write(tmp_path, lines([line_of(chat)]))) == [chat]


def test_a_prompt_becomes_a_chat_when_that_is_asked_for() -> None:
    assert line_of(PromptCompletion("a", "b"), as_chat=True) == {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    }


@pytest.mark.parametrize("path", sorted(EXAMPLES.iterdir()), ids=lambda path: path.name)
def test_the_examples_are_converted_to_lines_of_the_same_records(
    path: Path, tmp_path: Path
) -> None:
    with open_data(path) as reader:
        own = [record for _, record in reader]
    converted = write(
        tmp_path, lines([line_of(record) for record in own if not isinstance(record, Fault)])
    )
    with open_data(converted) as reader:
        assert [record for _, record in reader] == own
