"""Whatever happens in whatever order: a store, two hosts with a reconciler each, and attempts that
a test plays.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import text

from ft_service.errors import LimitError, SpecError
from ft_service.jobs.states import TERMINAL, Absent, Job, Running, State, Unknown
from ft_service.jobs.user_actions import Verb
from ft_service.rundir.attempt_outcome import exit_of
from ft_service.rundir.documents import Desired, ExitReason
from ft_service.spec import StoredSpec
from ft_service.store.records import NewJob, TenantLimits
from ft_service.store.sql import Store, open_store
from ft_service.store.tenants.usage import UsageQuery
from tests.support.attempts import wait_for
from tests.support.fake_launcher import FakeLauncher
from tests.support.reconciling import PROJECT, new_reconciler, new_store, spec_of

SLOTS = {"h0": 3, "h1": 2}
MAX_SLOTS = 3
MAX_QUEUED = 4
LIMITED = "limited"


class Installation(RuleBasedStateMachine):
    """Two projects, one of them with limits."""

    template: Path

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="ft-interleavings-"))
        shutil.copy(self.template, self.folder / "ft.db")
        self.store: Store = open_store(f"sqlite:///{self.folder / 'ft.db'}")
        self.launchers = {host: FakeLauncher(slots, host=host) for host, slots in SLOTS.items()}
        self.reconcilers = {
            host: new_reconciler(
                self.folder, self.store, launcher, preempt_after=0.0, lease_seconds=0.0
            )
            for host, launcher in self.launchers.items()
        }
        self.away: dict[str, dict[tuple[str, int], Any]] = {}
        self.accepted: list[str] = []

    def jobs(self) -> list[Job]:
        return self.store.jobs.jobs_by_id(self.accepted)

    def pick(self, number: int, *states: State) -> Job | None:
        found = [job for job in self.jobs() if not states or job.state in states]
        return found[number % len(found)] if found else None

    def alive(self) -> list[tuple[FakeLauncher, tuple[str, int]]]:
        seen = ((launcher, key) for launcher in self.launchers.values() for key in launcher.started)
        return [
            (launcher, key)
            for launcher, key in seen
            if isinstance(self.real(launcher, key), Running)
        ]

    def real(self, launcher: FakeLauncher, key: tuple[str, int]) -> Any:
        """What is true of an attempt, whether or not its host answers."""
        hidden = self.away.get(launcher.host, {})
        return hidden.get(key) or launcher._seen.get(key, Absent())

    @rule(
        project=st.sampled_from([PROJECT, LIMITED]),
        slots=st.integers(1, 3),
        priority=st.integers(0, 2),
    )
    def submit(self, project: str, slots: int, priority: int) -> None:
        job_id = f"ftjob-{len(self.accepted)}"
        spec = StoredSpec.of(spec_of(job_id))
        job = Job(
            id=job_id,
            project_id=project,
            created_at=0.0,
            request={},
            stored_spec=spec,
            state=State.VALIDATING,
            slots=slots,
            priority=priority,
        )
        waiting = sum(
            job.project_id == LIMITED and job.state in (State.VALIDATING, State.QUEUED)
            for job in self.jobs()
        )
        try:
            self.store.jobs.create_jobs(
                [NewJob(job, max_queued=MAX_QUEUED if project == LIMITED else None)]
            )
        except LimitError:
            assert waiting >= MAX_QUEUED, "refused without need"
        else:
            assert project != LIMITED or waiting < MAX_QUEUED, "one more waits than may"
            self.accepted.append(job_id)

    @rule(number=st.integers(0, 99), verb=st.sampled_from(list(Verb)))
    def ask(self, number: int, verb: Verb) -> None:
        job = self.pick(number)
        if job is not None:
            try:
                self.store.jobs.request(job.project_id, job.id, verb)
            except SpecError:
                assert job.state in TERMINAL

    @rule(host=st.sampled_from(sorted(SLOTS)), times=st.integers(1, 6))
    def step(self, host: str, times: int) -> None:
        for _ in range(times):
            self.reconcilers[host].step()

    @precondition(lambda self: self.alive())
    @rule(
        number=st.integers(0, 99),
        how=st.sampled_from(["report", "succeed", "fail", "lost", "stop", "unknown"]),
    )
    def happen(self, number: int, how: str) -> None:
        there = self.alive()
        launcher, key = there[number % len(there)]
        if launcher.host in self.away:
            return
        asked = any(
            (job_id, attempt) == key and control.desired is not Desired.RUN
            for job_id, attempt, control in launcher.signals
        )
        match how:
            case "report":
                launcher.report(*key)
            case "succeed":
                launcher.end(*key, exit_of(ExitReason.SUCCEEDED, ""), checkpoint_step=9)
            case "fail":
                launcher.end(
                    *key, exit_of(ExitReason.WORKER_ERROR, "broken"), checkpoint_step=key[1]
                )
            case "lost":
                launcher.end(*key, None)
            case "stop" if asked:
                launcher.end(*key, exit_of(ExitReason.STOPPED, "stopped"), checkpoint_step=key[1])
            case _:
                pass

    @rule(host=st.sampled_from(sorted(SLOTS)))
    def leave_or_return(self, host: str) -> None:
        """The host does not answer, or answers again."""
        launcher = self.launchers[host]
        if host in self.away:
            launcher._seen.update(self.away.pop(host))
        else:
            self.away[host] = dict(launcher._seen)
            for key in self.away[host]:
                launcher.set(*key, Unknown("away", 60.0))

    @rule()
    def lose_a_lease(self) -> None:
        """Somebody else has claimed a job, and is gone."""
        self.store.leases.claim(host="h0", owner="gone", lease_seconds=0.0, idle_seconds=0.0)

    @rule(number=st.integers(0, 99))
    def crash_in_a_turn(self, number: int) -> None:
        """A reconciler ends after it has acted, before it has written."""
        host = sorted(SLOTS)[number % 2]
        apply = self.store.leases.apply  # type: ignore[method-assign]
        self.store.leases.apply = lambda *_: False  # type: ignore[method-assign]
        try:
            self.reconcilers[host].step()
        finally:
            self.store.leases.apply = apply  # type: ignore[method-assign]

    @rule()
    def time_passes(self) -> None:
        with self.store.writing() as connection:
            connection.execute(text("UPDATE jobs SET not_before = 0"))

    @invariant()
    def a_job_has_one_attempt_at_a_time(self) -> None:
        alive = [key for _, key in self.alive()]
        assert len({job_id for job_id, _ in alive}) == len(alive)
        started = [key for launcher in self.launchers.values() for key in launcher.started]
        assert len(started) == len(set(started)), "an attempt was started twice"

    @invariant()
    def no_slot_is_held_twice_and_no_limit_exceeded(self) -> None:
        jobs = {job.id: job for job in self.jobs()}
        with self.store.reading() as connection:
            held = connection.execute(
                text(
                    "SELECT host, job_id, project_id, count(*) FROM slots GROUP BY host, job_id, "
                    "project_id"
                )
            ).all()
        on_host = Counter[str]()
        of_project = Counter[str]()
        running = Counter[str]()
        for host, job_id, project, number in held:
            on_host[host] += number
            of_project[project] += number
            assert number == jobs[job_id].slots
            assert jobs[job_id].state is State.RUNNING or jobs[job_id].phase is not None
        for launcher, (job_id, _) in self.alive():
            running[launcher.host] += jobs[job_id].slots
        assert all(
            on_host[host] <= total and running[host] <= total for host, total in SLOTS.items()
        )
        assert of_project[LIMITED] <= MAX_SLOTS

    def teardown(self) -> None:
        """Everything that was accepted ends, once what is away returns and users ask for nothing
        more.
        """
        try:
            for host in list(self.away):
                self.leave_or_return(host)
            for job in self.jobs():
                if job.state not in TERMINAL:
                    self.store.jobs.request(job.project_id, job.id, Verb.RESUME)
            wait_for(self._all_ended, 60.0)
            used = self.store.usage.usage(UsageQuery(first_day=0, last_day=10**6))
            assert sum(row.slot_seconds for row in used) == sum(
                job.slot_seconds for job in self.jobs()
            )
            assert all(
                self.store.leases.free_slots(host, total) == list(range(total))
                for host, total in SLOTS.items()
            )
        finally:
            for reconciler in self.reconcilers.values():
                reconciler.close()
            self.store.close()
            shutil.rmtree(self.folder)

    def _all_ended(self) -> bool:
        self.time_passes()
        for launcher, key in self.alive():
            stop = any(
                (j, a) == key and control.desired is not Desired.RUN
                for j, a, control in launcher.signals
            )
            reason = ExitReason.STOPPED if stop else ExitReason.SUCCEEDED
            launcher.end(*key, exit_of(reason, ""), checkpoint_step=5)
        for reconciler in self.reconcilers.values():
            for _ in range(8):
                reconciler.step()
        return all(job.state in TERMINAL and job.phase is None for job in self.jobs())


MANY = pytest.param(200, 50, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])
"""10,000 steps: each waits for the disk."""


@pytest.mark.parametrize(("examples", "steps"), [(4, 30), MANY])
def test_whatever_happens_slots_and_limits_hold_and_every_accepted_job_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, examples: int, steps: int
) -> None:
    for name in (
        "job_placement.PREEMPT_SECONDS",
        "job_placement.TOO_LARGE_SECONDS",
        "job_validation.DROP_SECONDS",
    ):
        monkeypatch.setattr(f"ft_service.control.jobs.{name}", 0.0)
    store = new_store(tmp_path)
    store.projects.ensure_project(LIMITED, "local")
    store.projects.update_project(
        LIMITED, limits=vars(replace(TenantLimits(), max_slots=MAX_SLOTS))
    )
    store.close()
    monkeypatch.setattr(Installation, "template", tmp_path / "ft.db", raising=False)
    run_state_machine_as_test(
        Installation,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
