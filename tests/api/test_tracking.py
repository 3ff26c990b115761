"""Jobs with integrations: what W&B gets of them, by its real SDK, in the process that the server
keeps for it.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import wraps
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import SecretStr

from ft_service.control.tracking import integration_check, metric_sender
from ft_service.control.tracking.metric_sender import MetricsSender
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Phase, State
from ft_service.rundir.events import Metrics
from ft_service.store.records import NewEvent
from tests.support.attempts import kill_leftovers, wait_for
from tests.support.bases import save_base
from tests.support.rest.process import ended, server, started
from tests.support.rest.service import TRAINING as LINES
from tests.support.rest.service import Service, put, wait_until
from tests.support.wandb_server import KEY, RecordedRun, WandbServer, wandb_serving

WANDB: dict[str, Any] = {"project": "tuning", "tags": ["a"]}
TRAINING = {"state": State.RUNNING, "phase": Phase.TRAINING, "host": "h"}
SUCCEEDED = {
    "state": State.SUCCEEDED,
    "phase": None,
    "reason": Reason.SUCCEEDED,
    "finished_at": 2e9,
}


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of temporary files of processes that a test starts: trackers' packages leave
    nothing in it, torch a cache.
    """
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    assert [
        path.name for path in folder.iterdir() if not path.name.startswith("torchinductor_")
    ] == []


@pytest.fixture
def wandb_server() -> Iterator[WandbServer]:
    with wandb_serving() as server:
        yield server


@pytest.fixture
def configure(configure: dict[str, Any], wandb_server: WandbServer) -> dict[str, Any]:
    return configure | {"wandb_api_key": SecretStr(KEY), "wandb_base_url": wandb_server.url}


@pytest.fixture
def sender(
    service: Service, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MetricsSender]:
    monkeypatch.setattr(metric_sender, "TURN_SECONDS", 0.05)
    monkeypatch.setattr(metric_sender, "TRANSMIT_SECONDS", 1)
    sender = MetricsSender(service.settings, service.store)
    yield sender
    sender.stop()


def undelivered(service: Service) -> bool:
    """Whether something is left to be sent."""
    with service.store.reading() as connection:
        return (
            connection.exec_driver_sql(
                "SELECT 1 FROM integrations WHERE finished_at IS NULL"
            ).first()
            is not None
        )


def until(sender: MetricsSender, condition: Callable[[], object]) -> None:
    """Let a sender look for what is to be sent until the condition is true."""

    @wraps(condition)
    def looked() -> object:
        sender.look()
        return condition()

    wait_for(looked)


def steps(*numbers: int, attempt: int = 1) -> list[NewEvent]:
    return [
        NewEvent(
            level="info",
            message=f"Step {number}",
            created_at=1e9 + number,
            metrics=Metrics(
                step=number,
                total_steps=8,
                train_loss=1 / number,
                train_mean_token_accuracy=0.5,
                tokens=10,
            ),
            source=(attempt * 100 + number, 0),
        )
        for number in numbers
    ]


def create(client: openai.OpenAI, training_file: str, **wandb: Any) -> str:
    given: Any = [{"type": "wandb", "wandb": {**WANDB, **wandb}}]
    return client.fine_tuning.jobs.create(
        model="tiny", training_file=training_file, integrations=given
    ).id


def only_run(server: WandbServer) -> RecordedRun:
    (run,) = server.runs.values()
    return run


def told(client: openai.OpenAI, job_id: str, word: str) -> list[str]:
    return [
        event.message
        for event in client.fine_tuning.jobs.list_events(job_id)
        if word in event.message
    ]


def holding(folder: Path, text: str) -> list[Path]:
    found = []
    for path in (Path(inside, name) for inside, _, names in os.walk(folder) for name in names):
        with suppress(FileNotFoundError):  # a process that ends removes its folder
            # Not the socket of W&B's SDK.
            found += [path] if path.is_file() and text.encode() in path.read_bytes() else []
    return found


