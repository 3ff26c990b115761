"""Answers with labels, good or bad: in every form that trainers have for them, told by line where
they are wrong, counted, tokenised, shown and written.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ft_service.data.data_file import check_lines
from ft_service.data.formats.columns import Columns
from ft_service.data.formats.reading import open_data
from ft_service.data.formats.writing import line_of
from ft_service.data.label_balance import balance_messages
from ft_service.data.line_errors import Fault
from ft_service.data.sample_kinds import Conversation, PromptCompletion
from ft_service.spec import KtoOptions

LABELLED = Columns(labels=True)
EITHER = Columns(labels=None)
ASK = {"role": "user", "content": "ask"}
SAY = {"role": "assistant", "content": "say"}
TURNS = [{"from": "human", "value": "ask"}, {"from": "gpt", "value": "say"}]
FORMS: dict[str, dict[str, Any]] = {
    "TRL's texts": {"prompt": "ask", "completion": "say", "label": False},
    "TRL's messages": {"prompt": [ASK], "completion": [SAY], "label": False},
    "ms-swift's": {"messages": [ASK, SAY], "label": False},
    "LLaMA-Factory's turns": {"conversations": TURNS, "kto_tag": False},
    "LLaMA-Factory's instructions": {"instruction": "ask", "output": "say", "kto_tag": False},
}


def written(folder: Path, *rows: dict[str, Any], name: str = "data.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(path: Path, columns: Columns = LABELLED) -> list[Any]:
    with open_data(path, columns=columns) as reader:
        return [record for _, record in reader]


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_read_with_its_label_and_written_with_it(form: str, tmp_path: Path) -> None:
    good = {name: True if value is False else value for name, value in FORMS[form].items()}
    path = written(tmp_path, FORMS[form], good)
    for columns in (LABELLED, EITHER):
        bad_one, good_one = read(path, columns)
        assert (bad_one.label, good_one.label) == (False, True)
        report = check_lines(path, columns=columns)
        assert (report.bad, report.good, report.unused) == (1, 1, ())
    again = written(tmp_path, line_of(bad_one), line_of(good_one), name="again.jsonl")
    assert read(again) == [bad_one, good_one]
    assert json.loads(again.read_text(encoding="utf-8").splitlines()[0])["label"] is False
    if isinstance(bad_one, PromptCompletion):
        assert bad_one.as_chat.label is False


def test_of_a_chat_what_follows_the_user_s_last_message_is_learned(tmp_path: Path) -> None:
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ],
    }
    result = {"role": "tool", "tool_call_id": "a", "content": "1"}
    row = {"messages": [ASK, SAY, ASK, call, result, SAY], "label": True}
    [chat] = read(written(tmp_path, row))
    assert isinstance(chat, Conversation)
    assert chat.weights == (0, 0, 0, 1, 0, 1)
    assert chat.first(2, (0, 1)).label is True


@pytest.mark.parametrize(
    ("row", "field", "part"),
    [
        ({"label": 1}, "label", "must be true for a good answer or false for a bad one, not 1"),
        ({"label": "up"}, "label", "not 'up'"),
        ({"kto_tag": "yes"}, "kto_tag", "not 'yes'"),
        ({"label": None}, "label", "is required by method kto"),
        ({}, "label", "is required by method kto"),
        (
            {"messages": [ASK, SAY, ASK], "label": True},
            "",
            "no answer to learn after the user's last message",
        ),
        (
            {"messages": [ASK, SAY, ASK, SAY | {"weight": 0}], "label": True},
            "",
            "no answer to learn after the user's last message",
        ),
    ],
)
def test_a_wrong_label_is_told_by_line(
    row: dict[str, Any], field: str, part: str, tmp_path: Path
) -> None:
    right = {"messages": [ASK, SAY], "label": True}
    path = written(tmp_path, right, {"messages": [ASK, SAY], **row})
    report = check_lines(path, columns=LABELLED, pairs=False)
    [fault] = report.faults
    assert (fault.line, fault.field) == (2, field)
    assert part in fault.reason


def test_pairs_and_documents_have_no_labels(tmp_path: Path) -> None:
    pair = {"prompt": "ask", "chosen": "say", "rejected": "no", "label": True}
    [fault] = check_lines(written(tmp_path, pair), columns=LABELLED, pairs=False).faults
    assert "is a preference pair, which needs method: {type: dpo}" in fault.reason
    [document] = read(written(tmp_path, {"text": "words", "label": True}))
    assert isinstance(document, Fault)
    assert (document.field, "a label is of an answer" in document.reason) == ("text", True)


@pytest.mark.parametrize("form", FORMS)
def test_other_methods_refuse_bad_answers(form: str, tmp_path: Path) -> None:
    [fault] = check_lines(written(tmp_path, FORMS[form])).faults
    assert fault.field in ("label", "kto_tag")
    assert "method: {type: kto}" in fault.reason


def test_cells_of_tables_and_columns_of_other_names_are_labels_too(tmp_path: Path) -> None:
    table = tmp_path / "data.csv"
    table.write_text("question,reply,thumb\nask,say,True\nask,no,false\n", encoding="utf-8")
    named = (("completion", "reply"), ("label", "thumb"), ("prompt", "question"))
    records = read(table, Columns(named, labels=True))
    assert [record.label for record in records] == [True, False]


def test_a_column_of_classes_is_no_label_where_no_method_is_known(tmp_path: Path) -> None:
    rows = [{"prompt": "ask", "completion": "say", "label": label} for label in ("spam", 0, 3)]
    path = written(tmp_path, *rows)
    report = check_lines(path, columns=EITHER)
    assert (report.examples, report.good, report.bad) == (3, 0, 0)
    assert len(check_lines(path, columns=LABELLED).faults) == 3


def test_the_balance_of_good_and_bad_is_told_with_the_weights_that_the_paper_asks_for() -> None:
    def told(good: int, bad: int, **options: float) -> list[tuple[str, str]]:
        weights = {"desirable_weight": 1.0, "undesirable_weight": 1.0, **options}
        kto = KtoOptions.model_validate({"beta": 0.1, "loss_type": "kto", **weights})
        return list(balance_messages("a", good, bad, kto))

    assert told(40, 30) == [("info", "a: 40 good and 30 bad answers.")]
    assert told(30, 30) == [("info", "a: 30 good and 30 bad answers.")]
    [_, (level, text)] = told(3000, 300)
    assert level == "warn"
    assert "are 10 times the bad ones" in text
    assert "undesirable_weight from 7.5 to 10 gives" in text
    assert len(told(3000, 300, undesirable_weight=7.5)) == 1
    assert len(told(3000, 300, undesirable_weight=10)) == 1
    [_, (_, text)] = told(100, 400)
    assert "desirable_weight from 4 to 5.33 gives" in text
    assert len(told(100, 400, desirable_weight=4)) == 1
    [_, (_, text)] = told(7, 0)
    assert "all its answers are good" in text
    assert "supervised" in text
    [_, (_, text)] = told(0, 7)
    assert "all its answers are bad" in text
