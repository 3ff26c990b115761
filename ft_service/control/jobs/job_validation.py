"""Validation of new jobs: they wait until their base is described and their files are checked, in
processes of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from ft_service.bases.describing import files_state
from ft_service.control.admission.job_admission import LateAdmission
from ft_service.control.checks.data_checks import Check, Checked, Checks, check_data
from ft_service.engines.sharing import options_left_open, share_key
from ft_service.engines.tending import EngineOptions
from ft_service.errors import NotFoundError
from ft_service.host.loops import Interval
from ft_service.jobs import decisions
from ft_service.jobs.states import Job, State
from ft_service.shared_work.losses import Losses, pause_seconds
from ft_service.spec import StoredSpec
from ft_service.storage.locations import Places
from ft_service.store.leases import LONGEST_REST_SECONDS
from ft_service.store.records import JobChange, NewEvent
from ft_service.store.sql import Store

CHECK_REST_SECONDS = 5.0
"""Interval at which a job is looked at while its files are checked.

The end of the check ends the interval too.
"""
CHECK_AGAIN_SECONDS = 5.0
MOST_CHECK_REST_SECONDS = LONGEST_REST_SECONDS
"""Pause after a check that could not be finished, and the longest after several."""
DROP_SECONDS = 0.5
"""Interval at which checks of cancelled jobs are looked for."""


ALONE = (
    "It runs without an engine: the memory of the nodes is not known here, so its ranks choose "
    "{options}. Give these, or ask the operator for `hardware` in the profile, and without GPUs "
    "for a limit of memory."
)


class JobValidation:
    """Checks of new jobs, and what becomes of the jobs. For the reconciler's thread."""

    def __init__(
        self,
        store: Store,
        places: Places,
        wake: Callable[[], None],
        check: Check | None,
        admission: LateAdmission | None,
        *,
        engines: EngineOptions | None = None,
    ) -> None:
        """`wake`: called in another thread when a check has ended.

        `check`, `admission`: as in ReconcilerOptions. `engines`: those of the place; None: none.
        """
        self._store = store
        self._admission = admission
        self._engines = engines or EngineOptions()
        self._waiting_for_base: dict[str, Job] = {}
        self._lost = Losses(
            "the check of a job", first=CHECK_AGAIN_SECONDS, longest=MOST_CHECK_REST_SECONDS
        )
        self._drop = Interval(DROP_SECONDS)
        usual = partial(
            check_data,
            places=places,
            plan=None if admission is None else admission.plan,
            settle=None if admission is None else admission.settle,
            note_images=None if admission is None else admission.note_images,
        )
        self._warms = check is None
        self._checks = Checks(check or usual, wake, places.tokens_dir)

    def warm(self) -> None:
        """Start the process of the first check, unless the check is another's."""
        if self._warms:
            self._checks.warm()

    def close(self) -> None:
        self._checks.close()

    def attend(self) -> None:
        """Have jobs looked at now whose check has ended or whose base was described, and end checks
        of cancelled jobs.
        """
        self._checks.demote_slow()
        for job in (*self._checks.finished(), *self._checks.begun()):
            self._store.leases.look_again(job.id)
        if not self._drop.is_due:
            return
        self._drop.restart()
        for job in tuple(self._waiting_for_base.values()):
            if self._admission is None or self._admission.delay(job) is None:
                del self._waiting_for_base[job.id]
                self._store.leases.look_again(job.id)
        for job in self._checks.under_way():
            if not self._is_validating(job):
                self._checks.drop(job)

    def change(self, job: Job, now: float) -> tuple[JobChange, Checked | None]:
        """What becomes of a job that is being validated, and the finished check that says so."""
        delay = None if self._admission is None else self._admission.delay(job)
        if delay is not None:
            self._waiting_for_base[job.id] = job
            return JobChange(job=replace(job, pending=delay), rest_seconds=CHECK_REST_SECONDS), None
        checked = self._checks.result(job)
        if checked is None:
            # Why its last check could not be finished.
            again = job.pending if self._lost.count(job.id) else None
            job = replace(job, pending=self._checks.waits(job) or again)
            return JobChange(
                job=job, events=self._checks.news(job), rest_seconds=CHECK_REST_SECONDS
            ), None
        if checked.waits is not None:
            losses = self._lost.count(job.id)
            rest = pause_seconds(
                losses + 1, first=CHECK_AGAIN_SECONDS, longest=MOST_CHECK_REST_SECONDS
            )
            events = (
                []
                if losses
                else [NewEvent(level="warn", message=f"The job waits. {checked.waits}")]
            )
            return JobChange(
                job=replace(job, pending=checked.waits), events=events, rest_seconds=rest
            ), checked
        job = _with_plan(
            decisions.validated(job, checked.error, now), checked, not self._engines.mounts
        )
        if job.state is State.FAILED:
            ended = NewEvent(level="error", message=str(job.error and job.error["message"]))
        else:
            ended = NewEvent(level="info", message="Files validated, moving job to queued state.")
        events = [*checked.events, *self._why_alone(job), ended]
        return JobChange(job=job, events=events), checked

    def _why_alone(self, job: Job) -> list[NewEvent]:
        """Return an event if the operator's profile alone keeps a job out of engines."""
        asks = job.state is not State.FAILED and not job.shapes and job.spec.engine != "off"
        left = options_left_open(job.spec) if self._engines.most_seats and asks else []
        if not left:
            return []
        return [NewEvent(level="info", message=ALONE.format(options=", ".join(left)))]

    def stored(self, job: Job, checked: Checked) -> None:
        """Forget a finished check once the change that follows from it is stored."""
        if checked.waits is None:
            self._lost.forget(job.id)
        else:
            self._lost.add(job.id, f"job {job.id}: {checked.waits}")
        self._checks.forget(job)

    def _is_validating(self, job: Job) -> bool:
        try:
            return self._store.jobs.get_job(job.project_id, job.id).state is State.VALIDATING
        except NotFoundError:
            return False


def _with_plan(job: Job, checked: Checked, shares_adapters: bool) -> Job:
    """The job with what its check has planned and has chosen for "auto", and with the key of the
    jobs that it may share an engine with. `shares_adapters`: as `share_key`'s.
    """
    if (planned := checked.planned) is not None:
        names = ("stored_spec", "shapes", "work", "planned_seconds", "seat")
        job = replace(job, **{name: getattr(planned, name) for name in names})
    if (settled := checked.settled) is not None:
        job = replace(job, stored_spec=StoredSpec.of(settled.spec), seat=settled.seat)
        if settled.work is not None:
            job = replace(job, work=settled.work.flops, planned_seconds=settled.work.seconds)
    if job.state is State.FAILED or job.shapes:
        return job
    try:
        files = files_state(Path(job.spec.model.path))
    except OSError:  # other hosts alone have it
        files = ""
    return replace(
        job, share_key=share_key(job.spec, job.seat, files, shares_adapters=shares_adapters)
    )
