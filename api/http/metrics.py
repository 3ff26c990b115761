"""All metrics in Prometheus' format: this process's counters, and numbers that the database and the disk give now."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ft_service.control.capacity import capacity_of
from ft_service.jobs.states import TERMINAL
from ft_service.meters import Meters
from ft_service.settings import Settings
from ft_service.store.sql import Store

_TERMINAL = {state.value for state in TERMINAL}


def exposition(meters: Meters, settings: Settings, store: Store) -> bytes:
    """The text of one scrape. Raises UnavailableError if the database is away."""
    current = CollectorRegistry()
    current.register(_Now(settings, store))
    return generate_latest(meters.registry) + generate_latest(current)


class _Now(Collector):
    """Numbers read at each scrape, so that every server of one database says the same, and a restart forgets nothing."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self._settings = settings
        self._store = store

    def describe(self) -> Iterable[Metric]:
        return []  # or registering would ask the database

    def collect(self) -> Iterable[Metric]:
        started = time.perf_counter()
        statistics = self._store.statistics()
        seconds = time.perf_counter() - started
        yield from _jobs(statistics.jobs)
        yield _gauge(
            "ft_queue_oldest_seconds", "How long the job that waits longest has been queued.", statistics.oldest_queued_seconds
        )
        lag = "How long the running or validating job that was looked at longest ago has not been looked at."
        yield _gauge("ft_reconciler_lag_seconds", lag, statistics.overdue_seconds)
        yield _in_use(statistics.slots_in_use)
        yield _gauge("ft_slots", "Slots that jobs of this service can hold in all.", _slots(self._settings, self._store))
        yield _gauge("ft_file_bytes", "Bytes of uploaded and result files.", statistics.file_bytes)
        yield _gauge("ft_webhooks_waiting", "Webhook deliveries neither made nor given up.", statistics.webhooks_waiting)
        disk = shutil.disk_usage(self._settings.home)
        yield _gauge("ft_disk_total_bytes", "Of the file system that holds FT_HOME.", disk.total)
        yield _gauge("ft_disk_free_bytes", "The same, free.", disk.free)
        yield _gauge("ft_statistics_seconds", "How long the database took for this scrape.", seconds)


def _slots(settings: Settings, store: Store) -> int:
    """All that the service has; of hosts with agents those that are there."""
    if settings.launcher != "agents":
        return capacity_of(settings).slots
    return sum(host.slots for host in store.fleet() if host.silent_seconds < settings.host_lease_seconds)


def _jobs(counts: dict[tuple[str, str], int]) -> Iterable[Metric]:
    states = GaugeMetricFamily("ft_jobs", "Jobs by state.", labels=["state"])
    ended = CounterMetricFamily("ft_jobs_finished", "Jobs that are over, by state and why.", labels=["state", "reason"])
    by_state: dict[str, int] = {}
    for (state, reason), count in sorted(counts.items()):
        by_state[state] = by_state.get(state, 0) + count
        if state in _TERMINAL:
            ended.add_metric([state, reason], count)
    for state, count in by_state.items():
        states.add_metric([state], count)
    return states, ended


def _in_use(slots: dict[str, int]) -> Metric:
    gauge = GaugeMetricFamily("ft_slots_in_use", "Slots (ranks; with GPUs, GPUs) that jobs hold, by host.", labels=["host"])
    for host, count in sorted(slots.items()):
        gauge.add_metric([host], count)
    return gauge


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)
