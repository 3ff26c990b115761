from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from lightkube.config.kubeconfig import KubeConfig
from lightkube.config.models import Cluster as KubeCluster
from lightkube.config.models import User

from ft_service.launcher.kubernetes import cluster as cluster_module
from ft_service.launcher.kubernetes.cluster import (
    Cluster,
    ClusterAwayError,
    QuotaError,
    RefusedError,
    UnpreparedError,
)
from ft_service.launcher.kubernetes.manifests import AttemptShape, Site, job_manifest
from tests.cluster.apiserver import ApiServer, Refused, State
from tests.cluster.controllers import Controllers
from tests.support.attempts import wait_for
from tests.support.pods import SECONDS, profile_for

TRIES = 40


class AwayCluster:
    """Cannot be watched for TRIES times; then each watch tells of one Job, and the cluster is
    closed.
    """

    def __init__(self) -> None:
        self.closed = False
        self.tries: dict[str, int] = {}
        self.rests: dict[str, list[float]] = {}

    def rest(self, seconds: float) -> None:
        taken = self.rests.setdefault(threading.current_thread().name, [])
        taken.append(seconds)
        if len(taken) > TRIES:
            self.closed = len(self.rests) == 2 and all(
                len(rested) > TRIES for rested in self.rests.values()
            )

    def watch(self, kind: str) -> Iterator[str]:
        self.tries[kind] = self.tries.get(kind, 0) + 1
        if self.tries[kind] <= TRIES:
            raise ClusterAwayError("connection refused")
        yield f"a-{kind}"


def test_while_the_cluster_is_away_watches_try_less_often_and_log_next_to_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = AwayCluster()
    caplog.set_level(logging.INFO)
    changes = cluster_module.JobChanges(cast("Cluster", cluster))
    wait_for(lambda: cluster.closed)
    assert changes.take("a-Job")
    assert changes.take("a-Pod")
    rests = cluster.rests
    assert rests["watch-Job"][:7] == [1, 2, 4, 8, 16, 30, 30]
    assert rests["watch-Job"][TRIES] == 1, "it was there again"
    told = [
        record.getMessage() for record in caplog.records if record.getMessage().startswith("Jobs")
    ]
    assert told == [
        "Jobs cannot be watched: connection refused",
        "Jobs cannot be watched: no longer, after 0 seconds",
    ]


def test_a_break_ends_as_soon_as_the_cluster_answers_again() -> None:
    nobody = KubeConfig.from_one(
        cluster=KubeCluster(server="http://127.0.0.1:1"), user=User(token="t")
    )
    cluster = Cluster("n", nobody)
    rested = threading.Thread(target=cluster.rest, args=(600.0,), daemon=True)
    rested.start()

    def woken() -> bool:
        cluster.wake()
        return not rested.is_alive()

    wait_for(woken)
    cluster.close()


WATCHING = Path(__file__).parents[3] / "support/programs/watching.py"
NAMESPACE = "ft"
STARTS = 6
AT_ONCE = 3


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[tuple[ApiServer, str]]:
    """An API server that has a Job, and its name; the Job's two pods wait for a node."""
    server = ApiServer(State())
    controllers = Controllers(server.state, schedules=False)
    server.start()
    controllers.start()
    try:
        server.state.create("namespaces", "", {"metadata": {"name": NAMESPACE}})
        server.state.create("serviceaccounts", NAMESPACE, {"metadata": {"name": "ft-worker"}})
        body = job_manifest(
            AttemptShape("ftjob-1", 1, 2, 1, tmp_path / "runs/ftjob-1"),
            profile_for(tmp_path, "succeed"),
            Site(NAMESPACE, tmp_path, "", 20.0),
        )
        job = server.state.create("jobs", NAMESPACE, body)
        wait_for(lambda: len(server.state.list("pods")) == 2, SECONDS)
        yield server, job["metadata"]["name"]
    finally:
        controllers.stop()
        server.stop()


def test_both_watches_may_decode_their_first_object_at_once(plane: tuple[ApiServer, str]) -> None:
    """Jobs hold pods' types, and the decoder learns a type when it first meets it: half learnt, it
    ended the process.
    """
    server, job = plane
    command = [sys.executable, str(WATCHING), server.url, NAMESPACE, job]
    environment = {**os.environ, "PYTHONPATH": str(WATCHING.parents[3])}
    ended: list[int] = []
    for _ in range(STARTS // AT_ONCE):
        started = [subprocess.Popen(command, env=environment) for _ in range(AT_ONCE)]
        ended += [process.wait(2 * SECONDS) for process in started]
    assert ended == [0] * STARTS


def test_a_creation_that_met_another_at_a_quota_is_tried_again(
    plane: tuple[ApiServer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API server's words and reason (kubernetes#67761); an object that exists has another
    reason.
    """
    server, job = plane
    config = KubeConfig.from_one(cluster=KubeCluster(server=server.url), user=User(token="t"))
    cluster = Cluster(NAMESPACE, config)
    body = server.state.get(("jobs", NAMESPACE, job))
    new = {
        **body,
        "metadata": {
            "name": "another",
            "namespace": NAMESPACE,
            "labels": body["metadata"]["labels"],
        },
    }
    with monkeypatch.context() as patch:

        def conflict(*_: object) -> None:
            text = (
                'Operation cannot be fulfilled on resourcequotas "q": the object has been '
                "modified; please apply your changes"
            )
            raise Refused(409, "Conflict", text)

        patch.setattr(server.state, "_admit", conflict)
        with pytest.raises(ClusterAwayError, match="resourcequotas"):
            cluster.create(new)
    assert cluster.create(body)["metadata"]["uid"] == body["metadata"]["uid"]
    assert cluster.create(new)["metadata"]["name"] == "another"
    cluster.close()


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        (401, "Unauthorized", ClusterAwayError),
        (
            403,
            'jobs.batch is forbidden: User "u" cannot create resource "jobs" in API group "batch"',
            UnpreparedError,
        ),
        (404, 'namespaces "research" not found', UnpreparedError),
        (
            403,
            'jobs.batch "a" is forbidden: exceeded quota: q, requested: count/jobs.batch=1',
            QuotaError,
        ),
        (
            403,
            'jobs.batch "a" is forbidden: violates PodSecurity "restricted:latest"',
            RefusedError,
        ),
        (
            422,
            'Job.batch "a" is invalid: spec.template.spec.volumes[0].name: Required value',
            RefusedError,
        ),
    ],
)
def test_what_a_refusal_is_about(
    plane: tuple[ApiServer, str],
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    text: str,
    kind: type[Exception],
) -> None:
    server, job = plane
    cluster = Cluster(
        NAMESPACE, KubeConfig.from_one(cluster=KubeCluster(server=server.url), user=User(token="t"))
    )

    def refuse(*_: object) -> None:
        raise Refused(code, "Reason", text)

    monkeypatch.setattr(server.state, "_admit", refuse)
    with pytest.raises((ClusterAwayError, RefusedError)) as raised:
        cluster.create(
            {
                **server.state.get(("jobs", NAMESPACE, job)),
                "metadata": {"name": "a", "namespace": NAMESPACE},
            }
        )
    assert raised.type is kind
    cluster.close()
