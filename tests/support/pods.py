"""Attempts as pods of a cluster, which play a script."""

from __future__ import annotations

import secrets
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Ended, Observation, Running
from ft_service.launcher.kubernetes.kubernetes_launcher import KubernetesLauncher
from ft_service.launcher.kubernetes.manifests import JOB_NAME, object_name
from ft_service.launcher.kubernetes.profile import PodProfile
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Start
from tests.cluster.harness import HarnessCluster
from tests.cluster.kubelet import TOLERATION
from tests.support.attempts import wait_for

POD_WORKER = Path(__file__).parent / "programs/pod_worker.py"
SECONDS = 120.0
"""Long enough on a busy machine, and on a cluster that takes its time."""
LOOK_SECONDS = 0.1
"""Between two looks: each asks the control plane for the Job, its pods and their events."""


@dataclass
class PodAttempt:
    """One attempt of a job of its own, and the launcher that is to run it."""

    cluster: HarnessCluster
    launcher: KubernetesLauncher
    profile: PodProfile
    home: Path
    run: RunDir
    job_id: str

    @property
    def handle(self) -> Attempt:
        return Attempt(self.run, 1, job_id=self.job_id)

    @property
    def name(self) -> str:
        return object_name(self.job_id, 1)

    def start(self) -> None:
        self.launcher.start(self.handle)

    def seen(self) -> Observation:
        return self.launcher.observe(self.handle)

    def pod(self, index: int) -> str:
        """Name of an index's pod, once it runs."""
        return wait_for(lambda: self.cluster.pod(self.name, index), SECONDS)

    def wait_reported(self) -> None:
        def reported() -> bool:
            seen = self.seen()
            assert not isinstance(seen, Ended), seen
            return isinstance(seen, Running) and seen.reported

        wait_for(reported, SECONDS, every=LOOK_SECONDS)

    def wait_noted(self) -> Running:
        """What is seen, once there is something to tell."""

        def noted() -> Running | None:
            seen = self.seen()
            return seen if isinstance(seen, Running) and seen.note else None

        return wait_for(noted, SECONDS, every=LOOK_SECONDS)

    def wait_told(self, note: str) -> None:
        """Until this is what its place says about it."""

        def told() -> bool:
            seen = self.seen()
            return isinstance(seen, Running) and seen.note == note

        wait_for(told, SECONDS, every=LOOK_SECONDS)

    def wait_ended(self) -> Ended:
        def ended() -> Ended | None:
            seen = self.seen()
            return seen if isinstance(seen, Ended) else None

        return wait_for(ended, SECONDS, every=LOOK_SECONDS)

    def only_logs_are_left(self) -> None:
        """Its Job stays to be looked at, and so do its pods, of which nothing runs."""
        assert self.cluster.get("jobs", self.name) is not None
        pods = [
            pod
            for pod in self.cluster.items("pods")
            if pod["metadata"]["labels"].get(JOB_NAME) == self.name
        ]
        assert {pod["status"]["phase"] for pod in pods} <= {"Succeeded", "Failed"}
        assert pods

    def wait_gone(self) -> None:
        wait_for(lambda: self.cluster.nothing_left(self.name), SECONDS)


class Attempts:
    """Makes attempts, and removes their Jobs in the end."""

    def __init__(self, cluster: HarnessCluster, folder: Path) -> None:
        self._cluster = cluster
        self._folder = folder
        self._made: list[PodAttempt] = []

    def __call__(
        self, script: str, nodes: int = 2, *, grace: float = 20.0, **changes: Any
    ) -> PodAttempt:
        """`script`: what node 0 plays. `changes`: of the profile."""
        home = self._folder / f"home-{len(self._made)}"
        job_id = f"ftjob-{secrets.token_hex(6)}"
        run = RunDir(home / "runs" / job_id)
        start = Start(
            job_id=job_id, attempt=1, world_size=nodes, generation=1, checkpoint=None, nodes=nodes
        )
        Attempt(run, 1).write_start(start)
        profile = profile_for(
            home, script, **{"node_selector": self._cluster.node_selector, **changes}
        )
        made = PodAttempt(
            self._cluster,
            self._cluster.launcher(profile, home, grace=grace),
            profile,
            home,
            run,
            job_id,
        )
        self._made.append(made)
        return made

    def remove(self) -> None:
        def killed(attempt: PodAttempt) -> bool:
            # again: a connection may be from before a break.
            attempt.launcher.kill(attempt.handle, Reason.USER_CANCELLED)
            return self._cluster.get("jobs", attempt.name) is None

        for attempt in self._made:
            wait_for(partial(killed, attempt), SECONDS)
        for attempt in self._made:
            attempt.wait_gone()


def profile_for(home: Path, script: str, **changes: Any) -> PodProfile:
    """Pods of CPUs that share `home` with the test, and play a script."""
    values: dict[str, Any] = {
        "image": "worker:test",
        "command": [sys.executable, str(POD_WORKER)],
        "slots": 8,
        "ranks_per_node": 4,
        "gpu_resource": None,
        "env": [{"name": "POD_SCRIPT", "value": script}],
        "tolerations": [TOLERATION],
        "volumes": [{"name": "data", "hostPath": {"path": str(home)}}],
        "volume_mounts": [{"name": "data", "mountPath": str(home)}],
    }
    return PodProfile.model_validate({**values, **changes})
