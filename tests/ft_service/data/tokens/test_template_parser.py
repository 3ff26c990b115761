"""Messages found again in a prompt's tokens, whatever the template writes around them."""

from __future__ import annotations

from typing import Any

import pytest

from ft_service.data.token_options import TokenOptions
from ft_service.data.tokens.chat_template import ChatTemplate
from ft_service.data.tokens.template_parser import Write, turns_of
from ft_service.data.tokens.tokenize import load_tokenizer
from ft_service.spec.templates import named_template
from tests.support.bases import SAMPLE

SYSTEM = {"role": "system", "content": "Sort the tickets."}
ASKED = {"role": "user", "content": "Where is\n\nmy order? user: 7"}
SAID = {"role": "assistant", "content": "On its way."}
TEMPLATES = ("", "zephyr", "vicuna", "alpaca")


def writing(tokenizer: Any) -> Write:
    template = ChatTemplate.of(tokenizer)
    assert template is not None
    return lambda messages: template.write(messages, None, TokenOptions().day, prompt=True)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(
    "messages",
    [[ASKED], [SYSTEM, ASKED], [SYSTEM, ASKED, SAID, ASKED], [ASKED, SAID, ASKED, SAID, ASKED]],
)
def test_the_messages_of_a_prompt_are_found_in_its_tokens(
    template: str, messages: list[dict[str, Any]]
) -> None:
    tokenizer = load_tokenizer(str(SAMPLE), named_template(template) if template else "")
    write = writing(tokenizer)
    ids = tokenizer(write(messages), add_special_tokens=False)["input_ids"]
    assert turns_of(ids, tokenizer, write) == messages


def test_what_is_no_conversation_of_text_is_not_made_one() -> None:
    tokenizer = load_tokenizer(str(SAMPLE))
    write = writing(tokenizer)
    for text in ("Once upon a time", write([ASKED]) + "And so"):
        assert (
            turns_of(tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer, write)
            is None
        )
    assert turns_of([], tokenizer, write) is None
