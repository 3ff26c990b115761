"""Metrics in Prometheus' format: this process's counters, and numbers read from the database and
the disk.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ft_service.control.places.capacity import total_slots
from ft_service.errors import UnavailableError
from ft_service.jobs.reasons import Reason, may_fail
from ft_service.jobs.states import TERMINAL, State
from ft_service.meters import MOST_PROJECTS, OTHERS, Meters
from ft_service.settings import Settings
from ft_service.shared_work.places import Outcome, every_kind
from ft_service.store.records import ProjectStatistics, ServiceStatistics
from ft_service.store.sql import Store

_TERMINAL = {state.value for state in TERMINAL}
_ENDS = {
    State.SUCCEEDED: [Reason.SUCCEEDED],
    State.CANCELLED: [Reason.USER_CANCELLED],
    State.FAILED: [
        reason
        for reason in Reason
        if may_fail(reason) and reason not in (Reason.SUCCEEDED, Reason.USER_CANCELLED)
    ],
}
_NONE = {(state.value, reason.value): 0 for state, reasons in _ENDS.items() for reason in reasons}
"""Counts before the first job: Prometheus' `increase` does not see what a new series begins
with.
"""

_UP = (
    "1: the database has answered this scrape; 0: it has not, and what is read from it is missing."
)


_KEPT_PER_SECOND = 20.0
"""Seconds for which statistics count that took the database a second: however many jobs there are,
reading them takes a twentieth of its time at most.
"""


class ReadStatistics:
    """Statistics of the database, with the seconds that reading took. Safe between threads."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds since any moment."""
        self.store = store
        self._clock = clock
        self._guard = threading.Lock()
        self._kept: tuple[ServiceStatistics, float] | None = None
        self._until = 0.0

    def read(self) -> tuple[ServiceStatistics, float]:
        """Return them, read now or not long ago. Raises UnavailableError."""
        with self._guard:
            if self._kept is not None and self._clock() < self._until:
                return self._kept
            began = self._clock()
            found = self.store.statistics()
            took = self._clock() - began
            self._kept = found, took
            self._until = began + took + _KEPT_PER_SECOND * took
            return self._kept


def exposition(meters: Meters, settings: Settings, statistics: ReadStatistics) -> bytes:
    """Return the text of one scrape; without a database's answer, of this process and the disk
    alone.
    """
    current = CollectorRegistry()
    current.register(_Now(settings, statistics))
    current.register(_Work())
    return generate_latest(meters.registry) + generate_latest(current)


class _Now(Collector):
    """Numbers that are read at each scrape, so that all servers of a database report the same, also
    after a restart.
    """

    def __init__(self, settings: Settings, statistics: ReadStatistics) -> None:
        self._settings = settings
        self._statistics = statistics

    def describe(self) -> Iterable[Metric]:
        return []  # registering would otherwise query the database

    def collect(self) -> Iterable[Metric]:
        disk = shutil.disk_usage(self._settings.home)
        yield from _gauges(
            ("ft_disk_total_bytes", "Size of the file system that holds FT_HOME.", disk.total),
            ("ft_disk_free_bytes", "Free bytes of the file system that holds FT_HOME.", disk.free),
            (
                "ft_slots",
                "Slots that jobs of this service can hold in all.",
                total_slots(self._settings),
            ),
        )
        store = self._statistics.store
        yield from _gauges(
            (
                "ft_database_connections",
                "Connections to the database that this process uses.",
                store.connections,
            ),
            (
                "ft_database_connections_limit",
                "Most that it may use (FT_DATABASE_CONNECTIONS).",
                store.most_connections,
            ),
        )
        try:
            store.now()
            statistics, seconds = self._statistics.read()
        except UnavailableError:
            yield from _gauges(("ft_database_up", _UP, 0))
            return
        yield from _jobs(statistics.jobs)
        yield from _projects(statistics.projects)
        yield _in_use(statistics.slots_in_use)
        yield from _gauges(
            ("ft_database_up", _UP, 1),
            (
                "ft_queue_oldest_seconds",
                "Age of the job that is queued longest.",
                statistics.oldest_queued_seconds,
            ),
            (
                "ft_reconciler_lag_seconds",
                "Time since the reconciler's last look at the running or validating job that has "
                "waited longest for one.",
                statistics.overdue_seconds,
            ),
            ("ft_engines", "Engines that hold slots, each for several jobs.", statistics.engines),
            ("ft_engine_jobs", "Jobs that engines train.", statistics.seats),
            ("ft_file_bytes", "Bytes of uploaded and result files.", statistics.file_bytes),
            (
                "ft_webhooks_waiting",
                "Webhook deliveries that still wait.",
                statistics.webhooks_waiting,
            ),
            ("ft_statistics_seconds", "Time that the database took for these numbers.", seconds),
        )


