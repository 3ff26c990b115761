from __future__ import annotations

import json
from typing import Any

import pytest

from ft_service.data.formats.detect_format import Format, recognise
from ft_service.data.formats.normalize import as_record
from ft_service.data.line_errors import LineError
from ft_service.data.sample_kinds import Conversation, Pair, Record

HI, GOOD, BAD = (
    {"role": role, "content": text}
    for role, text in (("user", "hi"), ("assistant", "good"), ("assistant", "bad"))
)
SYSTEM = {"role": "system", "content": "Be brief."}


def read(fields: dict[str, Any]) -> Record:
    format = recognise(fields)
    assert format is not None
    return as_record(format, fields)


@pytest.mark.parametrize("mask", [{"train": False}, {"weight": 0}])
def test_a_masked_turn_of_sharegpt_is_not_learned(mask: dict[str, Any]) -> None:
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "bad", **mask}]
    turns += [
        {"from": "human", "value": "hi", "train": False},
        {"from": "gpt", "value": "good", "train": True},
    ]
    assert read({"conversations": turns}) == Conversation((HI, BAD, HI, GOOD), (0, 0, 0, 1))
    with pytest.raises(
        LineError, match=r"conversations\.1\.train_detail: masks parts of a message"
    ):
        read({"conversations": [turns[0], turns[1] | {"train_detail": []}]})


def test_tools_of_sharegpt_may_be_a_string_of_json_as_llama_factory_has_them() -> None:
    tool = {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {}},
    }
    turns = [
        ("human", "hi"),
        ("function_call", '{"name": "add", "arguments": {"a": 1}}'),
        ("observation", "1"),
        ("gpt", "good"),
    ]
    record = read(
        {
            "conversations": [{"from": who, "value": text} for who, text in turns],
            "tools": json.dumps([tool]),
        }
    )
    assert isinstance(record, Conversation)
    assert record.tools == ({"type": "function", "function": tool},)
    assert record.weights == (0, 1, 0, 1)


def test_earlier_turns_of_alpacas_records_are_learned_as_by_llama_factory() -> None:
    record = read(
        {"instruction": "hi", "output": "good", "system": "Be brief.", "history": [["hi", "bad"]]}
    )
    assert record == Conversation((SYSTEM, HI, BAD, HI, GOOD), (0, 0, 1, 0, 1))
    assert read({"instruction": "hi", "output": "good", "history": None}) == Conversation(
        (HI, GOOD), (0, 1)
    )


@pytest.mark.parametrize(
    ("history", "place"),
    [
        ("hi", "history"),
        ([["hi"]], r"history\.0"),
        ([["hi", 1]], r"history\.0"),
        (["hi"], r"history\.0"),
    ],
)
def test_earlier_turns_of_another_shape_are_refused(history: object, place: str) -> None:
    with pytest.raises(LineError, match=f"^{place}: must be"):
        read({"instruction": "hi", "output": "good", "history": history})


@pytest.mark.parametrize(
    "fields",
    [
        {
            "conversations": [{"from": "human", "value": "hi"}],
            "chosen": {"from": "gpt", "value": "good"},
            "rejected": {"from": "gpt", "value": "bad"},
        },
        {"instruction": "hi", "input": "", "chosen": "good", "rejected": "bad"},
        {"conversation": [HI], "chosen": GOOD, "rejected": BAD},
        {"prompt": "hi", "chosen": GOOD, "rejected": BAD},
    ],
    ids=["LLaMA-Factory's ShareGPT", "LLaMA-Factory's Alpaca", "Axolotl", "one message each"],
)
def test_pairs_of_other_tools_are_trls(fields: dict[str, Any]) -> None:
    assert recognise(fields) is Format.TRL_PAIRS
    assert read(fields) == Pair(Conversation((HI, GOOD), (0, 1)), Conversation((HI, BAD), (0, 1)))
    if "prompt" not in fields:
        with_system = read({**fields, "system": "Be brief."})
        assert isinstance(with_system, Pair)
        assert with_system.preferred == Conversation((SYSTEM, HI, GOOD), (0, 0, 1))


def test_answers_that_are_whole_conversations_need_no_prompt_whatever_else_a_record_holds() -> None:
    fields = {
        "conversation": [{"input": "hi", "output": "good"}],
        "chosen": [HI, GOOD],
        "rejected": [HI, BAD],
    }
    assert read(fields) == Pair(Conversation((HI, GOOD), (0, 1)), Conversation((HI, BAD), (0, 1)))


def test_faults_of_pairs_of_other_tools_are_told_by_their_own_names() -> None:
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hm"}]
    with pytest.raises(
        LineError, match=r"^conversations: must end with a message that the two answers answer"
    ):
        read({"conversations": turns, "chosen": "good", "rejected": "bad"})
    with pytest.raises(LineError, match=r"^chosen\.0\.from: must be one of"):
        read(
            {
                "conversations": turns[:1],
                "chosen": {"from": "x", "value": "good"},
                "rejected": "bad",
            }
        )
