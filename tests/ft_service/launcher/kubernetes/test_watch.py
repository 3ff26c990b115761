from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import cast

import pytest
from lightkube.config.kubeconfig import KubeConfig
from lightkube.config.models import Cluster as KubeCluster
from lightkube.config.models import User

from ft_service.launcher.kubernetes import watch
from ft_service.launcher.kubernetes.cluster import Cluster, ClusterAwayError
from tests.support.attempts import wait_for

TRIES = 40


class AwayCluster:
    """Cannot be watched for TRIES times; then each watch tells of one Job, and the cluster is closed."""

    def __init__(self) -> None:
        self.closed = False
        self.tries: dict[str, int] = {}
        self.rests: dict[str, list[float]] = {}

    def rest(self, seconds: float) -> None:
        taken = self.rests.setdefault(threading.current_thread().name, [])
        taken.append(seconds)
        if len(taken) > TRIES:
            self.closed = len(self.rests) == 2 and all(len(rested) > TRIES for rested in self.rests.values())

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
    changes = watch.Changes(cast("Cluster", cluster))
    wait_for(lambda: cluster.closed)
    assert changes.take("a-Job")
    assert changes.take("a-Pod")
    rests = cluster.rests
    assert rests["watch-Job"][:7] == [1, 2, 4, 8, 16, 30, 30]
    assert rests["watch-Job"][TRIES] == 1, "it was there again"
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Jobs")]
    assert told == ["Jobs cannot be watched: connection refused", "Jobs cannot be watched: no longer, after 0 seconds"]


def test_a_break_ends_as_soon_as_the_cluster_answers_again() -> None:
    nobody = KubeConfig.from_one(cluster=KubeCluster(server="http://127.0.0.1:1"), user=User(token="t"))
    cluster = Cluster("n", nobody)
    rested = threading.Thread(target=cluster.rest, args=(600.0,), daemon=True)
    rested.start()

    def woken() -> bool:
        cluster.wake()
        return not rested.is_alive()

    wait_for(woken)
    cluster.close()
