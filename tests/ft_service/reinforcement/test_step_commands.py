"""The commands of a record, and what the ranks read in them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ft_service.reinforcement import step_commands
from ft_service.reinforcement.step_commands import (
    TOKENS_OF_COMMAND,
    commands_of,
    first_commands,
    metrics_of,
)
from ft_service.reinforcement.step_records import StepRecord
from ft_service.spec import DistillationOptions
from ft_service.tinker.commands import MOST_BYTES, TARGETS
from ft_service.tinker.loss_calls import LossRequest
from tests.support.rollout_commands import SCHEDULE, data_of, spec_with
from tests.support.rollouts import answer, group, record

GROUPS = [
    group(0, [answer([11, 12], 1.0), answer([13], 0.0)]),
    group(1, [answer([14], 1.0), answer([15, 16, 17], 1.0)]),
]


def advantages_of(found: StepRecord, **hyperparameters: Any) -> list[list[float]]:
    """Advantages of the trained answers' tokens, without those of the prompts, which are 0."""
    data = data_of(commands_of(found, spec_with(**hyperparameters), SCHEDULE))
    assert all((datum.inputs["advantages"][:2] == 0).all() for datum in data)
    return [datum.inputs["advantages"][2:].tolist() for datum in data]


def test_a_job_begins_with_weights_to_sample_from() -> None:
    assert [(command.seq, command.op) for command in first_commands("ftjob-1")] == [
        (0, "create_model"),
        (1, "save_weights_for_sampler"),
    ]


def test_a_step() -> None:
    commands = commands_of(record(1, GROUPS, first_seq=2), spec_with(), SCHEDULE)
    assert [(c.seq, c.op) for c in commands] == [
        (2, "forward_backward"),
        (3, "optim_step"),
        (4, "save_weights_for_sampler"),
    ]
    first, second = data_of(commands)
    assert first.ids.tolist() == [5, 6, 7, 11]
    assert first.targets.tolist() == [6, 7, 11, 12]
    assert first.inputs["logprobs"].tolist() == pytest.approx([0, 0, -0.6931, -0.6931])
    assert first.inputs["advantages"].tolist() == pytest.approx([0, 0, 0.5 / 7, 0.5 / 7]), (
        "7 tokens in all"
    )
    assert second.inputs["advantages"].tolist() == pytest.approx([0, 0, -0.5 / 7])
    assert commands[1].options["report"]["epoch"] == 0.25
    assert commands[1].options["scheduled"] == 4


def test_what_was_drawn_at_a_temperature_is_trained_on_at_it() -> None:
    """Records of before have no temperature, and their log-probabilities are those at 1."""
    of_before = StepRecord.model_validate(
        record(1, GROUPS, first_seq=2).model_dump(exclude={"head": {"temperature"}})
    )
    at = [
        commands_of(own, spec_with(temperature=0.6), SCHEDULE)
        for own in (record(1, GROUPS, first_seq=2, temperature=0.6), of_before)
    ]
    assert [commands[0].options for commands in at] == [{"temperature": 0.6}, {}]
    assert at[0][0].body == at[1][0].body


def test_checkpoints_go_by_reward_and_the_last_record_ends_the_job() -> None:
    valid = [group(0, [answer([9], 1.0), answer([9], 0.0)], ids=())]
    saved = commands_of(
        record(3, GROUPS, first_seq=9, saves=True, validation=valid), spec_with(), SCHEDULE
    )
    assert (saved[0].op, saved[0].options) == ("checkpoint", {"criterion": -0.5, "saves": True})
    assert saved[2].options["report"]["more"]["valid_mean_reward"] == 0.5
    last = commands_of(
        record(5, [], first_seq=20, ends=True, validation=valid), spec_with(), SCHEDULE
    )
    assert [(c.seq, c.op) for c in last] == [(20, "checkpoint"), (21, "finish")]
    assert last[1].options["report"]["more"]["valid_mean_reward"] == 0.5
    assert [
        c.op for c in commands_of(record(5, [], first_seq=20, ends=True), spec_with(), SCHEDULE)
    ] == ["finish"]


def test_nothing_to_learn_skips_the_step() -> None:
    same = record(1, [group(0, [answer([1], 1.0), answer([2], 1.0)])], first_seq=2)
    commands = commands_of(same, spec_with(), SCHEDULE)
    assert [c.op for c in commands] == ["optim_step", "save_weights_for_sampler"]
    assert commands[0].options["skipped"] is True


def test_the_loss_is_the_mean_that_was_asked_for() -> None:
    found = record(1, GROUPS, first_seq=2)
    assert advantages_of(found, loss_type="grpo") == [
        pytest.approx([0.5 / 8] * 2),
        pytest.approx([-0.5 / 4]),
    ]
    assert advantages_of(found, loss_type="dr_grpo", max_completion_length=10)[0] == pytest.approx(
        [0.5 / 40] * 2
    )


def test_answers_that_count_for_nothing() -> None:
    answers = [answer([11], 1.0), answer([12, 13], 0.0, truncated=True), answer([14], None)]
    found = record(1, [group(0, answers)], first_seq=2)
    assert advantages_of(found) == [pytest.approx([0.5 / 3]), pytest.approx([-0.5 / 3] * 2)]
    # Of the answer that is left out the tokens do not count, but it stays one of two answers, as in
    # TRL.
    masked = {"mask_truncated_completions": True, "max_completion_length": 10}
    for loss, weight in (("dapo", 1.0), ("grpo", 0.5), ("dr_grpo", 0.05)):
        assert advantages_of(found, loss_type=loss, **masked) == [[pytest.approx(0.5 * weight)]], (
            loss
        )


