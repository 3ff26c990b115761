"""Recipes of the unmodified tinker-cookbook against a real server with real ranks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from ft_service.data.tokens.tokenize import load_tokenizer
from tests.support.bases import SAMPLE
from tests.support.describing import put_descriptions
from tests.support.service import Server, upload, wait_until
from tests.support.tinker_server import PROGRAMS, environment_of, serving
from tests.support.training.attempts import losses
from workers.data.batches import batch_of_step

EXAMPLES = SAMPLE.parents[1]
DATA = EXAMPLES / "data"

COOKBOOK = Path(os.environ.get("FT_TEST_CLIENTS", Path(sys.prefix) / "clients")) / "cookbook"
"""The package with what its recipes import; `make test-all` installs it."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        not (COOKBOOK / "tinker_cookbook").is_dir(),
        reason="tinker-cookbook is not installed (make test-all)",
    ),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    models = folder / "models"
    shutil.copytree(SAMPLE, models / SAMPLE.name)
    # Sampling takes a while, and models that wait for it need not be paused.
    with serving(
        folder, models, 2, ranks=1, together=16, precision="bf16", FT_TINKER_IDLE_SECONDS="60"
    ) as server:
        yield server


def run(server: Server, logs: Path, *command: str) -> list[dict[str, Any]]:
    """The metrics of a recipe, which must succeed."""
    printed(server, *command)
    return [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()]


