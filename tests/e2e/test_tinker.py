"""The unmodified `tinker` package against a real server with real ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from docs.site.tinker_page import CLIENTS, NOT_HERE, methods
from ft_service.rundir.directory import RunDir
from ft_service.tinker.commands import CommandLog
from ft_service.tinker.names import KEY_PREFIX, WeightsPath, job_id_of
from ft_service.tinker.saved_weights import sampler_key
from tests.support.ports import free_port
from tests.support.service import Server, processes_of, send
from tests.support.training.models import save_chat_base

PROGRAMS = Path(__file__).parents[1] / "support/programs"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    save_chat_base(tmp_path / "models" / "tiny")
    (tmp_path / "home").mkdir()
    options = tmp_path / "options.yaml"
    options.write_text("precision: {default: nf4, compute: fp32}\ntraining: {max_length: 64}\n")
    server = Server(
        tmp_path / "home",
        tmp_path / "models",
        slots=3,
        FT_TINKER_OPTIONS=str(options),
        FT_TINKER_IDLE_SECONDS="5",
        FT_PORT=str(free_port()),  # the same after a kill
    )
    server.start()
    yield server
    server.stop()


def environment_of(server: Server) -> dict[str, str]:
    """What the package needs to know."""
    client = server.client()
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("FT_", "TINKER_"))},
        "TINKER_BASE_URL": str(client.base_url).removesuffix("/v1/"),
        "TINKER_API_KEY": KEY_PREFIX + client.api_key,
        "TINKER_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1",
    }


def test_every_method(server: Server, tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAMS / "tinker_walk.py"), "tiny"]
    folder = tmp_path / "models"  # where the client finds the tokenizer of "tiny"
    walked = subprocess.run(command, env=environment_of(server), cwd=folder, capture_output=True, text=True, timeout=400)
    assert walked.returncode == 0, walked.stderr[-4000:]
    lines = [json.loads(line) for line in walked.stdout.splitlines() if line.startswith("{")]
    errors = {line["method"]: line["error"] for line in lines}
    wanted = {f"{client}.{name}" for client in CLIENTS for name in methods(client)}
    assert errors.keys() == wanted
    refused = {method for method in wanted if method.removesuffix("_async") in NOT_HERE}
    assert {method for method, error in errors.items() if error} == refused, {m: e for m, e in errors.items() if e}
    for job in server.client().fine_tuning.jobs.list():
        assert str(job.status) in ("running", "queued", "paused", "succeeded"), job


Loop = subprocess.Popen[str]


def begin_loop(server: Server, steps: int, seed: int) -> Loop:
    command = [sys.executable, str(PROGRAMS / "tinker_loop.py"), "tiny", str(steps), str(seed)]
    return subprocess.Popen(command, env=environment_of(server), stdout=subprocess.PIPE, text=True)


def read_loop(loop: Loop, until: int | None = None) -> list[dict[str, Any]]:
    """The lines of a loop, up to that of a step; None: to its end."""
    assert loop.stdout is not None
    lines = []
    for line in loop.stdout:
        lines.append(json.loads(line))
        if until is not None and lines[-1].get("step") == until:
            return lines
    loop.stdout.close()
    assert loop.wait(60) == 0
    return lines


def weights(server: Server, lines: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    path = WeightsPath.parse(lines[-1]["path"])
    return load_file(server.run(job_id_of(path.model_id)).path(f"{sampler_key(path.name)}/adapter_model.safetensors"))


@pytest.mark.slow
def test_kills_lose_nothing_and_repeat_nothing(server: Server) -> None:
    """Two clients on one engine: the server is killed and started again between their calls, then a rank."""
    steps = 12
    whole = {seed: read_loop(begin_loop(server, steps, seed)) for seed in (1, 2)}
    loops = {seed: begin_loop(server, steps, seed) for seed in (1, 2)}
    lines = {seed: read_loop(loop, until=0) for seed, loop in loops.items()}
    for step in (3, 5):
        lines[1] += read_loop(loops[1], until=step)
        server.kill()
        server.start()
    lines[1] += read_loop(loops[1], until=7)
    for engine in (server.home / "engines").iterdir():
        send(set(processes_of(RunDir(engine))["rank"]), signal.SIGKILL)
    for seed, loop in loops.items():
        lines[seed] += read_loop(loop)
        assert lines[seed][1:-1] == whole[seed][1:-1], "the same numbers, to the last bit"
        own, other = weights(server, lines[seed]), weights(server, whole[seed])
        assert own.keys() == other.keys()
        assert all(torch.equal(own[name], other[name]) for name in own)
        log = CommandLog(server.run(job_id_of(lines[seed][0]["model"])))
        assert log.newest() == 2 * steps + 1, "no command twice, none missing"
