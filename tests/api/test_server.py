"""The server as a process: first start, credentials, restart, and its end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest

from api.app import create_app
from api.server import _bound, _warn_of_shown, _web_server, serve
from ft_service.client.connection import find_connection
from ft_service.errors import FtError, SpecError
from ft_service.jobs.states import State
from ft_service.settings import Settings
from ft_service.store.sql import migrate, open_store
from tests.support.bases import save_base
from tests.support.databases import new_postgres_database, postgres_url
from tests.support.reconciling import new_store
from tests.support.rest.process import ended, read, server, started
from tests.support.rest.service import TRAINING, put_state, wait_until
from tests.support.silent_proxy import silent_proxy

__all__ = ["postgres_url"]

SERVE_AND_RUN = """
from api.server import serve
from ft_service.settings import Settings

serve(Settings(), as_json=True)
"""

RECONCILE = """
import threading
from api.server import reconcile_only
from ft_service.cli.root_command import run
from ft_service.settings import Settings

def wait(settings, store, meters, stop: threading.Event) -> None:
    stop.wait()

run(["migrate", "--json"])
reconcile_only(Settings(), wait, as_json=True)
"""

RECONCILE_WITH_PREVIEW = """
import json
import threading
from api.server import reconcile_only
from ft_service.cli.root_command import run
from ft_service.settings import Settings

def wait(settings, store, meters, stop: threading.Event) -> None:
    asks = {"preview", "evals", "reinforcement", "samples"}
    while asks - {thread.name for thread in threading.enumerate()} and not stop.wait(0.02):
        pass
    print(json.dumps({"event": "asks" if not stop.is_set() else "incomplete"}), flush=True)
    stop.wait()

run(["migrate", "--json"])
reconcile_only(Settings(), wait, as_json=True)
"""

ENDLESS_CHECK = """
import threading
from api import server
from ft_service.launcher.local_launcher import LocalLauncher
from ft_service.storage.locations import Places
from ft_service.control.jobs.reconciler import Reconciler, ReconcilerOptions
from ft_service.settings import Settings

def check(job, examiner, tell) -> None:
    settings.home.joinpath("checking").touch()
    threading.Event().wait()

def reconcile(settings, store, meters, stop: threading.Event) -> None:
    Reconciler(store, LocalLauncher(2), Places.of(settings), ReconcilerOptions(check=check)).run(stop)

settings = Settings()
server.serve(settings, reconcile)
"""

SERVE_BY_COMMAND = """
import sys
from ft_service.cli.root_command import run

sys.exit(run(["serve"]))
"""

FAILING_RECONCILER = """
from api.server import serve
from ft_service.settings import Settings

def fail(settings, store, meters, stop) -> None:
    raise RuntimeError("no launcher here")

