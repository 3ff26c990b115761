"""Attempts as Indexed Jobs: started by name, observed by looking, ended by deleting.

`launched.json` says that the Job was created, so that a Job which is gone later was lost and not never there. An attempt has
ended when its Job has (or is gone) and no pod of it can be alive; what the nodes wrote, and what the cluster says of the pods,
makes the exit record then. A pod on a node that does not answer counts as alive: two attempts at once are worse than one that
waits for the cluster's operator.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ft_service.jobs.line import Host
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Absent, Ended, Observation, Running, Unknown
from ft_service.launcher.base import LaunchError, ListedAttempt
from ft_service.launcher.kubernetes import status
from ft_service.launcher.kubernetes.cluster import Cluster, ClusterAwayError, QuotaError, RefusedError
from ft_service.launcher.kubernetes.manifests import (
    JOB_LABEL,
    AttemptShape,
    Manifest,
    Site,
    graces,
    instance_labels,
    job_manifest,
    object_name,
    owned_manifests,
)
from ft_service.launcher.kubernetes.outage import Outage
from ft_service.launcher.kubernetes.placement import Placements
from ft_service.launcher.kubernetes.profile import QUEUE_SLOTS, PodProfile
from ft_service.launcher.kubernetes.shown import visible_reads
from ft_service.launcher.kubernetes.watch import Changes
from ft_service.launcher.silence import Silence
from ft_service.rundir.attempt import Attempt, unreadable_exit
from ft_service.rundir.checkpoints import newest_step
from ft_service.rundir.directory import UnreadableDocumentError
from ft_service.rundir.documents import Control, Desired, Exit, ExitReason, Launched
from ft_service.spec import JobSpec
from ft_service.supervisor.verdict import exit_of, killed_exit

log = logging.getLogger(__name__)

LOOK_SECONDS = 15.0
"""How long a look at an attempt is good for, if the cluster tells of no change."""
QUOTA_SECONDS = 5.0
"""Rest until a Job that a quota refused is created again; doubled each time, up to MAX_QUOTA_SECONDS."""
MAX_QUOTA_SECONDS = 60.0


@dataclass(frozen=True)
class _Look:
    """What the cluster said, and when (our monotonic clock)."""

    job: dict[str, Any] | None
    pods: list[dict[str, Any]]
    warnings: list[str]
    workload: dict[str, Any] | None
    """Kueue's, while it keeps the Job suspended."""
    at: float
    fresh: bool = True
    """False: it was made in an earlier turn."""


@dataclass(frozen=True)
class _Held:
    """A quota refuses the Job of an attempt for now."""

    reason: str
    delay: float
    """Seconds from one try to the next."""
    until: float
    """Our monotonic clock."""


