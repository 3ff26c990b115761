"""Prompts are read as they were written, and answers by what their header says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ft_service.data.answer_format import Answer, AnswerFormat
from ft_service.data.tool_call_parser import CallFormat
from ft_service.errors import DataError
from ft_service.reinforcement.prompt_file import (
    PROMPTS,
    PromptFile,
    PromptHeader,
    PromptTokens,
    write_prompts,
)
from ft_service.rundir.directory import RunDir

CALLS = CallFormat("<tool_call>", "name", "arguments")
ADDITION = '{"name": "add", "arguments": {"a": 1}}'


def test_prompts_come_back(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    prompts = [
        PromptTokens([i, 7], {"answer": "é" * i}, f"prompt {i}", i == 1, "</think>")
        for i in range(3)
    ]
    prompts[1] = replace(prompts[1], teacher_ids=[4, 5, 1, 7])
    header = PromptHeader([2, 9], 2, 1, AnswerFormat(("</s>",), CALLS))
    write_prompts(run, header, prompts)
    file = PromptFile(run)
    assert file.header == header
    assert [file.training(0), file.training(1), file.validation(0)] == prompts
    with run.path(PROMPTS).open("a") as lines:
        lines.write("{}\n")
    with pytest.raises(DataError, match="4 prompts"):
        PromptFile(run)


def test_a_header_of_ft_service_0_2_is_read(tmp_path: Path) -> None:
    """Its job goes on with the next version of the service."""
    run = RunDir(tmp_path)
    calls = {"prefix": "<tool_call>", "name": "name", "arguments": "arguments"}
    head = {
        "ends": [2],
        "training": 1,
        "validation": 0,
        "special": ["<s>", "<tool_call>"],
        "calls": calls,
    }
    prompt = {"ids": [7], "item": {}, "text": "2+2?", "tools": True}
    run.path(PROMPTS).parent.mkdir()
    run.path(PROMPTS).write_text("".join(json.dumps(line) + "\n" for line in (head, prompt)))
    file = PromptFile(run)
    read = file.header.read(
        f"<think>two</think><s>See.<tool_call>{ADDITION}</tool_call>", file.training(0)
    )
    assert read == Answer("See.", "two", [{"name": "add", "arguments": '{"a": 1}'}])
