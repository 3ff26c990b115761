"""A job makes room for one of higher priority, and later has the result that it would have had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ft_service.rundir.attempt import last_attempt
from tests.e2e.kills import uninterrupted
from tests.support.service import Server, submit, wait_until, wait_until_step


@pytest.mark.slow
def test_a_displaced_job_has_bitwise_the_result_that_it_would_have_had(
    models: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FT_PREEMPT_AFTER_MINUTES", "0")
    server = Server(tmp_path / "home", models)
    server.home.mkdir()
    server.start()
    try:
        client = server.client()
        low = submit(client, data, steps=40)
        wait_until_step(client, low.id, 3)
        high = submit(client, data, steps=2, extra={"priority": 5})
        wait_until(client, high.id, "succeeded")
        displaced: Any = client.fine_tuning.jobs.retrieve(low.id)
        assert displaced.attempt == 1 or displaced.status == "running"
        wait_until(client, low.id, "succeeded")
        told = [event.message for event in client.fine_tuning.jobs.list_events(low.id)]
    finally:
        assert server.stop() == 0
    run = server.run(low.id)
    assert last_attempt(run) == 2
    assert any("make room for a job of priority 5" in message for message in told)
    whole = uninterrupted(run, tmp_path / "whole")
    ours, theirs = (load_file(one.path("adapter/adapter_model.safetensors")) for one in (run, whole))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
