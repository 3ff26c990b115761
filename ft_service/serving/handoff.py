"""Hand-off of tuned models to the operator's inference server (FT_INFERENCE_URL, FT_ADAPTERS), with
proof that they answer.

The adapter of every succeeded job is copied to FT_ADAPTERS, into a folder with the tuned model's
name, where vLLM's resolver finds it, and every replica is asked to load it. Then its
log-probabilities are compared with the trainer's (served_verdict.py), since loading an adapter can
fail silently. The result is an event of the job, once, and `serving.json` in its run directory,
which also names the replicas that need no comparison any more: one that could not answer is asked
again.

The desired and the observed state are compared repeatedly, which also covers restarts of either
side and replicas that did not answer. A deleted model is unloaded, and its folder removed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pydantic import SecretStr

from ft_service.bases.base_files import document_or_none
from ft_service.errors import FtError, NotFoundError, UnavailableError
from ft_service.host.loops import every, log_errors
from ft_service.jobs.states import Job
from ft_service.meters import Meters
from ft_service.rundir.evaluations import Probe
from ft_service.rundir.verified_files import refuse_damaged
from ft_service.serving.inference_server import InferenceServer
from ft_service.serving.served_verdict import (
    Verdict,
    forget_replica,
    is_judged,
    judge,
    read_probes,
    report,
)
from ft_service.serving.worker_tasks import run_worker
from ft_service.settings import Settings
from ft_service.storage.locations import Places
from ft_service.store.sql import Store

log = logging.getLogger(__name__)

POLL_SECONDS = 2.0
_GENERATION = "generation_config.json"
SERVING = "serving.json"
"""Document with the verdict that the job's user was told (served_verdict.py)."""
_NOTHING_TOLD = (
    "served, not verified: all that could be compared has images, and the server tells no "
    "log-probabilities of such prompts (prompt_logprobs of /chat/completions, as vLLM does), or "
    "its chat template writes other tokens than the job's"
)


def run(settings: Settings, store: Store, meters: Meters, stop: threading.Event) -> None:
    """Hand over tuned models until `stop` is set. Returns at once without FT_ADAPTERS."""
    if settings.adapters is None:
        return
    with log_errors(
        f"creating FT_ADAPTERS = {settings.adapters}"
    ):  # else the kubelet makes it for the server, as root's
        settings.adapters.mkdir(parents=True, exist_ok=True)
    handoff = Handoff(settings, store, settings.adapters)
    every(POLL_SECONDS, handoff.look, stop, "handing over tuned models")
    handoff.close()