serve(Settings(), fail)
"""


def test_a_server_whose_reconciler_fails_ends_and_says_why(tmp_path: Path) -> None:
    with server(tmp_path, FAILING_RECONCILER) as serving:
        _, err = serving.printed()
        assert serving.process.returncode != 0
        assert "The thread reconciler has failed" in err
        assert "no launcher here" in err


def test_a_first_start_makes_a_key_and_a_restart_keeps_it(tmp_path: Path) -> None:
    save_base(tmp_path / "models" / "tiny")
    (tmp_path / "files").mkdir()
    for name, age in ((".upload-old", 2 * 24 * 3600), (".upload-new", 0)):
        (tmp_path / "files" / name).touch()
        written = time.time() - age
        os.utime(tmp_path / "files" / name, (written, written))
    with server(tmp_path) as serving:
        with started(tmp_path, serving) as client:
            assert sorted(path.name for path in (tmp_path / "files").iterdir()) == [".upload-new"]
            assert [model.id for model in client.models.list()] == ["tiny"]
            file_id = client.files.create(file=("a.jsonl", TRAINING), purpose="fine-tune").id
            job_id = client.fine_tuning.jobs.create(model="tiny", training_file=file_id).id
        first = read(tmp_path / "credentials")
        first_url = read(tmp_path / "server.json")["url"]
        out, err = ended(serving, signal.SIGTERM)
    assert first_url in out
    assert set(first) == {"api_key"}
    assert first["api_key"] not in out + err
    lines = [json.loads(line) for line in err.splitlines()]
    assert [line for line in lines if line["level"] != "info"] == []
    created = next(
        line for line in lines if line.get("method") == "POST" and line["route"].endswith("/jobs")
    )
    assert created["request_id"].startswith("req_")
    assert (tmp_path / "credentials").stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "server.json").exists()

    store = open_store(f"sqlite:///{tmp_path / 'ft.db'}")
    put_state(store, job_id, State.RUNNING)
    store.close()
    with server(tmp_path) as serving:
        with started(tmp_path, serving) as client:
            assert client.fine_tuning.jobs.retrieve(job_id).status == "running"
        second = read(tmp_path / "credentials")
        second_url = read(tmp_path / "server.json")["url"]
        out, _ = ended(serving, signal.SIGINT)
    assert second == first
    assert second_url != first_url
    assert f"Training continues without the server: {job_id}" in out


@pytest.mark.slow
def test_the_command_line_goes_on_to_find_a_server_beside_which_another_one_was(
    tmp_path: Path,
) -> None:
    with server(tmp_path) as long:
        started(tmp_path, long).close()
        first = find_connection({}, tmp_path)
        with server(tmp_path) as short:
            started(tmp_path, short).close()
            assert find_connection({}, tmp_path).base_url != first.base_url
            out, _ = ended(short, signal.SIGTERM)
        # The second one says that another is running, and what that means.
        assert (
            f"is served already, by {first.base_url.removesuffix('/v1')} (process "
            f"{long.process.pid})" in out
        )
        assert "share one SQLite database" in out
        assert find_connection({}, tmp_path) == first
        with server(tmp_path) as killed:
            started(tmp_path, killed).close()
        assert killed.process.returncode == -signal.SIGKILL
        assert find_connection({}, tmp_path) == first
        out, _ = ended(long, signal.SIGTERM)
        assert "served already" not in out
    with pytest.raises(FtError, match="No server is running"):
        find_connection({}, tmp_path)


def test_a_file_that_cannot_be_trained_on_fails_the_job_without_a_training_process(
    tmp_path: Path,
) -> None:
    save_base(tmp_path / "models" / "tiny")
    with server(tmp_path, SERVE_AND_RUN) as serving:
        with started(tmp_path, serving) as client:
            file_id = client.files.create(
                file=("bad.jsonl", TRAINING + b"{}\n"), purpose="fine-tune"
            ).id
            job_id = client.fine_tuning.jobs.create(model="tiny", training_file=file_id).id
            wait_until(lambda: client.fine_tuning.jobs.retrieve(job_id).status == "failed")
            job = client.fine_tuning.jobs.retrieve(job_id)
        url = read(tmp_path / "server.json")["url"]
        out, _ = ended(serving, signal.SIGTERM)
    begun, stopped = map(json.loads, out.splitlines())
    assert (begun["event"], begun["base_url"], stopped) == (
        "serving",
        f"{url}/v1",
        {"event": "stopped", "running": []},
    )

    assert job.error is not None
    assert job.error.model_dump() == {
        "code": "invalid_training_file",
        "message": "bad.jsonl: 1 of 4 lines cannot be trained on.\nline 4: messages is required",
        "param": "training_file",
    }
    assert not (tmp_path / "runs" / job_id / "attempts").exists()


def test_parts_of_the_server_say_what_they_do_as_json(tmp_path: Path) -> None:
    with server(tmp_path, RECONCILE) as serving:
        said = [json.loads(serving.process.stdout.readline())["event"] for _ in range(2)]
        ended(serving, signal.SIGTERM)
    assert said == ["migrated", "reconciling"]


def test_what_asks_models_runs_beside_a_reconciler_that_has_the_preview(tmp_path: Path) -> None:
    """API processes that move no jobs have none: nobody else would answer."""
    with server(tmp_path, RECONCILE_WITH_PREVIEW, FT_PREVIEW="on") as serving:
        said = {json.loads(serving.process.stdout.readline())["event"] for _ in range(3)}
        ended(serving, signal.SIGTERM)
    assert said == {"migrated", "reconciling", "asks"}


def test_the_server_ends_while_a_large_file_is_checked(tmp_path: Path) -> None:
    save_base(tmp_path / "models" / "tiny")
    with server(tmp_path, ENDLESS_CHECK) as serving:
        with started(tmp_path, serving) as client:
            file_id = client.files.create(file=("a.jsonl", TRAINING), purpose="fine-tune").id
            job_id = client.fine_tuning.jobs.create(model="tiny", training_file=file_id).id
            wait_until((tmp_path / "checking").exists)
            assert client.fine_tuning.jobs.retrieve(job_id).status == "validating_files"
        ended(serving, signal.SIGTERM)


def test_a_wrong_setting_of_the_workers_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FT_CACHE_BYTES", "5GB")
    with pytest.raises(FtError, match="FT_CACHE_BYTES = '5GB': a number of bytes is needed"):
        serve(Settings(home=tmp_path))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]", "it is no mapping"),
        ("model: x", "model"),
        ("lora: {rank: 8}", "rank"),
        ("training: {max_length: 0}", "at least"),
        ("lora: {lora_dropout: 0.1}", "than the sampler"),
    ],
)
def test_wrong_options_of_tinkers_models_are_refused_at_the_start(
    tmp_path: Path, content: str, said: str
) -> None:
    """Else clients are told, who cannot change them."""
    (tmp_path / "options.yaml").write_text(content)
    settings = Settings(home=tmp_path, tinker_options=tmp_path / "options.yaml")
    with pytest.raises(SpecError, match=r"^FT_TINKER_OPTIONS = .*options\.yaml: ") as error:
        create_app(settings, new_store(tmp_path))
    assert said in error.value.message


def test_a_port_that_is_taken_is_named_and_nothing_is_started(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        with server(tmp_path, FT_PORT=port) as serving:
            _, err = serving.printed()

    assert serving.process.returncode == 1
    assert f"Port {port} of 127.0.0.1 is in use by process {os.getpid()}: " in err
    assert "Stop that, or use another: --port N" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("body", "says"), [(b"no database at all" * 100, "is not a database"), (None, "is damaged")]
)
def test_a_database_that_cannot_be_used_is_the_last_word(
    tmp_path: Path, body: bytes | None, says: str
) -> None:
    path = tmp_path / "ft.db"
    if body is None:
        migrate(f"sqlite:///{path}")
        body = path.read_bytes()[:4096] + os.urandom(path.stat().st_size - 4096)
    path.write_bytes(body)
    with server(tmp_path, SERVE_BY_COMMAND) as serving:
        _, err = serving.printed()
    assert serving.process.returncode == 1
    last = err.splitlines()[-1]
    assert last.startswith("ft: The database")
    assert says in last
    assert "Traceback" not in err


def test_answers_do_not_wait_for_acknowledgements(tmp_path: Path) -> None:
    """Nagle's algorithm would hold back the second half of each answer on a kept connection for 40
    ms.
    """
    with _bound(Settings(home=tmp_path, port=0)) as listener:
        loop = asyncio.new_event_loop()
        found: list[int] = []

        class Protocol(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                found.append(
                    transport.get_extra_info("socket").getsockopt(
                        socket.IPPROTO_TCP, socket.TCP_NODELAY
                    )
                )

        async def connect() -> None:
            served = await loop.create_server(Protocol, sock=listener)
            _, writer = await asyncio.open_connection(*listener.getsockname())
            while not found:
                await asyncio.sleep(0.01)
            writer.close()
            await writer.wait_closed()
            served.close()

        loop.run_until_complete(connect())
        loop.close()
    assert found[0] != 0


def test_its_start_tells_what_python_graders_would_see(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    library = Path(sysconfig.get_path("stdlib"))
    _warn_of_shown({"FT_HOME": tmp_path, "FT_CACHE": library / "cache"})
    [told] = caplog.messages
    assert told.startswith("Graders of type python are refused")
    assert f"FT_CACHE = {library}/cache" in told


@pytest.mark.slow
def test_a_server_whose_database_has_fallen_silent_ends_by_a_signal(
    tmp_path: Path, postgres_url: str
) -> None:
    """Also connections that are made meanwhile: every thread waits for an answer, or is about
    to.
    """
    with (
        silent_proxy(new_postgres_database(postgres_url)) as proxy,
        server(tmp_path, SERVE_AND_RUN, FT_DATABASE_URL=proxy.url) as serving,
    ):
        started(tmp_path, serving).close()
        proxy.silence(later_too=True)
        serving.process.send_signal(signal.SIGTERM)
        _, err = serving.printed()
    assert serving.process.returncode == 0, err
    assert "hangs in a thread" not in err


@pytest.mark.parametrize(
    ("trusted", "address"),
    [
        ("", "127.0.0.1"),
        ("127.0.0.1", "203.0.113.9"),
        ("127.0.0.0/8, 10.0.0.0/8", "203.0.113.9"),
        ("10.0.0.0/8", "127.0.0.1"),
    ],
)
def test_the_clients_address_is_what_a_trusted_proxy_says(trusted: str, address: str) -> None:
    """And not what the client says of itself: the last address that no proxy of ours has."""
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["client"][0])

    config = _web_server(app, 100, trusted).config
    config.load()
    headers = [(b"x-forwarded-for", b"198.51.100.1, 203.0.113.9")]
    scope: Any = {"type": "http", "client": ("127.0.0.1", 1), "headers": headers, "scheme": "http"}
    served: Any = config.loaded_app
    asyncio.run(served(scope, None, None))
    assert seen == [address]
