"""Homes that releases left go on with their jobs, keys and files, and command lines of their
processes are understood.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.support.attempts import scripted
from tests.support.homes import MODELS, OldHome, releases, unpack
from tests.support.rest.receiver import Receiver, receiving
from tests.support.service import SECONDS, Server, eventually, nothing_left, wait_until

SUPERVISOR = [sys.executable, "-P", "-m", "ft_service.supervisor"]
"""As pods of every release spell it: other versions must know it by this name."""
CLI = [sys.executable, "-m", "ft_service.cli"]


# The oldest goes through every revision; newer ones are parts of its way.
OLDEST, *NEWER = releases()


@pytest.fixture(
    scope="module",
    params=[OLDEST, *(pytest.param(newer, marks=pytest.mark.slow) for newer in NEWER)],
)
def old(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OldHome:
    return unpack(request.param, tmp_path_factory.mktemp("old"))


@pytest.fixture(scope="module")
def hook(old: OldHome) -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def server(old: OldHome, hook: Receiver) -> Iterator[Server]:
    """This version's server on the old home.

    `queued` needs both slots, of which `lost` has one: it waits for it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FT_WEBHOOK_ALLOW_PRIVATE", "1")
        server = Server(old.home, MODELS, slots=2, described=False)
    server.start()
    try:
        with server.client() as client:
            endpoint = old.recorded["webhook"]["id"]
            client.post(
                f"/webhook_endpoints/{endpoint}",
                body={"url": f"{hook.url}/new"},
                cast_to=httpx2.Response,
            )
    except BaseException:
        server.stop()
        raise
    yield server
    for name in ("lost", "queued", "paused"):
        eventually(lambda name=name: nothing_left(server.run(old.job_id(name))))
    assert server.stop() == 0


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


def ask(client: openai.OpenAI, path: str) -> Any:
    return client.get(path, cast_to=httpx2.Response).json()


def losses_of(client: openai.OpenAI, job_id: str) -> dict[int, float]:
    """Step → training loss; of steps that were trained again, the newest."""
    events: Any = list(client.fine_tuning.jobs.list_events(job_id, limit=100))
    return {
        event.data["step"]: event.data["train_loss"]
        for event in reversed(events)
        if event.type == "metrics"
    }


def resumed_behind(client: openai.OpenAI, job_id: str) -> list[str]:
    return [
        event.message
        for event in client.fine_tuning.jobs.list_events(job_id, limit=100)
        if "resumes" in event.message
    ]


def faults_of(path: Path) -> list[str]:
    """What `ft verify` says against it."""
    done = subprocess.run(
        [*CLI, "verify", "--json", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)["faults"]


def holds(answer: Any, recorded: Any) -> bool:
    """Whether an answer is the recorded one, but for fields that came later."""
    match recorded:
        case dict():
            return isinstance(answer, dict) and all(
                key in answer and holds(answer[key], recorded[key]) for key in recorded
            )
        case list():
            return len(answer) == len(recorded) and all(map(holds, answer, recorded))
        case _:
            return answer == recorded


# What is at rest
# ------------------------------------------------------------------------------


def test_answers_are_what_the_old_server_said(client: openai.OpenAI, old: OldHome) -> None:
    recorded = dict(old.recorded["answers"])
    models = recorded.pop("/models")
    endpoint = f"/webhook_endpoints/{old.recorded['webhook']['id']}"
    recorded[endpoint] = {
        name: value
        for name, value in recorded[endpoint].items()
        if name not in ("url", "updated_at")
    }
    answers = {path: ask(client, path) for path in recorded}
    assert {
        path: answer for path, answer in answers.items() if not holds(answer, recorded[path])
    } == {}

    def described() -> list[Any] | None:
        """The models, once the new server has described their bases: the cache is not part of a
        home.
        """
        there = ask(client, "/models")["data"]  # and perhaps what has been trained since
        return (
            there
            if all(model["base"] is None or model["base"]["described"] for model in there)
            else None
        )

    there = eventually(described, every=0.5)
    for before in models["data"]:
        if not before["id"].startswith("ft:"):
            del before["created"]  # a base's is its folder's, which is the checkout's
        assert any(holds(model, before) for model in there), before
    assert {job.id for job in client.fine_tuning.jobs.list()} == set(old.recorded["jobs"].values())


def test_old_keys_open_the_new_server(server: Server, old: OldHome) -> None:
    keys = old.recorded["keys"]
    assert json.loads((old.home / "credentials").read_text())["api_key"] == keys["admin"]
    with server.client(api_key=keys["user"]) as user, server.client() as admin:
        assert old.job_id("first") in [job.id for job in user.fine_tuning.jobs.list()]
        model = user.fine_tuning.jobs.retrieve(old.job_id("first")).fine_tuned_model
        path = f"/fine_tuning/checkpoints/{model}/permissions"
        assert holds(ask(admin, path)["data"], [old.recorded["permission"]])
        with pytest.raises(openai.PermissionDeniedError):
            ask(user, path)


def test_files_are_what_was_uploaded(client: openai.OpenAI, old: OldHome) -> None:
    for name, file in old.recorded["files"].items():
        assert (
            client.files.content(file).content
            == (old.folder / "data" / f"{name}.jsonl").read_bytes()
        )


def test_a_pending_upload_can_be_completed(client: openai.OpenAI, old: OldHome) -> None:
    pending = old.recorded["upload"]
    rest = client.uploads.parts.create(pending["id"], data=pending["rest"].encode())
    done = client.uploads.complete(pending["id"], part_ids=[*pending["parts"], rest.id])
    assert done.file is not None
    assert (
        client.files.content(done.file.id).content
        == (old.folder / "data" / "valid.jsonl").read_bytes()
    )


def test_the_tuned_model_downloads_and_verifies(
    client: openai.OpenAI, old: OldHome, tmp_path: Path
) -> None:
    body = client.get(
        f"/fine_tuning/jobs/{old.job_id('first')}/adapter", cast_to=httpx2.Response
    ).content
    with tarfile.open(fileobj=io.BytesIO(body)) as archive:
        members = {
            Path(member.name).name: archive.extractfile(member)
            for member in archive
            if member.isfile()
        }
        found = {
            name: hashlib.sha256(file.read()).hexdigest() for name, file in members.items() if file
        }
    assert found == old.recorded["adapter"]
    downloaded = tmp_path / "adapter.tar"
    downloaded.write_bytes(body)
    assert faults_of(old.run("first")) == faults_of(downloaded) == []


def test_a_new_job_goes_on_from_the_old_tuned_model(client: openai.OpenAI, old: OldHome) -> None:
    model = client.fine_tuning.jobs.retrieve(old.job_id("first")).fine_tuned_model
    assert model is not None
    job = client.fine_tuning.jobs.create(model=model, training_file=old.recorded["files"]["train"])
    client.fine_tuning.jobs.pause(job.id)  # that it also succeeds is another test's
    wait_until(client, job.id, "paused")
    client.fine_tuning.jobs.cancel(job.id)


# What continues
# ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_lost_attempt_is_followed_by_one_from_its_checkpoint(
    server: Server, client: openai.OpenAI, old: OldHome, hook: Receiver
) -> None:
    checkpoint = old.recorded["checkpoints"]["lost"][-1]
    job: Any = wait_until(client, old.job_id("lost"), "succeeded")
    assert job.attempt == 2
    start = json.loads(server.run(job.id).path("attempts/2/start.json").read_text())
    assert start["checkpoint"] == checkpoint
    assert f"after step {checkpoint.split('-')[1]} " in resumed_behind(client, job.id)[0]
    assert sorted(losses_of(client, job.id)) == old.steps("lost")

    told = eventually(
        lambda: next((r for r in list(hook.arrived.queue) if job.id in r.body.decode()), None)
    )
    client.webhooks.verify_signature(
        told.body.decode(), told.headers, secret=old.recorded["webhook"]["signing_secret"]
    )


