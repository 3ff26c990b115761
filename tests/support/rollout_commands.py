"""A schedule of reinforcement learning, and what the commands of its steps train on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ft_service.reinforcement.schedule import RolloutSchedule
from ft_service.spec import DataFileRef, JobSpec
from ft_service.tinker.commands import Command
from ft_service.tinker.loss_calls import Datum, LossRequest
from tests.support.rollouts import rollout_spec

FILE = DataFileRef(name="prompts.jsonl", path="/nowhere", sha256="")

SCHEDULE = RolloutSchedule(
    prompts=8,
    batch=2,
    total_steps=4,
    eval_interval=2,
    save_interval=2,
    keep_every=None,
    validates=True,
    steps_ahead=0,
    seed=1,
)


def spec_with(**hyperparameters: Any) -> JobSpec:
    return rollout_spec(Path("/nowhere"), FILE, hyperparameters, training={"max_length": 40})


def data_of(commands: list[Command]) -> list[Datum]:
    calls = [
        LossRequest.parse(command.body).call(vocabulary=100, longest=40)
        for command in commands
        if command.body
    ]
    assert all(call.loss_fn == "cispo" and call.config["clip_low_threshold"] == 0 for call in calls)
    return [datum for call in calls for datum in call.data]
