"""A real job pauses at a checkpoint once it has cost what it may, and goes on with more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from ft_service.rundir.checkpoints import complete_checkpoints
from tests.support.attempts import wait_for
from tests.support.service import SECONDS, Server, submit, wait_until, wait_until_step

pytestmark = pytest.mark.slow
EUR_A_SLOT_SECOND = 1.0


@pytest.fixture
def server(models: Path, tmp_path: Path) -> Iterator[Server]:
    prices = tmp_path / "prices.yaml"
    prices.write_text(f"currency: EUR\nslot_hour: {3600 * EUR_A_SLOT_SECOND}\n")
    server = Server(tmp_path / "home", models, FT_PRICES=str(prices))
    server.home.mkdir()
    server.start()
    yield server
    server.stop()


def of(client: openai.OpenAI, job_id: str) -> dict[str, Any]:
    return client.fine_tuning.jobs.retrieve(job_id).model_dump()


def resume(client: openai.OpenAI, job_id: str, max_cost: float | None) -> Any:
    body = None if max_cost is None else {"max_cost": max_cost}
    return client.post(f"/fine_tuning/jobs/{job_id}/resume", body=body, cast_to=object)


def test_a_job_pauses_at_its_cost_and_is_resumed_with_more(server: Server, data: Path) -> None:
    client = server.client()
    job = submit(client, data, steps=4000, extra={"max_cost": 500_000})
    wait_until_step(client, job.id, 8)
    running = of(client, job.id)
    limit = running["cost"]["value"] + 5.0
    resume(client, job.id, limit)  # a lower limit, of a job that runs
    paused = wait_until(client, job.id, "paused").model_dump()
    assert paused["reason"] == "cost_limit"
    assert paused["max_cost"] == pytest.approx(limit)
    assert paused["cost"]["value"] >= limit
    checkpoints = complete_checkpoints(server.run(job.id))
    stopped_at = paused["progress"]["step"]
    assert f"step-{stopped_at}-a1" in checkpoints
    with pytest.raises(openai.BadRequestError) as caught:
        resume(client, job.id, None)
    assert (caught.value.param, caught.value.code) == ("max_cost", "cost_limit")
    resume(client, job.id, 600_000)
    wait_until_step(client, job.id, stopped_at + 1, attempt=2)
    client.fine_tuning.jobs.cancel(job.id)
    wait_for(lambda: of(client, job.id)["phase"] is None, SECONDS)
    done = of(client, job.id)
    assert done["cost"]["value"] > paused["cost"]["value"]
    costs: Any = client.get("/organization/costs", cast_to=object)
    spent = sum(one["amount"]["value"] for day in costs["data"] for one in day["results"])
    assert spent == pytest.approx(done["cost"]["value"], abs=1e-6)
    used: Any = client.get("/organization/usage/fine_tuning", cast_to=object)
    seconds = sum(one["gpu_seconds"] for day in used["data"] for one in day["results"])
    assert spent == pytest.approx(seconds * EUR_A_SLOT_SECOND, abs=2e-6), "to the cent, and below"
