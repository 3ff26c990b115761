"""A sweep with real workers: jobs that share what is made of base and data, two stopped at a
checkpoint, the best one named.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.service import SECONDS, Server, upload

SWEEPS = "/fine_tuning/sweeps"
RATES = [1e-7, 1e-2, 1e-6, 3e-3]


@pytest.mark.slow
def test_a_sweep_over_the_learning_rate_stops_the_hopeless_and_names_the_best(
    server: Server, data: Path
) -> None:
    client = server.client()
    file = upload(client, data)
    body = {
        "model": "tiny",
        "training_file": file,
        "validation_file": file,
        "seed": 3,
        "precision": {"default": "nf4"},
        "lora": {"r": 4},
        "training": {
            "max_steps": 24,
            "batch_size": 16,
            "lr_scheduler_type": "constant",
            "eval_steps": 24,
        },
        "distributed": {"nproc_per_node": 1},
        "checkpoint": {"save_steps": 100},
        "sweep": {"training.learning_rate": RATES, "halving": {"eta": 2, "min_share": 0.25}},
    }
    sweep: Any = client.post(SWEEPS, body=body, cast_to=object)
    deadline = time.monotonic() + SECONDS
    while sweep["status"] == "running":
        assert time.monotonic() < deadline, sweep
        time.sleep(0.5)
        sweep = client.get(f"{SWEEPS}/{sweep['id']}", cast_to=object)
    by_rate = {job["values"]["training.learning_rate"]: job for job in sweep["jobs"]}
    assert sweep["status"] == "succeeded"
    assert sweep["best"]["values"]["training.learning_rate"] in (1e-2, 3e-3), sweep
    losses = [job["valid_loss"] for job in sweep["jobs"]]
    assert losses == sorted(losses), "best first"
    assert sweep["jobs"][0]["id"] == sweep["best"]["job_id"]
    assert sweep["best"]["valid_loss"] < by_rate[1e-7]["valid_loss"] - 0.01, (
        "it has learned what the others have not"
    )

    stopped = [job for job in sweep["jobs"] if job["reason"] == "sweep_stopped"]
    assert {1e-7, 1e-6} & {job["values"]["training.learning_rate"] for job in stopped}, sweep
    for job in stopped:
        assert job["status"] == "cancelled"
        assert job["stopped"].startswith("stopped by the sweep: after "), job
        assert job["step"] < 24
        [point] = client.fine_tuning.jobs.checkpoints.list(job["id"])
        assert point.step_number >= 6, "it keeps what it stopped at, and can go on from there"

    home = server.home
    assert len(list((home / "tokens").glob("*.*"))) == 1, "the tokens of one file, made once"
    assert (
        len([entry for entry in (home / "cache").iterdir() if (entry / "index.json").exists()]) == 1
    ), "one quantised base"
    told = [
        e.message
        for job in sweep["jobs"]
        for e in client.fine_tuning.jobs.list_events(job["id"], limit=100).data
    ]
    assert sum("The quantised base was read from the cache" in message for message in told) >= 2
    assert sum(message.startswith("Best of the 4 jobs of sweep") for message in told) == 1
