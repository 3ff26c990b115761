"""Launcher that runs attempts as Indexed Jobs of Kubernetes.

`launched.json` records that the Job was created: a Job that is missing later was lost. An attempt
has ended when its Job has ended (or is missing) and no pod of it can be alive; its exit record is
then made from the nodes' documents and the cluster's statuses. A pod on a node that does not answer
counts as alive: two attempts at once are worse than one that waits for the cluster's operator.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Absent, Ended, Level, Observation, Running, Unknown
from ft_service.launcher.kubernetes import status
from ft_service.launcher.kubernetes.cluster import (
    Cluster,
    ClusterAwayError,
    JobChanges,
    PostponedError,
    RefusedError,
    UnpreparedError,
)
from ft_service.launcher.kubernetes.manifests import (
    JOB_LABEL,
    AttemptShape,
    Manifest,
    Site,
    grace_periods,
    instance_labels,
    job_manifest,
    object_name,
    owned_manifests,
)
from ft_service.launcher.kubernetes.placement import Placements, was_in_vain
from ft_service.launcher.kubernetes.profile import QUEUE_SLOTS, PodProfile
from ft_service.launcher.kubernetes.volumes import VisibleFiles, visible_reads, visible_to_engine
from ft_service.launcher.liveness import EventAge, Outage
from ft_service.launcher.protocol import LaunchError, ListedAttempt
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.attempt_outcome import exit_of, killed_exit, recorded_exit
from ft_service.rundir.checkpoints import complete_checkpoints, newest_step
from ft_service.rundir.documents import Control, Desired, Exit, ExitReason, Launched
from ft_service.spec import JobSpec

log = logging.getLogger(__name__)

SNAPSHOT_SECONDS = 15.0
"""Seconds for which the cluster's answer about an attempt counts, unless a watch reports a
change.
"""
HOLD_SECONDS = 5.0
"""Pause before a Job that was refused for now is created again; doubled each time, up to
MAX_HOLD_SECONDS.
"""
MAX_HOLD_SECONDS = 60.0


@dataclass(frozen=True)
class _Snapshot:
    """The cluster's answer about an attempt, and its time (monotonic clock)."""

    job: dict[str, Any] | None
    pods: list[dict[str, Any]]
    warnings: list[str]
    """Messages of the warning events of the Job while pods are missing, else of a pod that its node
    does not start.
    """
    workload: dict[str, Any] | None
    """Kueue's Workload, while the Job is suspended."""
    at: float
    lacks_kueue: bool = False
    """Whether the Job waits for a queue in a cluster that has no Kueue."""
    fresh: bool = True
    """Whether it was made for this call."""


@dataclass(frozen=True)
class _Hold:
    """Delay of an attempt's Job that the cluster refuses for now: by a quota, or for want of a
    right or its namespace.
    """

    reason: str
    level: Level
    delay: float
    """Seconds between two tries."""
    until: float
    """Time of the next try (monotonic clock)."""


