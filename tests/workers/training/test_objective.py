"""Continued training on documents: windows in full rows, on ranks, against the loss of stock parts
on each window alone.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ft_service.data.tokens.token_set import TokenSet
from ft_service.data.tokens.tokenize import file_samples, load_tokenizer
from ft_service.data.tokens.training_set.windows import in_rows, in_windows
from ft_service.rundir.directory import RunDir, sha256_of
from ft_service.rundir.documents import Outcome, OutcomeKind
from ft_service.spec import DataFileRef, JobSpec
from tests.support.training.attempts import losses, run_attempt
from tests.support.training.models import save_chat_base, spec_for
from workers.data.batches import batch_of_step

LENGTH = 32
ROWS = 2
STEPS = 6
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> JobSpec:
    folder = tmp_path_factory.mktemp("documents")
    path = folder / "train.jsonl"
    texts = [f"document {number} " * (1 + number % 9) for number in range(20)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return spec_for(
        save_chat_base(folder / "base"),
        DataFileRef(name=path.name, path=str(path), sha256=sha256_of(path)),
        ranks=2,
        precision={"compute": "fp32"},
        training={
            "max_steps": STEPS,
            "batch_size": ROWS,
            "max_length": LENGTH,
            "learning_rate": 1e-9,
        },
        checkpoint={"save_steps": 2, "save_total_limit": 10},
        lora={"r": 4},
    )


@pytest.fixture(scope="module")
def finished(spec: JobSpec, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run = RunDir(tmp_path_factory.mktemp("finished"))
    run.write("spec.json", spec)
    assert run_attempt(run, 1, 2) == Outcome(kind=OutcomeKind.SUCCEEDED)
    return run


def test_the_loss_of_a_row_is_that_of_its_windows_alone(finished: RunDir, spec: JobSpec) -> None:
    """At a rate that changes nothing, so that every step is the base's own."""
    tokenizer = load_tokenizer(spec.model.path)
    windows = in_windows(TokenSet.of(file_samples(tokenizer, spec.data_files[0])), LENGTH)
    rows = in_rows(windows.lengths.tolist(), LENGTH)
    assert len(rows) < len(windows), "short ones share a row"
    model: Any = AutoModelForCausalLM.from_pretrained(spec.model.path, dtype=torch.float32)
    for step, loss in losses(finished).items():
        items = batch_of_step(step - 1, len(rows), ROWS, spec.seed)
        summed = 0.0
        count = 0
        for sample in (windows[number] for item in items for number in rows[item]):
            ids = torch.tensor(sample.ids).long()[None]
            with torch.no_grad():
                own = torch.nn.functional.cross_entropy(
                    model(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="sum"
                )
            summed = summed + float(own)
            count = count + ids.shape[1] - 1
        assert loss == pytest.approx(summed / count, abs=1e-5)


@pytest.mark.parametrize("world", [1, 2])
def test_a_resumed_job_goes_on_with_the_same_rows(
    finished: RunDir, spec: JobSpec, tmp_path: Path, world: int
) -> None:
    run = RunDir(tmp_path)
    shutil.copytree(finished.path("attempts"), run.path("attempts"))
    shutil.copytree(finished.path("checkpoints/step-2-a1"), run.path("checkpoints/step-2-a1"))
    run.write("spec.json", spec)
    assert run_attempt(run, 2, world, "step-2-a1") == Outcome(kind=OutcomeKind.SUCCEEDED)
    assert losses(run) == pytest.approx(losses(finished), abs=1e-6)
