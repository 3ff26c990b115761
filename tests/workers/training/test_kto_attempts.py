"""Whole attempts of KTO on real gloo ranks: on any number of ranks, in any micro-batches, resumed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Outcome, OutcomeKind
from ft_service.spec import JobSpec
from tests.support.training.attempts import (
    adapter,
    losses,
    messages,
    run_attempt,
    table,
    trained,
)
from tests.support.training.models import save_chat_base, save_labelled, spec_for

STEPS = 4


def spec_of(folder: Path, *, ranks: int, loss_type: str = "kto", **training: Any) -> JobSpec:
    hyperparameters = {"loss_type": loss_type, "beta": 0.5, "undesirable_weight": 1.25}
    return spec_for(
        save_chat_base(folder / "base"),
        save_labelled(folder / "train.jsonl", 13),
        valid=save_labelled(folder / "valid.jsonl", 6),
        ranks=ranks,
        method={"type": "kto", "kto": {"hyperparameters": {**hyperparameters, "batch_size": 6}}},
        precision={"default": "nf4", "compute": "fp32", "compare_served": "off"},
        training={
            "max_steps": STEPS,
            "tokens_per_micro_batch": 128,
            "learning_rate": 5e-3,
            "eval_steps": 1,
            **training,
        },
        checkpoint={"save_steps": 2, "save_total_limit": 10},
        lora={"r": 4, "lora_dropout": 0.1},
    )


def test_kto_learns_alike_on_ranks_and_resumed(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, ranks=2)
    finished = trained(spec, tmp_path / "finished", 2)
    rows = table(finished)
    started = {0.5 * (good + (6 - good) * 1.25) / 6 for good in range(1, 6)}
    assert float(rows[0]["train_loss"]) in [pytest.approx(loss, abs=1e-5) for loss in started]
    assert float(rows[-1]["valid_rewards/margins"]) > float(rows[0]["valid_rewards/margins"]) + 0.05
    assert float(rows[-1]["valid_loss"]) < float(rows[0]["valid_loss"]) - 0.01
    assert float(rows[0]["kl"]) == pytest.approx(0, abs=1e-5), "the adapter adds nothing yet"
    assert float(rows[-1]["valid_kl"]) >= 0
    assert finished.path("reference.bin").stat().st_size == 8 * 2 * (13 + 6)
    assert any("Reference log-prob" in text and "38 answers" in text for text in messages(finished))

    alone = trained(spec, tmp_path / "alone", 1)
    assert losses(alone) == pytest.approx(losses(finished), rel=1e-6, abs=1e-6)

    run = RunDir(tmp_path / "resumed")
    shutil.copytree(finished.path("attempts"), run.path("attempts"))
    shutil.copytree(finished.path("checkpoints/step-2-a1"), run.path("checkpoints/step-2-a1"))
    for name in ("spec.json", "origins.json", "reference.json", "reference.bin"):
        shutil.copy(finished.path(name), run.path(name))
    assert run_attempt(run, 2, 2, "step-2-a1") == Outcome(kind=OutcomeKind.SUCCEEDED)
    assert losses(run) == losses(finished)
    for name, matrix in adapter(finished).items():
        assert torch.equal(adapter(run)[name], matrix), name
