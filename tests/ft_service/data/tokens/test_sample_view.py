"""Samples as the model sees them: every token with its text and its role."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from ft_service.data.formats.columns import Columns
from ft_service.data.formats.reading import open_data
from ft_service.data.sample_request import RecordRange, Role, SamplePage
from ft_service.data.token_options import DEFAULT, TokenOptions
from ft_service.data.tokens import sample_view
from ft_service.data.tokens.sample_view import page_of
from tests.support.chat_templates import TEMPLATES
from tests.support.training.models import save_tokenizer

USER = {"role": "user", "content": " user é? "}
ANSWER = {"role": "assistant", "content": "Ja ñ!"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def pages(
    tokenizer: Any,
    folder: Path,
    rows: Sequence[Any],
    options: TokenOptions = DEFAULT,
    max_length: int = 512,
    **page: int,
) -> SamplePage:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return page_of(
        tokenizer,
        open_data(path),
        options,
        max_length,
        RecordRange(**{"after": 0, "limit": 10, **page}),
    )


def by_role(page: SamplePage, number: int = 0) -> list[tuple[Role, str]]:
    """The text of a sample, in stretches of one role."""
    stretches: list[tuple[Role, str]] = []
    for token in page.samples[number].tokens:
        if stretches and stretches[-1][0] == token.role:
            stretches[-1] = (token.role, stretches[-1][1] + token.text)
        else:
            stretches.append((token.role, token.text))
    return stretches


def test_every_token_has_its_text_and_its_role(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    page = pages(tokenizer, tmp_path, [{"messages": [USER, ANSWER]}])
    assert by_role(page) == [
        ("template", "<|im_start|>user\n "),
        ("words", "user é?"),
        ("template", " <|im_end|>\n<|im_start|>assistant\n"),
        ("learned", "Ja ñ!<|im_end|>"),
    ]
    (sample,) = page.samples
    assert (sample.line, sample.learned, sample.total, sample.cut_at, sample.error) == (
        1,
        7,
        len(sample.tokens),
        None,
        None,
    )
    assert tokenizer.decode([token.id for token in sample.tokens]) == "".join(
        token.text for token in sample.tokens
    )


def test_each_sample_of_a_conversation_is_shown(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """An answer that is written otherwise once more follows has a sample of its own."""
    other = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, eos_token="<|im_end|>")
    other.chat_template = TEMPLATES["qwen3"]
    page = pages(other, tmp_path, [{"messages": [USER, ANSWER] * 2}] * 2, limit=1)
    assert [sample.line for sample in page.samples] == [1, 1]
    assert page.has_more
    roles = [
        [text for role, text in by_role(page, number) if role == "learned"] for number in range(2)
    ]
    assert roles == [["<think>\n\n</think>\n\nJa ñ!<|im_end|>"]] * 2
    assert [
        len([role for role, _ in by_role(page, number) if role == "words"]) for number in range(2)
    ] == [1, 3]


def test_nothing_of_a_prompt_to_grade_is_learned(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"messages": [USER], "answer": "Ja"}) + "\n")
    data = open_data(path, columns=Columns(of_prompts=True))
    page = page_of(tokenizer, data, DEFAULT, 512, RecordRange(after=0, limit=10))
    assert by_role(page) == [
        ("template", "<|im_start|>user\n "),
        ("words", "user é?"),
        ("template", " <|im_end|>\n<|im_start|>assistant\n"),
    ]


def test_a_sample_that_would_take_too_long_is_not_shown_and_the_others_are(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_view, "MOST_CHARACTERS", 200)
    rows = [
        {"messages": [USER, {"role": "assistant", "content": words}]}
        for words in ("a", "a" * 300, "b")
    ]
    first, long, last = pages(tokenizer, tmp_path, rows).samples
    assert (first.error, last.error) == (None, None)
    assert (long.line, long.tokens) == (2, ())
    assert re.fullmatch(
        r"has 3\d\d characters, and samples of at most 200 are shown", long.error or ""
    )


def test_what_is_cut_is_shown_as_such(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    row = {"messages": [USER, ANSWER]}
    most = pages(tokenizer, tmp_path, [row]).samples[0].total - 5
    page = pages(tokenizer, tmp_path, [row], max_length=most)
    assert by_role(page)[-2:] == [("learned", "Ja"), ("cut", " ñ!<|im_end|>")]
    assert (page.samples[0].cut_at, page.samples[0].learned) == (most, 2)


def test_what_is_asked_for_is_what_is_learned(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    row = {"messages": [USER, ANSWER, USER, ANSWER]}
    first, second = by_role(
        pages(tokenizer, tmp_path, [row], TokenOptions(train_on="last_assistant"))
    )[3:6:2]
    assert first[0] == "words"
    assert second[0] == "words"
    assert (
        by_role(pages(tokenizer, tmp_path, [row], TokenOptions(train_on="last_assistant")))[-1][0]
        == "learned"
    )
    assert [
        role
        for role, _ in by_role(
            pages(tokenizer, tmp_path, [row], TokenOptions(train_on="everything"))
        )
    ] == ["learned"]
    told = pages(
        tokenizer, tmp_path, [{"messages": [*row["messages"][:3], ANSWER | {"weight": 0}]}]
    )
    assert [role for role, _ in by_role(told)].count("learned") == 1
    (refused,) = pages(
        *(tokenizer, tmp_path, [{"messages": [USER, ANSWER, USER, ANSWER | {"weight": 0}]}]),
        TokenOptions(train_on="last_assistant"),
    ).samples
    assert refused.error is not None
    assert refused.error.startswith("messages.3.weight is 0 for the last answer")


def test_bare_text_has_no_template(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    page = pages(tokenizer, tmp_path, [{"prompt": "2+2=", "completion": "4"}])
    assert by_role(page) == [("words", "2+2="), ("learned", "4<|im_end|>")]
    assert by_role(pages(tokenizer, tmp_path, [{"text": "Once."}])) == [
        ("learned", "Once.<|im_end|>")
    ]
    (refused,) = pages(
        tokenizer, tmp_path, [{"text": "Once."}], TokenOptions(train_on="last_assistant")
    ).samples
    assert refused.error is not None
    assert refused.error.startswith(
        "text has no answers, and training.train_on = 'last_assistant' learns the last"
    )


def test_a_beginning_of_text_is_the_templates(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    from tokenizers.processors import TemplateProcessing

    begins = PreTrainedTokenizerFast.from_pretrained(
        save_tokenizer(tmp_path).name_or_path or tmp_path
    )
    begins.bos_token = "<|im_start|>"
    begins.backend_tokenizer.post_processor = TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    assert by_role(pages(begins, tmp_path, [{"text": "Once."}])) == [
        ("template", "<|im_start|>"),
        ("learned", "Once.<|im_end|>"),
    ]
    (sample,) = pages(begins, tmp_path, [{"text": "<|im_start|>Once."}]).samples
    assert (sample.error or "").startswith(
        "text was written by a chat template: it begins with <|im_start|>"
    )


def test_a_document_is_learned_whole_however_long(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """It is split into windows, and nothing of it is cut."""
    (sample,) = pages(tokenizer, tmp_path, [{"text": "Once. " * 20}], max_length=16).samples
    assert (sample.learned, sample.total, sample.cut_at) == (120, 121, None)
    assert {token.role for token in sample.tokens} == {"learned"}


def test_both_answers_of_a_pair_are_shown(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    row = {"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER | {"content": "No."}]}
    page = pages(tokenizer, tmp_path, [row])
    assert [(sample.line, sample.answer) for sample in page.samples] == [
        (1, "preferred"),
        (1, "rejected"),
    ]
    assert by_role(page, 1)[-1] == ("learned", "No.<|im_end|>")


def test_pages_go_on_behind_a_line_and_name_lines_at_fault(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    rows = [{"text": "a"}, {"text": ""}, {"text": "c"}, {"text": "d"}]
    first = pages(tokenizer, tmp_path, rows, limit=2)
    assert (first.has_more, first.samples[1].error) == (
        True,
        "text is empty, so there is nothing to train on",
    )
    second = pages(tokenizer, tmp_path, rows, after=first.samples[-1].line)
    assert ([sample.line for sample in second.samples], second.has_more) == ([3, 4], False)
    assert (second.word, second.shape) == ("line", "plain text (text) in JSON lines")


TURNS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}END{% endfor %}{% if "
    "add_generation_prompt %}assistant: {% endif %}"
)
ALL = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|im_end|>{% endif "
    "%}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "answer", "reason"),
    [
        (
            TURNS.replace("END", "\n"),
            "4",
            "no end-of-turn token is learned: what is learned ends with '4\\n', so the",
        ),
        (
            TURNS.replace("END", ""),
            "",
            "not one of its tokens is learned: 'user:  user é? assistant: '",
        ),
        (
            "<|im_start|><|im_start|>" + TURNS,
            "4",
            "begins with <|im_start|> twice: the base's chat template writes it before",
        ),
        (
            ALL,
            "4",
            "messages.0.content the base's chat template leaves this user message out, so its "
            "words would not be seen",
        ),
    ],
)
def test_what_would_ruin_a_training_is_refused_with_the_sample(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, template: str, answer: str, reason: str
) -> None:
    other = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer, eos_token="<|im_end|>", bos_token="<|im_start|>"
    )
    other.chat_template = template
    rows = [{"messages": [USER, ANSWER | {"content": answer}]}]
    (sample,) = pages(other, tmp_path, rows).samples
    assert sample.error is not None
    assert sample.error.startswith(reason)
    other.chat_template = TURNS.replace("END", "<|im_end|>\n")
    assert pages(other, tmp_path, rows).samples[0].error is None


def test_a_sample_without_a_prompt_is_refused(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    other = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, eos_token="<|im_end|>")
    other.chat_template = ALL
    (sample,) = pages(other, tmp_path, [{"messages": [USER | {"content": " "}, ANSWER]}]).samples
    assert sample.error is not None
    assert sample.error.startswith(
        "all of its tokens are learned, as if there were no prompt: 'Ja ñ!<|im_end|>'"
    )
