"""The way to a control plane of somebody else's, walked on our own."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.cluster import plane
from tests.cluster.apiserver import ApiServer, State
from tests.cluster.harness import our_plane, place
from tests.cluster.jobs import Jobs
from tests.support.attempts import wait_for


def kubeconfig(folder: Path, url: str) -> Path:
    """With a context that has no user, and another that is not the current one."""
    body = {
        "clusters": [
            {"name": "c", "cluster": {"server": url}},
            {"name": "d", "cluster": {"server": "http://127.0.0.1:9"}},
        ],
        "users": [
            {"name": "u", "user": {"client-certificate": "gone.crt", "client-key": "gone.key"}}
        ],
        "contexts": [
            {"name": "x", "context": {"cluster": "c"}},
            {"name": "y", "context": {"cluster": "d", "user": "u"}},
        ],
        "current-context": "x",
    }
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(body))
    return path


def test_a_control_plane_without_a_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plane, "SCHEDULER_SECONDS", 0.2)
    with our_plane(schedules=False) as server:
        config = plane.credentials(f"{tmp_path}/none:{kubeconfig(tmp_path, server.url)}")
        with plane.connect(config) as http:
            with place(config, http) as cluster:
                jobs = Jobs(cluster)
                name = jobs.create("true")
                assert jobs.wait_for(name, "Complete")
                elsewhere = jobs.create("true", template=no_place(jobs, name))
                told = wait_for(
                    lambda: next(
                        (c for p in jobs.pods(elsewhere) for c in plane.conditions(p)), None
                    )
                )
                assert (told["reason"], "didn't match" in told["message"]) == (
                    "Unschedulable",
                    True,
                )
            left = {plural for plural, _, _ in server.state.objects}
            assert left == set(), "namespaces, nodes, and all that was in them"


def no_place(jobs: Jobs, name: str) -> dict[str, object]:
    template = jobs.cluster.get("jobs", name)["spec"]["template"]
    return {"spec": {**template["spec"], "nodeSelector": {"gpu": "none-has-it"}}}


def test_a_control_plane_that_runs_no_jobs_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plane, "SECONDS", 0.2)
    server = ApiServer(State())
    server.start()
    try:
        config = plane.credentials(str(kubeconfig(tmp_path, server.url)))
        lacking = pytest.raises(AssertionError, match="has it a kube-controller-manager")
        with plane.connect(config) as http, lacking, place(config, http):
            pass
    finally:
        server.stop()


def test_credentials_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="there is no such file"):
        plane.credentials(f"{tmp_path}/none")
