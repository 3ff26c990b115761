from __future__ import annotations

from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from ft_service.errors import SpecError
from ft_service.launcher.kubernetes.manifests import (
    AttemptShape,
    Site,
    job_manifest,
)
from ft_service.launcher.kubernetes.profile import PodProfile, load_profile
from tests.cluster.versions import KUBERNETES_VERSIONS

PROFILES = Path(__file__).parents[4] / "deploy/kubernetes"


JOB = "ftjob-aB3dE5gH7jK9mN1pQ3sT5vX7"


HOME = Path("/var/lib/ft")


LOCAL = {"image": "ft-worker:dev", "gpu_resource": None, "slots": 4, "ranks_per_node": 2}


LOCAL |= {
    "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "ft-data"}}],
    "volume_mounts": [{"name": "data", "mountPath": "/var/lib/ft"}],
}


def test_a_notice_too_short_to_stop_in_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text(yaml.safe_dump({**LOCAL, "termination_grace_seconds": 5}))
    with pytest.raises(SpecError, match=r"termination_grace_seconds.*5.*10"):
        load_profile(path)


@pytest.mark.parametrize("path", sorted(PROFILES.rglob("pod-profile.yaml")), ids=lambda path: path.parent.name)
def test_every_profile_in_deploy_loads(path: Path) -> None:
    load_profile(path)


@pytest.mark.parametrize(
    ("priority", "queue_class", "pod_class"),
    [(-1, "lowest", None), (0, "normal", None), (9, "normal", "soon"), (10, "high", "soon"), (1000, "high", "soon")],
)
def test_a_jobs_priority_becomes_the_clusters_classes(priority: int, queue_class: str, pod_class: str | None) -> None:
    profile = PodProfile.model_validate(
        {
            **LOCAL,
            "queue": "training",
            "queue_priority_class": "lowest",
            "queue_priority_classes": {0: "normal", 10: "high"},
            "priority_classes": {5: "soon"},
        }
    )
    job = job_manifest(AttemptShape(JOB, 1, 1, 1, HOME / "runs" / JOB, priority=priority), profile, Site("training", HOME))
    for version in KUBERNETES_VERSIONS:
        kubernetes_validate.validate(job, version, strict=True)
    assert job["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == queue_class
    assert job["spec"]["template"]["spec"].get("priorityClassName") == pod_class
