"""Recipes of the unmodified tinker-cookbook against a real server with real ranks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.support.bases import SAMPLE
from tests.support.service import Server
from tests.support.tinker_server import PROGRAMS, environment_of, serving

EXAMPLES = SAMPLE.parents[1]
DATA = EXAMPLES / "data"

COOKBOOK = Path(os.environ.get("FT_TEST_CLIENTS", Path(sys.prefix) / "clients")) / "cookbook"
"""The package with what its recipes import; `make test-all` installs it."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not (COOKBOOK / "tinker_cookbook").is_dir(), reason="tinker-cookbook is not installed (make test-all)"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    models = folder / "models"
    shutil.copytree(SAMPLE, models / SAMPLE.name)
    subprocess.run([sys.executable, EXAMPLES / "sums_base.py", SAMPLE, models / "tiny-sums"], check=True)
    # Sampling takes a while, and models that wait for it need not be paused.
    with serving(folder, models, 2, ranks=1, together=16, precision="bf16", FT_TINKER_IDLE_SECONDS="60") as server:
        yield server


def run(server: Server, logs: Path, *command: str) -> list[dict[str, Any]]:
    """The metrics of a recipe, which must succeed. It finds tokenizers in the folder of bases."""
    environment, folder = {**environment_of(server), "PYTHONPATH": str(COOKBOOK)}, server.home.parent / "models"
    arguments = [sys.executable, *command]
    ended = subprocess.run(arguments, env=environment, cwd=folder, capture_output=True, text=True, timeout=1500)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()]


def recipe(name: str, model: str, logs: Path, *options: str) -> list[str]:
    common = ["renderer_name=role_colon", "save_every=0", "eval_every=0", "lora_rank=32", f"log_path={logs}"]
    return ["-m", f"tinker_cookbook.recipes.{name}.train", f"model_name={model}", *common, *options]


def test_supervised(server: Server, tmp_path: Path) -> None:
    options = [f"dataset={DATA / 'train.jsonl'}", "learning_rate=2e-3", "batch_size=32", "max_length=256", "max_steps=8"]
    logs = tmp_path / "logs"
    losses = [row["train_mean_nll"] for row in run(server, logs, *recipe("chat_sl", "tiny-llama", logs, *options))]
    assert losses[7] < losses[0] - 1


def test_reinforcement(server: Server, tmp_path: Path) -> None:
    options = ["env=arithmetic", "loss_fn=importance_sampling", "learning_rate=3e-4", "max_tokens=20", "max_steps=50"]
    groups, logs = ["group_size=8", "groups_per_batch=16"], tmp_path / "logs"
    rows = run(server, logs, *recipe("math_rl", "tiny-sums", logs, *options, *groups))
    rewards = [row["env/all/reward/total"] for row in rows if "env/all/reward/total" in row]
    assert len(rewards) == 50
    assert fmean(rewards[-10:]) > max(0.5, fmean(rewards[:3]) + 0.15), rewards


def test_a_loss_of_the_clients_own(server: Server, tmp_path: Path) -> None:
    program, pairs = str(PROGRAMS / "cookbook_dpo.py"), str(DATA / "preferences.jsonl")
    losses = [row["dpo_loss"] for row in run(server, tmp_path, program, "tiny-llama", pairs, str(tmp_path))]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3), "the reference is where it begins"
    assert losses[-1] < 0.6