def test_every_step_arrives_once_whatever_ends_in_between(
    service: Service,
    client: openai.OpenAI,
    sender: MetricsSender,
    wandb_server: WandbServer,
    training_file: str,
    capfd: Any,
) -> None:
    job_id = create(client, training_file)
    sender.look()
    assert sender.pids == [], "nothing is started for a job that has not begun"

    put(service, job_id, *steps(1, 2, 3), **TRAINING, attempt=1)
    until(
        sender,
        lambda: (
            wandb_server.runs
            and only_run(wandb_server).lines
            and only_run(wandb_server).steps == [1, 2, 3]
        ),
    )
    os.kill(sender.pids[0], signal.SIGKILL)
    until(sender, lambda: not sender.pids)
    service.sql("UPDATE integrations SET next_try_at = 0")
    put(service, job_id, *steps(4, 5))
    put(service, job_id, *steps(4, 5, 6, attempt=2), **TRAINING, attempt=2)
    until(sender, lambda: only_run(wandb_server).steps[3:])
    put(service, job_id, *steps(7, attempt=2), **SUCCEEDED)
    until(sender, lambda: not undelivered(service))

    (place,) = wandb_server.runs
    run = wandb_server.runs[place]
    assert place == f"somebody/tuning/{job_id}"
    assert run.steps == [1, 2, 3, 4, 5, 6, 7]
    assert [line["train_loss"] for line in run.history] == [1 / step for step in run.steps]
    assert [line["_timestamp"] for line in run.history] == [1e9 + step for step in run.steps]
    assert {"train_mean_token_accuracy", "tokens"} <= set(run.history[0])
    assert run.states == ["running", "running", "0"]
    assert (run.display_name, run.tags) == (
        job_id,
        ["a", "ft-service/finetune", "ft-service/tiny", f"ft-service/{job_id}"],
    )
    assert (run.config["base_model"], run.config["training_file"]) == ("tiny", training_file)
    assert run.config["training"]["learning_rate"] == 2e-4
    assert str(service.settings.home) not in str(run.config)
    killed, opened = told(client, job_id, "W&B")
    assert opened == f"W&B run: {wandb_server.url}/somebody/tuning/runs/{job_id}"
    assert "was killed by signal 9" in killed
    assert wandb_server.paths == {"/graphql", f"/files/{place}/file_stream"}
    assert wandb_server.told == set(), "nothing of this host is sent"
    until(sender, lambda: not sender.pids)  # it removes its folder
    assert holding(service.settings.home, KEY) == []
    assert KEY not in "".join(capfd.readouterr())
    assert client.fine_tuning.jobs.retrieve(job_id).status == "succeeded"


# of any tracker: tests/ft_service/control/tracking/test_metric_sender.py
@pytest.mark.slow
def test_a_refused_key_is_told_once_and_holds_nothing_up(
    service: Service,
    client: openai.OpenAI,
    sender: MetricsSender,
    wandb_server: WandbServer,
    training_file: str,
) -> None:
    wandb_server.key = "another"
    job_id = create(client, training_file)
    put(service, job_id, *steps(1, 2), **TRAINING, attempt=1)
    until(sender, lambda: told(client, job_id, "W&B"))
    put(service, job_id, **SUCCEEDED)
    assert client.fine_tuning.jobs.retrieve(job_id).status == "succeeded"
    (event,) = (
        event for event in client.fine_tuning.jobs.list_events(job_id) if "W&B" in event.message
    )
    assert event.level == "warn"
    assert "401" in event.message
    assert wandb_server.refused > 0
    assert holding(service.settings.home, KEY) == []

    wandb_server.key = KEY  # as if somebody had mended it
    service.sql("UPDATE integrations SET next_try_at = 0")
    until(sender, lambda: not undelivered(service))
    assert (only_run(wandb_server).steps, only_run(wandb_server).states) == (
        [1, 2],
        ["running", "0"],
    )
    assert len(told(client, job_id, "W&B does not take")) == 1


@pytest.mark.slow
def test_a_run_rests_with_its_job_and_ends_with_it(
    service: Service,
    client: openai.OpenAI,
    sender: MetricsSender,
    wandb_server: WandbServer,
    training_file: str,
) -> None:
    job_id = create(client, training_file, name="mine", entity="team")
    put(service, job_id, *steps(1, 2), **TRAINING, attempt=1)
    until(sender, lambda: wandb_server.runs)
    put(service, job_id, state=State.PAUSED, phase=None)
    until(sender, lambda: only_run(wandb_server).states[-1] == "75")
    only_run(wandb_server).display_name = "renamed there"
    service.sql("UPDATE jobs SET state = 'running', phase = 'training', attempt = 2")
    put(service, job_id, *steps(2, 3, attempt=2))
    client.fine_tuning.jobs.cancel(job_id)
    put(service, job_id, phase=None)
    until(sender, lambda: not undelivered(service))

    run = wandb_server.runs[f"team/tuning/{job_id}"]
    assert (run.steps, run.display_name) == ([1, 2, 3], "renamed there")
    assert run.states == ["running", "preempting", "75", "running", "255"]