class Handoff:
    """The hand-off to all replicas. For one thread."""

    def __init__(self, settings: Settings, store: Store, adapters: Path) -> None:
        self._store = store
        self._adapters = adapters
        self._places = Places.of(settings)
        self._servers = inference_servers(settings)
        self._jobs: dict[str, Job] = {}
        """Name of the tuned model → job."""
        self._unpublished: set[str] = set()
        """Names of the adapters that could not be copied, which their users were told."""
        self._refused: set[tuple[str, str]] = set()
        """(replica, name) of failed loads, which are not tried again until the replica restarts."""
        self._judged: set[tuple[str, str]] = set()
        """(replica, name) of adapters that need no comparison until the replica loads them anew."""
        self._unanswered: Counter[tuple[str, str]] = Counter()
        """(replica, name) → comparisons in which the replica could not answer."""
        self._away: set[str] = set()

    def close(self) -> None:
        for server in self._servers:
            server.close()

    def look(self) -> None:
        """Compare and act once. Raises UnavailableError if the database does not answer."""
        known = {job.id for job in self._jobs.values()}
        succeeded = self._store.models.succeeded_jobs()
        for project_id, job_id in succeeded:
            if job_id not in known:
                with contextlib.suppress(NotFoundError):  # it has gone meanwhile
                    job = self._store.jobs.get_job(project_id, job_id)
                    self._jobs[str(job.tuned_name)] = job
        deleted = self._store.models.all_deleted_models()
        left = {job_id for _, job_id in succeeded}
        self._jobs = {name: job for name, job in self._jobs.items() if job.id in left}
        wanted = {name: job for name, job in self._jobs.items() if name not in deleted}
        for name in deleted.intersection(
            _names_in(self._adapters)
        ):  # of jobs that are deleted, too
            shutil.rmtree(self._adapters / name, ignore_errors=True)
        published = {name: job for name, job in wanted.items() if self._publish(name, job)}
        for server in self._servers:
            self._bring_up_to_date(server, published, deleted)

    def _bring_up_to_date(
        self, server: InferenceServer, published: dict[str, Job], deleted: set[str]
    ) -> None:
        try:
            there = server.models()
        except FtError as error:
            if server.url not in self._away:
                log.warning("an inference server does not answer: %s", error.message)
            self._away.add(server.url)
            self._refused = {(url, name) for url, name in self._refused if url != server.url}
            return
        self._away.discard(server.url)
        for name in sorted(there & deleted):
            self._unload(server, name)
        to_judge: list[str] = []
        for name, job in published.items():
            with log_errors(f"handing {name} over to {server.url}"):
                if (name in there or self._load(server, name, job)) and not self._is_judged(
                    server, name, job
                ):
                    to_judge.append(name)
        for name in sorted(to_judge, key=lambda name: self._unanswered[server.url, name]):
            with log_errors(f"verifying {name} on {server.url}"):
                if not self._verify(server, name, published[name]):
                    self._unanswered[server.url, name] += 1
                    return  # it cannot answer now, and each try may take a minute

    def _publish(self, name: str, job: Job) -> bool:
        """Copy an adapter to FT_ADAPTERS, atomically, unless it is there. False if that failed."""
        target = self._adapters / name
        if target.is_dir():
            return True
        try:
            source = self._places.run(job.id).plain("adapter")
            if not isinstance(source, Path) or not source.is_dir():
                return False
            refuse_damaged(source, name)
            base = job.stored_spec.base_folder
            put_adapter(source, target, base, ends=_ends(source, base))
        except UnavailableError:
            raise
        except (FtError, OSError) as error:
            if name not in self._unpublished:
                with log_errors(f"telling that {name} is not served"):
                    self._report(
                        job,
                        Verdict(
                            False,
                            f"not served: its adapter could not be put into FT_ADAPTERS: {error}",
                        ),
                    )
                self._unpublished.add(name)
            return False
        return True

    def _load(self, server: InferenceServer, name: str, job: Job) -> bool:
        """Have a replica load an adapter. False if it does not."""
        if (server.url, name) in self._refused:
            return False
        self._judged.discard((server.url, name))
        forget_replica(self._places.run(job.id), SERVING, server.url)
        try:
            server.load(name, str(self._adapters / name))
        except UnavailableError:
            return (
                False  # tried again when the server answers, unless it has loaded it all the same
            )
        except FtError as error:
            self._report(job, Verdict(False, f"not served: {error.message}{_instead(job)}"))
            self._refused.add((server.url, name))
            return False
        return True

    def _is_judged(self, server: InferenceServer, name: str, job: Job) -> bool:
        pair = server.url, name
        if pair not in self._judged and is_judged(self._places.run(job.id), SERVING, server.url):
            self._judged.add(pair)  # before this service began
        return pair in self._judged

    def _verify(self, server: InferenceServer, name: str, job: Job) -> bool:
        """Compare a replica's answers by an adapter that it has loaded with the trainer's.

        False if it cannot answer now.
        """
        probes = read_probes(self._places.run(job.id))
        verdict = Verdict(
            None,
            "served, not verified: the job ran with a version that measured nothing to compare "
            "with",
        )
        try:
            told = [(probe, told) for probe in probes if (told := _asked(server, name, probe))]
            if told:
                verdict = judge(*zip(*told, strict=True))
            elif probes:
                verdict = Verdict(None, _NOTHING_TOLD)
        except UnavailableError:
            return False
        except FtError as error:
            verdict = Verdict(False, f"not served: {error.message}{_instead(job)}")
        log.info("%s on %s: %s", name, server.url, verdict.text)
        self._report(job, verdict, server.url)
        self._judged.add((server.url, name))
        return True

    def _unload(self, server: InferenceServer, name: str) -> None:
        try:
            server.unload(name)
        except FtError as error:
            log.warning("%s was not unloaded: %s", name, error.message)

    def _report(self, job: Job, verdict: Verdict, replica: str | None = None) -> None:
        report(self._places.run(job.id), SERVING, self._store, job, verdict, replica)


