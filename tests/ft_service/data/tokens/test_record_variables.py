"""Variables of the chat template that a record sets (`chat_template_kwargs`), in every format."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from ft_service.data.formats.columns import Columns
from ft_service.data.formats.reading import open_data
from ft_service.data.formats.writing import line_of
from ft_service.data.line_errors import Fault, LineError
from ft_service.data.sample_kinds import Conversation, GradedPrompt, Pair
from ft_service.data.tokens.chat_template import ChatTemplate
from ft_service.data.tokens.render import render, render_prompt
from ft_service.spec.template_variables import with_variables
from tests.support.data_formats import ANSWER, USER, WORSE, lines, records, write
from tests.support.training.models import save_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not enable_thinking %}[short]{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not enable_thinking %}[short]{% endif %}{% endif %}"
)
SET = {"chat_template_kwargs": {"enable_thinking": True}}
TURNS = {"messages": [USER, ANSWER]}
BY_FORMAT: dict[str, dict[str, Any]] = {
    "chat": TURNS,
    "sharegpt": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    "gemini": {
        "contents": [
            {"role": "user", "parts": [{"text": "a"}]},
            {"role": "model", "parts": [{"text": "b"}]},
        ]
    },
    "alpaca": {"instruction": "a", "output": "b"},
    "turns": {"prompt": [USER], "completion": [ANSWER]},
    "openai pairs": {
        "input": {"messages": [USER]},
        "preferred_output": [ANSWER],
        "non_preferred_output": [WORSE],
    },
    "trl pairs": {"prompt": [USER], "chosen": [ANSWER], "rejected": [WORSE]},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    tokenizer = save_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def conversations(record: Any) -> list[Conversation]:
    return [record.preferred, record.rejected] if isinstance(record, Pair) else [record]


@pytest.mark.parametrize("name", BY_FORMAT)
def test_each_record_is_written_with_its_own(
    name: str, tmp_path: Path, base: PreTrainedTokenizerFast
) -> None:
    given = BY_FORMAT[name]
    thinking, short = records(write(tmp_path, lines([given | SET, given])))
    assert not isinstance(thinking, Fault)
    assert not isinstance(short, Fault)
    for record in conversations(thinking):
        (sample,) = render(base, record)
        assert "[short]" not in sample.text
        assert sample.source.variables == {"enable_thinking": True}
    for record in conversations(short):
        (sample,) = render(base, record)
        assert sample.text.count("[short]") == 1
    assert records(write(tmp_path, lines([line_of(thinking), line_of(short)]))) == [thinking, short]


def test_a_prompt_to_grade_asks_with_its_own(tmp_path: Path, base: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path, lines([{"messages": [USER], "answer": "4"} | SET, {"messages": [USER]}]))
    with open_data(path, columns=Columns(of_prompts=True)) as reader:
        thinking, short = (record for _, record in reader)
    assert isinstance(thinking, GradedPrompt)
    assert isinstance(short, GradedPrompt)
    assert thinking.item == {"answer": "4"}
    assert render_prompt(base, short) == render_prompt(base, thinking) + "[short]"


def test_they_stand_before_those_of_the_job(base: PreTrainedTokenizerFast) -> None:
    job = ChatTemplate({"default": with_variables(TEMPLATE, {"enable_thinking": True})}, {})
    written = job.setting({"enable_thinking": False}).write([USER], None, date.min, prompt=True)
    assert written.endswith("[short]")
    assert not job.write([USER], None, date.min, prompt=True).endswith("[short]")


def test_one_and_true_are_told_apart() -> None:
    template = ChatTemplate({"default": "{{ messages[0].content }}{{ x }}"}, {})
    written = [
        template.setting({"x": x}).write([USER], None, date.min) for x in (1, True, 1.0, "1")
    ]
    assert written == [f"{USER['content']}{text}" for text in ("1", "True", "1.0", "1")]


def test_null_ones_which_tables_write_are_left_out(tmp_path: Path) -> None:
    given = {"enable_thinking": True, "reasoning_effort": None}
    first, second = records(
        write(
            tmp_path,
            lines(
                [TURNS | {"chat_template_kwargs": given}, TURNS | {"chat_template_kwargs": None}]
            ),
        )
    )
    assert isinstance(first, Conversation)
    assert isinstance(second, Conversation)
    assert (first.variables, second.variables) == ({"enable_thinking": True}, {})


@pytest.mark.parametrize(
    ("line", "field"),
    [
        (TURNS | {"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs.messages"),
        (
            TURNS | {"chat_template_kwargs": {"enable_thinking": [1]}},
            "chat_template_kwargs.enable_thinking",
        ),
        (TURNS | {"chat_template_kwargs": "thinking"}, "chat_template_kwargs"),
        ({"text": "a"} | SET, "chat_template_kwargs"),
        ({"prompt": "a", "completion": "b"} | SET, "chat_template_kwargs"),
    ],
)
def test_those_without_an_effect_are_refused(
    line: dict[str, Any], field: str, tmp_path: Path
) -> None:
    with open_data(write(tmp_path, lines([line]))) as reader:
        ((_, fault),) = reader
    assert isinstance(fault, Fault)
    assert fault.field == field


def test_one_that_the_template_does_not_read_is_refused_with_those_that_it_reads(
    base: PreTrainedTokenizerFast,
) -> None:
    record = Conversation((USER, ANSWER), (0, 1), variables={"thinking": True})
    with pytest.raises(LineError, match="It reads enable_thinking") as caught:
        render(base, record)
    assert caught.value.field == "chat_template_kwargs.thinking"
