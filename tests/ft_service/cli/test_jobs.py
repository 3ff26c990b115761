from __future__ import annotations

import json
from pathlib import Path

import pytest

from ft_service.cli import output
from ft_service.client.answers import RemoteJob
from ft_service.client.client import Client
from ft_service.host.servers import announced
from tests.support.bases import save_base
from tests.support.command_line import Ft
from tests.support.rest.stub_server import BASE_URL, StubServer, event_body, job_body, metrics_event, tar_of

SPEC = """
model: tiny
training_file: data/train.jsonl
validation_file: data/valid.jsonl
lora: {r: 8}
training: {learning_rate: 2e-3}
"""

CHAT = '{"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day."}]}\n'


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train.jsonl").write_text(CHAT)
    (tmp_path / "data/valid.jsonl").write_text(CHAT * 2)
    path = tmp_path / "job.yaml"
    path.write_text(SPEC)
    return path


@pytest.fixture
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Polls without waiting."""
    follow = Client.follow
    monkeypatch.setattr(Client, "follow", lambda self, job_id: follow(self, job_id, sleep=lambda seconds: None))


def test_submit_uploads_the_files_and_creates_the_job(ft: Ft, server: StubServer, spec: Path) -> None:
    ended = ft("submit", spec)
    assert (ended.code, ended.out) == (0, "Created ftjob-1.\nWatch it: ft watch ftjob-1\n")
    assert server.uploads == [("train.jsonl", CHAT.encode()), ("valid.jsonl", 2 * CHAT.encode())]
    [body] = server.created
    assert body == {
        "model": "tiny",
        "training_file": "file-1",
        "validation_file": "file-2",
        "lora": {"r": 8},
        "training": {"learning_rate": "2e-3"},
    }


def test_submit_as_json(ft: Ft, server: StubServer, spec: Path) -> None:
    assert json.loads(ft("submit", spec, "--json").out)["id"] == "ftjob-1"


def test_a_missing_file_stops_submit_before_anything_is_sent(ft: Ft, server: StubServer, spec: Path) -> None:
    (spec.parent / "data/valid.jsonl").unlink()
    ended = ft("submit", spec)
    assert ended.code == 64
    assert ended.err.startswith("ft: validation_file = 'data/valid.jsonl': there is no file ")
    assert server.requests == []


def test_faults_of_the_data_are_told_before_anything_is_uploaded(ft: Ft, server: StubServer, spec: Path) -> None:
    (spec.parent / "data/valid.jsonl").write_text(CHAT + '{"instruction": "x", "output": "y"}\n' * 7)
    ended = ft("submit", spec)
    alpaca = (
        "is Alpaca (instruction, input, output), and this file began as OpenAI chat (messages): put each format into a file of"
    )
    assert (ended.code, server.uploads) == (64, [])
    assert ended.err.splitlines() == [
        "ft: valid.jsonl: 7 of 8 lines cannot be trained on. Nothing was uploaded.",
        f"  7 lines (2, 3, 4, 5, 6, …): {alpaca} its own",
    ]
    assert ft("submit", spec, "--unchecked").code == 0
    (spec.parent / "data/valid.jsonl").write_text("")
    assert ft("submit", spec).err == "ft: valid.jsonl: the file holds no examples. Nothing was uploaded.\n"


@pytest.mark.usefixtures("_at_once", "no_tokens")
def test_beside_the_server_tokens_are_counted_before_the_upload_and_warned_of_once(
    ft: Ft, server: StubServer, spec: Path, home: Path
) -> None:
    base = save_base(home / "models/tiny")
    warning = "train.jsonl: only 0 % of its tokens are learned."
    with announced(home, BASE_URL.removesuffix("/v1"), [base.parent]):
        [said] = [line for line in ft("submit", spec).err.splitlines() if warning in line]
        server.events.append(event_body(1, said.removeprefix("Warning: "), level="warn"))
        server.on_read = lambda reads: server.jobs["ftjob-2"].update(status="succeeded")
        watched = ft("submit", spec, "--watch")
    assert (watched.out + watched.err).count(warning) == 1
    assert warning not in ft("submit", spec).err, "what a base elsewhere makes of the data is the server's to say"


def test_pairs_are_checked_as_pairs_where_the_method_says_so(ft: Ft, server: StubServer, spec: Path) -> None:
    pair = '{"prompt": "a", "chosen": "b", "rejected": "c"}\n'
    for name in ("train", "valid"):
        (spec.parent / f"data/{name}.jsonl").write_text(pair)
    assert "which needs method: {type: dpo}" in ft("submit", spec).err
    spec.write_text(SPEC + "method: {type: dpo}\n")
    assert ft("submit", spec).code == 0


def test_a_model_that_the_server_does_not_know_is_refused_before_the_upload(ft: Ft, server: StubServer, spec: Path) -> None:
    spec.write_text(SPEC.replace("model: tiny", "model: tinny"))
    ended = ft("submit", spec)
    assert (ended.code, ended.err.splitlines()[-1]) == (64, "ft: model = 'tinny': there is no such base model.")
    assert server.uploads == []


def test_submit_refuses_a_model_by_its_folder(ft: Ft, server: StubServer, spec: Path) -> None:
    spec.write_text(SPEC.replace("model: tiny", "model: ./tiny"))
    ended = ft("submit", spec)
    assert ended.code == 64
    assert "model = './tiny'" in ended.err
    assert server.requests == []


@pytest.mark.usefixtures("_at_once")
def test_submit_and_watch(ft: Ft, server: StubServer, spec: Path) -> None:
    def finish(reads: int) -> None:
        server.jobs["ftjob-1"].update(status="succeeded", fine_tuned_model="ft:tiny:local::1")

    server.on_read = finish
    ended = ft("submit", spec, "--watch")
    assert ended.code == 0
    assert ended.out.splitlines()[0] == "Created ftjob-1."
    assert "ftjob-1 has succeeded: ft:tiny:local::1" in ended.out


def test_jobs(ft: Ft, server: StubServer) -> None:
    assert ft("jobs").out == "No jobs yet. Create one: ft submit SPEC\n"
    server.jobs["ftjob-1"] = job_body()
    server.jobs["ftjob-2"] = job_body("ftjob-2", "running", progress={"step": 4, "total_steps": 10, "train_loss": 1.5})
    server.jobs["ftjob-3"] = job_body(
        "ftjob-3", "failed", suffix="mine", finished_at=1_700_000_065, error={"message": "Line 3 is no chat."}
    )
    server.jobs["ftjob-2"]["progress"]["valid_loss"] = 1.25
    title, newest, second, oldest = ft("jobs").out.splitlines()
    assert title.split() == ["ID", "SUFFIX", "BASE", "STATUS", "STEP", "VALID", "TOOK", "WHY"]
    assert newest.split() == ["ftjob-3", "mine", "tiny", "failed", "1:05", "Line", "3", "is", "no", "chat."]
    assert second.split()[:5] == ["ftjob-2", "tiny", "running", "4/10", "1.250"]
    assert oldest.split()[:3] == ["ftjob-1", "tiny", "queued"]
    assert [job["id"] for job in json.loads(ft("jobs", "--json", "--limit", "1").out)] == ["ftjob-3"]


def test_get(ft: Ft, server: StubServer) -> None:
    server.jobs["ftjob-1"] = job_body(status="failed", error={"code": "x", "message": "Line 3 is no chat.", "param": None})
    shown = dict(line.split("  ", 1) for line in ft("get", "ftjob-1").out.splitlines())
    assert {name: value.strip() for name, value in shown.items()}["error"] == "Line 3 is no chat."
    assert json.loads(ft("get", "ftjob-1", "--json").out)["status"] == "failed"
    assert "pending reason" not in shown


def test_get_says_why_a_job_waits(ft: Ft, server: StubServer) -> None:
    server.jobs["ftjob-1"] = job_body(status="queued", phase="waiting", pending_reason="no node has 8 GPUs")
    shown = dict(line.split("  ", 1) for line in ft("get", "ftjob-1").out.splitlines())
    assert shown["status"].strip() == "queued: no node has 8 GPUs"


def test_get_says_what_was_chosen_and_why(ft: Ft, server: StubServer) -> None:
    server.jobs["ftjob-1"] = job_body(
        training={"tokens_per_micro_batch": 8192}, chosen={"training.tokens_per_micro_batch": "the longest sample"}
    )
    shown = dict(line.split("  ", 1) for line in ft("get", "ftjob-1").out.splitlines())
    assert shown["training.tokens_per_micro_batch"].strip() == "8192 (the longest sample)"


def test_an_unknown_job_is_one_line(ft: Ft, server: StubServer) -> None:
    ended = ft("get", "ftjob-9")
    assert (ended.code, ended.err) == (1, "ft: There are no jobs yet. Create one: ft submit SPEC\n")
    server.jobs["ftjob-1"] = job_body()
    assert "There is no job 'ftjob-9'. Give an id that `ft jobs` shows" in ft("get", "ftjob-9").err


@pytest.mark.usefixtures("_at_once")
def test_watch_prints_plain_lines_where_there_is_no_terminal(ft: Ft, server: StubServer) -> None:
    server.jobs["ftjob-1"] = job_body(status="running", phase="training")
    server.events += [event_body(0, "Job created.")]

    def pass_time(reads: int) -> None:
        steps = range(100 * (reads - 1) + 1, 100 * reads + 1)
        server.events.extend(metrics_event(step, step, total=200, step_seconds=0.5, tokens=64) for step in steps)
        if reads == 2:
            server.events.append(event_body(999, "Nearly out of disk.", level="warn"))
            server.jobs["ftjob-1"].update(status="succeeded", phase=None, fine_tuned_model="ft:tiny")

    server.on_read = pass_time
    ended = ft("watch", "ftjob-1")
    assert ended.code == 0
    lines = [line[10:] for line in ended.out.splitlines()]
    progress = [line for line in lines if line.startswith("step")]
    assert len(progress) == 20
    assert progress[-1] == "step 200/200 · loss 1.000 · 128 tokens/s"
    assert "warn: Nearly out of disk." in lines
    assert lines.count("training") == 1
    assert "\x1b" not in ended.out


@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize(
    ("status", "code", "line"),
    [
        ("paused", 75, "ft: ftjob-1 is paused. Let it go on: ft resume ftjob-1\n"),
        ("cancelled", 1, "ft: ftjob-1 was cancelled.\n"),
        ("failed", 1, "ft: ftjob-1 has failed: Out of memory.\n"),
    ],
)
def test_watch_ends_with_the_jobs_outcome(ft: Ft, server: StubServer, status: str, code: int, line: str) -> None:
    server.jobs["ftjob-1"] = job_body(status=status, error={"message": "Out of memory."} if status == "failed" else None)
    ended = ft("watch", "ftjob-1")
    assert (ended.code, ended.err) == (code, line)


@pytest.mark.usefixtures("_at_once")
def test_watch_as_json_prints_a_line_for_each_event_and_the_job_last(ft: Ft, server: StubServer) -> None:
    server.jobs["ftjob-1"] = job_body(status="succeeded")
    server.events += [event_body(1), metrics_event(2, 10)]
    lines = [json.loads(line) for line in ft("watch", "ftjob-1", "--json").out.splitlines()]
    assert [line["id"] for line in lines] == ["ftevent-1", "ftevent-2", "ftjob-1"]


@pytest.mark.usefixtures("_at_once")
def test_leaving_watch_leaves_the_job_running_and_says_so(ft: Ft, server: StubServer) -> None:
    server.jobs["ftjob-1"] = job_body(status="running")

    def press_ctrl_c(reads: int) -> None:
        if reads == 2:
            raise KeyboardInterrupt

    server.on_read = press_ctrl_c
    ended = ft("watch", "ftjob-1")
    assert ended.code == 130
    assert "the job goes on.\n  Watch it again: ft watch ftjob-1\n" in ended.err
    assert {request.method for request in server.requests} == {"GET"}


def test_verbs(ft: Ft, server: StubServer) -> None:
    server.jobs["ftjob-1"] = job_body(status="running")
    assert ft("pause", "ftjob-1").out == "ftjob-1 is paused\n"
    assert ft("resume", "ftjob-1").out == "ftjob-1 is queued\n"
    assert json.loads(ft("cancel", "ftjob-1", "--json").out)["status"] == "cancelled"


def test_a_job_that_still_stops_says_so(ft: Ft, server: StubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    job = RemoteJob.model_validate(job_body(status="running", phase="stopping"))
    monkeypatch.setattr(Client, "pause", lambda self, job_id: job)
    server.jobs["ftjob-1"] = job_body(status="running")
    said = "ftjob-1 will be paused as soon as it has written a checkpoint.\nLet it go on: ft resume ftjob-1\n"
    assert ft("pause", "ftjob-1").out == said
    assert job.state_text == "stopping at a checkpoint"


def test_watching_says_when_it_does_not_begin_at_the_beginning(ft: Ft, server: StubServer) -> None:
    server.jobs["ftjob-1"] = job_body(status="succeeded")
    server.events = [event_body(number, f"event {number}") for number in range(150)]
    assert "Earlier events are left out; these are the newest 100." in ft("watch", "ftjob-1").out
    server.events = server.events[:20]
    assert "Earlier events" not in ft("watch", "ftjob-1").out


def test_download(ft: Ft, server: StubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.jobs["ftjob-1"] = job_body(status="succeeded")
    server.adapter = tar_of({"adapter/adapter_config.json": b"{}"})
    monkeypatch.chdir(tmp_path)
    assert ft("download", "ftjob-1").out == "The adapter is in ftjob-1\n"
    assert (tmp_path / "ftjob-1/adapter_config.json").is_file()
    shown = json.loads(ft("download", "ftjob-1", "--out", tmp_path / "mine", "--json").out)
    assert shown == {"id": "ftjob-1", "adapter": str(tmp_path / "mine")}
    assert server.requests[-1].extensions["timeout"]["read"] <= 60, "it is there, so that silence is an error soon"
    assert ft("download", "ftjob-1").code == 64


def test_download_of_a_checkpoint_by_its_step(ft: Ft, server: StubServer, tmp_path: Path) -> None:
    server.jobs["ftjob-1"] = job_body(status="running")
    point = {"fine_tuning_job_id": "ftjob-1", "fine_tuned_model_checkpoint": "ft:x", "created_at": 0}
    server.checkpoints = [{**point, "id": f"ftckpt-{step}", "step_number": step} for step in (20, 10)]
    server.adapter = tar_of({"adapter/adapter_config.json": b"{}"})
    assert ft("download", "ftjob-1", "--checkpoint", "10", "--out", tmp_path / "mine").code == 0
    assert (tmp_path / "mine/adapter_config.json").is_file()
    assert server.requests[-1].url.path.endswith("/ftjob-1/checkpoints/ftckpt-10/adapter")
    assert server.requests[-1].extensions["timeout"]["read"] >= 600, "it may be made first, on a busy host"
    missing = ft("download", "ftjob-1", "--checkpoint", "11")
    assert (missing.code, missing.err) == (1, "ft: Job ftjob-1 has no checkpoint at step 11; it has: 10, 20.\n")


def test_models_and_logs(ft: Ft, server: StubServer) -> None:
    server.jobs["ftjob-1"] = job_body()
    assert ft("models").out.splitlines()[1].split() == ["tiny"], "of a server that does not say more"
    assert ft("logs", "ftjob-1").out == "rank 0 says hello\n"
    assert json.loads(ft("logs", "ftjob-1", "--rank", "0", "--json").out)["text"] == "rank 0 says hello\n"
    assert server.requests[-1].url.params["rank"] == "0"
    assert ft("logs", "-f", "ftjob-1").out == "rank 0 stdout | hello\nrank 0 stdout | bye\n"
    assert [json.loads(line)["line"] for line in ft("logs", "-f", "ftjob-1", "--json").out.splitlines()] == ["hello", "bye"]
    assert ft("logs", "-f", "ftjob-1", "--attempt", "1").code == 64


def test_connect_uses_the_servers_credentials_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.mkdir()
    (home / "credentials").write_text('{"api_key": "ft-x", "base_url": "http://127.0.0.1:1/v1"}')
    with output.connect() as client:
        assert client.base_url == "http://127.0.0.1:1/v1"
