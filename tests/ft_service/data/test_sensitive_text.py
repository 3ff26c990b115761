"""Secrets and personal data: named by kind, never shown, and not seen where there are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ft_service.cli.root_command import run
from ft_service.data.data_file import check_lines
from ft_service.data.sample_kinds import Conversation, PromptCompletion
from ft_service.data.sensitive_text import sensitive_kinds
from ft_service.data.statistics import Lines

HELD = {
    "-----BEGIN " + "RSA PRIVATE KEY-----\nMIIE": "a private key",
    "-----BEGIN " + "PRIVATE KEY-----": "a private key",
    "export AWS_ACCESS_KEY_ID=AKIA" + "IOSFODNN7EXAMPLE": "a key of AWS",
    "OPENAI_API_KEY=sk-" + "proj-" + "a1B2" * 10: "a key of OpenAI, Anthropic or a like service",
    "ghp_" + "a1B2" * 9: "a token of GitHub",
    "glpat-" + "a1B2" * 5: "a token of GitLab",
    "hf_" + "aB" * 17: "a token of Hugging Face",
    "xoxb-" + "123456789012-abc": "a token of Slack",
    "AIza" + "a1B2C" * 7: "a key of Google",
    "sk_live_" + "a1B2" * 6: "a key of Stripe",
    "npm_" + "a1B2" * 9: "a token of npm or PyPI",
    "eyJ" + "hbGciOiJIUzI1NiJ9.eyJ" + "zdWIiOiIxIn0abc.s1gnature_of-it": "a signed token (JWT)",
    "postgres://ft:hunter2@db/ft": "a password within a URL",
    "Write to ann.lee+ft@mail.harbour.org.": "an e-mail address",
    "card 4111 1111 1111 1111, please": "a card's number",
    "378282246310005": "a card's number",
    "pay to DE89 3704 0044 0532 0130 00 today": "an account's number (IBAN)",
    "GB82WEST12345698765432": "an account's number (IBAN)",
}
FREE = [
    "ann@example.com or bob@mail.example.org",
    "4111 1111 1111 1112",
    "0000 0000 0000 0000",
    "DE89 3704 0044 0532 0130 01",
    "ZZ89 3704 0044 0532 0130 00",
    "3.1415926535897932 and 12345678901234567890123",
    "sk-short, hf_hub_download, AKIA, ghp_x",
    "https://example.org:8080/a@b",
    "-----BEGIN PUBLIC KEY-----",
]


@pytest.mark.parametrize("text", HELD)
def test_each_kind_is_found_wherever_it_stands(text: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"deep": [text]}}}
    messages = (
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    )
    assert sensitive_kinds(Conversation(messages, (0, 1))) == [HELD[text]]
    assert sensitive_kinds(PromptCompletion("a\n" + text, "b")) == [HELD[text]]


@pytest.mark.parametrize("text", FREE)
def test_what_only_looks_like_one_is_none(text: str) -> None:
    assert sensitive_kinds(PromptCompletion(text, text)) == []


def test_lines_are_named_where_that_is_asked_and_the_secret_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secrets = list(HELD)
    path = tmp_path / "a.jsonl"
    lines = ["hello", secrets[2], "hello there", "say " + secrets[2], secrets[13]]
    path.write_text(
        "".join(
            json.dumps({"prompt": text, "completion": f"{number}"}) + "\n"
            for number, text in enumerate(lines)
        )
    )
    assert check_lines(path).sensitive == {}
    found = check_lines(path, sensitive=True)
    assert found.sensitive == {
        "a key of AWS": Lines(2, (2, 4)),
        "an e-mail address": Lines(1, (5,)),
    }
    assert run(["data", "check", str(path)]) == 0
    assert "AWS" not in capsys.readouterr().out
    assert run(["data", "check", str(path), "--sensitive"]) == 0
    told = capsys.readouterr().out
    assert "lines 2, 4" in told
    assert "AKIA" not in told
    assert "harbour" not in told
