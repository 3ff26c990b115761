"""/metrics: who may read it, and that it says what has happened, on both databases."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from api.http.prometheus import ReadStatistics, exposition
from ft_service.errors import UnavailableError
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Job, Phase, State
from ft_service.meters import MOST_PROJECTS, OTHERS, Meters
from ft_service.rundir.attempt_outcome import exit_of
from ft_service.rundir.documents import ExitReason
from ft_service.rundir.events import Event, Metrics, write_segment
from ft_service.settings import Settings
from ft_service.spec import StoredSpec
from ft_service.storage.locations import Places
from ft_service.store.records import (
    NewKey,
    ProjectStatistics,
    Scope,
    ServiceStatistics,
    TenantLimits,
)
from tests.support.attempts import wait_for
from tests.support.creating import create_job
from tests.support.fake_launcher import FakeLauncher
from tests.support.reconciling import new_reconciler, spec_of
from tests.support.rest.refusals import check_error
from tests.support.rest.service import Service, put

SLACK = 100.0
"""Seconds that a test may take between writing a time and reading an age."""


def samples(service: Service, key: str | None = None) -> dict[tuple[str, tuple[str, ...]], float]:
    """(name, label values) → value, without the buckets of histograms, which are most of it and
    slow to parse; and read from the database now.
    """
    vars(service.app.state.services).pop("statistics", None)
    answer = service.http("GET", "/metrics", key=key)
    assert answer.status_code == 200, answer.text
    lines = (line for line in answer.text.splitlines(keepends=True) if "_bucket{" not in line)
    families = text_string_to_metric_families("".join(lines))
    return {
        (s.name, tuple(v for _, v in sorted(s.labels.items()))): s.value
        for family in families
        for s in family.samples
    }


def test_jobs_slots_and_requests_are_counted(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    job_id = client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    put(service, job_id, state=State.FAILED, reason=Reason.WORKER_ERROR, attempt=1, finished_at=1e9)
    client.fine_tuning.jobs.create(model="tiny", training_file=training_file)
    service.http("GET", "/nowhere/at/all")
    found = samples(service)
    assert found["ft_jobs", ("failed",)] == 1
    assert found["ft_jobs", ("validating_files",)] == 1
    assert found["ft_jobs_finished_total", ("worker_error", "failed")] == 1
    assert (
        found["http_server_request_duration_seconds_count", ("POST", "200", "/v1/fine_tuning/jobs")]
        >= 2
    )
    assert found["http_server_request_duration_seconds_count", ("GET", "404", "none")] >= 1, (
        "no label for each made-up path"
    )
    assert [value for (name, _), value in found.items() if name == "ft_slots"] == [4]
    assert found["ft_disk_free_bytes", ()] > 0
    assert found["ft_file_bytes", ()] > 0
    text = service.http("GET", "/metrics").text
    assert job_id not in text
    assert "tiny" not in text


def test_work_is_counted_by_kind_by_project_and_by_its_end(service: Service) -> None:
    before = samples(service)
    service.http("POST", "/v1/fine_tuning/jobs", json={"model": "x" * 10_000})
    found = samples(service)

    def grown(name: str, *labels: str) -> float:
        return found[name, labels] - before.get((name, labels), 0.0)

    assert grown("ft_work_ended_total", "threads", "done") >= 1
    assert grown("ft_work_ended_total", "keys", "done") >= 1
    assert grown("ft_work_ended_total", "parsing", "done") == 1
    assert grown("ft_work_cpu_seconds_total", "threads", "default") > 0
    assert found["ft_work_waiting", ("parsing", "")] == 0
    assert ("ft_work_running", ("keys", "")) in found


def add_job(
    service: Service, job_id: str, state: State = State.VALIDATING, phase: Phase | None = None
) -> Job:
    job = Job(
        id=job_id,
        project_id="default",
        created_at=0.0,
        request={"training_file": "file-1"},
        stored_spec=StoredSpec.of(spec_of(job_id)),
        state=state,
        phase=phase,
        slots=2,
    )
    return create_job(service.store, job)


def made_older(service: Service, column: str, **ages: float) -> None:
    """Set a time of jobs back: `job_2=50.0` for the one with the id `job-2`, in seconds."""
    now = service.store.now()
    for job_id, age in ages.items():
        service.sql(
            f"UPDATE jobs SET {column} = :at WHERE id = :id",
            at=now - age,
            id=job_id.replace("_", "-"),
        )


def test_the_queue_is_as_old_as_the_job_that_waits_longest(service: Service) -> None:
    assert samples(service)["ft_queue_oldest_seconds", ()] == 0
    add_job(service, "job-1", State.QUEUED)
    add_job(service, "job-2", State.QUEUED)
    add_job(service, "job-3", State.RUNNING, Phase.TRAINING)
    made_older(service, "queued_at", job_1=500.0, job_2=50.0, job_3=5000.0)
    assert 500 <= samples(service)["ft_queue_oldest_seconds", ()] < 500 + SLACK


def test_the_reconciler_lags_by_the_job_that_was_looked_at_longest_ago(service: Service) -> None:
    assert samples(service)["ft_reconciler_lag_seconds", ()] == 0
    add_job(service, "job-1", State.RUNNING, Phase.TRAINING)
    add_job(service, "job-2")
    add_job(service, "job-3")  # was not looked at yet
    add_job(service, "job-4", State.QUEUED)
    add_job(service, "job-5", State.PAUSED)
    made_older(service, "looked_at", job_1=50.0, job_2=500.0, job_4=5000.0, job_5=5000.0)
    assert 500 <= samples(service)["ft_reconciler_lag_seconds", ()] < 500 + SLACK
    service.sql("UPDATE jobs SET state = 'cancelled' WHERE id = 'job-2'")
    assert 50 <= samples(service)["ft_reconciler_lag_seconds", ()] < 50 + SLACK


def test_webhooks_wait_until_they_are_made_or_given_up(
    service: Service, client: openai.OpenAI
) -> None:
    client.webhooks.create(
        name="a", url="https://example.com/hook", event_types=["fine_tuning.job.cancelled"]
    )
    for number in range(4):
        add_job(service, f"job-{number}")
        client.fine_tuning.jobs.cancel(f"job-{number}")
    assert samples(service)["ft_webhooks_waiting", ()] == 4
    delivered, failed, tried, _ = service.store.webhooks.claim_deliveries(
        limit=4, lease_seconds=60.0
    )
    service.store.webhooks.settle_delivery(delivered, error=None, retry_seconds=None)
    service.store.webhooks.settle_delivery(failed, error="410", retry_seconds=None)
    service.store.webhooks.settle_delivery(tried, error="500", retry_seconds=60.0)
    assert samples(service)["ft_webhooks_waiting", ()] == 2


def test_a_jobs_way_through_the_reconciler_is_counted(service: Service) -> None:
    launcher = FakeLauncher(2)
    places = Places(service.settings.home)
    meters = service.app.state.services.meters
    reconciler = new_reconciler(service.settings.home, service.store, launcher, meters=meters)
    add_job(service, "job-1", State.QUEUED)
    made_older(service, "queued_at", job_1=700.0)
    before = samples(service)

    def risen(name: str, *labels: str) -> float:
        return samples(service)[name, labels] - before.get((name, labels), 0.0)

    def launched() -> bool:
        reconciler.step()
        return bool(launcher.started)

    wait_for(launched)
    assert (risen("ft_attempts_started_total"), risen("ft_queue_wait_seconds_count")) == (1, 1)
    assert 700 <= risen("ft_queue_wait_seconds_sum") < 700 + SLACK
    assert risen("ft_event_lag_seconds_count") == 0, (
        "what the service itself says was not on its way"
    )

    wrote = time.time() - 500.0
    metrics = Metrics(step=1, total_steps=9, tokens=30)
    events = [
        Event(time=wrote, kind="metrics", message="step 1", metrics=metrics),
        Event(
            time=wrote + 200.0,
            kind="metrics",
            message="step 2",
            metrics=metrics.model_copy(update={"tokens": 40}),
        ),
    ]
    write_segment(places.run("job-1"), 1, 0, events)
    wait_for(lambda: reconciler.step() and risen("ft_event_lag_seconds_count") > 0)
    assert 300 <= risen("ft_event_lag_seconds_sum") < 300 + SLACK
    assert (risen("ft_trained_steps_total"), risen("ft_trained_tokens_total")) == (2, 70)

    launcher.end("job-1", 1, exit_of(ExitReason.STALLED, "It stalled."))
    wait_for(lambda: reconciler.step() and len(launcher.cleaned) > 0)
    assert risen("ft_attempts_ended_total", "stalled") == 1


def test_only_keys_of_scope_metrics_and_admin_read_them(service: Service) -> None:
    _, scraper = service.store.keys.create_key(
        NewKey(project_id="default", name="prometheus", scope="metrics")
    )
    _, user = service.store.keys.create_key(NewKey(project_id="default", name="u", scope="user"))
    assert samples(service, scraper)
    assert service.http("GET", "/metrics", key=user).status_code == 403
    assert service.http("GET", "/metrics", headers={"authorization": ""}).status_code == 401
    with pytest.raises(openai.PermissionDeniedError, match="reads /metrics and nothing else"):
        service.client(scraper).models.list()


@pytest.mark.parametrize("scope", ["admin", "metrics"])
def test_keys_of_other_organisations_do_not_read_the_numbers_of_all(
    service: Service, scope: Scope
) -> None:
    other = service.store.projects.create_project(
        name="rival", organization="rival", limits=TenantLimits()
    )
    _, key = service.store.keys.create_key(NewKey(project_id=other.id, name="k", scope=scope))
    assert check_error(service.http("GET", "/metrics", key=key), 403)
    team = service.store.projects.create_project(
        name="team", organization=service.settings.organization, limits=TenantLimits()
    )
    _, key = service.store.keys.create_key(NewKey(project_id=team.id, name="k", scope=scope))
    assert samples(service, key)


def test_an_operator_may_open_them(service: Service) -> None:
    settings = service.settings.model_copy(update={"metrics_open": True})
    service.use(settings)
    assert service.http("GET", "/metrics", headers={"authorization": ""}).status_code == 200


def test_without_a_database_open_metrics_say_so_and_are_the_process_s_own(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.use(service.settings.model_copy(update={"metrics_open": True}))
    assert samples(service)["ft_database_up", ()] == 1

    def gone() -> None:
        raise UnavailableError("The database does not answer.")

    monkeypatch.setattr(service.store, "statistics", gone)
    found = samples(service)
    assert found["ft_database_up", ()] == 0
    assert found["ft_disk_free_bytes", ()] > 0
    assert found["http_server_request_duration_seconds_count", ("GET", "200", "/metrics")] >= 1
    assert not [name for name, _ in found if name.startswith(("ft_jobs", "ft_queue_oldest"))], (
        "they are not known"
    )


def test_slots_queue_and_failures_are_counted_by_project(
    service: Service, client: openai.OpenAI
) -> None:
    service.store.projects.ensure_project("proj_2", "second")
    add_job(service, "job-1", State.QUEUED)
    made_older(service, "queued_at", job_1=500.0)
    for number in range(2):
        spec = StoredSpec.of(spec_of(f"other-{number}"))
        job = Job(
            id=f"other-{number}",
            project_id="proj_2",
            created_at=0.0,
            request={"training_file": "file-1"},
            stored_spec=spec,
            state=State.QUEUED,
            slots=2,
        )
        create_job(service.store, job)
    launcher = FakeLauncher(2)
    meters = service.app.state.services.meters
    reconciler = new_reconciler(service.settings.home, service.store, launcher, meters=meters)
    wait_for(lambda: reconciler.step() and bool(launcher.started))
    found = samples(service)
    (place,) = launcher.started
    holder = "default" if place[0] == "job-1" else "proj_2"
    assert found["ft_project_slots_in_use", (holder,)] == 2
    assert found["ft_project_jobs", (holder, "running")] == 1
    waiting = sum(found.get(("ft_project_jobs", (of, "queued")), 0) for of in ("default", "proj_2"))
    assert waiting == 2
    ends = exit_of(ExitReason.PERMANENT_ERROR, "No.")
    launcher.end(*place, ends)
    failed = ("ft_project_jobs_failed_total", (holder, "permanent_error"))
    wait_for(lambda: reconciler.step() and samples(service).get(failed, 0) == 1)
    assert found["process_open_fds", ()] > 0
    assert found["ft_database_connections_limit", ()] == service.store.most_connections
    assert found["ft_database_connections", ()] >= 0


class CountedStore:
    """A store whose statistics take a second."""

    most_connections = 1
    connections = 0

    def __init__(self) -> None:
        self.at = 0.0
        self.reads = 0

    def statistics(self) -> ServiceStatistics:
        self.at += 1.0
        self.reads += 1
        projects = {
            f"proj_{number}": ProjectStatistics(
                jobs={"queued": number}, oldest_queued_seconds=number, slots=1
            )
            for number in range(3 * MOST_PROJECTS)
        }
        return ServiceStatistics(
            jobs={},
            oldest_queued_seconds=0.0,
            overdue_seconds=0.0,
            slots_in_use={},
            engines=0,
            seats=0,
            file_bytes=0,
            webhooks_waiting=0,
            projects=projects,
        )

    def now(self) -> float:
        return self.at


def test_slow_statistics_are_read_a_twentieth_of_the_time(tmp_path: Path) -> None:
    store = CountedStore()
    read = ReadStatistics(cast("Any", store), clock=lambda: store.at)
    while store.at < 1000.0:
        assert read.read()[1] == 1.0
        store.at += 0.5
    assert 40 <= store.reads <= 1000 / 20


def test_of_many_projects_those_with_most_have_series_of_their_own(tmp_path: Path) -> None:
    store = CountedStore()
    meters = Meters()
    for number in range(2 * MOST_PROJECTS):
        meters.count_failure(f"proj_{number}", "stalled")
    settings = Settings(home=tmp_path)
    text = exposition(meters, settings, ReadStatistics(cast("Any", store))).decode()
    lines = [line for line in text.splitlines() if line.startswith("ft_project_jobs{")]
    assert len(lines) == MOST_PROJECTS + 1
    counts = [float(line.rsplit(" ", 1)[1]) for line in lines]
    assert sum(counts) == sum(range(3 * MOST_PROJECTS))
    failed = [
        line for line in text.splitlines() if line.startswith("ft_project_jobs_failed_total{")
    ]
    assert len(failed) == MOST_PROJECTS + 1
    assert f'{{project="{OTHERS}",reason="stalled"}} {MOST_PROJECTS}.0' in failed[-1]
