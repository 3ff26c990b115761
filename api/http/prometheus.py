"""Metrics in Prometheus' format: this process's counters, and numbers read from the database and
the disk.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ft_service.control.places.capacity import total_slots
from ft_service.errors import UnavailableError
from ft_service.jobs.reasons import Reason, may_fail
from ft_service.jobs.states import TERMINAL, State
from ft_service.meters import Meters
from ft_service.settings import Settings
from ft_service.shared_work.places import Outcome, every_kind
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


def exposition(meters: Meters, settings: Settings, store: Store) -> bytes:
    """Return the text of one scrape; without a database's answer, of this process and the disk
    alone.
    """
    current = CollectorRegistry()
    current.register(_Now(settings, store))
    current.register(_Work())
    return generate_latest(meters.registry) + generate_latest(current)


class _Now(Collector):
    """Numbers that are read at each scrape, so that all servers of a database report the same, also
    after a restart.
    """

    def __init__(self, settings: Settings, store: Store) -> None:
        self._settings = settings
        self._store = store

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
        started = time.perf_counter()
        try:
            statistics = self._store.statistics()
        except UnavailableError:
            yield from _gauges(("ft_database_up", _UP, 0))
            return
        seconds = time.perf_counter() - started
        yield from _jobs(statistics.jobs)
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
            ("ft_statistics_seconds", "Time that the database took for this scrape.", seconds),
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


def _in_use(slots: dict[str, int]) -> Metric:
    gauge = GaugeMetricFamily(
        "ft_slots_in_use",
        "Slots (ranks; with GPUs, GPUs) that jobs hold, by host.",
        labels=["host"],
    )
    for host, count in sorted(slots.items()):
        gauge.add_metric([host], count)
    return gauge
