"""Lines as public files of thumbs, of pairs and of prompts have them, rewritten: each is understood
by its method, or told what it is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ft_service.data.data_file import for_method
from ft_service.data.formats.columns import Columns
from ft_service.data.formats.reading import open_data
from ft_service.data.line_errors import Fault
from ft_service.data.sample_kinds import (
    Conversation,
    GradedPrompt,
    Pair,
    PromptCompletion,
    Record,
    label_of,
)
from ft_service.spec import MethodType
from ft_service.spec.options import DataOptions

ASKED = {"role": "user", "content": "Is the shop open?"}
GOOD = {"role": "assistant", "content": "Yes, until six."}
BAD = {"role": "assistant", "content": "Ask someone else."}
HUMAN = {"from": "human", "value": "Is the shop open?"}
GPT = {"from": "gpt", "value": "Yes, until six."}
WORSE = {"from": "gpt", "value": "Ask someone else."}

THUMBS: dict[str, tuple[dict[str, Any], Any]] = {
    "TRL's messages": ({"prompt": [ASKED], "completion": [GOOD], "label": True}, True),
    "TRL's text": ({"prompt": "Open?", "completion": "Ask.", "label": False}, False),
    "chat": ({"messages": [ASKED, BAD], "label": False}, False),
    "ShareGPT's": ({"conversations": [HUMAN, GPT], "kto_tag": True}, True),
    "with a system": ({"system": "Be brief.", "messages": [ASKED, GOOD], "label": True}, True),
    "Alpaca's": (
        {"instruction": "Open?", "input": "", "output": "Yes.", "kto_tag": "true"},
        True,
    ),
    "pairs": ({"prompt": "Open?", "chosen": "Yes.", "rejected": "Ask."}, "method: {type: dpo}"),
    "numbers": ({"prompt": "Open?", "completion": "Yes.", "label": 1}, "true for a good answer"),
    "words": ({"messages": [ASKED, GOOD], "label": "thumbs_up"}, "not 'thumbs_up'"),
    "no label": ({"messages": [ASKED, GOOD], "label": None}, "data: {label: COLUMN}"),
    "a label inside": ({"messages": [ASKED, GOOD], "feedback": {"score": 1}}, "{label: COLUMN}"),
    "stars": ({"prompt": "Open?", "response": "Yes.", "rating": 4}, "of no known format"),
}
PAIRS: dict[str, tuple[dict[str, Any], Any]] = {
    "TRL's text": ({"prompt": "Open?", "chosen": "Yes.", "rejected": "Ask."}, None),
    "TRL's messages": ({"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]}, None),
    "TRL's whole": ({"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, None),
    "OpenAI's": (
        {
            "input": {"messages": [ASKED]},
            "preferred_output": [GOOD],
            "non_preferred_output": [BAD],
        },
        None,
    ),
    "with scores": (
        {
            "prompt": "Is the shop open?",
            "prompt_id": "1",
            "chosen": [ASKED, GOOD],
            "rejected": [ASKED, BAD],
            "score_chosen": 8.0,
        },
        None,
    ),
    "speakers in the text": (
        {
            "chosen": "\n\nHuman: Open?\n\nAssistant: Yes.",
            "rejected": "\n\nHuman: Open?\n\nAssistant: Ask.",
        },
        None,
    ),
    "LLaMA-Factory's": ({"conversations": [HUMAN], "chosen": GPT, "rejected": WORSE}, None),
    "Alpaca's": ({"instruction": "Open?", "input": "", "chosen": "Yes.", "rejected": "No."}, None),
    "another name": (
        {"system": "Be brief.", "question": "Open?", "chosen": "Yes.", "rejected": "No."},
        "data: {prompt: question}",
    ),
    "Axolotl's": ({"messages": [ASKED], "chosen": GOOD, "rejected": BAD}, "{prompt: COLUMN}"),
    "ms-swift's": (
        {"messages": [ASKED, GOOD], "rejected_response": "Ask someone else."},
        "has one answer",
    ),
    "two answers and a choice": (
        {"history": "Open?", "human_ref_A": "Yes.", "human_ref_B": "No.", "labels": 1},
        "of no known format",
    ),
}
PROMPTS: dict[str, tuple[dict[str, Any], Any]] = {
    "chat": ({"messages": [ASKED]}, {}),
    "with its answer": ({"messages": [ASKED], "answer": "yes"}, {"answer": "yes"}),
    "with a system": ({"messages": [{"role": "system", "content": "Be brief."}, ASKED]}, {}),
    "TRL's": ({"prompt": [ASKED]}, {}),
    "verl's": (
        {"data_source": "x", "prompt": [ASKED], "reward_model": {"ground_truth": "yes"}},
        {"data_source": "x", "reward_model": {"ground_truth": "yes"}},
    ),
    "text": ({"prompt": "Is the shop open?"}, "is text, and the model answers conversations"),
    "answered": ({"messages": [ASKED, GOOD]}, "not with the assistant's own"),
    "completed": ({"prompt": [ASKED], "completion": [GOOD]}, "method: {type: supervised}"),
    "pairs": ({"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]}, "method: {type: dpo}"),
    "question": ({"question": "Open?", "answer": "Yes."}, "there are 'question', 'answer'"),
    "ShareGPT's": ({"conversations": [HUMAN]}, "data: {messages: COLUMN}"),
    "bare text": ({"text": "Once upon a time"}, "data: {messages: COLUMN}"),
}


def read(folder: Path, row: dict[str, Any], method: MethodType, *, sampled: bool) -> Record | Fault:
    path = folder / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    columns = Columns.of(DataOptions(), method, sampled=sampled)
    with open_data(path, (), columns) as reader:
        [(_, record)] = for_method(reader, pairs=method == "dpo")
    return record


def assert_told(record: Record | Fault, words: str) -> None:
    assert isinstance(record, Fault)
    assert record.line == 1
    assert words in record.reason


@pytest.mark.parametrize("name", THUMBS)
def test_thumbs(name: str, tmp_path: Path) -> None:
    row, expected = THUMBS[name]
    record = read(tmp_path, row, "kto", sampled=False)
    if isinstance(expected, str):
        assert_told(record, expected)
        return
    assert isinstance(record, Conversation | PromptCompletion)
    assert label_of(record) is expected


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name: str, tmp_path: Path) -> None:
    row, words = PAIRS[name]
    record = read(tmp_path, row, "dpo", sampled=False)
    if words is None:
        assert isinstance(record, Pair)
    else:
        assert_told(record, words)


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_that_a_student_answers(name: str, tmp_path: Path) -> None:
    row, expected = PROMPTS[name]
    record = read(tmp_path, row, "distillation", sampled=True)
    if isinstance(expected, str):
        assert_told(record, expected)
        return
    assert isinstance(record, GradedPrompt)
    assert record.messages[-1]["content"] == "Is the shop open?"
    assert record.item == expected


def test_there_are_twelve_of_each() -> None:
    assert [len(group) for group in (THUMBS, PAIRS, PROMPTS)] == [12, 12, 12]
