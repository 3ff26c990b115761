"""A token of a prompt's end and an answer's beginning is trained on as the real prompt has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ft_service.data.chat_line import parse_line
from ft_service.data.line_errors import Fault
from ft_service.data.sample_kinds import PromptCompletion
from ft_service.data.tokens.sample import Tokens
from tests.support.tokenized import tokenized

TEMPLATE = Path(__file__).parents[3] / "support/chat_templates_by_family/qwen 3.5.jinja"
ASKED = [{"role": "user", "content": "2+2?"}]


@pytest.fixture(scope="module")
def base() -> Any:
    """Bytes, one token for two new lines, and one that ends a turn."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ"]
    tokenizer = Tokenizer(
        models.BPE({word: number for number, word in enumerate(words)}, [("Ċ", "Ċ")])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.add_special_tokens({"eos_token": "<|im_end|>"})
    fast.chat_template = TEMPLATE.read_text()
    return fast


def tokens_of(base: Any, *messages: dict[str, Any]) -> Tokens:
    tokens = tokenized(base, parse_line(json.dumps({"messages": messages})))
    assert isinstance(tokens, Tokens)
    return tokens


def test_the_answer_goes_on_from_the_prompts_own_tokens(base: Any) -> None:
    prompt = base.apply_chat_template(ASKED, add_generation_prompt=True, tokenize=False)
    tokens = tokens_of(base, *ASKED, {"role": "assistant", "content": "4"})
    asked = base(prompt, add_special_tokens=False)["input_ids"]
    assert tokens.ids[: len(asked)].tolist() == asked
    assert not tokens.targets[: len(asked)].any()
    assert tokens.targets[len(asked) :].all()
    assert base.decode(tokens.ids[tokens.targets]) == "\n</think>\n\n4<|im_end|>"
    assert base.convert_tokens_to_ids("ĊĊ") in tokens.ids[tokens.targets], (
        "only what straddles is taken apart"
    )


def test_tokens_that_do_not_straddle_stay(base: Any) -> None:
    thinking = {"role": "assistant", "content": "4", "reasoning_content": "two twos"}
    tokens = tokens_of(base, *ASKED, thinking)
    text = base.apply_chat_template([*ASKED, thinking], tokenize=False).rstrip()
    assert tokens.ids.tolist() == base(text, add_special_tokens=False)["input_ids"]
    assert base.decode(tokens.ids[tokens.targets]) == "two twos\n</think>\n\n4<|im_end|>"


def test_a_tokenizer_that_takes_no_text_apart_is_refused(base: Any) -> None:
    """One that puts a space before whatever it is given: a piece of a text would get other
    tokens.
    """
    # Every character: no offset is off.
    words = list(dict.fromkeys(["\u2581", *"<|im_start>user\n?2+think4/d_", "\n\n"]))
    tokenizer = Tokenizer(
        models.BPE({word: number for number, word in enumerate(words)}, [("\n", "\n")])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)  # pyright: ignore[reportAttributeAccessIssue]
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.add_special_tokens({"eos_token": "<|im_end|>"})
    fast.chat_template = base.chat_template
    line = parse_line(json.dumps({"messages": [*ASKED, {"role": "assistant", "content": "4"}]}))
    fault = tokenized(fast, line)
    assert isinstance(fault, Fault)
    assert (
        "makes one token of the prompt's end and the answer's beginning, 't\\n<think>\\n' and "
        "'\\n</think>\\n'" in fault.reason
    )


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ("Q\n\n", "bar"),
        ("Q:\n\n", "bar"),
        ("Q  ", "1"),
        ("\n\n", "b"),
        ("Q\n", "b"),
        ("Q\n\n", "\nb"),
    ],
)
def test_white_space_at_the_end_of_a_prompt_has_the_prompts_own_tokens(
    base: Any, prompt: str, completion: str
) -> None:
    """GPT-2's pattern leaves the last of several white spaces to the word that follows."""
    tokenizer = Tokenizer.from_str(base.backend_tokenizer.to_str())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    tokens = tokenized(fast, PromptCompletion(prompt, completion))
    assert isinstance(tokens, Tokens)
    asked = fast(prompt, add_special_tokens=False)["input_ids"]
    assert tokens.ids[~tokens.targets].tolist() == asked
    assert fast.decode(tokens.ids[tokens.targets]) == f"{completion}<|im_end|>"