class _Work(Collector):
    """Work for callers in this process, by kind, and by project where that is known."""

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        labels = ["kind", "project"]
        waiting = GaugeMetricFamily(
            "ft_work_waiting", "Work that waits for its project's turn.", labels=labels
        )
        running = GaugeMetricFamily("ft_work_running", "Work that has a place.", labels=labels)
        cpu = CounterMetricFamily(
            "ft_work_cpu_seconds",
            "Processor time of work, as far as it is measured.",
            labels=labels,
        )
        ended = CounterMetricFamily(
            "ft_work_ended",
            "Work by its end: done; refused, by the doing of its input; lost, by the host's, "
            "which is tried again.",
            labels=["kind", "outcome"],
        )
        for places in every_kind():
            name = places.kind.name
            spent = dict(places.cpu_seconds)
            for project, (waits, runs) in ({"": (0, 0)} | places.projects()).items():
                waiting.add_metric([name, project], waits)
                running.add_metric([name, project], runs)
            for project, seconds in spent.items():
                cpu.add_metric([name, project], seconds)
            for outcome in Outcome:
                ended.add_metric([name, outcome], places.ended[outcome])
        yield from (waiting, running, cpu, ended)


def _gauges(*given: tuple[str, str, float]) -> Iterable[Metric]:
    """Metrics of (name, text, value)."""
    return [GaugeMetricFamily(name, text, value=value) for name, text, value in given]


def _jobs(counts: dict[tuple[str, str], int]) -> Iterable[Metric]:
    states = GaugeMetricFamily("ft_jobs", "Jobs by state.", labels=["state"])
    ended = CounterMetricFamily(
        "ft_jobs_finished", "Jobs that are over, by state and reason.", labels=["state", "reason"]
    )
    by_state: Counter[str] = Counter({state.value: 0 for state in State})
    for (state, reason), count in sorted((_NONE | counts).items()):
        by_state[state] += count
        if state in _TERMINAL:
            ended.add_metric([state, reason], count)
    for state, count in by_state.items():
        states.add_metric([state], count)
    return states, ended


def _projects(projects: Mapping[str, ProjectStatistics]) -> Iterable[Metric]:
    """Metrics of the projects with most slots and jobs; those of the others are summed."""
    by_size = sorted(
        projects, key=lambda name: (projects[name].slots, sum(projects[name].jobs.values()), name)
    )
    shown = set(by_size[-MOST_PROJECTS:])
    slots: Counter[str] = Counter()
    counts: Counter[tuple[str, str]] = Counter()
    oldest: dict[str, float] = {}
    for name, project in projects.items():
        label = name if name in shown else OTHERS
        slots[label] += project.slots
        oldest[label] = max(oldest.get(label, 0.0), project.oldest_queued_seconds)
        for state, count in project.jobs.items():
            counts[label, state] += count
    held = GaugeMetricFamily(
        "ft_project_slots_in_use", "Slots that jobs of a project hold.", labels=["project"]
    )
    jobs = GaugeMetricFamily(
        "ft_project_jobs", "Unfinished jobs, by project and state.", labels=["project", "state"]
    )
    waiting = GaugeMetricFamily(
        "ft_project_queue_oldest_seconds",
        "Age of a project's job that is queued longest.",
        labels=["project"],
    )
    for label, count in sorted(slots.items()):
        held.add_metric([label], count)
        waiting.add_metric([label], oldest[label])
    for (label, state), count in sorted(counts.items()):
        jobs.add_metric([label, state], count)
    return held, jobs, waiting


def _in_use(slots: dict[str, int]) -> Metric:
    gauge = GaugeMetricFamily(
        "ft_slots_in_use",
        "Slots (ranks; with GPUs, GPUs) that jobs hold, by host.",
        labels=["host"],
    )
    for host, count in sorted(slots.items()):
        gauge.add_metric([host], count)
    return gauge
