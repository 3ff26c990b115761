"""Tokenizers: what is recognised, and what is refused because it could not be shown to be the
same.
"""

from __future__ import annotations

from typing import Any

import pytest

from ft_service.errors import SpecError
from workers.exports.gguf_vocabulary import pre_tokenizer, scores_of

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2 = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}


def split(regex: str) -> list[dict[str, Any]]:
    return [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False},
        BYTES,
    ]


@pytest.mark.parametrize(
    ("steps", "ignore_merges", "name"),
    [
        (split(LLAMA_3), True, "llama-bpe"),
        (split(LLAMA_3), False, "dbrx"),
        (split(QWEN_2), False, "qwen2"),
        (split(TEKKEN), True, "tekken"),
        ([{**BYTES, "use_regex": True}], False, "gpt-2"),
        (
            [{"type": "Digits", "individual_digits": True}, {**BYTES, "use_regex": True}],
            False,
            "smollm",
        ),
    ],
)
def test_ways_to_cut_text_that_llama_cpp_knows(
    steps: list[Any], ignore_merges: bool, name: str
) -> None:
    assert pre_tokenizer(steps, ignore_merges=ignore_merges) == name


@pytest.mark.parametrize(
    "steps",
    [
        split(LLAMA_3.replace("1,3", "1,2")),
        [{**split(QWEN_2)[0], "behavior": "Removed"}, BYTES],
        [{**BYTES, "add_prefix_space": True, "use_regex": True}],
    ],
)
def test_others_are_refused(steps: list[Any]) -> None:
    with pytest.raises(SpecError, match=r"that llama\.cpp does not know by name"):
        pre_tokenizer(steps, ignore_merges=False)


def test_scores_put_merges_in_the_order_of_the_list() -> None:
    tokens = ["a", "b", "c", "ab", "abc"]
    normal = [1] * 5
    scores = scores_of(tokens, [["a", "b"], ["ab", "c"]], normal)
    assert scores[3] > scores[4] > scores[0], (
        "ab is joined first; a single character is made by nothing"
    )
    with pytest.raises(SpecError, match="fewer ways"):
        scores_of([*tokens, "bc"], [["a", "b"], ["b", "c"], ["ab", "c"]], [1] * 6)
    with pytest.raises(SpecError, match="not in the order"):
        scores_of([*tokens, "bc"], [["ab", "c"], ["b", "c"], ["a", "bc"]], [1] * 6)
