"""Metrics of the service for Prometheus: modules update them, and the web layer exposes them.

Names follow Prometheus: `_total` counts since this process began, `_seconds` are durations. Labels
never contain a name or an id that a user chose; of projects they have the id, of MOST_PROJECTS at
most. Values that the database knows are read at each
scrape instead (api/http/prometheus.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

STALLED_SECONDS = 300.0
"""Age of the reconciler's last turn at which a process counts as not ready.

Turns that store large results take minutes.
"""
HANGING_SECONDS = 900.0
"""Age at which it does not count as alive any more, and its cluster restarts it."""

_SHORT = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_NATS = (0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1)
_LONG = (0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 24 * 3600)


MOST_PROJECTS = 200
"""Most projects that have series of their own; those of others are one, with OTHERS as project."""
OTHERS = "others"


class Meters:
    """Metrics in a registry of their own; made in `main` and passed down.

    Safe to share between threads.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds since any moment."""
        self._clock = clock
        self._began = clock()
        self._turned: dict[str, float] = {}
        """Host → when its loop last began a turn."""
        self._away: list[Callable[[], float]] = []
        self._orphans: dict[str, int] = {}
        self._projects: set[str] = set()
        """Projects with series of their own."""
        self.registry = CollectorRegistry()
        registry = self.registry
        ProcessCollector(registry=registry)
        self.requests = Histogram(
            "http_server_request_duration_seconds",
            "Requests by method, route and status, until the last byte of the answer.",
            ["http_request_method", "http_route", "http_response_status_code"],
            buckets=_SHORT,
            registry=registry,
        )
        self.queue_wait = Histogram(
            "ft_queue_wait_seconds",
            "From entering the queue to holding slots, once per attempt.",
            buckets=_LONG,
            registry=registry,
        )
        self.attempts = Counter(
            "ft_attempts_started", "Attempts that were given slots.", registry=registry
        )
        self.attempts_ended = Counter(
            "ft_attempts_ended",
            "Attempts that gave their slots back, by why.",
            ["reason"],
            registry=registry,
        )
        self.tokens = Counter(
            "ft_trained_tokens",
            "Tokens trained on, steps repeated after a resume included.",
            registry=registry,
        )
        self.steps = Counter(
            "ft_trained_steps", "Optimizer steps, as for tokens.", registry=registry
        )
        self.event_lag = Histogram(
            "ft_event_lag_seconds",
            "From a worker writing an event to the database holding it.",
            buckets=_SHORT,
            registry=registry,
        )
        self.turns = Histogram(
            "ft_reconciler_turn_seconds",
            "One turn of one job in the reconciler.",
            buckets=_SHORT,
            registry=registry,
        )
        self.turns_failed = Counter(
            "ft_reconciler_turns_failed",
            "Turns that ended in an error, which the log holds.",
            registry=registry,
        )
        self._failed = Counter(
            "ft_project_jobs_failed",
            "Jobs that have failed since this process began, by project and reason.",
            ["project", "reason"],
            registry=registry,
        )
        self.webhooks_given_up = Counter(
            "ft_webhooks_given_up",
            "Webhook deliveries that were tried for as long as they are, in vain.",
            registry=registry,
        )
        self.sampler_gap = Histogram(
            "ft_sampler_gap_nats",
            "Mean distance of the sampler's log-probabilities from the trainer's, once per "
            "version of weights.",
            buckets=_NATS,
            registry=registry,
        )
        Gauge(
            "ft_place_away_seconds",
            "For how long the place where attempts run (the cluster) has not answered; 0: it "
            "answers.",
            registry=registry,
        ).set_function(lambda: max((away() for away in tuple(self._away)), default=0.0))
        Gauge(
            "ft_orphaned_jobs",
            "Unfinished Jobs of the cluster that the database does not know (ft doctor); NaN: not "
            "counted in this process.",
            registry=registry,
        ).set_function(lambda: sum(self._orphans.copy().values()) if self._orphans else math.nan)
        Gauge(
            "ft_reconciler_turn_age_seconds",
            "Since the reconciler's loop last began a turn, with or without a job; NaN: it does "
            "not run in this process.",
            registry=registry,
        ).set_function(lambda: self.turn_age() if self._turned else math.nan)

    def count_failure(self, project: str, reason: str) -> None:
        """Record that a job of a project has failed."""
        if len(self._projects) < MOST_PROJECTS:
            self._projects.add(project)
        shown = project if project in self._projects else OTHERS
        self._failed.labels(shown, reason).inc()

    def observe_place(self, away: Callable[[], float]) -> None:
        """Report a place where attempts run.

        `away`: seconds for which it has not answered; any thread may call it.
        """
        self._away.append(away)

    def count_orphans(self, host: str, number: int) -> None:
        """Record how many unfinished Jobs of a place the database does not know."""
        self._orphans[host] = number

    def turn(self, host: str = "") -> None:
        """Record that the loop of a host's reconciler begins a turn."""
        self._turned[host] = self._clock()

    @property
    def stalled(self) -> bool:
        """Whether a reconciler of this process has begun no turn for STALLED_SECONDS."""
        return bool(self._turned) and self.turn_age() >= STALLED_SECONDS

    def turn_age(self) -> float:
        """Return the seconds since the slowest loop last began a turn; before its first, since this
        process began.
        """
        return self._clock() - min(self._turned.copy().values(), default=self._began)