@pytest.mark.slow
def test_what_did_not_arrive_is_found_missing_and_sent_again(
    service: Service,
    client: openai.OpenAI,
    sender: MetricsSender,
    wandb_server: WandbServer,
    training_file: str,
) -> None:
    wandb_server.stream_status = 403  # the SDK says nothing of it when it ends the run
    job_id = create(client, training_file)
    put(service, job_id, *steps(1, 2), **SUCCEEDED, attempt=1)
    until(sender, lambda: told(client, job_id, "has not arrived"))
    assert undelivered(service)
    wandb_server.stream_status = 200
    service.sql("UPDATE integrations SET next_try_at = 0")
    until(sender, lambda: not undelivered(service))
    assert (only_run(wandb_server).steps, only_run(wandb_server).states[-1]) == ([1, 2], "0")


@pytest.mark.slow
def test_a_jobs_steps_go_to_trackio_and_its_event_says_where(
    service: Service,
    client: openai.OpenAI,
    training_file: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    pytest.importorskip("trackio", reason="the extra `trackio` is not installed")
    monkeypatch.setattr(metric_sender, "TURN_SECONDS", 0.05)
    folder = tmp_path / "trackio"
    settings = service.settings.model_copy(update={"trackio_url": folder.as_uri()})
    service.use(settings)
    given: Any = [{"type": "trackio", "trackio": {"project": "tuning", "name": "mine"}}]
    job_id = client.fine_tuning.jobs.create(
        model="tiny", training_file=training_file, integrations=given
    ).id
    put(service, job_id, *steps(1, 2, 3), **TRAINING, attempt=1)
    put(service, job_id, *steps(3, 4, attempt=2), **SUCCEEDED)
    sender = MetricsSender(settings, service.store)
    try:
        until(sender, lambda: not undelivered(service))
    finally:
        sender.stop()
    assert told(client, job_id, "trackio") == [f"trackio run: {folder.as_uri()}/?project=tuning"]
    with closing(sqlite3.connect(folder / "tuning.db")) as database:
        rows = database.execute(
            "SELECT step, run_id, run_name, metrics FROM metrics ORDER BY step"
        ).fetchall()
    assert [row[0] for row in rows] == [1, 2, 3, 4], "each once"
    assert {row[1:3] for row in rows} == {(job_id, "mine")}
    assert json.loads(rows[1][3])["train_loss"] == 0.5


def test_integrations_are_shown_as_openai_shows_them(
    client: openai.OpenAI, training_file: str
) -> None:
    full = {"project": "p", "name": "n", "entity": None, "tags": ["a"]}
    given: Any = [{"type": "wandb", "wandb": full}, {"type": "wandb", "wandb": {"project": "q"}}]
    job = client.fine_tuning.jobs.create(
        model="tiny", training_file=training_file, integrations=given
    )
    assert job.integrations is not None
    assert [type(found).__name__ for found in job.integrations] == [
        "FineTuningJobWandbIntegrationObject"
    ] * 2
    assert [found.model_dump() for found in job.integrations] == [
        {"type": "wandb", "wandb": full},
        {"type": "wandb", "wandb": {"project": "q", "name": None, "entity": None, "tags": []}},
    ]
    assert client.fine_tuning.jobs.retrieve(job.id).integrations == job.integrations


def test_what_cannot_be_is_refused_by_name(client: openai.OpenAI, training_file: str) -> None:
    wandb = {"type": "wandb", "wandb": {"project": "p"}}
    refused: list[tuple[list[Any], str]] = [
        ([{"type": "neptune", "neptune": {}}], "integrations.0.type"),
        ([{"type": "trackio", "trackio": {}}], "integrations.0.trackio.project"),
        ([{"type": "mlflow", "mlflow": {}}], "integrations.0.mlflow.experiment"),
        (
            [{"type": "mlflow", "mlflow": {"experiment": "e"}, "wandb": {"project": "p"}}],
            "integrations.0.wandb",
        ),
        ([wandb, {"type": "wandb"}], "integrations.1.wandb"),
        ([{"type": "wandb", "wandb": {}}], "integrations.0.wandb.project"),
        ([{"type": "wandb", "wandb": {"project": "a/b"}}], "integrations.0.wandb.project"),
        (
            [{"type": "wandb", "wandb": {"project": "p", "group": "g"}}],
            "integrations.0.wandb.group",
        ),
        (
            [{"type": "wandb", "wandb": {"project": "p", "tags": ["x" * 65]}}],
            "integrations.0.wandb.tags.0",
        ),
        ([wandb] * 6, "integrations"),
    ]
    for integrations, param in refused:
        with pytest.raises(openai.BadRequestError) as caught:
            client.fine_tuning.jobs.create(
                model="tiny", training_file=training_file, integrations=integrations
            )
        assert caught.value.param == param
    assert client.fine_tuning.jobs.list().data == []


def test_a_server_that_cannot_send_refuses_at_the_door(
    service: Service, client: openai.OpenAI, training_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integration_check, "find_spec", lambda name: None)
    with pytest.raises(
        openai.BadRequestError, match=r"pip install 'ft-service\[wandb\]'"
    ) as caught:
        create(client, training_file)
    assert (caught.value.param, caught.value.code) == ("integrations", "not_available")
    service.use(service.settings.model_copy(update={"wandb_api_key": None}))
    with pytest.raises(openai.BadRequestError, match="FT_WANDB_API_KEY"):
        create(client, training_file)


SERVE_SCRIPTED = """
from api import server
from ft_service.launcher.local_launcher import LocalLauncher
from ft_service.storage.locations import Places
from ft_service.control.jobs.reconciler import Reconciler, ReconcilerOptions
from ft_service.settings import Settings
from ft_service.control.tracking import metric_sender
from tests.support.attempts import scripted

metric_sender.TURN_SECONDS, metric_sender.TRANSMIT_SECONDS = 0.05, 1
SCRIPT = "event,event,event,wait/event,event,event,event,event,succeed"

def reconcile(settings, store, meters, stop):
    launcher = LocalLauncher(2, worker_command=scripted(SCRIPT))
    Reconciler(store, launcher, Places.of(settings), ReconcilerOptions(meters=meters)).run(stop)

server.serve(Settings(), reconcile)
"""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    kill_leftovers(tmp_path)


@pytest.mark.slow
def test_a_server_with_a_key_sends_what_its_jobs_report_and_shows_it_to_nobody(
    home: Path, wandb_server: WandbServer
) -> None:
    save_base(home / "models" / "tiny")
    settings = {
        "FT_WANDB_API_KEY": KEY,
        "FT_WANDB_BASE_URL": wandb_server.url,
        "CUDA_VISIBLE_DEVICES": "",
    }
    with server(home, SERVE_SCRIPTED, **settings) as process, started(home, process) as client:
        file = client.files.create(file=("a.jsonl", LINES), purpose="fine-tune").id
        job_id = create(client, file)
        wait_until(lambda: arrived(wandb_server) == [1, 2, 3])
        workers = [int(path.read_text()) for path in (home / "runs" / job_id / "pids").iterdir()]
        assert len(workers) == 3
        assert not any(KEY in Path(f"/proc/{pid}/environ").read_text() for pid in workers)
        _, first = ended(process, signal.SIGTERM)
    with server(home, SERVE_SCRIPTED, **settings) as process, started(home, process) as client:
        wait_until(lambda: only_run(wandb_server).states == ["running", "running"])
        client.fine_tuning.jobs.pause(job_id)
        wait_until(lambda: only_run(wandb_server).states[-1] == "75")
        client.fine_tuning.jobs.resume(job_id)
        wait_until(lambda: only_run(wandb_server).states[-1] == "0")
        assert client.fine_tuning.jobs.retrieve(job_id).status == "succeeded"
        assert told(client, job_id, "W&B") == [
            f"W&B run: {wandb_server.url}/somebody/tuning/runs/{job_id}"
        ]
        assert KEY not in "".join(
            event.to_json() for event in client.fine_tuning.jobs.list_events(job_id)
        )
        _, second = ended(process, signal.SIGTERM)
    assert arrived(wandb_server) == [1, 2, 3, 4, 5]
    assert KEY not in first + second
    assert list((home / "wandb").iterdir()) == []
    assert holding(home, KEY) == []


def arrived(server: WandbServer) -> list[int]:
    return only_run(server).steps if server.runs else []
