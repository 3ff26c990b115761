"""Costs as clients see them, by the real `openai` client where it has them."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import State
from ft_service.rundir.documents import Desired
from ft_service.store.records import NewKey
from ft_service.store.tenants.usage import add_use
from tests.support.creating import create_job
from tests.support.records import new_job
from tests.support.rest.service import TRAINING, Service

PRICES = "currency: EUR\nslot_hour: 3.60\ngrams_per_kwh: 360\nhardware: {L4: 0.70}\n"
JOBS = "/v1/fine_tuning/jobs"


@pytest.fixture
def priced(configure: dict[str, Any], tmp_path: Path) -> None:
    configure["prices"] = tmp_path / "prices.yaml"
    configure["prices"].write_text(PRICES)


def create(client: openai.OpenAI, file: str, **extra: Any) -> dict[str, Any]:
    made = client.fine_tuning.jobs.create(model="tiny", training_file=file, extra_body=extra)
    return made.model_dump()


def spend(service: Service, job_id: str, cost: int, **more: Any) -> None:
    """Have a job cost so much, as the store would have written it."""
    values = {"cost": cost, "slot_seconds": cost / 1000, **more}
    written = ", ".join(f"{name} = :{name}" for name in values)
    service.sql(f"UPDATE jobs SET {written} WHERE id = :id", id=job_id, **values)
    [key] = service.store.keys.list_keys("default")
    use = {"slot_seconds": cost / 1000, "cost": cost, "joules": 7.2e6, "co2_grams": 720.0}
    with service.store.writing() as connection:
        add_use(connection, "default", key.id, service.store.now(), "EUR", **use)


@pytest.mark.usefixtures("priced")
def test_a_job_shows_what_it_cost_and_may_cost(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    made = create(client, training_file, max_cost=12.5)
    assert made["max_cost"] == 12.5
    assert made["cost"] == {"value": 0.0, "currency": "EUR"}
    assert made["energy"] is None
    stored = service.store.jobs.get_job("default", made["id"])
    assert (stored.max_cost, stored.price, stored.currency) == (12_500_000, 3_600_000, "EUR")
    spend(service, made["id"], 1_234_567, joules=3.6e6, co2_grams=360.0)
    shown = client.fine_tuning.jobs.retrieve(made["id"]).model_dump()
    assert shown["cost"] == {"value": 1.234567, "currency": "EUR"}
    assert shown["energy"] == {"joules": 3.6e6, "co2_grams": 360.0}
    now = service.store.now()
    changes = "state = 'running', slots = 2, taken_at = :at"
    service.sql(f"UPDATE jobs SET {changes} WHERE id = :id", at=now - 1000.0, id=made["id"])
    live = client.fine_tuning.jobs.retrieve(made["id"]).model_dump()
    assert 3.234567 <= live["cost"]["value"] < 3.5


def test_without_prices_there_are_no_costs_and_no_limits(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    assert create(client, training_file)["cost"] is None
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, training_file, max_cost=5)
    assert (caught.value.param, caught.value.code) == ("max_cost", "no_price")
    body = {"limits": {"max_cost_per_month": 5}}
    refused = service.http("POST", "/v1/organization/projects/default", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "no_price"


@pytest.mark.usefixtures("priced")
@pytest.mark.parametrize("limit", [0, -1, 2e9, "much", True])
def test_an_impossible_limit_is_refused(
    client: openai.OpenAI, training_file: str, limit: Any
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, training_file, max_cost=limit)
    assert caught.value.param == "max_cost"


@pytest.mark.usefixtures("priced")
def test_a_paused_job_is_resumed_with_more(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    job = create(client, training_file, max_cost=1)
    spend(service, job["id"], 1_000_000)
    paused = f"state = 'paused', desired = 'pause', reason = '{Reason.COST_LIMIT}'"
    service.sql(f"UPDATE jobs SET {paused} WHERE id = :id", id=job["id"])
    address = f"{JOBS}/{job['id']}/resume"
    for body in (None, {"max_cost": 1}):
        refused = service.http("POST", address, json=body)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "cost_limit"
    resumed = service.http("POST", address, json={"max_cost": 2.5}).json()
    assert (resumed["status"], resumed["max_cost"], resumed["reason"]) == ("queued", 2.5, None)
    # Also for a job that runs.
    assert service.http("POST", address, json={"max_cost": 9}).json()["max_cost"] == 9
    assert service.store.jobs.get_job("default", job["id"]).desired is Desired.RUN


@pytest.mark.usefixtures("priced")
def test_a_project_that_has_spent_its_month_starts_nothing(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    job = create(client, training_file)
    spend(service, job["id"], 5_000_000)
    service.sql("UPDATE jobs SET state = 'paused', desired = 'pause'")
    address = "/v1/organization/projects/default"
    changed = service.http("POST", address, json={"limits": {"max_cost_per_month": 5}}).json()
    assert changed["limits"]["max_cost_per_month"] == 5
    again = service.store.keys.create_key(NewKey(project_id="default", name="new", scope="submit"))[
        1
    ]
    with pytest.raises(openai.RateLimitError) as caught:
        create(service.client(again), training_file)
    assert caught.value.code == "insufficient_quota"
    resume = service.http("POST", f"{JOBS}/{job['id']}/resume", key=again)
    assert resume.json()["error"]["code"] == "insufficient_quota"
    service.http("POST", address, json={"limits": {"max_cost_per_month": 5.01}})
    later = service.store.keys.create_key(
        NewKey(project_id="default", name="newer", scope="submit")
    )[1]
    assert create(service.client(later), training_file)["status"] == "validating_files"


@pytest.mark.usefixtures("priced")
def test_costs_of_an_organization_are_those_of_openai(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    spend(service, create(client, training_file)["id"], 1_500_000)
    usage: Any = openai.OpenAI(
        base_url=f"{service.url}/v1",
        api_key="none",
        admin_api_key=service.key,
        max_retries=0,
        http_client=service.connections,
    ).admin.organization.usage
    start = int(time.time()) - 2 * 86_400
    plain = usage.costs(start_time=start)
    assert [len(bucket.results) for bucket in plain.data] == [0, 0, 1]
    [result] = plain.data[-1].results
    assert result.object == "organization.costs.result"
    assert result.amount.model_dump() == {"currency": "eur", "value": 1.5}
    assert (result.project_id, result.line_item) == (None, None)
    grouped = usage.costs(start_time=start, group_by=["project_id", "line_item", "api_key_id"])
    [result] = grouped.data[-1].results
    assert (result.project_id, result.quantity) == ("default", pytest.approx(1500 / 3600))
    assert result.line_item
    first = usage.costs(start_time=start, limit=1)
    assert (first.has_more, len(first.data)) == (True, 1)
    for wrong in ({"group_by": ["user_id"]}, {"line_items": ["x"]}, {"limit": 181}):
        with pytest.raises(openai.BadRequestError):
            usage.costs(start_time=start, **wrong)


@pytest.mark.usefixtures("priced")
def test_usage_and_its_table_have_costs_and_energy(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    spend(service, create(client, training_file)["id"], 1_500_000)
    answer = service.http("GET", "/v1/organization/usage/fine_tuning?limit=7").json()
    [result] = answer["data"][-1]["results"]
    assert result["cost"] == {"value": 1.5, "currency": "EUR"}
    assert (result["energy_joules"], result["co2_grams"]) == (7.2e6, 720.0)
    table = service.http("GET", "/v1/organization/usage/fine_tuning?format=csv").text
    [row] = [row for row in csv.DictReader(table.splitlines()) if row["currency"]]
    assert (row["cost"], row["currency"], row["energy_joules"]) == ("1.5", "EUR", "7200000.0")


@pytest.mark.usefixtures("priced")
def test_a_plan_says_what_it_costs(client: openai.OpenAI, service: Service) -> None:
    file = client.files.create(file=("a.jsonl", TRAINING * 40), purpose="fine-tune")
    body = {"model": "tiny", "training_file": file.id, "distributed": {"nproc_per_node": 2}}
    plan = service.http("POST", "/v1/fine_tuning/plan", json=body).json()
    likely = plan["time"]["seconds_likely"]
    assert plan["cost"]["currency"] == "EUR"
    assert plan["cost"]["likely"] == pytest.approx(2 * likely * 0.001, abs=1e-6)
    of_job = create(client, file.id, max_cost=0.000001, distributed={"nproc_per_node": 2})
    assert of_job["planned_cost"]["value"] > 0
    told = [event.message for event in service.store.jobs.list_events("default", of_job["id"]).data]
    assert any("max_cost" in message for message in told)


@pytest.mark.usefixtures("priced")
def test_a_sweep_shows_what_its_jobs_cost(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    sweep = {"lora.r": [4, 8]}
    body = {"model": "tiny", "training_file": training_file, "validation_split": 0.3}
    made = service.http("POST", "/v1/fine_tuning/sweeps", json={**body, "sweep": sweep}).json()
    assert made["cost"] == {"value": 0.0, "currency": "EUR"}
    for at, job in enumerate(made["jobs"]):
        values = {"cost": 1_000_001 * (at + 1), "joules": 5.0}
        service.sql(
            "UPDATE jobs SET cost = :cost, joules = :joules WHERE id = :id", id=job["id"], **values
        )
    shown = service.http("GET", f"/v1/fine_tuning/sweeps/{made['id']}").json()
    assert shown["cost"] == {"value": 3.000003, "currency": "EUR"}
    assert shown["energy"] == {"joules": 10.0, "co2_grams": None}
    assert sorted(job["cost"]["value"] for job in shown["jobs"]) == [1.000001, 2.000002]


@pytest.mark.usefixtures("priced")
def test_the_command_line_shows_costs_and_raises_limits(service: Service, ft: Any) -> None:
    values = {"max_cost": 2_000_000, "price": 3_600_000, "currency": "EUR", "cost": 1_250_000}
    job = create_job(
        service.store,
        new_job(
            project_id="default",
            state=State.PAUSED,
            desired=Desired.PAUSE,
            reason=Reason.COST_LIMIT,
            stored_spec=service.store.jobs.get_job("default", _any_job(service)).stored_spec,
            joules=7.2e6,
            co2_grams=720.0,
            **values,
        ),
    )
    assert "1.25 EUR" in ft("jobs")
    shown = ft("get", job.id)
    assert "1.25 EUR" in shown
    assert "2.00 kWh, 720 g of CO2" in shown
    assert ft("resume", job.id, "--max-cost", "5")
    assert service.store.jobs.get_job("default", job.id).max_cost == 5_000_000


def _any_job(service: Service) -> str:
    client = service.client()
    file = client.files.create(file=("any.jsonl", TRAINING), purpose="fine-tune")
    return create(client, file.id)["id"]
