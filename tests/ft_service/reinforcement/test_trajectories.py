"""What is learned of a rollout is what was sampled, however its history is written again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ft_service.reinforcement.advantages import LEAST_DEVIATION
from ft_service.reinforcement.flat_steps import is_flat
from ft_service.reinforcement.step_commands import commands_of, metrics_of
from ft_service.reinforcement.step_records import (
    SampledAnswer,
    StepRecord,
    read_record,
    write_record,
)
from ft_service.reinforcement.trajectories import RecordedCall, rows_of
from ft_service.rundir.directory import RunDir
from tests.support.rollout_commands import SCHEDULE, data_of, spec_with
from tests.support.rollouts import answer, group, record, rollout

THOUGHT = 1
"""A token that a template leaves out of earlier answers."""
TOKENS = st.lists(st.integers(0, 4), min_size=1, max_size=4)
Rewrite = Callable[[Sequence[int]], list[int]]
REWRITES: dict[str, Rewrite] = {
    "as they were": list,
    "without thoughts": lambda tokens: [token for token in tokens if token != THOUGHT],
    "tokenised again": lambda tokens: [token + 1 if token == 2 else token for token in tokens],
    "forgotten": lambda _: [],
}


often = settings(
    max_examples=100, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)


def calls_of(turns: Sequence[tuple[list[int], list[int]]], rewrite: Rewrite) -> list[RecordedCall]:
    """Calls of an agent: each turn is what it adds, and what the model answers.

    `rewrite`: what the template makes of the answers so far.
    """
    calls = []
    history: list[int] = []
    for number, (added, drawn) in enumerate(turns):
        prompt = [*history, *added]
        calls.append(
            RecordedCall(prompt, drawn, [-number - place / 10 for place in range(len(drawn))])
        )
        history = [*prompt, *rewrite(drawn)]
    return calls


@often
@given(
    st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=6),
    st.sampled_from(list(REWRITES)),
    st.permutations(range(6)),
)
def test_every_sampled_token_is_learned_once_behind_its_prompt(
    turns: list[tuple[list[int], list[int]]], kind: str, order: list[int]
) -> None:
    """In whatever order the calls ended, and with repeated calls."""
    calls = calls_of(turns, REWRITES[kind])
    calls = [calls[place] for place in order if place < len(calls)] + calls[:1]
    rows, logprobs = rows_of(calls)
    places = iter(range(len(logprobs)))
    learned = Counter(
        (tuple(row.tokens[:begin]), tuple(row.tokens[begin:end]), tuple(of_logprobs))
        for row in rows
        for begin, end in row.sampled
        for of_logprobs in [[logprobs[next(places)] for _ in range(begin, end)]]
    )
    sampled = Counter((tuple(c.prompt), tuple(c.tokens), tuple(c.logprobs)) for c in calls)
    assert learned == sampled
    assert len(rows) <= len(calls)


@often
@given(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=6))
def test_a_history_as_it_was_is_one_row(turns: list[tuple[list[int], list[int]]]) -> None:
    rows, _ = rows_of(calls_of(turns, list))
    assert len(rows) == 1
    assert rows[0].answered == [token for _, drawn in turns for token in drawn]


TURNS = [([5], [6, 7]), ([8], [9]), ([5, 5], [6])]


def rollouts_of(kind: str, **changes: Any) -> StepRecord:
    """A group whose first answer is a rollout of three calls, and whose second one is another."""
    first = rollout(calls_of(TURNS, REWRITES[kind]), 1.0, **changes)
    other = rollout(calls_of([([5], [4, 4])], list), 0.0)
    return record(1, [group(0, [first, other])], first_seq=2)


def test_the_rows_of_a_rollout_share_its_advantage_and_count_as_one() -> None:
    """Rows as they were, or each call a row: the same tokens have the same weights."""
    weights = []
    for kind, rows in (("as they were", 1), ("forgotten", 3)):
        for loss in ("dapo", "grpo", "dr_grpo"):
            spec = spec_with(loss_type=loss, max_completion_length=8)
            data = data_of(commands_of(rollouts_of(kind), spec, SCHEDULE))
            assert len(data) == rows + 1
            own = [value for d in data for value in d.inputs["advantages"].tolist() if value]
            weights.append((loss, own))
    assert weights[:3] == weights[3:]
    dapo = dict(weights[:3])["dapo"]
    assert len(dapo) == 6
    assert {round(value * 6, 5) for value in dapo} == {0.5, -0.5}


def test_only_sampled_tokens_have_an_advantage_and_their_log_probability() -> None:
    [row, _] = data_of(commands_of(rollouts_of("as they were"), spec_with(), SCHEDULE))
    learned = row.inputs["advantages"] != 0
    assert row.targets[learned].tolist() == [6, 7, 9, 6]
    assert [round(float(value), 3) for value in row.inputs["logprobs"][learned]] == [
        0,
        -0.1,
        -1,
        -2,
    ]
    assert not row.inputs["logprobs"][~learned].any()


@pytest.mark.parametrize("rewards", [[], [0.1 + 0.2, 1e-17, 1 / 3]])
def test_a_record_keeps_rows_and_gives_the_same_commands(
    tmp_path: Path, rewards: list[float]
) -> None:
    found = rollouts_of("without thoughts", rewards=rewards)
    write_record(RunDir(tmp_path), found)
    again = read_record(RunDir(tmp_path), 1)
    assert again is not None
    assert commands_of(again, spec_with(), SCHEDULE) == commands_of(found, spec_with(), SCHEDULE)
    assert [own.trajectory and own.trajectory.rows for own in again.answers] == [
        own.trajectory and own.trajectory.rows for own in found.answers
    ]


@often
@given(
    st.lists(st.tuples(TOKENS, TOKENS, st.sampled_from([-1.0, 0.0, 0.5])), min_size=1, max_size=5),
    st.sampled_from(list(REWRITES)),
    st.sampled_from(["none", "group"]),
)
def test_with_rewards_of_calls_each_token_has_those_of_its_call_and_later_ones(
    turns: list[tuple[list[int], list[int], float]], kind: str, scale: str
) -> None:
    """Whatever rows the calls are in: token by token, against the formula of DeepSeekMath."""
    calls = calls_of([(added, drawn) for added, drawn, _ in turns], REWRITES[kind])
    rewards = [reward for *_, reward in turns]
    other = rollout(calls_of([([5], [4, 4])], list), 1.0, rewards=[1.0])
    own = rollout(calls, sum(rewards), rewards=rewards)
    found = record(1, [group(0, [own, other, answer([], None)])], first_seq=2)
    spec = spec_with(scale_rewards=scale)
    every = torch.tensor([*rewards, 1.0], dtype=torch.float64)
    divisor = every.std() + LEAST_DEVIATION if scale == "group" else 1.0
    normalised = (every - every.mean()) / divisor
    expected = [(4, float(normalised[-1]))] * 2
    for number, call in enumerate(calls):
        advantage = float(normalised[number : len(calls)].sum())
        expected += [(token, advantage) for token in call.tokens]
    expected = sorted(pair for pair in expected if abs(pair[1]) > 1e-4)
    tokens = len(own.tokens) + 2
    learned = sorted(
        (target, advantage * tokens)
        for datum in data_of(commands_of(found, spec, SCHEDULE))
        for target, advantage in zip(
            datum.targets.tolist(), datum.inputs["advantages"].tolist(), strict=True
        )
        if abs(advantage * tokens) > 1e-4
    )
    assert [token for token, _ in learned] == [token for token, _ in expected]
    advantages = [advantage for _, advantage in expected]
    assert [advantage for _, advantage in learned] == pytest.approx(advantages, rel=1e-5, abs=1e-6)


def test_a_group_is_flat_only_if_the_rewards_of_its_calls_are() -> None:
    def twice(*rewards: float) -> SampledAnswer:
        return rollout(calls_of([([5], [6]), ([5], [7])], list), sum(rewards), rewards=rewards)

    assert not is_flat(group(0, [twice(1.0, 0.0), twice(0.0, 1.0)]))
    assert is_flat(group(0, [twice(0.5, 0.5), twice(0.5, 0.5)]))


def test_metrics_of_rollouts() -> None:
    own = rollout(calls_of(TURNS, REWRITES["forgotten"]), 1.0, refused={"rollout_turns_used": 2})
    failed = answer([], None).model_copy(update={"errors": {"agent_timeout": "why"}})
    measured = metrics_of(record(1, [group(0, [own, failed])], first_seq=2), 1)
    assert measured["environment/turns"] == 3
    assert measured["environment/rows"] == 3
    assert measured["environment/rewritten"] == 1
    assert measured["environment/refused"] == 2
    assert measured["environment/errors/agent_timeout"] == 0.5
    assert not [name for name in measured if name.startswith("grader/errors/")]


def test_the_texts_of_a_row_are_what_was_read_and_what_is_learned() -> None:
    first = RecordedCall([1, 2], [3], [-1.0], prompt_text="<u>hi<a>", drawn_text="yo<e>")
    second = RecordedCall(
        [1, 2, 3, 4], [5], [-1.0], prompt_text="<u>hi<a>yo<e><u>so<a>", drawn_text="on<e>"
    )
    anew = RecordedCall([9], [5], [-1.0], prompt_text="<u>new<a>", drawn_text="on<e>")
    rows, _ = rows_of([first, second, anew])
    assert [list(row.texts) for row in rows] == [
        [("<u>hi<a>", False), ("yo<e>", True), ("<u>so<a>", False), ("on<e>", True)],
        [("<u>new<a>", False), ("on<e>", True)],
    ]
    unknown, _ = rows_of([RecordedCall([1], [2], [-1.0])])
    assert list(unknown[0].texts) == []
