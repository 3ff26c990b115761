"""Messages found again in a prompt's tokens, whatever the template writes around them."""

from __future__ import annotations

from typing import Any

import pytest

from ft_service.data.token_options import TokenOptions
from ft_service.data.tokens.render import render_prompt
from ft_service.data.tokens.tokenize import load_tokenizer
from ft_service.data.tokens.turns import turns_of
from ft_service.spec.templates import named_template
from tests.support.bases import SAMPLE

SYSTEM = {"role": "system", "content": "Sort the tickets."}
ASKED = {"role": "user", "content": "Where is\n\nmy order? user: 7"}
SAID = {"role": "assistant", "content": "On its way."}
TEMPLATES = ("", "zephyr", "vicuna", "alpaca")


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(
    "messages", [[ASKED], [SYSTEM, ASKED], [SYSTEM, ASKED, SAID, ASKED], [ASKED, SAID, ASKED, SAID, ASKED]]
)
def test_the_messages_of_a_prompt_are_found_in_its_tokens(template: str, messages: list[dict[str, Any]]) -> None:
    options = TokenOptions(named_template(template) if template else "")
    tokenizer = load_tokenizer(str(SAMPLE), options.chat_template)
    ids = tokenizer(render_prompt(tokenizer, messages, options), add_special_tokens=False)["input_ids"]
    assert turns_of(ids, tokenizer, options) == messages


def test_what_is_no_conversation_of_text_is_not_made_one() -> None:
    options = TokenOptions()
    tokenizer = load_tokenizer(str(SAMPLE))
    for text in ("Once upon a time", render_prompt(tokenizer, [ASKED], options) + "And so"):
        assert turns_of(tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer, options) is None
    assert turns_of([], tokenizer, options) is None
