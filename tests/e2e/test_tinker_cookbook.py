"""Recipes of the unmodified tinker-cookbook, in a virtual environment of its own, against a real server with real ranks."""

from __future__ import annotations

import json
import site
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.bases import SAMPLE
from tests.support.service import Server
from tests.support.tinker_server import PROGRAMS, environment_of, serving

DATA = SAMPLE.parents[1] / "data"

PACKAGES = (
    *("chz", "datasets", "termcolor", "tiktoken", "blobfile", "pyrage", "cloudpickle", "rich", "pillow", "aiohttp", "sympy"),
    *("pylatexenc", "math-verify"),
)
"""What the recipes import. The cookbook itself comes without its requirements, of which not every index has tml-renderers."""
COMMON = ("model_name=tiny-llama", "renderer_name=role_colon", "save_every=0", "eval_every=0", "lora_rank=8")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has the cookbook, and sees the packages of this one. Skips where it cannot be installed."""
    folder = tmp_path_factory.mktemp("cookbook")
    venv.create(folder, with_pip=True)
    python = folder / "bin/python"
    own = subprocess.run([python, "-c", "import site; print(site.getsitepackages()[0])"], capture_output=True, text=True)
    Path(own.stdout.strip(), "below.pth").write_text("\n".join(site.getsitepackages()))
    for wanted in (["--no-deps", "tinker-cookbook>=0.6,<0.7"], PACKAGES):
        installed = subprocess.run([python, "-m", "pip", "install", "-q", *wanted], capture_output=True, text=True)
        if installed.returncode:
            pytest.skip(f"tinker-cookbook cannot be installed: {installed.stderr.strip().splitlines()[-1]}")
    return python


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("served"), SAMPLE.parent, slots=2, ranks=1) as server:
        yield server


def run(python: Path, server: Server, folder: Path, *command: str) -> list[dict[str, Any]]:
    """The metrics of a recipe, which must succeed."""
    ended = subprocess.run(
        [python, *command], env=environment_of(server), cwd=SAMPLE.parent, capture_output=True, text=True, timeout=1500
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_supervised(python: Path, server: Server, tmp_path: Path) -> None:
    recipe = ["-m", "tinker_cookbook.recipes.chat_sl.train", f"dataset={DATA / 'train.jsonl'}", "learning_rate=2e-3"]
    options = ["batch_size=32", "max_length=256", "max_steps=8", f"log_path={tmp_path / 'logs'}", *COMMON]
    losses = [row["train_mean_nll"] for row in run(python, server, tmp_path / "logs", *recipe, *options)]
    assert losses[7] < losses[0] - 1


def test_reinforcement(python: Path, server: Server, tmp_path: Path) -> None:
    recipe = ["-m", "tinker_cookbook.recipes.math_rl.train", "env=arithmetic", "loss_fn=importance_sampling"]
    options = ["group_size=4", "groups_per_batch=4", "max_tokens=4", "max_steps=3", f"log_path={tmp_path / 'logs'}", *COMMON]
    rows = run(python, server, tmp_path / "logs", *recipe, *options)
    assert len([row for row in rows if "env/all/reward/total" in row]) == 3


def test_a_loss_of_the_clients_own(python: Path, server: Server, tmp_path: Path) -> None:
    program, pairs = str(PROGRAMS / "cookbook_dpo.py"), str(DATA / "preferences.jsonl")
    losses = [row["dpo_loss"] for row in run(python, server, tmp_path, program, "tiny-llama", pairs, str(tmp_path))]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3), "the reference is where it begins"
    assert losses[-1] < 0.6
