from __future__ import annotations

import pytest
import yaml

from ft_service.convert.yaml_text import yaml_text


@pytest.mark.parametrize(
    "text",
    [
        "a\nb",
        "a\nb\n",
        "a\n\n\n",
        "\n",
        "\n\na",
        "  a\n b",
        "a \n\tb\n",
        "a\n#b: c\n---\n...\n",
        "a\r\nb",
        "a\u2028\nb",
        "\x07\n",
        "x",
    ],
)
def test_text_reads_back_as_it_was(text: str) -> None:
    body = {"chat_template": text, "evaluation": {"prompts": text, "more": {"deep": text}}, "seed": 1}
    assert (
        yaml.safe_load(yaml_text(body, {"chat_template": "one", "evaluation": "two", "evaluation.more.deep": "three"})) == body
    )


def test_a_comment_stands_behind_its_option() -> None:
    body = {"lora": {"r": 8, "target_modules": ["q", "v"]}, "chat_template": "a\nb"}
    assert yaml_text(body, {"lora.r": "its", "chat_template": "text"}) == (
        "lora:\n  r: 8 # its\n  target_modules: [q, v]\nchat_template: |2- # text\n  a\n  b\n"
    )


def test_long_values_stay_on_one_line() -> None:
    body = {"name": "word " * 100, "names": ["name"] * 100}
    assert len(yaml_text(body, {}).splitlines()) == 2
    assert yaml.safe_load(yaml_text(body, {})) == body
