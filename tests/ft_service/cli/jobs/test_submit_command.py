from __future__ import annotations

import json
from pathlib import Path

import pytest

from ft_service.client.client import Client
from ft_service.host.running_servers import announced
from tests.support.bases import save_base
from tests.support.command_line import Ft
from tests.support.rest.stub_server import BASE_URL, StubServer, event_body

SPEC = """
model: tiny
training_file: data/train.jsonl
validation_file: data/valid.jsonl
lora: {r: 8}
training: {learning_rate: 2e-3}
"""


CHAT = (
    '{"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": '
    '"Good day."}]}\n'
)


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
    monkeypatch.setattr(
        Client, "follow", lambda self, job_id: follow(self, job_id, sleep=lambda seconds: None)
    )


def test_submit_uploads_the_files_and_creates_the_job(
    ft: Ft, server: StubServer, spec: Path
) -> None:
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


def test_a_missing_file_stops_submit_before_anything_is_sent(
    ft: Ft, server: StubServer, spec: Path
) -> None:
    (spec.parent / "data/valid.jsonl").unlink()
    ended = ft("submit", spec)
    assert ended.code == 64
    assert ended.err.startswith("ft: validation_file = 'data/valid.jsonl': there is no file ")
    assert server.requests == []


def test_faults_of_the_data_are_told_before_anything_is_uploaded(
    ft: Ft, server: StubServer, spec: Path
) -> None:
    (spec.parent / "data/valid.jsonl").write_text(
        CHAT + '{"instruction": "x", "output": "y"}\n' * 7
    )
    ended = ft("submit", spec)
    alpaca = (
        "is Alpaca (instruction, input, output), and this file began as OpenAI chat "
        "(messages): put each format into a file of"
    )
    assert (ended.code, server.uploads) == (64, [])
    assert ended.err.splitlines() == [
        "ft: valid.jsonl: 7 of 8 lines cannot be trained on. Nothing was uploaded.",
        f"  7 lines (2, 3, 4, 5, 6, …): {alpaca} its own",
    ]
    assert ft("submit", spec, "--unchecked").code == 0
    (spec.parent / "data/valid.jsonl").write_text("")
    assert (
        ft("submit", spec).err
        == "ft: valid.jsonl: the file holds no examples. Nothing was uploaded.\n"
    )


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
    assert warning not in ft("submit", spec).err, (
        "what a base elsewhere makes of the data is the server's to say"
    )


def test_files_for_a_server_elsewhere_are_one_only_if_their_contents_are(
    ft: Ft, server: StubServer, spec: Path
) -> None:
    data = spec.parent / "data"
    (data / "valid.jsonl").write_text(
        (data / "train.jsonl").read_text() + CHAT.replace("Hello", "Hi")
    )
    assert "is the training file" not in ft("submit", spec).err
    (data / "valid.jsonl").write_text((data / "train.jsonl").read_text())
    assert "Warning: valid.jsonl is the training file" in ft("submit", spec).err


def test_pairs_are_checked_as_pairs_where_the_method_says_so(
    ft: Ft, server: StubServer, spec: Path
) -> None:
    pair = '{"prompt": "a", "chosen": "b", "rejected": "c"}\n'
    for name in ("train", "valid"):
        (spec.parent / f"data/{name}.jsonl").write_text(pair)
    assert "which needs method: {type: dpo}" in ft("submit", spec).err
    spec.write_text(SPEC + "method: {type: dpo}\n")
    assert ft("submit", spec).code == 0


def test_a_model_that_the_server_does_not_know_is_refused_before_the_upload(
    ft: Ft, server: StubServer, spec: Path
) -> None:
    spec.write_text(SPEC.replace("model: tiny", "model: tinny"))
    ended = ft("submit", spec)
    assert (ended.code, ended.err.splitlines()[-1]) == (
        64,
        "ft: model = 'tinny': there is no such base model.",
    )
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
