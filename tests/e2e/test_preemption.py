"""A job makes room for one of higher priority, and later has the result that it would have had."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import load_file

from ft_service.rundir.attempt import Attempt, last_attempt
from tests.e2e.kills import uninterrupted
from tests.support.service import Server, submit, wait_until, wait_until_step
from workers.output.report import metrics_of_all_attempts


@pytest.fixture
def server(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Where a job may be displaced as soon as it trains."""
    monkeypatch.setenv("FT_PREEMPT_AFTER_MINUTES", "0")
    server = Server(tmp_path / "home", models)
    server.home.mkdir()
    server.start()
    yield server
    assert server.stop() == 0


def messages(client: openai.OpenAI, job_id: str) -> list[str]:
    return [event.message for event in client.fine_tuning.jobs.list_events(job_id)]


@pytest.mark.slow
def test_a_displaced_job_has_bitwise_the_result_that_it_would_have_had(
    server: Server, data: Path, tmp_path: Path
) -> None:
    client = server.client()
    low = submit(client, data, steps=40)
    wait_until_step(client, low.id, 3)
    high = submit(client, data, steps=2, extra={"priority": 5})
    wait_until(client, high.id, "succeeded")
    displaced: Any = client.fine_tuning.jobs.retrieve(low.id)
    assert displaced.attempt == 1 or displaced.status == "running"
    wait_until(client, low.id, "succeeded")
    run = server.run(low.id)
    assert last_attempt(run) == 2
    assert any(
        "make room for a job of priority 5" in message for message in messages(client, low.id)
    )
    whole = uninterrupted(run, tmp_path / "whole")
    ours, theirs = (
        load_file(one.path("adapter/adapter_model.safetensors")) for one in (run, whole)
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.mark.slow
def test_one_that_may_goes_on_beside_it_on_fewer_ranks_within_a_millionth(
    server: Server, data: Path, tmp_path: Path
) -> None:
    client = server.client()
    elastic = {
        "distributed": {"nproc_per_node": "1:2"},
        "precision": {"default": "nf4", "compute": "fp32"},
    }
    low = submit(client, data, steps=60, extra=elastic)
    wait_until_step(client, low.id, 3)
    high = submit(
        client, data, steps=400, extra={"priority": 5, "distributed": {"nproc_per_node": 1}}
    )
    wait_until(client, low.id, "succeeded")
    urgent: Any = client.fine_tuning.jobs.retrieve(high.id)
    client.fine_tuning.jobs.cancel(high.id)
    wait_until(client, high.id, "cancelled")
    assert urgent.status == "running", "it was not waited for"
    run = server.run(low.id)
    starts = [Attempt(run, number).read_start() for number in (1, 2)]
    assert [start and start.world_size for start in starts] == [2, 1]
    assert last_attempt(run) == 2
    rows, truth = (
        metrics_of_all_attempts(*one)
        for one in ((run, 2), (uninterrupted(run, tmp_path / "whole"), 1))
    )
    assert [(row.step, row.tokens) for row in rows] == [(row.step, row.tokens) for row in truth]
    assert [row.train_loss for row in rows] == pytest.approx(
        [row.train_loss for row in truth], rel=1e-6
    )
