"""Sweeps over the wire: created whole or refused with all that is wrong, shown best first,
cancelled and deleted as one.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from ft_service.control.sweep_loop import move_sweeps
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Phase, State
from ft_service.rundir.documents import Result
from ft_service.store.records import JobChange, NewKey
from tests.support.rest.service import LINE, Service, run_dir

SWEEPS = "/v1/fine_tuning/sweeps"


@pytest.fixture
def body(training_file: str) -> dict[str, Any]:
    tried = {"training.learning_rate": ["1e-4", 1e-3], "lora.r": [4, 8]}
    return {
        "model": "tiny",
        "training_file": training_file,
        "validation_file": training_file,
        "sweep": tried,
    }


def come_to(service: Service, courses: dict[str, float], state: State, reason: Reason) -> None:
    """Write to jobs what a reconciler would: validation losses, and how they ended."""
    while courses:
        claim = service.store.leases.claim(
            host="h", owner="test", lease_seconds=60.0, idle_seconds=0.0
        )
        assert claim is not None
        loss = courses.pop(claim.job.id, None)
        course = {
            "step": 20,
            "total_steps": 20,
            "valid_loss": loss,
            "best_loss": loss,
            "best_step": 10,
            "rungs": {},
        }
        changes: dict[str, Any] = {
            "state": state,
            "reason": reason,
            "attempt": 1,
            "finished_at": 1e9,
        }
        changed = claim.job if loss is None else replace(claim.job, sweep_course=course, **changes)
        assert service.store.leases.apply(claim, JobChange(job=changed))


def test_a_sweep_is_created_with_all_its_jobs(
    service: Service, client: openai.OpenAI, body: dict[str, Any]
) -> None:
    answer = service.http("POST", SWEEPS, json=body)
    assert answer.status_code == 200, answer.text
    sweep = answer.json()
    assert (sweep["object"], sweep["status"], sweep["counts"]) == (
        "fine_tuning.sweep",
        "running",
        {"validating_files": 4},
    )
    assert sweep["options"] == ["training.learning_rate", "lora.r"]
    assert (sweep["eta"], sweep["rungs"], sweep["best"]) == (2, [0.25, 0.5], None)
    assert [job["values"] for job in sweep["jobs"]] == [
        {"training.learning_rate": rate, "lora.r": r} for rate in (1e-4, 1e-3) for r in (4, 8)
    ]
    job: Any = client.fine_tuning.jobs.retrieve(sweep["jobs"][3]["id"])
    assert job.sweep == {
        "id": sweep["id"],
        "values": {"training.learning_rate": 1e-3, "lora.r": 8},
        "stopped": None,
    }
    assert (job.lora["r"], job.training["learning_rate"]) == (8, 1e-3)
    events = client.fine_tuning.jobs.list_events(job.id).data
    assert any(
        f"One of the 4 jobs of sweep {sweep['id']}: training.learning_rate = 0.001, lora.r = 8."
        in e.message
        for e in events
    )
    asked = service.http("GET", f"/v1/fine_tuning/jobs/{job.id}/request").json()
    assert "sweep" not in asked, "it can be repeated alone"
    assert asked["lora"] == {"r": 8}
    assert service.store.jobs.get_job("default", job.id).spec.rungs == (0.25, 0.5)
    assert service.http("GET", SWEEPS).json()["data"] == [sweep]


def test_nothing_is_created_where_anything_is_wrong(
    service: Service, client: openai.OpenAI, body: dict[str, Any]
) -> None:
    def refusal(**changes: Any) -> dict[str, Any]:
        answer = service.http("POST", SWEEPS, json={**body, **changes})
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]

    many = refusal(sweep={"lora.r": [4, 0], "lora.rank": [1]}, training={"n_epochs": 0})
    assert many["param"] == "sweep.lora.rank"
    assert all(
        words in many["message"] for words in ("did you mean lora.r?", "training.n_epochs = 0")
    )
    unmatched = refusal(sweep={"lora.target_modules": [["q_proj"], ["nothing"], ["nowhere"]]})[
        "message"
    ]
    assert all(f"'{name}' matches no linear layer" in unmatched for name in ("nothing", "nowhere"))
    assert refusal(validation_file=None)["param"] == "validation_file"
    service.store.projects.update_project("default", limits={"max_queued": 3})
    _, key = service.store.keys.create_key(
        NewKey(project_id="default", name="limited", scope="submit")
    )
    beyond = service.http("POST", SWEEPS, json=body, key=key)
    assert (beyond.status_code, beyond.json()["error"]["code"]) == (429, "queue_limit")
    assert client.fine_tuning.jobs.list().data == []
    assert service.http("GET", SWEEPS).json()["data"] == []


def test_a_sweep_is_shown_best_first_and_names_its_best(
    service: Service, body: dict[str, Any]
) -> None:
    sweep = service.http("POST", SWEEPS, json=body).json()
    ids = [job["id"] for job in sweep["jobs"]]
    come_to(service, {ids[1]: 2.0, ids[2]: 1.0}, State.SUCCEEDED, Reason.SUCCEEDED)
    shown = service.http("GET", f"{SWEEPS}/{sweep['id']}").json()
    assert [job["id"] for job in shown["jobs"]] == [ids[2], ids[1], ids[0], ids[3]]
    assert shown["best"]["job_id"] == ids[2]
    assert shown["best"]["fine_tuned_model"].endswith(ids[2].removeprefix("ftjob-"))
    come_to(service, {ids[0]: 0.5, ids[3]: 0.25}, State.FAILED, Reason.PERMANENT_ERROR)
    move_sweeps(service.store)
    over = service.http("GET", f"{SWEEPS}/{sweep['id']}").json()
    assert (over["status"], over["best"]["job_id"], over["best"]["step"]) == (
        "succeeded",
        ids[2],
        10,
    )
    assert over["finished_at"] is not None


def test_a_sweep_is_cancelled_and_deleted_as_one(
    service: Service, client: openai.OpenAI, body: dict[str, Any]
) -> None:
    sweep = service.http("POST", SWEEPS, json=body).json()
    path = f"{SWEEPS}/{sweep['id']}"
    assert service.http("DELETE", path).json()["error"]["code"] == "invalid_state"
    assert service.http("POST", f"{path}/cancel").json()["counts"] == {"cancelled": 4}
    assert {job.status for job in client.fine_tuning.jobs.list()} == {"cancelled"}
    move_sweeps(service.store)
    assert service.http("GET", path).json()["status"] == "cancelled"
    assert service.http("DELETE", path).json() == {
        "id": sweep["id"],
        "object": "fine_tuning.sweep",
        "deleted": True,
    }
    assert service.http("GET", path).status_code == 404
    assert len(client.fine_tuning.jobs.list().data) == 4, "jobs stay"


def test_a_job_of_a_sweep_that_has_left_its_result_is_not_cancelled_with_it(
    service: Service, body: dict[str, Any]
) -> None:
    sweep = service.http("POST", SWEEPS, json=body).json()
    path = f"{SWEEPS}/{sweep['id']}"
    found = service.store.leases.claim(host="h", owner="test", lease_seconds=60.0, idle_seconds=0.0)
    assert found is not None
    running = replace(found.job, state=State.RUNNING, phase=Phase.TRAINING, attempt=1, host="h")
    assert service.store.leases.apply(found, JobChange(job=running))
    result = Result(attempt=1, steps=1, trained_tokens=7, train_loss=2.0, valid_loss=None)
    run_dir(service, running.id).write("result.json", result)
    assert service.http("POST", f"{path}/cancel").json()["counts"] == {"cancelled": 3, "running": 1}
    refused = service.http("POST", f"/v1/fine_tuning/jobs/{running.id}/cancel")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_state")


def test_a_repeated_request_makes_no_second_sweep(service: Service, body: dict[str, Any]) -> None:
    keyed = {"idempotency-key": "once"}
    first = service.http("POST", SWEEPS, json=body, headers=keyed).json()
    assert service.http("POST", SWEEPS, json=body, headers=keyed).json()["id"] == first["id"]
    assert (
        service.http("POST", SWEEPS, json=body, headers={"x-stainless-retry-count": "1"}).json()[
            "id"
        ]
        == first["id"]
    )
    other = service.http("POST", SWEEPS, json={**body, "seed": 1}, headers=keyed).json()
    assert other["error"]["code"] == "idempotency_key_reused"
    assert service.http("POST", SWEEPS, json=body).json()["id"] != first["id"]


def test_auto_is_resolved_to_numbers_by_the_samples(
    service: Service, client: openai.OpenAI
) -> None:
    many = client.files.create(file=("many.jsonl", LINE.encode() * 5000), purpose="fine-tune").id
    auto: Any = {"n_epochs": "auto", "batch_size": "auto", "learning_rate_multiplier": "auto"}
    job: Any = client.fine_tuning.jobs.create(
        model="tiny",
        training_file=many,
        method={"type": "supervised", "supervised": {"hyperparameters": auto}},
    )
    assert (job.hyperparameters.n_epochs, job.hyperparameters.batch_size) == (3, 8)
    assert job.method.supervised.hyperparameters.batch_size == 8
    assert isinstance(job.hyperparameters.learning_rate_multiplier, float)
    assert job.chosen["training.batch_size"].startswith("0.2 % of 5,000 samples")
    assert job.chosen["training.n_epochs"] == "usual for 5,000 samples"
    few = client.files.create(file=("few.jsonl", LINE.encode() * 12), purpose="fine-tune").id
    small: Any = client.fine_tuning.jobs.create(
        model="tiny", training_file=few, hyperparameters=auto
    )
    assert (small.hyperparameters.n_epochs, small.hyperparameters.batch_size) == (8, 4)
    said: Any = client.fine_tuning.jobs.create(model="tiny", training_file=few)
    assert (said.hyperparameters.n_epochs, said.hyperparameters.batch_size) == (3, 8), (
        "what is not asked for stays the usual"
    )


def test_the_page_shows_a_sweep_best_first_and_leads_to_its_comparison(
    service: Service, body: dict[str, Any]
) -> None:
    sweep = service.http("POST", SWEEPS, json={**body, "suffix": "rates"}).json()
    ids = [job["id"] for job in sweep["jobs"]]
    come_to(service, {ids[1]: 2.0, ids[2]: 1.0}, State.SUCCEEDED, Reason.SUCCEEDED)
    with httpx2.Client(base_url=service.url, trust_env=False, timeout=60.0) as browser:
        browser.post("/sign-in", data={"key": service.key})
        listed = browser.get("/sweeps").text
        shown = browser.get(f"/sweeps/{sweep['id']}").text
        part = browser.get(f"/page/live/sweeps/{sweep['id']}?seen=")
        empty = browser.get("/sweeps/ftsweep-none")
    assert f'href="/sweeps/{sweep["id"]}">rates</a>' in listed
    places = [
        shown.index(f'<a href="/jobs/{job_id}" class="mono small">{job_id}</a></td>')
        for job_id in (ids[2], ids[1], ids[0])
    ]
    assert places == sorted(places)
    assert html.escape(f"/compare?job={ids[2]}&job={ids[1]}") in shown, (
        "only those that have numbers"
    )
    assert "Best so far" in shown
    assert part.status_code == 200
    assert "<html" not in part.text
    assert empty.status_code == 404


def test_the_command_line_submits_shows_and_removes_a_sweep(
    service: Service, ft: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "data.jsonl").write_text(LINE * 3)
    spec = tmp_path / "sweep.yaml"
    spec.write_text(
        "model: tiny\ntraining_file: data.jsonl\nvalidation_file: data.jsonl\nsuffix: rates\n"
        "sweep: {training.learning_rate: [1e-4, 1e-3, 1e-2]}\n"
    )
    assert "No sweeps yet" in ft("sweep", "list")
    assert "with 3 jobs" in ft("sweep", "submit", str(spec))
    [sweep] = json.loads(ft("sweep", "list", "--json"))
    assert json.loads(ft("sweep", "show", "rates", "--json"))["id"] == sweep["id"], "by its suffix"
    ids = [job["id"] for job in sweep["jobs"]]
    come_to(service, {ids[1]: 2.0, ids[2]: 1.0}, State.SUCCEEDED, Reason.SUCCEEDED)
    head, titles, *rows, best = ft("sweep", "show", "last").splitlines()[:-1]
    assert head == f"{sweep['id']} on tiny: running (1 validating files, 2 succeeded)"
    assert titles.split() == [
        "JOB",
        "training.learning_rate",
        "STEP",
        "VALID",
        "AT",
        "STATUS",
        "WHY",
    ]
    assert rows[0].split() == [ids[2], "0.01", "20/20", "1.0000", "10", "succeeded"]
    assert rows[2].split()[:2] == [ids[0], "0.0001"]
    assert (
        best == f"Best so far: {ids[2]} with training.learning_rate = 0.01; validation loss 1.0000"
    )
    assert f"{sweep['id']}: training.learning_rate = 0.01" in ft("get", ids[2])
    assert "1 cancelled" in ft("sweep", "cancel", sweep["id"][:14])
    move_sweeps(service.store)
    assert "--yes" in ft("sweep", "rm", "last", code=64)
    assert "Removed" in ft("sweep", "rm", "last", "--keep-best", "--yes")
    assert "There is no sweep" in ft("sweep", "show", "last", code=1)
    assert "ft sweep submit" in ft("submit", str(spec), code=64), "as one job it is none"
    assert "ft sweep submit" in ft("run", str(spec), code=64)