@pytest.mark.slow
def test_a_paused_job_goes_on_from_its_checkpoint(
    server: Server, client: openai.OpenAI, old: OldHome
) -> None:
    """It began on the tuned model that the old version made."""
    step = int(old.recorded["checkpoints"]["paused"][-1].split("-")[1])
    job_id = old.job_id("paused")
    assert client.fine_tuning.jobs.retrieve(job_id).status == "paused"
    client.fine_tuning.jobs.resume(job_id)
    wait_until(client, job_id, "succeeded")
    again = server.run(job_id).path("attempts/2/events")
    lines = [
        json.loads(line)
        for path in sorted(again.glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    trained = [line["metrics"]["step"] for line in lines if line["kind"] == "metrics"]
    assert trained == old.steps("paused")[step:], "not from the first step"
    assert sorted(losses_of(client, job_id)) == old.steps("paused")


def test_a_job_that_had_not_begun_runs_to_its_end(client: openai.OpenAI, old: OldHome) -> None:
    job: Any = wait_until(client, old.job_id("queued"), "succeeded")
    assert job.attempt == 1
    assert sorted(losses_of(client, job.id)) == old.steps("queued")


@pytest.mark.slow
def test_a_checkpoint_of_the_old_version_becomes_an_adapter(
    client: openai.OpenAI, old: OldHome, tmp_path: Path
) -> None:
    checkpoint = client.fine_tuning.jobs.checkpoints.list(old.job_id("paused")).data[0].id
    path = f"/fine_tuning/jobs/{old.job_id('paused')}/checkpoints/{checkpoint}/adapter"
    (tmp_path / "adapter.tar").write_bytes(client.get(path, cast_to=httpx2.Response).content)
    assert faults_of(tmp_path / "adapter.tar") == []


# Without a server
# ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["--grace", "60.0", "--detach"], id="server"),
        pytest.param(["--grace", "60.0", "--parent", "PARENT"], id="ft run"),
        pytest.param(["--grace", "60", "--node-rank", "0", "--scratch", "SCRATCH"], id="pod"),
        pytest.param(
            [
                *("--grace", "60", "--node-rank", "0", "--scratch", "SCRATCH"),
                *("--rdzv-endpoint", "job-0.job:29400", "--address", "127.0.0.1", "--conclude"),
            ],
            id="one of several",
        ),
    ],
)
def test_supervisors_know_the_command_lines_of_every_release(
    arguments: list[str], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    scratch = tmp_path / "scratch"
    (run_dir / "attempts/1").mkdir(parents=True)
    scratch.mkdir()
    start = {
        "job_id": "ftjob-1",
        "attempt": 1,
        "world_size": 2,
        "generation": 1,
        "checkpoint": None,
        "slots": [],
        "nodes": 1,
    }
    (run_dir / "attempts/1/start.json").write_text(json.dumps(start))
    words = {"SCRATCH": str(scratch), "PARENT": str(os.getpid())}
    given = [words.get(word, word) for word in arguments]
    command = [*SUPERVISOR, str(run_dir), "1", *given, "--command", *scripted("event,succeed")]
    # It needs no environment of its own: pods give it no FT_ variable but a few.
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    ended = eventually(lambda: read(run_dir / "attempts/1/exit.json"))
    assert (ended["code"], ended["reason"]) == (0, "succeeded")


def read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None
