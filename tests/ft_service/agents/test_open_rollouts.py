"""Rollouts that are open: budgets, keys, and what is recorded."""

from __future__ import annotations

import pytest

from ft_service.agents import open_rollouts
from ft_service.agents.open_rollouts import OpenRollouts
from ft_service.errors import AuthError, FtError, LimitError, NotFoundError, SpecError
from tests.support.agents import call, new_rollout, order_of, parts_of

MESSAGES = [{"role": "user", "content": "2 + 2"}]


def test_the_job_decides_how_answers_are_drawn() -> None:
    rollout = new_rollout()
    first = rollout.begin(order_of(MESSAGES, 2), MESSAGES, {"top_p": 0.9}).order
    second = rollout.begin(order_of(MESSAGES), MESSAGES, {}).order
    assert (first["temperature"], first["logprobs_at"], first["top_p"]) == (0.5, 0.5, 1.0)
    assert (first["adapter"], first["recorded"], first["window"]) == ("/step", True, 64)
    assert (first["max_tokens"], second["max_tokens"]) == (2, 3)
    assert first["seed"] != second["seed"]
    assert rollout.sampling == {"top_p": 0.9}


def test_what_was_sampled_is_recorded_and_known_to_later_calls() -> None:
    rollout = new_rollout()
    call(rollout, (3, 4))
    later = rollout.begin(order_of(MESSAGES), MESSAGES, {})
    assert later.order["seen"] == [[1, 2, 3, 4]]
    called = [{"name": "add", "arguments": "{}"}]
    rollout.end(later, parts_of((5,), (1, 2, 3, 4), "", reason="tool_calls", calls=called))
    recorded = [own.recorded for own in rollout.answered]
    assert [(list(own.prompt), list(own.tokens)) for own in recorded] == [
        ([1, 2], [3, 4]),
        ([1, 2, 3, 4], [5]),
    ]
    assert rollout.answered[1].message["tool_calls"][0]["function"] == called[0]


def test_calls_and_tokens_have_a_budget() -> None:
    rollout = new_rollout(turns=2)
    call(rollout)
    under_way = rollout.begin(order_of(MESSAGES), MESSAGES, {})
    with pytest.raises(SpecError) as refused:
        rollout.begin(order_of(MESSAGES), MESSAGES, {})
    assert refused.value.code == "rollout_turns_used"
    rollout.drop(under_way)
    rollout.begin(order_of(MESSAGES), MESSAGES, {})
    rollout = new_rollout(tokens=5)
    reserved = [rollout.begin(order_of(MESSAGES), MESSAGES, {}).order["max_tokens"] for _ in "ab"]
    assert reserved == [3, 2], "what is under way is reserved"
    with pytest.raises(SpecError) as refused:
        rollout.begin(order_of(MESSAGES), MESSAGES, {})
    assert refused.value.code == "rollout_tokens_used"


def test_too_many_calls_at_once_and_calls_without_end_are_refused() -> None:
    rollout = new_rollout(turns=1000, tokens=10_000)
    for _ in range(open_rollouts.CALLS_AT_ONCE):
        rollout.begin(order_of(MESSAGES), MESSAGES, {})
    with pytest.raises(LimitError):
        rollout.begin(order_of(MESSAGES), MESSAGES, {})
    for _ in range(open_rollouts.MOST_REFUSED):
        assert not rollout.is_flooded
        rollout.refuse("x")
    assert rollout.is_flooded


def test_a_key_opens_its_rollout_alone_and_while_it_is_open() -> None:
    opened = OpenRollouts("http://server")
    first = new_rollout()
    second = new_rollout()
    opened.open(first)
    opened.open(second)
    assert opened.find(first.id, first.key) is first
    assert opened.url_of(first) == f"http://server/v1/rollouts/{first.id}"
    assert first.key not in repr(opened)
    with pytest.raises(NotFoundError):
        opened.find(second.id, first.key)
    assert (first.refused, second.refused) == ({"rollout_wrong_key": 1}, {})
    opened.close(first)
    for key in (first.key, "ftr-guessed", ""):
        with pytest.raises(AuthError):
            opened.find(first.id, key)


def test_what_comes_after_the_end_is_not_recorded() -> None:
    rollout = new_rollout()
    late = rollout.begin(order_of(MESSAGES), MESSAGES, {})
    rollout.close()
    rollout.end(late, parts_of((3,)))
    assert rollout.answered == []
    with pytest.raises(FtError):
        rollout.begin(order_of(MESSAGES), MESSAGES, {})
