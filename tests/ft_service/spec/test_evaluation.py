"""Prompts of a file of JSON lines."""

from __future__ import annotations

import json

import pytest

from ft_service.spec import read_prompts


def test_only_line_feeds_end_a_prompts_line() -> None:
    prompt = {"messages": [{"role": "user", "content": "a\u2028b\u2029c\x85d"}], "key": "e"}
    line = json.dumps(prompt, ensure_ascii=False)
    found = read_prompts(f"{line}\r\n\n{line}", "prompts.jsonl")
    assert [own["messages"] for own in found] == [prompt["messages"]] * 2
    with pytest.raises(ValueError, match=r"prompts\.jsonl, line 3: it is no JSON"):
        read_prompts(f"{line}\n\nno", "prompts.jsonl")
