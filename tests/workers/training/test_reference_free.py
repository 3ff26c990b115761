"""Whole attempts of losses on pairs other than DPO's first, on real gloo ranks: without a
reference, on any number of ranks, and resumed.
"""

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
from tests.support.training.models import save_chat_base, save_pairs, spec_for

STEPS = 4
METHODS: dict[str, dict[str, Any]] = {
    "dpo": {"loss_type": "apo_zero", "beta": 0.5},
    "simpo": {"beta": 2.0, "gamma": 0.5},
    "orpo": {"beta": 0.5},
}


def spec_of(method: str, folder: Path) -> JobSpec:
    return spec_for(
        save_chat_base(folder / "base"),
        save_pairs(folder / "train.jsonl", 11),
        valid=save_pairs(folder / "valid.jsonl", 4),
        ranks=2,
        method={
            "type": method,
            method: {"hyperparameters": {**METHODS[method], "batch_size": 5}},
        },
        precision={"default": "nf4", "compute": "fp32", "compare_served": "off"},
        training={"max_steps": STEPS, "tokens_per_micro_batch": 128, "learning_rate": 5e-3},
        checkpoint={"save_steps": 2, "save_total_limit": 10},
        lora={"r": 4, "lora_dropout": 0.1},
    )


@pytest.mark.parametrize(
    ("method", "ways"),
    [
        ("simpo", {"alone"}),
        ("orpo", {"resumed"}),
        # test_preference.py has its numbers, and test_reference_logprobs.py jobs with a reference
        *(pytest.param(name, {"alone", "resumed"}, marks=pytest.mark.slow) for name in METHODS),
    ],
    ids=str,
)
def test_a_method_learns_alike_on_ranks_and_resumed(
    method: str, ways: set[str], tmp_path: Path
) -> None:
    """`ways`: in which it is trained besides on two ranks."""
    spec = spec_of(method, tmp_path)
    finished = trained(spec, tmp_path / "finished", 2)
    rows = table(finished)
    assert float(rows[-1]["train_loss"]) < float(rows[0]["train_loss"]) - 0.02
    assert float(rows[-1]["rewards/margins"]) > float(rows[0]["rewards/margins"]) + 0.05
    margin = float(rows[-1]["rewards/chosen"]) - float(rows[-1]["rewards/rejected"])
    assert float(rows[-1]["rewards/margins"]) == pytest.approx(margin, abs=1e-9)
    assert float(rows[-1]["valid_rewards/accuracies"]) > 0.5
    with_reference = method == "dpo"
    assert finished.path("reference.bin").is_file() == with_reference
    assert any("Reference log-prob" in text for text in messages(finished)) == with_reference

    if "alone" in ways:
        alone = trained(spec, tmp_path / "alone", 1)
        assert losses(alone) == pytest.approx(losses(finished), rel=1e-6, abs=1e-6)
    if "resumed" in ways:
        assert_resumes(finished, tmp_path, ("reference.json", "reference.bin") * with_reference)


def assert_resumes(finished: RunDir, tmp_path: Path, kept: tuple[str, ...]) -> None:
    """`kept`: what the job has besides its spec and origins."""
    run = RunDir(tmp_path / "resumed")
    shutil.copytree(finished.path("attempts"), run.path("attempts"))
    shutil.copytree(finished.path("checkpoints/step-2-a1"), run.path("checkpoints/step-2-a1"))
    for name in ("spec.json", "origins.json", *kept):
        shutil.copy(finished.path(name), run.path(name))
    assert run_attempt(run, 2, 2, "step-2-a1") == Outcome(kind=OutcomeKind.SUCCEEDED)
    assert losses(run) == losses(finished)
    for name, matrix in adapter(finished).items():
        assert torch.equal(adapter(run)[name], matrix), name