class KubernetesLauncher:
    """Runs attempts in one namespace of a cluster. For one thread."""

    def __init__(
        self,
        cluster: Cluster,
        profile: PodProfile,
        site: Site,
        *,
        watch: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`watch`: be told of changes; False: look every time."""
        self._cluster = cluster
        self._profile = profile
        self._site = site
        self._clock = clock
        self._silence = Silence(clock)
        self._outage = Outage("The cluster cannot be asked", clock)
        self._placements = Placements(profile.placement_seconds if profile.queue is None else None, clock)
        self._looks: dict[str, _Look] = {}
        self._held: dict[str, _Held] = {}
        self._whole: set[str] = set()
        """Jobs that have what belongs to them, or need nothing any more."""
        self._ending: dict[str, float] = {}
        """Jobs whose pods were told that they are cancelled → until when they may take (our monotonic clock)."""
        self._changes = Changes(cluster) if watch else None

    @property
    def host(self) -> str:
        """The namespace: whichever replica of the service looks, it sees the same."""
        return f"kubernetes/{self._site.namespace}"

    @property
    def slots(self) -> int:
        return self._profile.slots if self._profile.queue is None else QUEUE_SLOTS

    @property
    def hosts(self) -> Mapping[str, Host]:
        return {self.host: Host(slots=self.slots, counts=self._profile.queue is None)}

    @property
    def away_seconds(self) -> float:
        return self._outage.seconds

    def start(self, attempt: Attempt, spec: JobSpec | None = None) -> None:
        start = attempt.read_start()
        if start is None or attempt.has_exit():
            return
        reads = visible_reads(spec, self._site.files, self._profile) if spec is not None else ()
        shape = AttemptShape(
            attempt.job_id, attempt.number, start.nodes, start.world_size // start.nodes, reads, start.priority
        )
        try:
            if (job := self._create_job(shape)) is not None:
                self._complete(attempt, job)
        except RefusedError as error:
            self.kill(attempt, Reason.LAUNCH_FAILED)  # half a start must not come to life later
            raise LaunchError(f"The cluster refuses the job: {error}") from error
        except ClusterAwayError as error:
            log.warning("%s: not started yet, the cluster is away: %s", attempt, error)

    def _complete(self, attempt: Attempt, job: Manifest) -> None:
        """Give a Job what belongs to it, and write down that it has that."""
        for manifest in owned_manifests(job, self._profile.rendezvous_port):
            self._cluster.create(manifest)
        metadata = job["metadata"]
        attempt.write_launched(Launched(job=metadata["name"], uid=metadata["uid"]))
        self._whole.add(metadata["name"])

    def _catch_up(self, attempt: Attempt, job: Manifest) -> None:
        """Complete a start that was cut short after its Job was created: by the end of the service, or by a cluster that went
        away. Its pods would not find each other."""
        name = job["metadata"]["name"]
        if name in self._whole or status.is_finished(job) or status.is_leaving(job):
            return
        if self._was_started_or_ended(attempt):
            self._whole.add(name)
            return
        try:
            self._complete(attempt, job)
        except RefusedError as error:
            log.warning("%s: the cluster refuses what belongs to its Job: %s", attempt, error)
            self.kill(attempt, Reason.LAUNCH_FAILED)
        except ClusterAwayError as error:
            log.warning("%s: its start is not complete, the cluster is away: %s", attempt, error)

    def _create_job(self, shape: AttemptShape) -> Manifest | None:
        """None: a quota on Jobs is used up, and `observe` says so until it is time for another try."""
        name = object_name(shape.job_id, shape.attempt)
        try:
            job = self._cluster.create(job_manifest(shape, self._profile, self._site))
        except QuotaError as error:
            before = self._held.get(name)
            delay = QUOTA_SECONDS if before is None else min(2 * before.delay, MAX_QUOTA_SECONDS)
            self._held[name] = _Held(f"The cluster refuses the job for now: {error}", delay, self._clock() + delay)
            return None
        self._held.pop(name, None)
        return job

    def observe(self, attempt: Attempt) -> Observation:
        held = self._held.get(_name(attempt))
        if held is not None and self._clock() < held.until and not self._was_started_or_ended(attempt):
            return Running(note=held.reason, admitted=False, fresh=False)
        try:
            look = self._look(_name(attempt))
        except (ClusterAwayError, RefusedError) as error:
            self._outage.failed(error)
            return Unknown(f"the cluster cannot be asked: {error}", self._outage.seconds)
        if look.job is None and not any(map(status.is_alive, look.pods)):
            return self._gone(attempt)
        if look.job is not None:
            self._catch_up(attempt, look.job)
        if look.job is not None and self._is_taken_back(attempt, look):
            return self._taken_back(attempt, look)
        if look.job is None or not status.is_finished(look.job) or any(map(status.is_alive, look.pods)):
            self._end_cancelled(attempt)
            return replace(self._running(attempt, look), fresh=look.fresh)
        return self._ended(attempt, look)

    def signal(self, attempt: Attempt, control: Control) -> None:
        """Running pods read it; those that do not run yet cannot, and a cancelled attempt need not."""
        attempt.write_control(control)
        if control.desired is Desired.RUN:
            return
        try:
            name = _name(attempt)
            pods = self._cluster.pods(name)
            if control.desired is Desired.CANCEL and status.all_started(pods):
                # They end by themselves at once, and their logs stay; what has not ended by then is ended by the cluster.
                self._ending.setdefault(name, self._clock() + graces(self._profile, self._site)[1])
            elif control.desired is Desired.CANCEL:
                self._delete(attempt)
            elif not status.has_started(pods):
                self._seal(attempt, exit_of(ExitReason.STOPPED, "The attempt was stopped before it started."))
                self._delete(attempt)
        except (ClusterAwayError, RefusedError) as error:
            log.warning("%s: its pods were not told: %s", attempt, error)
            raise

    def _end_cancelled(self, attempt: Attempt) -> None:
        """Have the cluster end the pods of a cancelled attempt that have not ended in their time."""
        if self._clock() >= self._ending.get(_name(attempt), math.inf):
            try:
                self._delete(attempt)
            except (ClusterAwayError, RefusedError) as error:
                log.warning("%s: it was cancelled, and its pods go on: %s", attempt, error)

    def kill(self, attempt: Attempt, reason: Reason) -> None:
        """The supervisors kill their ranks as soon as they see the wish; pods that cannot read it are ended by the cluster."""
        attempt.write_control(Control(generation=2**31, desired=Desired.CANCEL))
        self._seal(attempt, killed_exit(reason))
        self._try_to_delete(attempt)

    def clean(self, attempt: Attempt) -> None:
        """A Job that has ended can be looked at until its time to live is over; one that has not would have pods again."""
        name = _name(attempt)
        self._silence.forget(attempt)
        self._forget(name)
        try:
            job = self._cluster.job(name)
            if job is not None and not status.is_finished(job):
                self._delete(attempt)
        except (ClusterAwayError, RefusedError) as error:
            log.warning("%s: what is left of its Job was not looked at: %s", attempt, error)

    def unfinished(self) -> list[ListedAttempt]:
        """Jobs of this installation, told from others in the namespace by `app.kubernetes.io/instance`, that have not ended."""
        labels = instance_labels(self._profile)
        try:
            jobs = self._cluster.jobs()
        except (ClusterAwayError, RefusedError) as error:
            raise LaunchError(f"the cluster cannot be asked: {error}") from error
        return [
            ListedAttempt(meta["name"], meta["labels"].get(JOB_LABEL, ""), str(meta.get("creationTimestamp", "")))
            for job in jobs
            if labels.items() <= (meta := job["metadata"]).get("labels", {}).items() and not status.is_finished(job)
        ]

    def end_unfinished(self, name: str) -> None:
        try:
            self._cluster.delete_job(name)
        except (ClusterAwayError, RefusedError) as error:
            raise LaunchError(f"the cluster does not end {name}: {error}") from error

    def close(self) -> None:
        """Attempts go on; nothing of them is observed any more."""
        self._cluster.close()

    def _look(self, name: str) -> _Look:
        known = self._looks.get(name)
        changed = self._changes is None or self._changes.take(name)
        if known is not None and not changed and self._clock() - known.at < LOOK_SECONDS:
            return replace(known, fresh=False)
        self._looks.pop(name, None)
        job = self._cluster.job(name)
        pods = self._cluster.pods(name)
        if self._outage.over():
            self._cluster.wake()
        refused = job is not None and len(pods) < job["spec"].get("parallelism", 1) and not status.is_suspended(job)
        queued = job is not None and status.is_suspended(job) and status.queue_of(job) is not None
        workload = self._cluster.workload(job["metadata"]["uid"]) if job is not None and queued else None
        look = _Look(job, pods, self._cluster.warnings(name) if refused else [], workload, self._clock())
        if job is not None and not status.is_finished(job) and not status.is_leaving(job):
            self._looks[name] = look  # what may end an attempt is looked at anew each time
        return look

    def _running(self, attempt: Attempt, look: _Look) -> Running:
        seen = self._silence.running(attempt)
        if self._is_stopped(attempt):
            if look.job is not None and not status.is_leaving(look.job) and not status.is_finished(look.job):
                self._try_to_delete(attempt)
            return replace(seen, note=status.disruption(look.pods), admitted=seen.reported)
        if look.job is None or seen.reported:
            self._placements.settled(attempt.job_id)
            return replace(seen, note=self._taken_away(look))
        waiting = status.waiting(look.job, look.pods, look.warnings, look.workload)
        held, wanted = status.places(look.job, look.pods)
        if (waiting is not None and not waiting.admitted) or (held < wanted and not status.is_failing(look.job)):
            return self._placing(attempt, seen, waiting, held, wanted)
        self._placements.forget(_name(attempt))
        if waiting is None:
            return replace(seen, note=self._taken_away(look))
        return replace(seen, note=waiting.reason, level=waiting.level)

    def _placing(self, attempt: Attempt, seen: Running, waiting: status.Waiting | None, held: int, wanted: int) -> Running:
        """Not all pods have a place. The attempt's time begins when they do; what some of them hold meanwhile is only lent."""
        self._silence.forget(attempt)
        seen = replace(seen, silent_seconds=0.0)
        name = _name(attempt)
        waiting = self._placements.waits(name, waiting)
        if self._placements.lasts(name, held if held < wanted else 0):
            lent = f"Only {held} of the attempt's {wanted} pods had a place for {self._profile.placement_seconds} seconds"
            why = f" {waiting.reason.rstrip('.')}." if waiting is not None else ""
            self._give_back(attempt, exit_of(ExitReason.STOPPED, f"{lent}; it was given back.{why}"))
            return replace(seen, admitted=False)
        if waiting is None:  # the cluster has not come to it yet
            return seen
        return replace(seen, note=waiting.reason, level=waiting.level, admitted=False)

    def _give_back(self, attempt: Attempt, ended: Exit) -> None:
        """End an attempt that has not begun, as if somebody had stopped it."""
        attempt.write_control(Control(generation=2**31, desired=Desired.CANCEL))
        self._seal(attempt, ended)
        self._try_to_delete(attempt)

    def _is_stopped(self, attempt: Attempt) -> bool:
        """Whether an attempt of several pods was stopped here while some may still run. That of one pod writes its own end."""
        recorded = attempt.read_exit()
        if recorded is None or recorded.reason is not ExitReason.STOPPED:
            return False
        start = attempt.readable_start()
        return start is not None and start.nodes > 1

    def _taken_away(self, look: _Look) -> str | None:
        taken = status.taken_back(look.job, look.workload) if look.job is not None else None
        return taken or status.disruption(look.pods)

    def _is_taken_back(self, attempt: Attempt, look: _Look) -> bool:
        """Whether the queue has suspended the Job again, and what ran of it is over."""
        start = attempt.readable_start()
        if start is None or look.job is None or not status.is_suspended(look.job) or any(map(status.is_alive, look.pods)):
            return False
        return bool(attempt.read_node_exits(start.nodes)) or attempt.has_outcome()

    def _taken_back(self, attempt: Attempt, look: _Look) -> Observation:
        """The attempt has ended: the queue must not admit its Job a second time, the next attempt has one of its own."""
        try:
            self._delete(attempt)
        except (ClusterAwayError, RefusedError) as error:
            self._outage.failed(error)
            why = f"the cluster does not take back the Job of an attempt that has ended: {error}"
            return Unknown(why, self._outage.seconds)
        return self._ended(attempt, look)

    def _gone(self, attempt: Attempt) -> Observation:
        """No Job and no pods: never created, deleted by us, gone by its time to live, or deleted by somebody."""
        self._silence.forget(attempt)
        ended = self._exit(attempt, None, [])
        if ended is None and not attempt.has_launched():
            return Absent()
        return self._over(attempt, ended)

    def _ended(self, attempt: Attempt, look: _Look) -> Ended:
        self._silence.forget(attempt)
        ended = self._exit(attempt, look.job, look.pods)
        if ended is not None:
            self._seal(attempt, ended)
        return self._over(attempt, ended)

    def _over(self, attempt: Attempt, ended: Exit | None) -> Ended:
        """An attempt that was stopped before it said a word did not get, or keep, its place."""
        unheard = not attempt.has_segment(0)
        if ended is not None and ended.reason is ExitReason.STOPPED and unheard:
            return Ended(ended, newest_step(attempt.run), self._placements.put_off(attempt.job_id, attempt.number))
        self._placements.settled(attempt.job_id)
        return Ended(ended, newest_step(attempt.run))

    def _exit(self, attempt: Attempt, job: dict[str, Any] | None, pods: list[dict[str, Any]]) -> Exit | None:
        try:
            start = attempt.read_start()
        except UnreadableDocumentError as error:
            return attempt.read_exit() or unreadable_exit(error)
        if start is None:
            return None
        result = attempt.read_result()
        recorded = attempt.read_exit()
        if recorded is not None and result is None:
            return recorded
        outcome = attempt.read_outcome()
        exits = attempt.read_node_exits(start.nodes)
        return status.judge(start.nodes, exits, outcome, result, job, pods, trained=attempt.has_segment(0))

    def _seal(self, attempt: Attempt, ended: Exit) -> None:
        attempt.write_exit(ended)

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
        self._looks.pop(name, None)
        self._held.pop(name, None)
        self._whole.discard(name)
        self._placements.forget(name)
        self._ending.pop(name, None)

    def _was_started_or_ended(self, attempt: Attempt) -> bool:
        """Whether any replica of the service has started the attempt, or it has ended."""
        return attempt.has_launched() or attempt.has_exit()


def _name(attempt: Attempt) -> str:
    """Name of the attempt's Job."""
    return object_name(attempt.job_id, attempt.number)
