"""Hands tuned models to the inference server that the operator runs (FT_INFERENCE_URL, FT_ADAPTERS), and proves that they
answer.

Of every job that has succeeded the adapter is put into FT_ADAPTERS, in a folder named as the tuned model, where vLLM's resolver
finds it, and every replica is told to load it. Then its log-probabilities are compared with the trainer's (verdict.py): loading
adapters fails silently in more than one way. What came of it is an event of the job, once, and `serving.json` in its run
directory.

Desired and observed are compared again and again, so that a restart of either side, or a replica that was away, needs no
thought. A deleted model is unloaded, and its folder goes.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from pathlib import Path

from ft_service.errors import FtError, UnavailableError
from ft_service.jobs.states import Job
from ft_service.meters import Meters
from ft_service.rundir.intact import refuse_damaged
from ft_service.serving import verified
from ft_service.serving.inference_server import InferenceServer
from ft_service.serving.verdict import Verdict, judge
from ft_service.settings import Settings
from ft_service.storage.locations import Places
from ft_service.store.sql import Store
from ft_service.supervisor.worker_tasks import run_worker

log = logging.getLogger(__name__)

POLL_SECONDS = 2.0
SERVING = "serving.json"
"""What the job's user was told (verified.py)."""


def run(settings: Settings, store: Store, meters: Meters, stop: threading.Event) -> None:
    """Until `stop` is set. Without FT_ADAPTERS nothing is handed over."""
    if settings.adapters is None:
        return
    handoff = Handoff(settings, store, settings.adapters)
    while not stop.is_set():
        try:
            handoff.look()
        except Exception:
            log.exception("tuned models were not handed over; the next try is in %g seconds", POLL_SECONDS)
        stop.wait(POLL_SECONDS)
    handoff.close()


class Handoff:
    """For one thread."""

    def __init__(self, settings: Settings, store: Store, adapters: Path) -> None:
        self._store, self._adapters = store, adapters
        self._places = Places.of(settings)
        key = settings.inference_api_key
        self._servers = [InferenceServer(url, key.get_secret_value() if key else None) for url in settings.inference_urls]
        self._jobs: dict[str, Job] = {}
        """By the names of their tuned models."""
        self._known: set[str] = set()
        self._refused: set[tuple[str, str]] = set()
        """(replica, name) that would not load: not tried again until the replica restarts."""
        self._away: set[str] = set()

    def close(self) -> None:
        for server in self._servers:
            server.close()

    def look(self) -> None:
        """Compare and act once. Raises UnavailableError if the database is away."""
        for project_id, job_id in self._store.succeeded_jobs():
            if job_id not in self._known:
                self._known.add(job_id)
                job = self._store.get_job(project_id, job_id)
                self._jobs[str(job.tuned_name)] = job
        deleted = self._store.all_deleted_models()
        wanted = {name: job for name, job in self._jobs.items() if name not in deleted}
        for name in self._jobs.keys() - wanted.keys():
            shutil.rmtree(self._adapters / name, ignore_errors=True)
        published = {name: job for name, job in wanted.items() if self._publish(name, job)}
        for server in self._servers:
            self._bring_up_to_date(server, published, deleted)

    def _bring_up_to_date(self, server: InferenceServer, published: dict[str, Job], deleted: set[str]) -> None:
        try:
            there = server.models()
        except FtError as error:
            if server.url not in self._away:
                log.warning("an inference server is away: %s", error.message)
            self._away.add(server.url)
            self._refused = {(url, name) for url, name in self._refused if url != server.url}
            return
        self._away.discard(server.url)
        for name in sorted(there & deleted & self._jobs.keys()):
            self._unload(server, name)
        for name, job in published.items():
            if name not in there and (server.url, name) not in self._refused:
                self._load(server, name, job)

    def _publish(self, name: str, job: Job) -> bool:
        """Whether the adapter lies in FT_ADAPTERS, where it comes to lie whole."""
        target = self._adapters / name
        if target.is_dir():
            return True
        source = self._places.run(job.id).plain("adapter")
        if not isinstance(source, Path) or not source.is_dir():
            return False
        beside = self._adapters / f".{job.id}.tmp"
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        try:
            refuse_damaged(source, name)
            _fill(source, beside)
            os.replace(beside, target)
        except (FtError, OSError) as error:
            shutil.rmtree(beside, ignore_errors=True)
            self._tell(job, Verdict(False, f"not served: its adapter could not be put into FT_ADAPTERS: {error}"))
            return False
        return True

    def _load(self, server: InferenceServer, name: str, job: Job) -> None:
        try:
            server.load(name, str(self._adapters / name))
            verdict = self._verify(server, name, job)
        except UnavailableError:
            return  # it is tried again when the server is back
        except FtError as error:
            self._refused.add((server.url, name))
            verdict = Verdict(False, f"not served: {error.message}")
        log.info("%s on %s: %s", name, server.url, verdict.text)
        self._tell(job, verdict)

    def _verify(self, server: InferenceServer, name: str, job: Job) -> Verdict:
        probes = verified.read_probes(self._places.run(job.id))
        if not probes:
            return Verdict(None, "served, not verified: the job ran with a version that measured nothing to compare with")
        return judge(probes, [server.logprobs(name, probe.tokens) for probe in probes])

    def _unload(self, server: InferenceServer, name: str) -> None:
        try:
            server.unload(name)
        except FtError as error:
            log.warning("%s was not unloaded: %s", name, error.message)

    def _tell(self, job: Job, verdict: Verdict) -> None:
        verified.tell(self._places.run(job.id), SERVING, self._store, job, verdict)


def _fill(source: Path, target: Path) -> None:
    """Copy an adapter, in a form that vLLM reads: it knows no patterns of rank and alpha."""
    config = json.loads((source / "adapter_config.json").read_text())
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        run_worker("workers.tasks.pad_ranks", [str(source), str(target)])
        return
    for path in source.iterdir():
        if path.is_file() and not path.is_symlink():
            shutil.copyfile(path, target / path.name)
