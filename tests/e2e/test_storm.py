"""A storm: jobs of three projects on one service, while all that can be killed is killed.

None is lost, doubled or failed, and each leaves the adapter, to the last bit, that it leaves
without a blow.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import load_file

from ft_service.rundir.directory import RunDir
from ft_service.store.records import NewKey
from ft_service.store.sql import open_store
from ft_service.tinker.names import job_id_of
from tests.e2e import test_reinforcement as reinforcement
from tests.support.attempts import wait_for
from tests.support.databases import new_postgres_database, postgres_url
from tests.support.ports import free_port
from tests.support.service import SECONDS, Server, eventually, nothing_left, send, upload
from tests.support.tinker_loops import VARIANTS, outcome
from tests.support.tinker_loops import loops as tinker_loops
from tests.support.tinker_server import serving, tinker_settings
from tests.support.training.attempts import run_attempt
from tests.support.training.models import save_chat_base, save_chats, save_pairs

__all__ = ["postgres_url"]

STEPS = 12
PROJECTS = ("default", "second", "third")
MODULES = {
    "ft_service.cli": "server",
    "ft_service.supervisor": "supervisor",
    "torch.distributed.run": "torchrun",
    "workers.train": "rank",
    "workers.engine": "rank",
    "workers.serving": "preview",
    "workers.describe": "describer",
    "ft_service.data.tokens.examine": "examiner",
    "ft_service.data.tokens.template_worker": "template",
}
"""Module after -m → the kind of victim; any other helper goes by its own name."""


@dataclass
class Storm:
    """A service of one server or two, its jobs, and what has struck them."""

    servers: list[Server]
    database: str
    folder: Path
    random: random.Random
    jobs: dict[str, tuple[openai.OpenAI, str]] = field(default_factory=dict)
    """Job → its project's client, and what it is."""
    struck: Counter[str] = field(default_factory=Counter[str])

    @property
    def home(self) -> Path:
        return self.servers[0].home

    def victims(self) -> dict[str, list[int]]:
        """Living processes of the service, by kind: those below a server, and those that name its
        home.
        """
        parents: dict[int, tuple[int, list[str]]] = {}
        for entry in Path("/proc").iterdir():
            try:
                words = (
                    (entry / "cmdline").read_bytes().decode().split("\0")
                    if entry.name.isdigit()
                    else []
                )
                rest = (
                    (entry / "stat").read_text().rpartition(")")[2].split()
                    if words[:1] not in ([], [""])
                    else ["Z"]
                )
            except (FileNotFoundError, ProcessLookupError):
                continue
            if rest[0] != "Z":
                parents[int(entry.name)] = int(rest[1]), words
        found: dict[str, list[int]] = {}
        for pid, (_, words) in parents.items():
            above = pid
            line = list[int]()
            while above in parents and above not in line:
                line.append(above)
                above = parents[above][0]
            ours = {server.pid for server in self.servers} & {*line}
            if ours or any(word.startswith(str(self.home)) for word in words):
                module = words[words.index("-m") + 1] if "-m" in words else Path(words[0]).name
                found.setdefault(MODULES.get(module, module), []).append(pid)
        return found

    def strike(self) -> None:
        """Kill one process of a kind, each kind as likely as the others."""
        victims = self.victims()
        kind = self.random.choice(sorted(victims))
        if kind == "server":
            server = self.random.choice(self.servers)
            server.kill()
            time.sleep(self.random.uniform(0, 1))
            server.start()
        else:
            try:
                os.kill(self.random.choice(victims[kind]), signal.SIGKILL)
            except ProcessLookupError:
                return
        self.struck[kind] += 1

    def clients(self) -> list[openai.OpenAI]:
        """One for each project, the last of which asks the last server."""
        found = [self.servers[0].client(base_url=self.servers[0].url, max_retries=20)]
        with closing(open_store(self.database)) as store:
            for name in PROJECTS[1:]:
                store.projects.ensure_project(
                    name, store.projects.get_project("default").organization
                )
                key = store.keys.create_key(NewKey(project_id=name, name="storm", scope="submit"))[
                    1
                ]
                found.append(
                    self.servers[-1].client(
                        base_url=self.servers[-1].url, api_key=key, max_retries=20
                    )
                )
        return found

    def submit(self, client: openai.OpenAI, what: str) -> None:
        job = (
            reinforcement.submit(client, self.folder)
            if what == "reinforcement"
            else self._create(client, what)
        )
        self.jobs[job.id] = client, what

    def _create(self, client: openai.OpenAI, what: str) -> Any:
        path = self.folder / f"{what}.jsonl"
        if not path.exists():
            (save_pairs if what == "dpo" else save_chats)(path, 16)
        method: Any = {"dpo": {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.5}}}}.get(
            what, {"type": "supervised"}
        )
        return client.fine_tuning.jobs.create(
            model="tiny",
            training_file=upload(client, path),
            method=method,
            seed=1,
            extra_body={
                "precision": {"default": "nf4", "compute": "fp32"},
                "lora": {"r": 4},
                "training": {
                    "max_steps": STEPS,
                    "batch_size": 4,
                    "per_device_train_batch_size": 2,
                    "learning_rate": 1e-3,
                },
                "distributed": {"nproc_per_node": 1},
                "checkpoint": {"save_steps": 3},
            },
        )

    def unfinished(self) -> list[str]:
        """The jobs that are not over. Fails for one that has failed."""
        left: list[str] = []
        for job_id, (client, what) in self.jobs.items():
            job = client.fine_tuning.jobs.retrieve(job_id)
            assert job.status not in ("failed", "cancelled"), (
                f"{what}, after {self.struck}: {job.error}"
            )
            left += [] if job.status == "succeeded" else [job_id]
        return left


