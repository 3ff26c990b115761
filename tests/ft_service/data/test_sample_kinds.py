"""Kinds of records."""

from __future__ import annotations

from ft_service.data.sample_kinds import Conversation


def test_each_learned_answer_becomes_a_conversation_that_ends_with_it() -> None:
    messages = tuple(
        {"role": role, "content": str(n)}
        for n, role in enumerate(["user", *["assistant", "user"] * 2, "assistant"])
    )
    parts = list(Conversation(messages, (0, 1, 0, 0, 0, 1)).by_answers())
    assert [(len(part.messages), part.weights) for part in parts] == [
        (2, (0, 1)),
        (6, (0, 0, 0, 0, 0, 1)),
    ]