def printed(server: Server, *command: str) -> str:
    """What a program of the cookbook prints, which must succeed.

    It finds tokenizers in the folder of bases.
    """
    environment = {**environment_of(server), "PYTHONPATH": str(COOKBOOK)}
    folder = server.home.parent / "models"
    arguments = [sys.executable, *command]
    ended = subprocess.run(
        arguments, env=environment, cwd=folder, capture_output=True, text=True, timeout=1500
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return ended.stdout


def recipe(
    name: str, model: str, logs: Path, *options: str, renderer: str = "role_colon"
) -> list[str]:
    common = [
        f"renderer_name={renderer}",
        "save_every=0",
        "eval_every=0",
        "lora_rank=32",
        f"log_path={logs}",
    ]
    return ["-m", f"tinker_cookbook.recipes.{name}.train", f"model_name={model}", *common, *options]


STEPS = 12
BATCH = 32
RATE = 2e-3
RENDERER = "qwen3_instruct"
"""Writes what the sample base's chat template writes."""
ADAM = {"adam_beta1": 0.9, "adam_beta2": 0.95, "adam_epsilon": 1e-8 / BATCH}
"""The recipe's. The losses of a batch's sequences add up there, and are a mean in a job, so that
its gradients are smaller.
"""
ROUNDING = 1e-5
"""Nats, over all steps; 6e-7 was measured."""
Sequence = tuple[tuple[int, ...], tuple[bool, ...]]
"""Token ids, and which of them are learned."""


def test_supervised(server: Server, tmp_path: Path) -> None:
    """`chat_sl` has the losses of a job here on the same batches, with the same numbers for AdamW.

    A step's loss there is the mean over its sequences, here over its tokens: all sequences have
    equally many learned ones.
    """
    chats = tmp_path / "chats.jsonl"
    logs = tmp_path / "logs"
    chats.write_text(
        "".join(
            of_equal_answers(
                (DATA / "train.jsonl").read_text().splitlines(keepends=True), STEPS * BATCH
            )
        )
    )
    lines = dict(
        zip(sequences(server, chats), chats.read_text().splitlines(keepends=True), strict=True)
    )
    program = str(PROGRAMS / "cookbook_batches.py")
    batches = json.loads(printed(server, program, "tiny-llama", RENDERER, str(chats), str(BATCH)))
    order = [
        lines[tuple(ids), tuple(learned)] for batch in batches for ids, learned in batch
    ]  # the same tokens are learned

    options = [f"dataset={chats}", f"learning_rate={RATE}", f"batch_size={BATCH}"]
    told = run(server, logs, *recipe("chat_sl", "tiny-llama", logs, *options, renderer=RENDERER))
    there, here = side_by_side(server, told, tmp_path, order)
    assert there == pytest.approx(here, abs=ROUNDING)
    assert there[-1] < there[0] - 4


def of_equal_answers(lines: list[str], count: int) -> list[str]:
    """Chats whose answers have equally many tokens."""
    tokenizer = load_tokenizer(str(SAMPLE))
    lengths = [len(tokenizer.encode(json.loads(line)["messages"][-1]["content"])) for line in lines]
    [(usual, _)] = Counter(lengths).most_common(1)
    return [line for line, length in zip(lines, lengths, strict=True) if length == usual][:count]


def sequences(server: Server, chats: Path) -> list[Sequence]:
    """What a job trains on, of each line of a file."""
    client = server.client()
    found = list[Sequence]()
    path = f"/files/{upload(client, chats)}/samples"
    while True:
        query = {"model": "tiny-llama", "after": len(found), "limit": 100}
        page: Any = client.get(path, cast_to=object, options={"params": query})
        for sample in page["data"]:
            tokens = sample["tokens"]
            found.append(
                (
                    tuple(token["id"] for token in tokens),
                    tuple(token["role"] == "learned" for token in tokens),
                )
            )
        if not page["has_more"]:
            return found


def side_by_side(
    server: Server, told: list[dict[str, Any]], folder: Path, order: list[str]
) -> tuple[list[float], list[float]]:
    """The losses of the newest model as its client was told them, which are those of its own curve
    too; and those of a job that begins with the same adapter, on chats in this order.
    """
    client = server.client()
    model = wait_until(client, client.fine_tuning.jobs.list(limit=1).data[0].id, "succeeded")
    there = [row["train_mean_nll"] for row in told]
    assert len(there) == STEPS
    assert list(losses(server.run(model.id)).values()) == pytest.approx(there, abs=ROUNDING)
    return there, trained(server, folder, order, model.seed)


def trained(server: Server, folder: Path, order: list[str], seed: int) -> list[float]:
    """The losses of a job on chats in this order."""
    client = server.client()
    lines = [""] * len(order)
    numbers = [
        number for step in range(STEPS) for number in batch_of_step(step, len(order), BATCH, seed)
    ]
    for number, line in zip(numbers, order, strict=True):
        lines[number] = line
    (folder / "ordered.jsonl").write_text("".join(lines))
    options = {
        "precision": {"default": "bf16", "compute": "fp32"},
        "lora": {"r": 32, "lora_alpha": 32},
        "training": {
            **{
                "n_epochs": 1,
                "batch_size": BATCH,
                "learning_rate": RATE,
                "warmup_steps": 0,
                "max_grad_norm": 0,
            },
            **ADAM,
        },
        "distributed": {"nproc_per_node": 1},
    }
    file = upload(client, folder / "ordered.jsonl")
    job = client.fine_tuning.jobs.create(
        model="tiny-llama", training_file=file, seed=seed, extra_body=options
    )
    wait_until(client, job.id, "succeeded")
    return list(losses(server.run(job.id)).values())


def test_reinforcement(server: Server, tmp_path: Path) -> None:
    models = server.home.parent / "models"
    subprocess.run(
        [sys.executable, EXAMPLES / "sums_base.py", SAMPLE, models / "tiny-sums"], check=True
    )
    put_descriptions(server.home, models)
    options = [
        "env=arithmetic",
        "loss_fn=importance_sampling",
        "learning_rate=3e-4",
        "max_tokens=20",
        "max_steps=50",
    ]
    groups = ["group_size=8", "groups_per_batch=16"]
    logs = tmp_path / "logs"
    rows = run(server, logs, *recipe("math_rl", "tiny-sums", logs, *options, *groups))
    rewards = [row["env/all/reward/total"] for row in rows if "env/all/reward/total" in row]
    assert len(rewards) == 50
    assert fmean(rewards[-10:]) > max(0.5, fmean(rewards[:3]) + 0.15), rewards


def test_a_loss_of_the_clients_own(server: Server, tmp_path: Path) -> None:
    program = str(PROGRAMS / "cookbook_dpo.py")
    pairs = str(DATA / "preferences.jsonl")
    losses = [
        row["dpo_loss"]
        for row in run(server, tmp_path, program, "tiny-llama", pairs, str(tmp_path))
    ]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3), "the reference is where it begins"
    assert losses[-1] < 0.6
