"""Which Jobs have changed, told as soon as the cluster tells it: watching only saves waiting, looking is the truth."""

from __future__ import annotations

import threading

from ft_service.launcher.kubernetes.cluster import Cluster, ClusterAwayError, ExpiredError, RefusedError
from ft_service.launcher.kubernetes.outage import Outage

BREAK_SECONDS = 1.0
"""Until a watch that failed is tried again; doubled each time, up to MAX_BREAK_SECONDS."""
MAX_BREAK_SECONDS = 30.0


class Changes:
    """Watches Jobs and pods in threads of its own, which end with the process."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._lock = threading.Lock()
        self._changed: set[str] = set()
        for kind in ("Job", "Pod"):
            threading.Thread(target=self._watch, args=(kind,), name=f"watch-{kind}", daemon=True).start()

    def take(self, job: str) -> bool:
        """Whether a Job or its pods have changed since this was asked last."""
        with self._lock:
            changed = job in self._changed
            self._changed.discard(job)
            return changed

    def _watch(self, kind: str) -> None:
        outage, rest = Outage(f"{kind}s cannot be watched"), BREAK_SECONDS
        while not self._cluster.closed:
            try:
                for job in self._cluster.watch(kind):  # begins with all that there is, so that a break hides nothing
                    outage.over()
                    rest = BREAK_SECONDS
                    with self._lock:
                        self._changed.add(job)
            except ExpiredError:
                continue
            except (ClusterAwayError, RefusedError) as error:
                outage.failed(error)
            except RuntimeError:  # of a client that was closed meanwhile
                if not self._cluster.closed:
                    raise
            self._cluster.rest(rest)
            rest = min(2 * rest, MAX_BREAK_SECONDS)
