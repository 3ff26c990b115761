"""Launcher that runs attempts as batch jobs: found by name, observed with squeue, ended with
scancel.

The name of a batch job contains the job's id and the attempt. The launcher looks for it before it
submits, so that neither a restart of the service nor a command that timed out starts an attempt
twice. If two of one name are submitted all the same, Slurm runs them one after the other
(`--dependency=singleton`), and the supervisors of the second find the attempt ended.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Absent, Ended, Observation, Running, Unknown
from ft_service.launcher.liveness import EventAge, Outage
from ft_service.launcher.protocol import LaunchError, ListedAttempt
from ft_service.launcher.slurm.batch_script import (
    SlurmSite,
    attempt_of,
    batch_script,
    job_name,
    sbatch_arguments,
)
from ft_service.launcher.slurm.slurm_commands import (
    SlurmAwayError,
    SlurmCommands,
    SlurmJob,
    SlurmPostponedError,
    SlurmRefusedError,
)
from ft_service.launcher.slurm.slurm_profile import SlurmProfile
from ft_service.launcher.slurm.slurm_states import (
    REQUEUED,
    is_held_still,
    is_lasting,
    judge_exit,
    standing,
    waiting_text,
    with_cause,
)
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.attempt_outcome import exit_of, killed_exit, recorded_exit
from ft_service.rundir.checkpoints import newest_step
from ft_service.rundir.documents import Control, Desired, ExitReason, Launched, Start
from ft_service.spec import JobSpec

log = logging.getLogger(__name__)

PLACE = "slurm"
"""Host of jobs where there is one profile."""
QUEUE_SLOTS = 4096
"""Ranks of jobs in Slurm's queue at once."""
QUEUE_AGE_SECONDS = 3.0
"""Seconds for which a reading of the queue counts, so that the controller of a large cluster is not
overloaded.
"""
END_SECONDS = 30.0
"""Seconds between the end of the ranks' grace and the cancelling of a cancelled attempt's batch
job.
"""
TAKEN_SECONDS = 60.0
"""Seconds until the next attempt, after one that was cancelled in Slurm before it had begun."""
HOLD_SECONDS = 5.0
"""Pause before a batch job that was refused for now is submitted again; doubled each time, up to
MAX_HOLD_SECONDS.
"""
MAX_HOLD_SECONDS = 60.0
SUSPENDED = "Slurm has suspended the attempt's batch job, and lets it go on later."


@dataclass(frozen=True)
class _Queue:
    """All batch jobs of the service by name, and the time of the reading (monotonic clock)."""

    jobs: dict[str, list[SlurmJob]]
    at: float


@dataclass(frozen=True)
class _Postponed:
    """Delay of a batch job that Slurm refuses for now."""

    reason: str
    delay: float
    """Seconds between two tries."""
    until: float
    """Time of the next try (monotonic clock)."""