@pytest.fixture
def storm(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Storm]:
    """On SQLite; of two servers on PostgreSQL."""
    save_chat_base(tmp_path / "models" / "tiny")
    (tmp_path / "home").mkdir()
    database = f"sqlite:///{tmp_path}/home/ft.db"
    number = 1
    if request.param == "postgresql":
        database = new_postgres_database(request.getfixturevalue("postgres_url"))
        number = 2
    settings = {
        "FT_DATABASE_URL": database,
        "FT_ENGINE_JOBS": "4",
        **tinker_settings(tmp_path, ranks=1),
    }
    servers: list[Server] = []
    for each in range(number):
        own: Any = {**settings, "FT_PORT": str(free_port())}
        servers.append(
            Server(
                tmp_path / "home",
                tmp_path / "models",
                slots=3,
                described=False,
                api_only=each > 0,
                **own,
            )
        )
        servers[-1].start()
    storm = Storm(servers, database, tmp_path, random.Random(1))
    yield storm
    for server in servers:
        server.stop()
    for pids in storm.victims().values():  # which a failed test leaves, and go on without a server
        send({*pids}, signal.SIGKILL)


LONG = (pytest.mark.slow, pytest.mark.timeout(7200))
MIXED = ("supervised", "dpo", "supervised", "reinforcement", "dpo") * 7


@pytest.mark.parametrize(
    ("storm", "jobs", "loops", "blows"),
    [
        pytest.param("sqlite", ("supervised", "dpo"), 0, 2, id="short"),
        pytest.param("sqlite", MIXED, VARIANTS, 200, id="long-sqlite", marks=LONG),
        pytest.param("postgresql", MIXED, VARIANTS, 200, id="long-postgresql", marks=LONG),
    ],
    indirect=["storm"],
)
def test_in_a_storm_no_job_is_lost_doubled_or_failed(
    storm: Storm, jobs: tuple[str, ...], loops: int, blows: int, tmp_path: Path
) -> None:
    """`loops`: those of Tinker's clients beside the jobs."""
    clients = storm.clients()
    server = storm.servers[0]
    alone = _alone(tmp_path, range(loops)) if loops else {}
    with tinker_loops(server, range(loops)) if loops else nullcontext((None, {})) as (_, lines):
        for number, what in enumerate(jobs):
            storm.submit(clients[number % len(clients)], what)
        while storm.struck.total() < blows and storm.unfinished():
            time.sleep(storm.random.uniform(0.5, 4))
            storm.strike()
        assert storm.struck.total() >= blows // 2, "the jobs were faster"
        wait_for(lambda: not storm.unfinished(), SECONDS * (2 + len(jobs) / 5), every=0.5)
    for seed, own in lines.items():
        assert outcome(server, own) == alone[seed], f"Tinker's client {seed}, after {storm.struck}"

    listed = {job.id for client in clients for job in client.fine_tuning.jobs.list(limit=100)}
    assert listed == {*storm.jobs, *(job_id_of(own[0]["model"]) for own in lines.values())}, (
        "each once"
    )
    whole: dict[str, dict[str, torch.Tensor]] = {}
    for job_id, (_, what) in storm.jobs.items():
        run = server.run(job_id)
        eventually(lambda run=run: nothing_left(run))
        if what == "reinforcement":  # its answers are its own
            wanted = reinforcement.trained_again(run, tmp_path / f"again-{job_id}")
        elif what in whole:
            wanted = whole[what]
        else:
            wanted = whole[what] = _adapter(_uninterrupted(run, tmp_path / f"whole-{what}"))
        ours = _adapter(run)
        assert ours.keys() == wanted.keys()
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in ours.items()), (
            f"{what}, after {storm.struck}"
        )


def _alone(folder: Path, seeds: Sequence[int]) -> dict[int, Any]:
    """What Tinker's clients are told, and what they leave, on ranks of their own that nobody
    kills.
    """
    with serving(
        folder / "alone", folder / "models", slots=2, ranks=1, FT_ENGINE_JOBS="0"
    ) as server:
        with tinker_loops(server, seeds) as (_, lines):
            pass
        return {seed: outcome(server, own) for seed, own in lines.items()}


def _uninterrupted(like: RunDir, folder: Path) -> RunDir:
    """The same job alone, without a blow."""
    run = RunDir(folder)
    spec = like.get("spec.json")
    assert spec is not None
    run.put("spec.json", spec)
    assert run_attempt(run, 1, 1).kind == "succeeded"
    return run


def _adapter(run: RunDir) -> dict[str, torch.Tensor]:
    return load_file(run.path("adapter/adapter_model.safetensors"))
