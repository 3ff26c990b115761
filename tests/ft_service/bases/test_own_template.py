"""The variables of a job's chat template become lines of its text."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from ft_service.bases.own_template import own_template, with_template_variables
from ft_service.data.tokens.chat_template import ChatTemplate
from ft_service.errors import SpecError
from ft_service.spec import parse_request
from ft_service.spec.template_variables import variables_of, with_variables, without_variables

HYBRID = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if "
    "add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking %}<think>{% elif effort == 'a \"b\" é %}' %}!{% endif %}{% endif %}"
)
CHAT = [{"role": "user", "content": "Why?"}]


def request(**options: Any) -> Any:
    return parse_request({"model": "m", "training_file": "f", **options})


def asked(template: str, **given: Any) -> str:
    """The prompt as a server renders it."""
    (text,), _ = chat_template_utils.render_jinja_template(
        [CHAT], chat_template=template, add_generation_prompt=True, **given
    )
    return text


def base(folder: Path, template: Any = HYBRID) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


def test_the_text_sets_what_the_job_gives_and_a_server_may_give_another(tmp_path: Path) -> None:
    given: Any = with_template_variables(
        request(chat_template_kwargs={"enable_thinking": True}), base(tmp_path)
    )
    assert variables_of(given.chat_template) == ["enable_thinking"]
    assert asked(given.chat_template) == "<|user|>Why?<|end|><|assistant|><think>"
    assert (
        asked(given.chat_template, enable_thinking=False)
        == asked(HYBRID)
        == "<|user|>Why?<|end|><|assistant|>"
    )
    template = ChatTemplate({"default": given.chat_template}, {})
    template.require_usable()
    assert template.write(CHAT, None, date.min, prompt=True) == asked(given.chat_template)


@pytest.mark.parametrize("value", [True, 3, 0.5, 'a "b" é %}', "a\nb\\n"])
def test_values_are_kept(value: Any) -> None:
    text = with_variables("{{ x | tojson }} {{ x is string }}", {"x": value})
    assert asked(text) == f"{json.dumps(value, ensure_ascii=False)} {isinstance(value, str)}"
    assert asked(with_variables(HYBRID, {"effort": 'a "b" é %}'})).endswith("!")


def test_a_job_that_goes_on_sets_them_anew() -> None:
    once = with_variables(HYBRID, {"enable_thinking": True, "effort": "a"})
    again = with_variables(once, {"enable_thinking": False})
    assert (variables_of(again), without_variables(again)) == (["enable_thinking"], HYBRID)


def test_a_variable_that_the_template_does_not_read_is_refused_with_those_that_it_reads() -> None:
    with pytest.raises(SpecError, match="It reads effort, enable_thinking: leave it out") as caught:
        ChatTemplate({"default": with_variables(HYBRID, {"thinking": True})}, {}).require_usable()
    assert caught.value.param == "chat_template_kwargs.thinking"
    with pytest.raises(SpecError, match="It reads none that could be set"):
        ChatTemplate(
            {"default": with_variables("{{ bos_token }}{{ messages }}", {"x": 1})}, {}
        ).require_usable()


@pytest.mark.parametrize(
    "given",
    [None, [{"name": "default", "template": HYBRID}, {"name": "tool_use", "template": HYBRID}]],
)
def test_a_base_without_one_template_needs_one(tmp_path: Path, given: Any) -> None:
    folder = base(tmp_path, given)
    assert own_template(folder) is None
    wanted = request(chat_template_kwargs={"enable_thinking": True})
    with pytest.raises(SpecError) as caught:
        with_template_variables(wanted, folder)
    assert caught.value.param == "chat_template_kwargs"
    own: Any = with_template_variables(wanted.model_copy(update={"chat_template": HYBRID}), folder)
    assert without_variables(own.chat_template) == HYBRID
    assert with_template_variables(request(), folder).chat_template is None


def test_a_file_goes_before_the_configuration(tmp_path: Path) -> None:
    (base(tmp_path, "a") / "chat_template.jinja").write_text("b")
    assert own_template(tmp_path) == "b"


@pytest.mark.parametrize("name", ["messages", "bos_token", "for", "a b", "a" * 65])
def test_names_that_no_job_sets_are_refused(name: str) -> None:
    with pytest.raises(SpecError) as caught:
        request(chat_template_kwargs={name: True})
    assert (caught.value.param or "").startswith("chat_template_kwargs")


@pytest.mark.parametrize("value", [None, [], {}, float("nan"), "a" * 1001])
def test_values_that_no_job_sets_are_refused(value: Any) -> None:
    with pytest.raises(SpecError):
        request(chat_template_kwargs={"x": value})
