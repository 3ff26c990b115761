"""Jobs that share an engine: a real server, a real engine below torchrun, killed for real."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from ft_service.rundir.attempt import Attempt
from ft_service.rundir.checkpoints import complete_checkpoints
from ft_service.rundir.directory import RunDir
from tests.e2e.kills import uninterrupted
from tests.support.service import Server, eventually, processes_of, submit, wait_until
from tests.support.training.attempts import adapter, losses
from tests.support.training.models import save_chat_base, save_chats

STEPS = 30


@pytest.fixture
def ranks() -> int:
    """How many an engine has, and so the slots of the server."""
    return 2


@pytest.fixture
def server(tmp_path: Path, ranks: int) -> Iterator[Server]:
    models = tmp_path / "models"
    save_chat_base(models / "tiny")
    home = tmp_path / "home"
    home.mkdir()
    server = Server(home, models, ranks, FT_ENGINE_JOBS="4")
    server.start()
    yield server
    server.stop()


def job_of(client: openai.OpenAI, data: Path, rank: int, steps: int = STEPS, ranks: int = 2) -> str:
    training = {"max_steps": steps, "per_device_train_batch_size": 4, "learning_rate": 1e-3}
    extra: dict[str, Any] = {
        "precision": {"default": "nf4", "compute": "fp32"},
        "lora": {"r": rank, "lora_dropout": 0.1},
        "training": training,
        "checkpoint": {"save_steps": 5},
        "distributed": {"nproc_per_node": ranks, "replicate": 1},
    }
    return submit(client, data, steps=steps, seed=rank, extra=extra).id


def engines_of(run: RunDir) -> list[str]:
    """Names of the engines in which a job's attempts had seats."""
    found = []
    for number in range(1, 10):
        start = Attempt(run, number).readable_start()
        if start is not None:
            found.append(Path(start.engine).name if start.engine else "")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1])
def test_jobs_share_an_engine(server: Server, ranks: int, tmp_path: Path) -> None:
    client = server.client()
    data = tmp_path / "train.jsonl"
    save_chats(data, 16)
    job_of(client, data, 1, 2, ranks)  # holds the slot while the others come together
    jobs = [job_of(client, data, rank, 3, ranks) for rank in (2, 4)]
    for job in jobs:
        wait_until(client, job, "succeeded")
    (first,), (second,) = (engines_of(server.run(job)) for job in jobs)
    assert first
    assert first == second


@pytest.mark.slow
def test_jobs_share_an_engine_that_is_killed_and_end_as_if_each_had_been_alone(
    server: Server, tmp_path: Path
) -> None:
    client = server.client()
    data = tmp_path / "train.jsonl"
    save_chats(data, 32)
    job_of(client, data, 1, steps=2)  # holds the slots while the others come together
    jobs = [job_of(client, data, rank) for rank in (2, 4, 8)]
    runs = [server.run(job) for job in jobs]
    assert eventually(lambda: all(complete_checkpoints(run) for run in runs))
    engine = engines_of(runs[0])[0]
    assert engine
    assert all(engines_of(run)[0] == engine for run in runs), "one engine for all"
    ranks = processes_of(RunDir(server.home / "engines" / engine))["rank"]
    assert len(ranks) == 2
    assert not any(processes_of(run)["rank"] for run in runs), "its two ranks are all that train"
    os.kill(ranks[1], signal.SIGKILL)
    for job, run in zip(jobs, runs, strict=True):
        done: Any = wait_until(client, job, "succeeded")
        assert done.attempt >= 2
        alone = uninterrupted(run, tmp_path / "alone" / job)
        assert losses(run) == losses(alone)
        whole = adapter(alone)
        assert all(torch.equal(tensor, whole[name]) for name, tensor in adapter(run).items())
