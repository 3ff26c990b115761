"""The quickstart as a process: what it leaves behind, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ft_service.cli.quickstart.quickstart_processes import ProcessError, QuickstartServer
from ft_service.client.client import Client
from ft_service.host import processes
from ft_service.host.lifetime import RANKS_LOCK, is_locked
from ft_service.installation import ROOT, SAMPLE_MODELS, SAMPLE_SPEC
from tests.support.attempts import kill_leftovers, wait_for

EXAMPLES = ROOT / "examples"
SECONDS = 120.0
FLOW = """
import sys
from pathlib import Path
from ft_service.cli.quickstart.quickstart_flow import main
sys.exit(main(*map(Path, sys.argv[1:]), called="make it"))
"""
HOLD = """
import sys, time
from pathlib import Path
from ft_service.cli.quickstart.quickstart_processes import QuickstartServer
with QuickstartServer(*map(Path, sys.argv[1:])):
    time.sleep(600)
"""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "home"
    kill_leftovers(tmp_path)


def start(home: Path, code: str, *arguments: str | Path) -> subprocess.Popen[bytes]:
    env = {**os.environ, "FT_HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path)}
    home.mkdir(exist_ok=True)
    with (home / "output").open("wb") as output:
        command = [sys.executable, "-c", code, *map(str, arguments)]
        return subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)


def output(home: Path) -> str:
    return (home / "output").read_text()


def test_the_server_is_ready_when_the_block_begins_and_gone_after_it(home: Path) -> None:
    with QuickstartServer(home, SAMPLE_MODELS) as server, Client(server.connection) as client:
        assert home.stat().st_mode & 0o777 == 0o700
        assert [model.id for model in client.models()] == ["tiny-llama", "tiny-vision"]
        server_process = processes.of(json.loads((home / "server.json").read_text())["pid"])
        assert processes.is_alive(server_process)
    assert not processes.is_alive(server_process)


def test_a_server_that_does_not_start_says_why(home: Path) -> None:
    home.mkdir()
    (home / "ft.db").write_text("not a database, and longer than its header" * 10)
    with (
        pytest.raises(ProcessError, match=r"The server did not start: .*database"),
        QuickstartServer(home, SAMPLE_MODELS),
    ):
        pass


def test_the_server_dies_with_the_quickstart(home: Path) -> None:
    quickstart = start(home, HOLD, home, SAMPLE_MODELS)
    wait_for(lambda: (home / "server.json").exists() or quickstart.poll() is not None, SECONDS)
    server = processes.of(json.loads((home / "server.json").read_text())["pid"])
    quickstart.kill()
    quickstart.wait()
    wait_for(lambda: not processes.is_alive(server), SECONDS)


@pytest.mark.slow
def test_interrupted_it_pauses_and_leaves_nothing_and_the_next_run_finishes(home: Path) -> None:
    spec = home.parent / "spec.yaml"
    text = (
        SAMPLE_SPEC.read_text()
        .replace("../../examples", str(EXAMPLES))
        .replace("max_steps: 150", "max_steps: 40")
    )
    text = text.replace("batch_size: 32", "batch_size: 4").replace(
        "train_batch_size: 16", "train_batch_size: 2"
    )
    spec.write_text(text)

    first = start(home, FLOW, home, spec)
    wait_for(lambda: "step 4/40" in output(home) or first.poll() is not None, SECONDS)
    first.send_signal(signal.SIGINT)
    assert first.wait(SECONDS) == 130
    assert "The job is paused at step " in output(home)
    assert "`make it` continues with it." in output(home)
    assert not (home / "server.json").exists()
    [run_dir] = (home / "runs").iterdir()
    assert not is_locked(run_dir / RANKS_LOCK)

    second = start(home, FLOW, home, spec)
    assert second.wait(2 * SECONDS) == 0, output(home)
    assert "resumed from its checkpoint" in output(home)
    assert " of 100 held-out messages" in output(home)
    titles = [
        line.split()[0]
        for line in output(home).splitlines()
        if line.startswith(("  message ", "  base ", "  tuned "))
    ]
    assert titles == ["message", "base", "tuned"] * 3
    [results] = (home / "quickstart").iterdir()
    assert (results / "adapter/adapter_model.safetensors").is_file()
    assert (results / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert results.name == run_dir.name
