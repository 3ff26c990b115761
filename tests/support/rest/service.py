"""A server on a free port of this host as tests of the interface see it, and what a reconciler
would write to its jobs.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2
import openai
import uvicorn
from fastapi import FastAPI
from sqlalchemy import text

from api.app import create_app
from ft_service.agents.open_rollouts import OpenRollouts
from ft_service.ids import new_id
from ft_service.jobs.states import Job, Phase, State
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import CheckpointMarker
from ft_service.rundir.events import Metrics
from ft_service.settings import Settings
from ft_service.store.records import Checkpoint, JobChange, NewEvent
from ft_service.store.sql import Store, open_store
from tests.support.attempts import HANG_SECONDS, wait_for

LINE = (
    json.dumps(
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    )
    + "\n"
)
TRAINING = LINE.encode() * 3
METRICS = Metrics(
    step=5,
    total_steps=20,
    train_loss=1.25,
    valid_loss=1.5,
    valid_mean_token_accuracy=0.5,
    tokens=400,
    step_seconds=2.0,
)


@dataclass
class Service:
    """A running server and what stands behind it."""

    url: str
    settings: Settings
    store: Store
    key: str
    app: FastAPI
    connections: httpx2.Client
    """Shared by all tests: setting up TLS, which nothing here uses, costs more than most
    requests.
    """

    def client(self, key: str | None = None) -> openai.OpenAI:
        """The real client. Not to be closed: it would close the shared connections."""
        return openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key=key or self.key,
            max_retries=0,
            http_client=self.connections,
        )

    def use(self, settings: Settings) -> None:
        """Let the server go on with other settings."""
        self.app.state.services = replace(self.app.state.services, settings=settings)

    def sql(self, statement: str, **values: Any) -> None:
        """A write that no method of the store makes, such as a step in time."""
        with self.store.writing() as connection:
            connection.execute(text(statement), values)

    def http(
        self, method: str, path: str, *, key: str | None = None, **options: Any
    ) -> httpx2.Response:
        """A request that the openai client would not send."""
        headers = {"authorization": f"Bearer {key or self.key}", **options.pop("headers", {})}
        return self.connections.request(method, f"{self.url}{path}", headers=headers, **options)


def wait_until(condition: Callable[[], object], seconds: float = HANG_SECONDS) -> None:
    """As `wait_for`, of what is soon there: the first pauses are 5 milliseconds."""
    wait_for(condition, seconds, every=0.005)


@contextmanager
def serving_app(settings: Settings, database: Path) -> Iterator[tuple[str, FastAPI]]:
    """The address of a server, and its application."""
    store = open_store(f"sqlite:///{database}")
    app = create_app(settings, store, rollouts=OpenRollouts("http://here.example"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
        thread = threading.Thread(target=server.run, args=([listener],), name="web")
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", app
        finally:
            server.should_exit = True
            thread.join()
            store.close()


def put(
    service: Service,
    job_id: str,
    *events: NewEvent,
    checkpoints: tuple[int, ...] = (),
    **changes: Any,
) -> Job:
    """Write to a job what a reconciler would write."""
    claim = service.store.leases.claim(host="h", owner="test", lease_seconds=60.0, idle_seconds=0.0)
    assert claim is not None
    assert claim.job.id == job_id
    points = [
        Checkpoint(
            id=new_id("ftckpt_"),
            project_id=claim.job.project_id,
            job_id=job_id,
            name=f"step-{step}-a1",
            step=step,
            attempt=1,
            created_at=0.0,
            metrics=METRICS if step == METRICS.step else None,
        )
        for step in checkpoints
    ]
    change = JobChange(job=replace(claim.job, **changes), events=events, checkpoints=points)
    assert service.store.leases.apply(claim, change)
    for point in points:
        marker = CheckpointMarker(step=point.step, attempt=1, world_size=2, files=[])
        run_dir(service, job_id).write(f"checkpoints/{point.name}/COMPLETE", marker)
    return service.store.jobs.get_job(claim.job.project_id, job_id)


def put_state(store: Store, job_id: str, state: State) -> None:
    """Write a state to the job whose turn it is, as a reconciler of this host would."""
    claim = store.leases.claim(host="h", owner="test", lease_seconds=60.0, idle_seconds=0.0)
    assert claim is not None
    assert claim.job.id == job_id
    phase = Phase.TRAINING if state is State.RUNNING else None
    assert store.leases.apply(
        claim, JobChange(job=replace(claim.job, state=state, phase=phase, attempt=1, host="h"))
    )


def run_dir(service: Service, job_id: str) -> RunDir:
    return RunDir(service.settings.runs_dir / job_id)


def stored(service: Service) -> list[str]:
    """Names of everything in the files folder, temporary ones too."""
    folder = service.settings.files_dir
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []
