"""Pods that describe bases: the worker's image reads a folder of the models' volume and prints the
document to its log.

Each base without a description gets a Job with one pod. The service has no torch, and the code that
trains a base must describe it. The pod sees only the models, and has no GPU.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ft_service.bases.describing import (
    MEMORY_BYTES,
    SECONDS,
    DescribeError,
    DescribeLaterError,
    described_by,
    files_key,
)
from ft_service.bases.description import Described
from ft_service.launcher.kubernetes import status
from ft_service.launcher.kubernetes.cluster import Cluster, ClusterAwayError, RefusedError
from ft_service.launcher.kubernetes.manifests import Manifest, Site, describe_manifest
from ft_service.launcher.kubernetes.profile import PodProfile

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
START_SECONDS = 900.0
"""Seconds that a pod may take to get a node and its image, in addition to the time to describe."""
LOOK_SECONDS = 10.0
"""Pause between two looks for the reason why a pod does not run yet."""


class DescribePods:
    """Descriptions of bases by pods in one namespace of a cluster. For any number of threads."""

    def __init__(self, cluster: Cluster, profile: PodProfile, site: Site) -> None:
        self._cluster = cluster
        self._profile = profile
        self._site = site
        self._reasons: dict[Path, str] = {}
        """Folder of a base → why its pod does not run yet."""

    def waits(self, folder: Path) -> str | None:
        """Return why the pod that describes a base does not run yet; None: it does, or the cluster
        does not say.
        """
        return self._reasons.get(folder)

    def describe(self, folder: Path, stop: Callable[[], bool]) -> Described:
        """Return the description of a base, after waiting for its pod.

        Several servers that need the same base share one Job.

        Raises DescribeError, and DescribeLaterError if the cluster does not answer, has no node for
        the pod or takes it away.
        """
        seed = f"{files_key(folder)} {self._profile.image} {folder}"
        name = f"ft-describe-{hashlib.sha256(seed.encode()).hexdigest()[:24]}"
        seconds = int(START_SECONDS + SECONDS)
        try:
            manifest = describe_manifest(
                name, folder, self._profile, self._site, memory=2 * MEMORY_BYTES, seconds=seconds
            )
            self._cluster.create(manifest)
            due = time.monotonic() + seconds
            look = 0.0
            while not status.is_finished(job := self._job(name)):
                if time.monotonic() >= look:
                    self._look(name, folder, job)
                    look = time.monotonic() + LOOK_SECONDS
                if stop() or time.monotonic() > due:
                    raise DescribeLaterError(self._late(folder))
                time.sleep(POLL_SECONDS)
            return self._read_answer(name, folder)
        except (ClusterAwayError, RefusedError) as error:
            raise DescribeLaterError(f"the cluster does not run the pod: {error}") from None
        finally:
            self._remove(name)
            self._reasons.pop(folder, None)

    def _job(self, name: str) -> Manifest:
        job = self._cluster.job(name)
        if job is None:
            raise DescribeLaterError("the Job that describes it was deleted")
        return job

    def _look(self, name: str, folder: Path, job: Manifest) -> None:
        """Find out why the pod does not run yet."""
        pods = self._cluster.pods(name)
        stuck = status.stuck(pods)
        warnings = self._cluster.warnings(stuck, kind="Pod") if stuck is not None else []
        waiting = status.waiting(
            job, pods, warnings or ([] if pods else self._cluster.warnings(name))
        )
        if waiting is None:
            self._reasons.pop(folder, None)
        elif self._reasons.get(folder) != waiting.reason:
            self._reasons[folder] = waiting.reason
            log.warning(
                "the pod that describes the base in %s does not run yet: %s", folder, waiting.reason
            )

    def _late(self, folder: Path) -> str:
        why = self._reasons.get(folder)
        return f"no pod of the cluster has described it in time{f': {why}' if why else ''}"

    def _read_answer(self, name: str, folder: Path) -> Described:
        pods = self._cluster.pods(name)
        if not pods:  # by its deadline, or deleted
            raise DescribeLaterError(self._late(folder))
        lines = self._cluster.log(pods[-1]["metadata"]["name"]).strip().splitlines()
        last = lines[-1] if lines else ""
        try:
            answer: Any = json.loads(last)
        except ValueError:
            if (taken := status.taken_away(pods)) is not None:
                raise DescribeLaterError(taken) from None
            why = status.end_of(pods[-1]) or f"printed {last[:200]!r}"
            kind = DescribeLaterError if status.was_killed(pods[-1]) else DescribeError
            raise kind(f"the pod that describes bases gave no answer: it {why}") from None
        for name, kind in (("error", DescribeError), ("later", DescribeLaterError)):
            if isinstance(answer, dict) and isinstance(answer.get(name), str):
                raise kind(answer[name])
        return described_by(last.encode())

    def _remove(self, name: str) -> None:
        try:
            self._cluster.delete_job(name)
        except (ClusterAwayError, RefusedError) as error:  # its time to live removes it
            log.warning("the Job %s was not deleted: %s", name, error)