class SlurmLauncher:
    """Runs attempts as batch jobs of this process's user. For one thread."""

    slots = QUEUE_SLOTS
    counts = False
    slots_name_gpus = False

    def __init__(
        self,
        profile: SlurmProfile,
        site: SlurmSite,
        *,
        host: str = PLACE,
        lists: bool = True,
        commands: SlurmCommands | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`host`: its name in the database. `lists`: whether `unfinished` lists the batch jobs;
        False: another launcher's does.
        """
        self.host = host
        self._lists = lists
        self._profile = profile
        self._site = site
        self._commands = commands or SlurmCommands()
        self._clock = clock
        self._event_age = EventAge(clock)
        self._outage = Outage("Slurm does not answer", clock)
        self._queue = _Queue({}, -math.inf)
        self._postponed: dict[str, _Postponed] = {}
        self._ending: dict[str, float] = {}
        """Cancelled batch jobs whose supervisors were notified → deadline of their end (monotonic
        clock).
        """

    def refusal(self) -> str | None:
        """Return in Slurm's words why it refuses every job of the profile: a partition, an account
        or a QOS that there is not; None: it does not, or says nothing now. Nothing is submitted.
        """
        start = Start(job_id="none", attempt=1, world_size=1, generation=1, checkpoint=None)
        described = start, self._site.home, self._profile, self._site
        return self._commands.refusal(sbatch_arguments(*described), batch_script(*described))

    @property
    def away_seconds(self) -> float:
        return self._outage.seconds

    def start(self, attempt: Attempt, spec: JobSpec | None = None) -> None:
        start = attempt.read_start()
        if start is None or attempt.has_exit() or attempt.has_launched():
            return
        try:
            jobs = self._jobs(attempt, fresh=True)
            if not jobs:
                attempt.run.path(attempt.keys.logs).mkdir(parents=True, exist_ok=True)
                described = start, attempt.run.root, self._profile, self._site
                number = self._commands.submit(
                    sbatch_arguments(*described), batch_script(*described)
                )
            else:
                number = jobs[0].number
        except SlurmPostponedError as error:
            self._postpone(attempt, error)
            return
        except SlurmRefusedError as error:
            self.kill(attempt, Reason.LAUNCH_FAILED)
            raise LaunchError(f"Slurm refuses the job: {error}") from error
        except (
            SlurmAwayError
        ) as error:  # the next reading of the queue says whether it was submitted
            log.warning("%s: not started yet, Slurm does not answer: %s", attempt, error)
            return
        self._queue = _Queue({}, -math.inf)
        self._postponed.pop(job_name(attempt.job_id, attempt.number), None)
        attempt.write_launched(
            Launched(job=job_name(attempt.job_id, attempt.number), uid=str(number))
        )

    def _postpone(self, attempt: Attempt, error: SlurmPostponedError) -> None:
        """Have `observe` say why the attempt is not submitted, until it is time for another try."""
        name = job_name(attempt.job_id, attempt.number)
        before = self._postponed.get(name)
        delay = HOLD_SECONDS if before is None else min(2 * before.delay, MAX_HOLD_SECONDS)
        self._postponed[name] = _Postponed(
            f"Slurm refuses the job for now: {error}", delay, self._clock() + delay
        )

    def observe(self, attempt: Attempt) -> Observation:
        held = self._postponed.get(job_name(attempt.job_id, attempt.number))
        if (
            held is not None
            and self._clock() < held.until
            and not (attempt.has_launched() or attempt.has_exit())
        ):
            return Running(note=held.reason, admitted=False, fresh=False)
        try:
            jobs = self._jobs(attempt) or self._jobs(attempt, fresh=True)
            begun = any(standing(job.state) == "waiting" for job in jobs) and _has_begun(attempt)
            if begun:  # perhaps since that reading of the queue
                jobs = self._jobs(attempt, fresh=True)
        except (SlurmAwayError, SlurmRefusedError) as error:
            self._outage.failed(error)
            return Unknown(
                f"Slurm does not answer: {error}",
                self._outage.seconds,
                begun=attempt.has_launched(),
            )
        if not jobs:
            return self._gone(attempt)
        by_standing = {standing(job.state): job for job in jobs}
        if "unknown" in by_standing:
            return Unknown(
                f"Slurm reports the state {by_standing['unknown'].state}, which this version does "
                "not know"
            )
        if "alive" in by_standing:
            self._end_cancelled(attempt)
            return self._alive(attempt, by_standing["alive"])
        if "waiting" not in by_standing:
            return self._ended(attempt, jobs[-1].state)
        if not begun:
            return self._waiting(attempt, by_standing["waiting"])
        return self._put_back(
            attempt, by_standing["over"].state if "over" in by_standing else REQUEUED
        )

    def signal(self, attempt: Attempt, control: Control) -> None:
        """Write the request, which running supervisors read; a batch job that does not run yet is
        cancelled.
        """
        attempt.write_control(control)
        if control.desired is Desired.RUN:
            return
        name = job_name(attempt.job_id, attempt.number)
        jobs = self._jobs(attempt, fresh=True)
        if any(standing(job.state) == "alive" for job in jobs):
            if control.desired is Desired.CANCEL:
                self._ending.setdefault(
                    name, self._clock() + self._site.stop_grace_seconds + END_SECONDS
                )
            return
        if control.desired is Desired.PAUSE and jobs:
            attempt.write_exit(
                exit_of(ExitReason.STOPPED, "The attempt was stopped before it started.")
            )
        self._cancel(attempt)

    def kill(self, attempt: Attempt, reason: Reason) -> None:
        """Write a cancellation, on which supervisors kill their ranks, and cancel the batch job."""
        attempt.write_control(Control(generation=2**31, desired=Desired.CANCEL))
        attempt.write_exit(killed_exit(reason))
        try:
            self._cancel(attempt)
        except SlurmAwayError as error:
            log.warning("%s: its batch job is not cancelled yet: %s", attempt, error)

    def clean(self, attempt: Attempt) -> None:
        self._event_age.forget(attempt)
        self._ending.pop(job_name(attempt.job_id, attempt.number), None)
        self._postponed.pop(job_name(attempt.job_id, attempt.number), None)

    def unfinished(self) -> list[ListedAttempt]:
        """Return the batch jobs of this installation, known by their comment, that are not over."""
        try:
            jobs = self._commands.jobs() if self._lists else []
        except (SlurmAwayError, SlurmRefusedError) as error:
            raise LaunchError(f"Slurm does not answer: {error}") from error
        ours = [
            job
            for job in jobs
            if job.comment == self._site.comment and standing(job.state) != "over"
        ]
        named = [(job, known[0]) for job in ours if (known := attempt_of(job.name)) is not None]
        return [ListedAttempt(job.name, job_id, job.submitted_at) for job, job_id in named]

    def end_unfinished(self, name: str) -> None:
        try:
            self._commands.cancel(name)
        except SlurmAwayError as error:
            raise LaunchError(f"Slurm does not end {name}: {error}") from error

    def close(self) -> None:
        """Do nothing: attempts continue, and no connection is open."""

    def _jobs(self, attempt: Attempt, *, fresh: bool = False) -> list[SlurmJob]:
        """Return the attempt's batch jobs, the newest last: several only if the answer to a
        submission was lost. `fresh`: read the queue now.
        """
        if fresh or self._clock() - self._queue.at >= QUEUE_AGE_SECONDS:
            jobs: dict[str, list[SlurmJob]] = {}
            for job in sorted(self._commands.jobs(), key=lambda job: job.number):
                jobs.setdefault(job.name, []).append(job)
            self._queue = _Queue(jobs, self._clock())
            self._outage.over()
        return self._queue.jobs.get(job_name(attempt.job_id, attempt.number), [])

    def _alive(self, attempt: Attempt, job: SlurmJob) -> Running:
        """Return the observation of an attempt whose processes live; while Slurm has stopped them,
        they have nothing to say.
        """
        running = self._event_age.running(attempt)
        if not is_held_still(job.state):
            return running
        self._event_age.forget(attempt)
        return replace(running, silent_seconds=0.0, note=SUSPENDED)

    def _put_back(self, attempt: Attempt, state: str) -> Observation:
        """Cancel a batch job that waits although the attempt has run, as one that an operator has
        put back into the queue: Slurm would run the attempt again, or keep it for ever. `state`: to
        judge the attempt by.
        """
        try:
            self._cancel(attempt)
        except SlurmAwayError as error:
            self._outage.failed(error)
            return Unknown(
                f"Slurm does not cancel the batch job of an attempt that has ended: {error}",
                self._outage.seconds,
            )
        return self._ended(attempt, state)

    def _waiting(self, attempt: Attempt, job: SlurmJob) -> Running:
        """Return the observation of a waiting attempt, whose time begins when Slurm starts it."""
        self._event_age.forget(attempt)
        level = "error" if is_lasting(job.reason) else "info"
        return Running(note=waiting_text(job.reason), level=level, admitted=False)

    def _gone(self, attempt: Attempt) -> Observation:
        """Return the observation of an attempt without a batch job: never submitted, or over long
        ago.
        """
        if attempt.has_launched():
            launched = attempt.read_launched()
            return self._ended(
                attempt,
                self._commands.ended_state(int(launched.uid)) if launched is not None else None,
            )
        recorded = attempt.read_exit()
        return Absent() if recorded is None else Ended(recorded, newest_step(attempt.run))

    def _ended(self, attempt: Attempt, state: str | None) -> Ended:
        self._event_age.forget(attempt)
        ended = recorded_exit(attempt, lambda records: judge_exit(state, records))
        if ended is not None:
            attempt.write_exit(ended)
            ended = with_cause(state, ended, attempt.readable_control())
        seen = Ended(ended, newest_step(attempt.run))
        if ended is not None and ended.reason is ExitReason.STOPPED and not attempt.has_segment(0):
            return replace(seen, delay_seconds=TAKEN_SECONDS)
        return seen

    def _end_cancelled(self, attempt: Attempt) -> None:
        """Kill a cancelled attempt that has not ended in time."""
        if self._clock() >= self._ending.get(job_name(attempt.job_id, attempt.number), math.inf):
            self.kill(attempt, Reason.USER_CANCELLED)

    def _cancel(self, attempt: Attempt) -> None:
        self._commands.cancel(job_name(attempt.job_id, attempt.number))
        self._queue = _Queue({}, -math.inf)
        self._postponed.pop(job_name(attempt.job_id, attempt.number), None)


def _has_begun(attempt: Attempt) -> bool:
    """Return whether a supervisor has run the attempt on one of its nodes, or it has ended."""
    start = attempt.readable_start()
    nodes = 1 if start is None else start.nodes
    return attempt.has_exit() or any(
        attempt.node(index, nodes).has_supervisor() for index in range(nodes)
    )
