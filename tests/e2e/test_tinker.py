"""The unmodified `tinker` package against a real server with real ranks."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from docs.site.tinker_page import CLIENTS, NOT_HERE, methods
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.documents import OutcomeKind
from ft_service.tinker.names import job_id_of
from tests.support.service import Server, eventually, send, wait_until
from tests.support.tinker_loops import VARIANTS, loops, outcome
from tests.support.tinker_server import PROGRAMS, environment_of, samplers_of, serving, trainers_of
from tests.support.training.models import save_chat_base


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    save_chat_base(tmp_path / "models" / "tiny")
    with serving(tmp_path, tmp_path / "models", slots=2, ranks=1) as server:
        yield server


@pytest.mark.parametrize("forms", ["one", pytest.param("both", marks=pytest.mark.slow)])
def test_every_method(server: Server, tmp_path: Path, forms: str) -> None:
    """`forms`: of methods that have an asynchronous one beside the other."""
    command = [sys.executable, str(PROGRAMS / "tinker_walk.py"), "tiny", f"--{forms}"]
    folder = tmp_path / "models"  # where the client finds the tokenizer of "tiny"
    walked = subprocess.run(
        command, env=environment_of(server), cwd=folder, capture_output=True, text=True, timeout=800
    )
    assert walked.returncode == 0, walked.stderr[-4000:]
    lines = [json.loads(line) for line in walked.stdout.splitlines() if line.startswith("{")]
    errors = {line["method"]: line["error"] for line in lines}
    wanted = {f"{client}.{name}" for client in CLIENTS for name in methods(client)}
    if forms == "one":
        wanted = {name for name in wanted if name.removesuffix("_async") not in wanted - {name}}
    assert errors.keys() == wanted
    refused = {method for method in wanted if method.removesuffix("_async") in NOT_HERE}
    assert {method for method, error in errors.items() if error} == refused, {
        m: e for m, e in errors.items() if e
    }
    for job in server.client().fine_tuning.jobs.list():
        assert str(job.status) in ("running", "queued", "paused", "succeeded"), job


# its parts: test_reconciler.py has the signs, workers/tinker/test_reinforcement.py ranks that get
# none
@pytest.mark.slow
@pytest.mark.parametrize("engine_jobs", ["0", "8"])
def test_ranks_whose_server_is_gone_leave_and_go_on_when_it_is_back(
    tmp_path: Path, engine_jobs: str
) -> None:
    """An engine then ends, too, once it has had no job for a minute."""
    save_chat_base(tmp_path / "models" / "tiny")
    settings: Any = {
        "FT_UNATTENDED_SECONDS": "10",
        "FT_TINKER_IDLE_SECONDS": "600",
        "FT_ENGINE_JOBS": engine_jobs,
    }
    with serving(tmp_path, tmp_path / "models", slots=2, ranks=1, **settings) as server:
        command = [sys.executable, str(PROGRAMS / "tinker_pause.py"), "tiny"]
        pipe = subprocess.PIPE
        environment = environment_of(server)
        with subprocess.Popen(
            command, env=environment, stdin=pipe, stdout=pipe, text=True
        ) as client:
            assert client.stdout is not None
            first = json.loads(client.stdout.readline())
            job_id = job_id_of(first["model"])
            attempts = server.run(job_id).path("attempts")
            assert trainers_of(server)
            server.stop()
            eventually(lambda: not trainers_of(server))
            last = max(int(path.name) for path in attempts.iterdir())
            outcome = Attempt(server.run(job_id), last).read_outcome()
            assert (outcome and outcome.kind) is OutcomeKind.STOPPED
            server.start()
            second, _ = client.communicate("\n")
            assert client.returncode == 0
        assert json.loads(second)["loss:sum"] < first["loss:sum"], (
            "it has learnt what it was told before"
        )
        wait_until(server.client(), job_id, "succeeded")
        events = server.client().fine_tuning.jobs.list_events(job_id, limit=100).data
        assert any("no sign of the service" in event.message for event in events)
        assert max(int(path.name) for path in attempts.iterdir()) > last


LOOPS = 20
BLOWS = ("server", "trainer", "sampler") * 4


def strike(server: Server, kind: str, random: Random) -> bool:
    """Kill one process of a kind. False: there is none."""
    if kind == "server":
        server.kill()
        time.sleep(random.uniform(0, 1))
        server.start()
        return True
    victims = trainers_of(server) if kind == "trainer" else samplers_of(server)
    if victims:
        send({random.choice(victims)}, signal.SIGKILL)
    return bool(victims)


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_twenty_clients_and_kills_lose_nothing_and_repeat_nothing(tmp_path: Path) -> None:
    """On one engine, while processes of server, ranks and sampler are killed at random moments.

    Each client is told, and leaves, what it is told by ranks of its own that nobody kills.
    """
    save_chat_base(tmp_path / "models" / "tiny")
    with serving(
        tmp_path / "alone", tmp_path / "models", slots=2 * VARIANTS, FT_ENGINE_JOBS="0"
    ) as server:
        with loops(server, range(VARIANTS)) as (_, lines):
            pass
        alone = {seed: outcome(server, own) for seed, own in lines.items()}
    random = Random(5)
    struck = Counter[str]()
    with serving(
        tmp_path / "shared", tmp_path / "models", slots=3, FT_ENGINE_JOBS=str(LOOPS)
    ) as server:
        with loops(server, range(LOOPS)) as (process, lines):
            eventually(lambda: any(lines.values()))
            strike(server, "server", random)
            # first, its model.
            eventually(
                lambda: all(len(own) > 1 for own in lines.values()) or process.poll() is not None
            )
            engines = {job.engine_id for job in server.client().fine_tuning.jobs.list(limit=100)}  # pyright: ignore
            for kind in BLOWS:
                time.sleep(random.uniform(1, 4))
                eventually(partial(strike, server, kind, random))
                assert process.poll() is None, f"the clients were done before all blows: {struck}"
                struck[kind] += 1
        assert len(engines) == 1, engines
        for seed, own in lines.items():
            assert outcome(server, own) == alone[seed % VARIANTS], f"client {seed}, after {struck}"
