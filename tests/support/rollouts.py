"""Records of steps with answers that nothing has sampled, and jobs of reinforcement learning."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ft_service.reinforcement.step_records import (
    AnsweredPrompt,
    RecordHead,
    SampledAnswer,
    StepRecord,
    Trajectory,
)
from ft_service.reinforcement.trajectories import RecordedCall, rows_of
from ft_service.rundir.directory import sha256_of
from ft_service.spec import BaseModelRef, DataFileRef, JobContext, JobSpec, resolve
from ft_service.spec.request import parse_request
from tests.support.bases import AS_IT_IS

GRADER = {
    "type": "string_check",
    "name": "right",
    "input": "{{ sample.output_text }}",
    "reference": "{{ item.answer }}",
    "operation": "eq",
}


def save_prompts(path: Path, count: int, first: int = 0) -> DataFileRef:
    """Sums with their answers as items."""
    lines = [
        {
            "messages": [{"role": "user", "content": f"{first + i} + 1 ="}],
            "answer": str(first + i + 1),
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return DataFileRef(name=path.name, path=str(path), sha256=sha256_of(path))


def method(**hyperparameters: Any) -> dict[str, Any]:
    """`method` of a create body."""
    return {
        "type": "reinforcement",
        "reinforcement": {"grader": GRADER, "hyperparameters": hyperparameters},
    }


def rollout_spec(
    base: Path,
    file: DataFileRef,
    hyperparameters: Mapping[str, Any] | None = None,
    *,
    ranks: int = 1,
    validation: DataFileRef | None = None,
    **options: Any,
) -> JobSpec:
    """The spec of a job; `options` as in a create body."""
    files = {"training_file": "prompts"} | ({"validation_file": "held out"} if validation else {})
    distributed = {"nproc_per_node": ranks, **AS_IT_IS}
    body = {
        "model": "tiny",
        **files,
        "method": method(**(hyperparameters or {})),
        "distributed": distributed,
        **options,
    }
    context = JobContext(
        job_id="ftjob-test",
        organization="local",
        model=BaseModelRef(name="tiny", path=str(base)),
        training_data=file,
        validation_data=validation,
        seed=7,
        gpus=0,
        samples=10,
    )
    return resolve(parse_request(body), context)


def answer(tokens: Sequence[int], reward: float | None, **changes: Any) -> SampledAnswer:
    """An answer whose tokens had a probability of one half, unless `logprobs` says otherwise."""
    errors = {} if reward is not None else {"other_error": "why"}
    given = {
        "logprobs": [-0.6931] * len(tokens),
        "text": "",
        "truncated": False,
        "errors": errors,
        **changes,
    }
    return SampledAnswer(tokens=tokens, reward=reward, **given)


def group(
    number: int, answers: Sequence[SampledAnswer], ids: Sequence[int] = (5, 6, 7)
) -> AnsweredPrompt:
    return AnsweredPrompt(prompt=number, ids=ids, text=f"prompt {number}", answers=answers)


def record(
    step: int, groups: Sequence[AnsweredPrompt], *, first_seq: int, **changes: Any
) -> StepRecord:
    validation = changes.pop("validation", ())
    head = RecordHead(
        step=step, first_seq=first_seq, sampled_from=step - 1, groups=len(groups), **changes
    )
    return StepRecord(head=head, groups=groups, validation=validation)


def random_groups(count: int, answers: int, vocabulary: int, *, seed: int) -> list[AnsweredPrompt]:
    """Groups of answers of several lengths with random rewards and log-probabilities."""
    random = np.random.default_rng(seed)
    groups = []
    for number in range(count):
        ids = random.integers(3, vocabulary, size=int(random.integers(3, 9))).tolist()
        own = []
        for _ in range(answers):
            tokens = random.integers(3, vocabulary, size=int(random.integers(1, 12))).tolist()
            logprobs = (-np.log(vocabulary) + random.normal(scale=0.3, size=len(tokens))).tolist()
            own.append(answer(tokens, float(random.normal()), logprobs=logprobs))
        groups.append(group(number, own, ids))
    return groups


def rollout(calls: Sequence[RecordedCall], reward: float | None, **changes: Any) -> SampledAnswer:
    """The answer of a rollout with an environment."""
    rows, logprobs = rows_of(calls)
    numbers = [{"completion_tokens": len(call.tokens)} for call in calls]
    way = {"rows": rows, "calls": numbers, "rewritten": max(0, len(rows) - 1), "seconds": 2.0}
    trajectory = Trajectory(**{**way, **changes})
    tokens = [token for row in rows for token in row.answered]
    return answer(tokens, reward, logprobs=logprobs, trajectory=trajectory)


def random_trajectories(
    count: int, answers: int, vocabulary: int, *, seed: int, processes: Collection[int] = ()
) -> list[AnsweredPrompt]:
    """Groups of rollouts of three calls, of which the last but one of each group has forgotten what
    came before. `processes`: numbers of groups in which each call has a reward.
    """
    random = np.random.default_rng(seed)

    def tokens(least: int, most: int) -> list[int]:
        return random.integers(3, vocabulary, size=int(random.integers(least, most))).tolist()

    groups = []
    for number in range(count):
        ids = tokens(3, 9)
        own = []
        for place in range(answers):
            calls: list[RecordedCall] = []
            prompt = ids
            for _ in range(3):
                drawn = tokens(1, 8)
                spread = random.normal(scale=0.3, size=len(drawn))
                calls.append(RecordedCall(prompt, drawn, (spread - np.log(vocabulary)).tolist()))
                prompt = [*ids, *tokens(1, 5)] if place == 1 else [*prompt, *drawn, *tokens(1, 5)]
            rewards = random.normal(size=3).tolist()
            by_call = rewards if number in processes else ()
            own.append(rollout(calls, sum(rewards), rewards=by_call))
        groups.append(group(number, own, ids))
    return groups