class KubernetesLauncher:
    """Runs attempts in one namespace of a cluster. For one thread."""

    slots_name_gpus = False

    def __init__(
        self,
        cluster: Cluster,
        profile: PodProfile,
        site: Site,
        *,
        host: str | None = None,
        lists: bool = True,
        watch: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`host`: None: named after the namespace.

        `lists`: whether `unfinished` lists the namespace; False: another launcher's does. `watch`:
        whether to watch for changes; False: ask the cluster every time.
        """
        self.host = host or f"kubernetes/{site.namespace}"
        self._lists = lists
        self.slots = profile.slots if profile.queue is None else QUEUE_SLOTS
        self.counts = profile.queue is None
        self._cluster = cluster
        self._profile = profile
        self._site = site
        self._clock = clock
        self._event_age = EventAge(clock)
        self._outage = Outage("The cluster does not answer", clock)
        self._placements = Placements(
            profile.placement_seconds if profile.queue is None else None, clock
        )
        self._snapshots: dict[str, _Snapshot] = {}
        self._holds: dict[str, _Hold] = {}
        self._complete: set[str] = set()
        """Jobs whose Service and NetworkPolicy exist or are no longer needed."""
        self._ending: dict[str, float] = {}
        """Cancelled Jobs whose pods were notified → deadline of their end (monotonic clock)."""
        self._changes = JobChanges(cluster) if watch else None

    @property
    def away_seconds(self) -> float:
        return self._outage.seconds

    def start(self, attempt: Attempt, spec: JobSpec | None = None) -> None:
        start = attempt.read_start()
        if start is None or attempt.has_exit():
            return
        seen = visible_to_engine(attempt.run, self._site.files, self._profile)
        if seen is None:
            reads = visible_reads(spec, self._site.files, self._profile) if spec is not None else ()
            seen = VisibleFiles(reads)
        shape = AttemptShape(
            job_id=attempt.job_id,
            attempt=attempt.number,
            nodes=start.nodes,
            ranks_per_node=start.world_size // start.nodes,
            run=attempt.run.root,
            seen=seen,
            priority=start.priority,
        )
        try:
            if (job := self._create_job(shape)) is not None:
                self._create_owned(attempt, job)
        except RefusedError as error:
            self.kill(attempt, Reason.LAUNCH_FAILED)  # half a start must not come to life later
            raise LaunchError(f"The cluster refuses the job: {error}") from error
        except ClusterAwayError as error:
            log.warning("%s: not started yet, the cluster does not answer: %s", attempt, error)

    def _create_owned(self, attempt: Attempt, job: Manifest) -> None:
        """Create the Service and NetworkPolicy of a Job, then record in launched.json that the
        start is complete. If one is refused for now, give the places back: pods of several nodes
        would not find each other.
        """
        try:
            for manifest in owned_manifests(job, self._profile):
                self._cluster.create(manifest)
        except PostponedError as error:
            self._give_back(
                attempt,
                f"The cluster refuses a part of the attempt for now, which was given back: {error}",
            )
            return
        metadata = job["metadata"]
        attempt.write_launched(Launched(job=metadata["name"], uid=metadata["uid"]))
        self._complete.add(metadata["name"])

    def _complete_start(self, attempt: Attempt, job: Manifest) -> None:
        """Complete a start that was interrupted after its Job was created, by a restart of the
        service or an outage of the cluster: without its Service the pods would not find each
        other.
        """
        name = job["metadata"]["name"]
        if name in self._complete or status.is_finished(job) or status.is_leaving(job):
            return
        if self._was_started_or_ended(attempt):
            self._complete.add(name)
            return
        try:
            self._create_owned(attempt, job)
        except RefusedError as error:
            log.warning(
                "%s: the cluster refuses the Service or NetworkPolicy of its Job: %s",
                attempt,
                error,
            )
            self.kill(attempt, Reason.LAUNCH_FAILED)
        except ClusterAwayError as error:
            log.warning(
                "%s: its start is not complete, the cluster does not answer: %s", attempt, error
            )

    def _create_job(self, shape: AttemptShape) -> Manifest | None:
        """Create the Job; None: the cluster refuses it for now, which `observe` reports until it is
        time for another try.
        """
        name = object_name(shape.job_id, shape.attempt)
        try:
            job = self._cluster.create(job_manifest(shape, self._profile, self._site))
        except PostponedError as error:
            before = self._holds.get(name)
            delay = HOLD_SECONDS if before is None else min(2 * before.delay, MAX_HOLD_SECONDS)
            level: Level = "error" if isinstance(error, UnpreparedError) else "info"
            reason = f"The cluster refuses the job for now: {error}"
            self._holds[name] = _Hold(reason, level, delay, self._clock() + delay)
            return None
        self._holds.pop(name, None)
        return job

    def observe(self, attempt: Attempt) -> Observation:
        held = self._holds.get(_name(attempt))
        if (
            held is not None
            and self._clock() < held.until
            and not self._was_started_or_ended(attempt)
        ):
            return Running(note=held.reason, level=held.level, admitted=False, fresh=False)
        try:
            seen = self._snapshot(_name(attempt))
        except (ClusterAwayError, RefusedError) as error:
            self._outage.failed(error)
            return Unknown(
                f"the cluster does not answer: {error}",
                self._outage.seconds,
                begun=attempt.has_launched(),
            )
        if seen.job is None and not any(map(status.is_alive, seen.pods)):
            return self._gone(attempt)
        if seen.job is not None:
            self._complete_start(attempt, seen.job)
        if seen.job is not None and self._was_evicted(attempt, seen):
            return self._evicted(attempt, seen)
        if (
            seen.job is None
            or not status.is_finished(seen.job)
            or any(map(status.is_alive, seen.pods))
        ):
            self._end_cancelled(attempt)
            return replace(self._running(attempt, seen), fresh=seen.fresh)
        return self._ended(attempt, seen.job, seen.pods)

    def signal(self, attempt: Attempt, control: Control) -> None:
        """Write the request, which running pods read.

        A cancelled attempt whose pods do not all run yet is deleted.
        """
        attempt.write_control(control)
        if control.desired is Desired.RUN:
            return
        try:
            name = _name(attempt)
            pods = self._cluster.pods(name)
            if control.desired is Desired.CANCEL and status.all_started(pods):
                # They end by themselves and keep their logs. The cluster ends those that have not
                # ended by the deadline.
                self._ending.setdefault(
                    name, self._clock() + grace_periods(self._profile, self._site)[1]
                )
            elif control.desired is Desired.CANCEL:
                self._delete(attempt)
            elif not status.has_started(pods):
                attempt.write_exit(
                    exit_of(ExitReason.STOPPED, "The attempt was stopped before it started.")
                )
                self._delete(attempt)
        except (ClusterAwayError, RefusedError) as error:
            log.warning("%s: its pods did not get the request: %s", attempt, error)
            raise

    def _end_cancelled(self, attempt: Attempt) -> None:
        """Delete the Job of a cancelled attempt whose pods have not ended in time."""
        if self._clock() >= self._ending.get(_name(attempt), math.inf):
            try:
                self._delete(attempt)
            except (ClusterAwayError, RefusedError) as error:
                log.warning("%s: it was cancelled, and its pods still run: %s", attempt, error)

    def kill(self, attempt: Attempt, reason: Reason) -> None:
        """Write a cancellation, on which supervisors kill their ranks, and delete the Job, which
        ends pods that cannot read it.
        """
        attempt.write_control(Control(generation=2**31, desired=Desired.CANCEL))
        attempt.write_exit(killed_exit(reason))
        self._try_to_delete(attempt)

    def clean(self, attempt: Attempt) -> None:
        """Delete a Job that has not finished, since it would create pods again.

        A finished one stays for its time to live.
        """
        name = _name(attempt)
        self._event_age.forget(attempt)
        self._forget(name)
        try:
            job = self._cluster.job(name)
            if job is not None and not status.is_finished(job):
                self._delete(attempt)
        except (ClusterAwayError, RefusedError) as error:
            log.warning("%s: the rest of its Job was not deleted: %s", attempt, error)

    def unfinished(self) -> list[ListedAttempt]:
        """Return the unfinished Jobs of this installation, selected by
        `app.kubernetes.io/instance`.
        """
        labels = instance_labels(self._profile)
        try:
            jobs = self._cluster.jobs() if self._lists else []
        except (ClusterAwayError, RefusedError) as error:
            raise LaunchError(f"the cluster does not answer: {error}") from error
        return [
            ListedAttempt(
                meta["name"],
                meta["labels"].get(JOB_LABEL, ""),
                str(meta.get("creationTimestamp", "")),
            )
            for job in jobs
            if labels.items() <= (meta := job["metadata"]).get("labels", {}).items()
            and not status.is_finished(job)
        ]

    def end_unfinished(self, name: str) -> None:
        try:
            self._cluster.delete_job(name)
        except (ClusterAwayError, RefusedError) as error:
            raise LaunchError(f"the cluster does not end {name}: {error}") from error

    def close(self) -> None:
        """Close the connection; attempts continue."""
        self._cluster.close()

    def _snapshot(self, name: str) -> _Snapshot:
        known = self._snapshots.get(name)
        changed = self._changes is None or self._changes.take(name)
        if known is not None and not changed and self._clock() - known.at < SNAPSHOT_SECONDS:
            return replace(known, fresh=False)
        self._snapshots.pop(name, None)
        job = self._cluster.job(name)
        pods = self._cluster.pods(name)
        if self._outage.over():
            self._cluster.wake()
        refused = (
            job is not None
            and len(pods) < job["spec"].get("parallelism", 1)
            and not status.is_suspended(job)
        )
        queued = job is not None and status.is_suspended(job) and status.queue_of(job) is not None
        workload = (
            self._cluster.workload(job["metadata"]["uid"]) if job is not None and queued else None
        )
        missing = queued and workload is None and self._cluster.lacks_kueue
        warnings = self._cluster.warnings(name) if refused else []
        stuck = status.stuck(pods) if job is not None and not status.is_finished(job) else None
        if stuck is not None and not warnings:
            warnings = self._cluster.warnings(stuck, kind="Pod")
        snapshot = _Snapshot(job, pods, warnings, workload, self._clock(), missing)
        if job is not None and not status.is_finished(job) and not status.is_leaving(job):
            self._snapshots[name] = snapshot  # never one that may end the attempt
        return snapshot

    def _running(self, attempt: Attempt, seen: _Snapshot) -> Running:
        running = self._event_age.running(attempt)
        if self._is_stopped(attempt):
            if (
                seen.job is not None
                and not status.is_leaving(seen.job)
                and not status.is_finished(seen.job)
            ):
                self._try_to_delete(attempt)
            return replace(running, note=status.disruption(seen.pods), admitted=running.reported)
        if seen.job is None or running.reported:
            return replace(running, note=_disruption(seen))
        waiting = status.without_kueue(seen.job) if seen.lacks_kueue else None
        waiting = waiting or status.waiting(seen.job, seen.pods, seen.warnings, seen.workload)
        held, wanted = status.places(seen.job, seen.pods)
        if (waiting is not None and not waiting.admitted) or (
            held < wanted and not status.is_failing(seen.job)
        ):
            return self._placing(attempt, running, waiting, held, wanted)
        if not status.is_failing(
            seen.job
        ):  # whose pods go: what was seen before says whether they had their places
            self._placements.forget(_name(attempt))
        if waiting is None:
            return replace(running, note=_disruption(seen))
        return replace(running, note=waiting.reason, level=waiting.level)

    def _placing(
        self,
        attempt: Attempt,
        running: Running,
        waiting: status.PodWait | None,
        held: int,
        wanted: int,
    ) -> Running:
        """Observe an attempt without a node for all pods.

        Its time begins when all have one; until then it can lose those it has.
        """
        self._event_age.forget(attempt)
        running = replace(running, silent_seconds=0.0)
        name = _name(attempt)
        waiting = self._placements.waits(name, waiting)
        if self._placements.has_expired(name, held if held < wanted else 0):
            message = (
                f"Only {held} of the attempt's {wanted} pods had a place for "
                f"{self._profile.placement_seconds} seconds"
            )
            why = f" {waiting.reason.rstrip('.')}." if waiting is not None else ""
            self._give_back(attempt, f"{message}; it was given back.{why}")
            return replace(running, admitted=False)
        if waiting is None:  # the cluster has not handled it yet
            return running
        return replace(running, note=waiting.reason, level=waiting.level, admitted=False)

    def _give_back(self, attempt: Attempt, message: str) -> None:
        """Stop an attempt without some of its parts; the next one is tried later."""
        attempt.write_control(Control(generation=2**31, desired=Desired.CANCEL))
        attempt.write_exit(exit_of(ExitReason.STOPPED, message))
        self._try_to_delete(attempt)

    def _is_stopped(self, attempt: Attempt) -> bool:
        """Return whether the service stopped an attempt of several pods that may still run.

        With one pod, the pod writes its end.
        """
        recorded = attempt.read_exit()
        if recorded is None or recorded.reason is not ExitReason.STOPPED:
            return False
        start = attempt.readable_start()
        return start is not None and start.nodes > 1

    def _was_evicted(self, attempt: Attempt, seen: _Snapshot) -> bool:
        """Return whether the queue has suspended the Job again and its processes have ended."""
        start = attempt.readable_start()
        if (
            start is None
            or seen.job is None
            or not status.is_suspended(seen.job)
            or any(map(status.is_alive, seen.pods))
        ):
            return False
        return bool(attempt.read_node_exits(start.nodes)) or attempt.has_outcome()

    def _evicted(self, attempt: Attempt, seen: _Snapshot) -> Observation:
        """Delete the Job, so that the queue does not admit it again: the next attempt has a Job of
        its own.
        """
        try:
            self._delete(attempt)
        except (ClusterAwayError, RefusedError) as error:
            self._outage.failed(error)
            return Unknown(
                f"the cluster does not delete the Job of an attempt that has ended: {error}",
                self._outage.seconds,
            )
        return self._ended(attempt, seen.job, seen.pods)

    def _gone(self, attempt: Attempt) -> Observation:
        """Observe an attempt without Job and pods: never created, deleted, or removed after its
        time to live.
        """
        self._event_age.forget(attempt)
        ended = recorded_exit(attempt, lambda records: status.judge_pods(records, None, []))
        return (
            Absent() if ended is None and not attempt.has_launched() else self._over(attempt, ended)
        )

    def _ended(
        self, attempt: Attempt, job: dict[str, Any] | None, pods: list[dict[str, Any]]
    ) -> Ended:
        self._event_age.forget(attempt)
        waited = self._placements.is_waiting(_name(attempt))
        ended = recorded_exit(
            attempt, lambda records: status.judge_pods(records, job, pods, waited=waited)
        )
        if ended is not None:
            attempt.write_exit(ended)
        return self._over(attempt, ended)

    def _over(self, attempt: Attempt, ended: Exit | None) -> Ended:
        step = newest_step(attempt.run)
        reason = None if ended is None else ended.reason
        asked = attempt.run.readable(attempt.keys.control, Control)
        if was_in_vain(attempt.number, reason, asked, complete_checkpoints(attempt.run)):
            return Ended(ended, step, self._placements.put_off(attempt.job_id, attempt.number))
        self._placements.settled(attempt.job_id)
        return Ended(ended, step)

    def _try_to_delete(self, attempt: Attempt) -> None:
        try:
            self._delete(attempt)
        except (ClusterAwayError, RefusedError) as error:
            log.warning("%s: its Job is not deleted yet: %s", attempt, error)

    def _delete(self, attempt: Attempt) -> None:
        name = _name(attempt)
        self._forget(name)
        self._cluster.delete_job(name)

    def _forget(self, name: str) -> None:
        self._snapshots.pop(name, None)
        self._holds.pop(name, None)
        self._complete.discard(name)
        self._placements.forget(name)
        self._ending.pop(name, None)

    def _was_started_or_ended(self, attempt: Attempt) -> bool:
        """Return whether any replica of the service has started the attempt, or it has ended."""
        return attempt.has_launched() or attempt.has_exit()


def _name(attempt: Attempt) -> str:
    """Return the name of the attempt's Job."""
    return object_name(attempt.job_id, attempt.number)


def _disruption(seen: _Snapshot) -> str | None:
    evicted = status.taken_back(seen.job, seen.workload) if seen.job is not None else None
    return evicted or status.disruption(seen.pods)
