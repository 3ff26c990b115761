"""Prompts are read as they were written, and answers by what their header says."""

from __future__ import annotations

from pathlib import Path

import pytest

from ft_service.data.tool_call_parser import CallFormat
from ft_service.errors import DataError
from ft_service.reinforcement.prompt_file import PROMPTS, PromptFile, PromptHeader, PromptTokens, write_prompts
from ft_service.rundir.directory import RunDir

CALLS = CallFormat("<tool_call>", "name", "arguments")
ADDITION = '{"name": "add", "arguments": {"a": 1}}'


def test_prompts_come_back(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    prompts = [PromptTokens([number, 7], {"answer": "é" * number}, f"prompt {number}", number == 1) for number in range(3)]
    header = PromptHeader([2, 9], 2, 1, ["</s>"], CALLS)
    write_prompts(run, header, prompts)
    file = PromptFile(run)
    assert file.header == header
    assert [file.training(0), file.training(1), file.validation(0)] == prompts
    with run.path(PROMPTS).open("a") as lines:
        lines.write("{}\n")
    with pytest.raises(DataError, match="4 prompts"):
        PromptFile(run)


@pytest.mark.parametrize(
    ("text", "words", "calls"),
    [
        ("<s>four</s>", "four", []),
        (f"Let me see.<tool_call>{ADDITION}</tool_call></s>", "Let me see.", [{"name": "add", "arguments": '{"a": 1}'}]),
        (f"<s><tool_call>{ADDITION}\n{ADDITION}", "", [{"name": "add", "arguments": '{"a": 1}'}] * 2),
        ("<tool_call>add 1</tool_call>", "add 1</tool_call>", []),
    ],
)
def test_words_and_calls_of_an_answer(text: str, words: str, calls: list[dict[str, str]]) -> None:
    assert PromptHeader([], 0, 0, ["<s>", "</s>", "<tool_call>"], CALLS).read(text, tools=True) == (words, calls)


def test_without_tools_an_object_of_json_is_text() -> None:
    assert PromptHeader([], 0, 0, [], CallFormat("", "name", "arguments")).read(ADDITION, tools=False) == (ADDITION, [])


def test_special_texts_within_others_and_no_known_calls() -> None:
    assert PromptHeader([], 0, 0, ["<a", "<a>"]).read(f"<a>x<a{ADDITION}", tools=True) == (f"x{ADDITION}", [])
    assert PromptHeader([], 0, 0).read("as it is", tools=True) == ("as it is", [])
