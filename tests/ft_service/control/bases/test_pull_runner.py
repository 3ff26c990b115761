"""Bases that the server fetches, by its own processes, from a hub on loopback."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ft_service.bases.describing import Descriptions
from ft_service.bases.description import Described, Refusal, description_key
from ft_service.control.bases.base_pulls import Pull, PullFolder
from ft_service.control.bases.pull_runner import KEPT, Puller
from ft_service.host import helper_process
from ft_service.host.helper_process import Program
from tests.support.attempts import wait_for
from tests.support.bases import save_base
from tests.support.describing import VERSIONS, small_document
from tests.support.hub import COMMIT, Hub, hub_serving
from tests.support.killed_helpers import says

LARGE = "model-00002-of-00002.safetensors"
CHUNK = 10 * 2**20
"""The hub's library writes a file by such parts."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    save_base(tmp_path / "published")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "none"))
    with hub_serving(tmp_path / "published") as serving:
        monkeypatch.setenv("HF_ENDPOINT", serving.url)
        yield serving


@dataclass
class Server:
    """What fetches, as a server's thread would."""

    folder: PullFolder
    puller: Puller

    def ask(self, *, look: bool = False, anyway: bool = False) -> Pull:
        return self.folder.add("org/tiny", None, look=look, anyway=anyway)

    def work(self) -> Pull:
        """Fetch all that was asked for; the newest pull then."""
        self.puller.fetch_all(lambda: False)
        return self.folder.pulls()[0]


def described(folder: Path, stop: Callable[[], bool]) -> Described:
    return small_document(folder)


def refused(folder: Path, stop: Callable[[], bool]) -> Described:
    key = description_key(folder, VERSIONS)
    refusal = Refusal("It is a model of pictures.", code="no_decoder")
    return Described(key, VERSIONS, refused=refusal)


@pytest.fixture
def server(tmp_path: Path, hub: Hub) -> Server:
    folder = PullFolder(tmp_path / "models")
    return Server(folder, Puller(folder, Descriptions(None, None, described)))


def test_a_base_is_looked_up_then_fetched_and_is_in_its_place(server: Server, hub: Hub) -> None:
    asked = server.ask(look=True)
    assert server.folder.progress(asked) == ("queued", 0)
    found = server.work()
    assert (found.state, found.commit, found.licence, found.trainable) == (
        *("found", COMMIT, "apache-2.0", True),
    )
    whole = sum(map(len, hub.files().values()))
    weights = len(hub.files()["model.safetensors"])
    assert (found.bytes, server.folder.progress(found)) == (whole, ("found", whole - weights))
    assert "model.safetensors" not in {name for name, _ in hub.asked}
    server.folder.go_on(found.id)
    done = server.work()
    assert (done.id, server.folder.progress(done)) == (asked.id, ("done", whole))
    there = server.folder.models / "org/tiny"
    assert json.loads((there / "origin.json").read_text())["revision"] == "main"
    assert [name for name, _ in hub.asked].count("config.json") == 1
    server.folder.remove(done.id)
    assert (server.folder.pulls(), there.is_dir()) == ([], True)


def test_whatever_ends_a_pull_it_goes_on_where_it_was(
    server: Server, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends, the process is killed, somebody stops it, and it is removed at last."""
    (hub.folder / LARGE).write_bytes(bytes(6 * CHUNK))
    hub.holds_after = CHUNK + 1
    started: list[int] = []
    popen = helper_process._popen

    def counted(program: Program):
        started.append((new := popen(program)).pid)
        return new

    monkeypatch.setattr(helper_process, "_popen", counted)
    pull = server.ask()
    ends = threading.Event()

    def until_it_hangs(then: Callable[[], object], chunks: int) -> Pull:
        thread = threading.Thread(target=server.puller.fetch_all, args=(ends.is_set,))
        thread.start()
        part = server.folder.path / f"org--tiny@{COMMIT[:12]}" / f"{LARGE}.part"
        wait_for(lambda: part.exists() and part.stat().st_size >= chunks * CHUNK)
        assert server.folder.progress(server.folder.find(pull.id))[0] == "fetching"
        then()
        thread.join()
        return next(iter(server.folder.pulls()), pull)

    assert until_it_hangs(ends.set, 1).state == "queued", "the next server goes on"
    ends.clear()
    killed = until_it_hangs(lambda: os.kill(started[-1], signal.SIGKILL), 2)
    assert killed.state == "stopped"
    assert killed.error is not None
    assert "was killed by signal 9" in killed.error
    assert killed.error.endswith(KEPT)
    server.folder.go_on(pull.id)
    stopped = until_it_hangs(lambda: server.folder.stop(pull.id), 3)
    assert (stopped.state, stopped.error, stopped.code) == ("stopped", None, None)
    assert [asked for name, asked in hub.asked if name == LARGE] == [
        *("", f"bytes={CHUNK}-", f"bytes={2 * CHUNK}-"),
    ]
    assert [name for name, _ in hub.asked].count("config.json") == 1, "it was looked up once"
    server.folder.go_on(pull.id)
    until_it_hangs(lambda: server.folder.remove(pull.id), 4)
    assert {path.suffix for path in server.folder.path.iterdir()} == {".lock"}
    assert not (server.folder.models / "org").exists()
    for pid in started:
        wait_for(lambda pid=pid: not Path(f"/proc/{pid}").exists())


def test_a_server_that_has_ended_fetches_nothing(server: Server) -> None:
    pull = server.ask()
    left = server.folder.change(pull, ["queued"], state="fetching")
    assert left is not None
    assert server.folder.progress(left)[0] == "queued"
    assert server.work().state == "done"


def test_a_base_that_cannot_be_tuned_is_found_but_not_fetched_unless_it_is_wanted_anyway(
    server: Server, hub: Hub
) -> None:
    server.puller = replace(server.puller, descriptions=Descriptions(None, None, refused))
    server.ask(look=True)
    found = server.work()
    assert (found.state, found.trainable) == ("found", False)
    assert found.why_not == "It is a model of pictures."
    server.folder.go_on(found.id)
    failed = server.work()
    assert (failed.state, failed.code) == ("failed", "no_decoder")
    assert failed.error == "It is a model of pictures. No weights were fetched."
    assert server.folder.staged(failed) is None
    assert "model.safetensors" not in {name for name, _ in hub.asked}
    server.folder.go_on(found.id, anyway=True)
    assert server.work().state == "done"


def test_what_the_hub_refuses_is_told_in_its_words_and_without_the_token(
    server: Server, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = "hf_right"
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    server.ask()
    failed = server.work()
    assert (failed.state, failed.code) == ("failed", "gated")
    assert failed.error is not None
    assert "the token in use has no access to it yet" in failed.error
    assert "hf_wrong" not in json.dumps(failed.model_dump())
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    server.folder.go_on(failed.id)
    assert server.work().state == "done"


def test_an_answer_that_is_none_is_the_processs_fault(server: Server) -> None:
    server.puller = replace(server.puller, command=says("no JSON"))
    server.ask()
    failed = server.work()
    assert (failed.state, failed.code) == ("failed", "helper_failed")