def _asked(server: InferenceServer, name: str, probe: Probe) -> list[float] | None:
    """The server's log-probabilities of a probe; None: it tells none."""
    if probe.chat is None:
        return server.logprobs(name, probe.tokens)
    return server.chat_logprobs(name, probe.chat, probe.tokens)


def _names_in(folder: Path) -> list[str]:
    with contextlib.suppress(OSError):  # `_publish` says what is wrong with it
        return [path.name for path in folder.iterdir()]
    return []


def inference_servers(settings: Settings) -> list[InferenceServer]:
    """Clients of all replicas of FT_INFERENCE_URL."""
    return _clients(settings.inference_urls, settings.inference_api_key)


def teaching_servers(settings: Settings) -> list[InferenceServer]:
    """Clients of all replicas of FT_TEACHER_URL."""
    return _clients(settings.teacher_urls, settings.teacher_api_key)


def _clients(urls: Sequence[str], key: SecretStr | None) -> list[InferenceServer]:
    return [InferenceServer(url, key.get_secret_value() if key else None) for url in urls]


def ends_of_handed_over(adapters: Path, name: str) -> list[int]:
    """Tokens that end a tuned model's answers and that its base's files do not name; empty: there
    are none, or it was not handed over. `adapters`: FT_ADAPTERS.
    """
    return (document_or_none(adapters / name / _GENERATION) or {}).get("eos_token_id", [])


def _ends(adapter: Path, base: str) -> list[int]:
    """Those tokens, told by a worker; empty, too, if it cannot: the model is handed over in any
    case.
    """
    if not Path(base).is_dir():  # empty, or on other hosts alone
        return []
    try:
        return run_worker("workers.tasks.end_tokens", [str(adapter), base])["ends"]
    except FtError as error:
        log.warning("it is not known at which tokens answers of %s end: %s", adapter, error.message)
        return []


def put_adapter(source: Path, target: Path, base: str = "", *, ends: Sequence[int] = ()) -> None:
    """Copy an adapter, whole, to where inference servers see it, unless it is there.

    `base`: the folder of its base, which adapters on stacks of experts need. `ends`: of
    `ends_of_handed_over`, to be kept with it. Raises OSError and FtError.
    """
    if target.is_dir():
        return
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        _fill(source, temporary, base)
        if ends:
            (temporary / _GENERATION).write_text(
                json.dumps({"eos_token_id": list(ends)}) + "\n", encoding="utf-8"
            )
        os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _fill(source: Path, target: Path, base: str) -> None:
    """Copy an adapter in a form that every vLLM reads: none knows PEFT's names of experts, and
    older ones no patterns.
    """
    config = json.loads((source / "adapter_config.json").read_text(encoding="utf-8"))
    if any(config.get(name) for name in ("rank_pattern", "alpha_pattern", "target_parameters")):
        run_worker("workers.tasks.pad_ranks", [str(source), str(target), *([base] if base else [])])
        return
    for path in source.iterdir():
        if path.is_file() and not path.is_symlink():
            shutil.copyfile(path, target / path.name)


def _instead(job: Job) -> str:
    """What to do with an adapter that a server refuses."""
    if not job.stored_spec.adapts_experts:
        return ""
    return (
        " vLLM computes adapters on experts on GPUs only: merge the tuned model (ft export "
        "--format merged) and serve that."
    )
