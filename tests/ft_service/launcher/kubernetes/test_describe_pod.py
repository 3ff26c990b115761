"""Bases that pods describe: on the tests' cluster, whose node runs pods as processes of this
host.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ft_service.bases.describing import DescribeError, DescribeLaterError, Descriptions
from ft_service.bases.description import write_described
from ft_service.launcher.kubernetes import status
from ft_service.launcher.kubernetes.describe_pod import DescribePods
from ft_service.launcher.kubernetes.manifests import CONTAINER, DESCRIBES, Site, describe_manifest
from ft_service.launcher.kubernetes.profile import PodProfile
from ft_service.rundir.directory import RunDir
from tests.cluster.harness import HarnessCluster
from tests.cluster.kubelet import MISSING_IMAGE, TOLERATION
from tests.support.attempts import wait_for
from tests.support.bases import save_base
from tests.support.describing import small_document

ANSWERS = Path(__file__).parents[3] / "support/programs/answer_from_folder.py"
"""In place of the image's interpreter: prints what the base's folder holds as `answer`."""


def never() -> bool:
    return False


Open = Callable[..., DescribePods]


@pytest.fixture
def open_pods(cluster: HarnessCluster, tmp_path: Path) -> Open:
    if cluster.fake is None:
        pytest.skip("a real control plane asks a real node for logs")
    home = tmp_path / "home"
    models = tmp_path / "models"
    home.mkdir()

    def opened(image: str = "worker:1") -> DescribePods:
        profile = PodProfile.model_validate(
            {
                "image": image,
                "command": ["python", str(ANSWERS)],
                "slots": 2,
                "ranks_per_node": 1,
                "gpu_resource": "nvidia.com/gpu",
                "node_selector": cluster.node_selector,
                "tolerations": [TOLERATION],
                "volumes": [
                    {"name": "home-volume", "hostPath": {"path": str(home)}},
                    {"name": "models", "hostPath": {"path": str(models)}},
                ],
                "volume_mounts": [
                    {"name": "home-volume", "mountPath": str(home)},
                    {"name": "models", "mountPath": str(models), "readOnly": True},
                ],
            }
        )
        return DescribePods(
            cluster.client(), profile, Site(cluster.namespace, home, models=(models,))
        )

    return opened


def base_that_answers(tmp_path: Path, answer: str | None = None) -> Path:
    base = save_base(tmp_path / "models" / "base")
    document = small_document(base)
    (base / "answer").write_text(write_described(document).decode() if answer is None else answer)
    return base


def test_a_pod_hands_the_document_back_and_leaves_nothing(
    cluster: HarnessCluster, tmp_path: Path, open_pods: Open
) -> None:
    base = base_that_answers(tmp_path)
    descriptions = Descriptions(RunDir(tmp_path / "cache"), "worker:1", open_pods().describe)

    found = descriptions.describe(base)

    assert found.key == small_document(base).key
    assert found.base is not None
    assert Descriptions(RunDir(tmp_path / "cache"), "worker:1").known(base) is not None
    assert Descriptions(RunDir(tmp_path / "cache"), "worker:2").known(base) is None, (
        "another image may find another model"
    )
    jobs = [
        item
        for item in cluster.items("jobs")
        if item["metadata"]["name"].startswith("ft-describe-")
    ]
    assert [job for job in jobs if "deletionTimestamp" not in job["metadata"]] == []
    descriptions.close()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            json.dumps({"error": "workers.describe needed more than 300 seconds of a processor"}),
            "more than 300 seconds",
        ),
        ("all is well", "gave no answer: it ended with code 0"),
        (json.dumps({"key": "x"}), "not a description of a base"),
    ],
)
def test_what_a_pod_could_not_describe_is_said(
    tmp_path: Path, open_pods: Open, answer: str, words: str
) -> None:
    base = base_that_answers(tmp_path, answer)
    with pytest.raises(DescribeError, match=words):
        open_pods().describe(base, never)


def test_a_process_of_a_pod_that_its_node_killed_is_no_fault_of_the_base(
    tmp_path: Path, open_pods: Open
) -> None:
    base = base_that_answers(
        tmp_path, json.dumps({"later": "workers.describe was killed by signal 9 (SIGKILL)"})
    )
    with pytest.raises(DescribeLaterError, match="killed by signal 9"):
        open_pods().describe(base, never)


@pytest.mark.parametrize(
    ("ended", "is_killed"),
    [
        ({"exitCode": 137}, True),
        ({"exitCode": 143}, True),
        ({"exitCode": 1, "reason": "OOMKilled"}, True),
        ({"exitCode": 1}, False),
        ({"exitCode": 134}, False),
    ],
)
def test_a_pod_that_was_killed_is_told_from_one_that_ended(
    ended: dict[str, object], is_killed: bool
) -> None:
    pod = {"status": {"containerStatuses": [{"name": CONTAINER, "state": {"terminated": ended}}]}}
    assert status.was_killed(pod) is is_killed


def test_an_image_that_does_not_come_is_no_fault_of_the_base(
    tmp_path: Path, open_pods: Open
) -> None:
    base = base_that_answers(tmp_path)
    pods = open_pods(MISSING_IMAGE)
    descriptions = Descriptions(None, None, pods.describe, waits=pods.waits)
    assert descriptions.ask(base) is None
    why = wait_for(lambda: pods.waits(base), 60)
    assert re.fullmatch(r"pod ft-describe-[a-z0-9-]+ cannot start: ErrImagePull: .*", why)
    assert descriptions.delay(base) == f"The base in {base} is not described yet: {why}"
    descriptions.close()
    wait_for(lambda: pods.waits(base) is None, 60)
    with pytest.raises(
        DescribeLaterError,
        match=r"no pod of the cluster has described it in time: pod .* ErrImagePull",
    ):
        pods.describe(base, lambda: pods.waits(base) is not None)


def test_a_pod_that_is_evicted_while_it_describes_is_no_fault_of_the_base(
    cluster: HarnessCluster, tmp_path: Path, open_pods: Open
) -> None:
    base = base_that_answers(tmp_path)
    pods = open_pods()
    (base / "answer").unlink()
    os.mkfifo(base / "answer")  # it reads for ever

    def running() -> str | None:
        found = [item for item in cluster.items("pods") if item["status"].get("phase") == "Running"]
        return next(
            (
                item["metadata"]["name"]
                for item in found
                if item["metadata"]["name"].startswith("ft-describe-")
            ),
            None,
        )

    with ThreadPoolExecutor() as thread:
        describing = thread.submit(pods.describe, base, never)
        cluster.kubelet.evict_under_pressure(wait_for(running, 60))
        with pytest.raises(
            DescribeLaterError,
            match=r"pod ft-describe-.* is taken away \(TerminationByKubelet\): The node was low",
        ):
            describing.result(60)


def test_the_pod_sees_the_models_and_nothing_of_the_service(tmp_path: Path) -> None:
    home = tmp_path / "home"
    profile = PodProfile.model_validate(
        {
            "image": "worker:1",
            "slots": 1,
            "ranks_per_node": 1,
            "env": [{"name": "SECRET", "value": "s"}],
            "volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": "ft"}}],
            "volume_mounts": [{"name": "shared", "mountPath": str(home)}],
        }
    )
    site = Site("ns", home, models=(home / "models",))
    job = describe_manifest(
        "ft-describe-1", home / "models/org/base", profile, site, memory=2**33, seconds=900
    )
    (container,) = job["spec"]["template"]["spec"]["containers"]

    assert job["metadata"]["labels"].items() >= DESCRIBES.items()
    assert container["command"][-3:] == ["-P", "-m", "ft_service.bases.describing"]
    assert container["args"] == [str(home / "models/org/base")]
    assert [entry["name"] for entry in container["env"]] == ["HOME", "TMPDIR"]
    assert "nvidia.com/gpu" not in container["resources"]["limits"]
    (shown,) = [mount for mount in container["volumeMounts"] if mount["name"] == "shared"]
    assert (shown["mountPath"], shown["subPath"], shown["readOnly"]) == (
        str(home / "models"),
        "models",
        True,
    )