def test_divergence_from_the_start_is_part_of_the_advantage() -> None:
    answers = [
        answer([11, 12], 1.0, reference=[-0.6931, -1.6931]),
        answer([13], 1.0, reference=[-0.1931]),
    ]
    found = record(1, [group(0, answers)], first_seq=2)
    assert advantages_of(found, beta=0.3) == [pytest.approx([0.0, -0.1]), pytest.approx([0.05])]
    assert advantages_of(found) == []


def test_many_answers_are_several_commands() -> None:
    many = [group(n, [answer([1], 1.0), answer([2], 0.0)]) for n in range(200)]
    commands = commands_of(record(1, many, first_seq=2), spec_with(), SCHEDULE)
    assert [c.op for c in commands] == [
        "forward_backward",
        "forward_backward",
        "optim_step",
        "save_weights_for_sampler",
    ]
    assert len(data_of(commands)) == 400


def test_long_answers_are_several_commands_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command's file may have 64 MiB, which 256 answers of 14,000 tokens exceed."""
    monkeypatch.setattr(step_commands, "TOKENS_OF_COMMAND", 12)
    lengths = (2, 3, 4, 20, 2, 2)
    many = [
        group(n, [answer([1] * length, 1.0), answer([2], 0.0)]) for n, length in enumerate(lengths)
    ]
    commands = [
        c
        for c in commands_of(record(1, many, first_seq=2), spec_with(), SCHEDULE)
        if c.op == "forward_backward"
    ]
    found = [[len(datum.ids) for datum in data_of([command])] for command in commands]
    assert found == [[4, 3, 5], [3, 6, 3], [22], [3, 4, 3], [4, 3]]
    (datum,) = LossRequest.parse(commands[2].body).message.data
    assert datum.ByteSize() / 22 * TOKENS_OF_COMMAND < MOST_BYTES, (
        "22 tokens with the names of their arrays"
    )


def test_a_teacher_with_a_context_reads_each_answer_behind_its_own_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loss = DistillationOptions(loss_type="reverse_kl", beta=0.5, with_context="Be brief.")
    spec = spec_with().model_copy(update={"loss": loss})
    groups = [
        own.model_copy(update={"teacher_ids": [8, 9, *own.ids]})
        for own in (*GROUPS, group(2, [answer([], 0.0)]))
    ]
    taught = record(1, groups, first_seq=2)
    first, *_ = commands_of(taught, spec, SCHEDULE)
    assert (first.op, first.options) == ("distill", {TARGETS: 7})
    data = LossRequest.parse(first.body).call(vocabulary=100, longest=40).data
    assert len(data) == 8, "of an answer without tokens nothing is compared"
    for own, behind in zip(data[::2], data[1::2], strict=True):
        assert own.ids[:3].tolist() == [5, 6, 7]
        assert behind.ids[:5].tolist() == [8, 9, 5, 6, 7]
        assert own.targets[2:].tolist() == behind.targets[4:].tolist()
        assert np.flatnonzero(behind.inputs["weights"]).tolist() == list(
            range(4, len(behind.targets))
        )
    monkeypatch.setattr(step_commands, "TOKENS_OF_COMMAND", 17)  # both rows have 10, 8, 8 and 12
    parts = [one for one in commands_of(taught, spec, SCHEDULE) if one.op == "distill"]
    rows = [LossRequest.parse(one.body).call(vocabulary=100, longest=40).data for one in parts]
    assert [len(own) for own in rows] == [2, 4, 2]


def test_metrics() -> None:
    failed = answer([14], None, errors={"python_grader_runtime_error": "line 1"})
    groups = [
        group(0, [answer([11, 12], 1.0), answer([13], 0.0, truncated=True)]),
        group(1, [failed, answer([15], 1.0)]),
    ]
    found = record(1, groups, first_seq=2, sampling_seconds=2.0, grading_seconds=0.5)
    metrics = metrics_of(found, 2)
    assert metrics["train_mean_reward"] == pytest.approx(2 / 3)
    assert metrics["completions/mean_length"] == 1.25
    assert metrics["completions/truncated"] == 0.25
    assert metrics["groups/without_variance"] == 0.5
    assert metrics["grader/errors"] == metrics["grader/errors/python_grader_runtime_error"] == 0.25
    assert (metrics["seconds/sampling"], metrics["seconds/grading"]) == (2.0, 0.5)
    assert np.isfinite(list(metrics.values())).all()
    assert metrics_of(replace_groups(found), 0) == {}


def replace_groups(found: StepRecord) -> StepRecord:
    return found.model_copy(update={"groups": ()})


def test_the_same_record_gives_the_same_bytes() -> None:
    found = record(1, GROUPS, first_seq=2)
    again = StepRecord.model_validate_json(found.model_dump_json())
    assert commands_of(found, spec_with(), SCHEDULE) == commands_of(
        again, spec_with(), replace(SCHEDULE)
    )
