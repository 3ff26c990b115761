"""The unmodified `tinker` package against a real server with real ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.site.tinker_page import CLIENTS, NOT_HERE, methods
from ft_service.tinker.names import KEY_PREFIX
from tests.support.service import Server
from tests.support.training.models import save_chat_base

PROGRAMS = Path(__file__).parents[1] / "support/programs"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    save_chat_base(tmp_path / "models" / "tiny")
    (tmp_path / "home").mkdir()
    options = tmp_path / "options.yaml"
    options.write_text("precision: {default: nf4, compute: fp32}\ntraining: {max_length: 64}\n")
    server = Server(tmp_path / "home", tmp_path / "models", slots=3, FT_TINKER_OPTIONS=str(options), FT_TINKER_IDLE_SECONDS="5")
    server.start()
    yield server
    server.stop()


def run_client(server: Server, program: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A program that uses the package, to its end."""
    client = server.client()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("FT_", "TINKER_"))},
        "TINKER_BASE_URL": str(client.base_url).removesuffix("/v1/"),
        "TINKER_API_KEY": KEY_PREFIX + client.api_key,
        "TINKER_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, str(PROGRAMS / program), *arguments]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=400)


def test_every_method(server: Server, tmp_path: Path) -> None:
    walked = run_client(server, "tinker_walk.py", "tiny", folder=tmp_path / "models")
    assert walked.returncode == 0, walked.stderr[-4000:]
    lines = [json.loads(line) for line in walked.stdout.splitlines() if line.startswith("{")]
    errors = {line["method"]: line["error"] for line in lines}
    wanted = {f"{client}.{name}" for client in CLIENTS for name in methods(client)}
    assert errors.keys() == wanted
    refused = {method for method in wanted if method.removesuffix("_async") in NOT_HERE}
    assert {method for method, error in errors.items() if error} == refused, {m: e for m, e in errors.items() if e}
    for job in server.client().fine_tuning.jobs.list():
        assert job.status in ("running", "succeeded"), job
