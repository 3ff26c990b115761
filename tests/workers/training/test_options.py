"""Options that the loop reads for each step do something, and what a job sets aside is the same
wherever it runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ft_service.data.tokens.tokenize import file_samples, load_tokenizer
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Outcome, OutcomeKind
from tests.support.training.attempts import adapter, losses, run_attempt
from tests.support.training.models import reference, save_chat_base, save_chats, spec_for
from workers.base.load import initial_adapter, plain_name
from workers.data.batches import collate

ADAM: dict[str, float] = {"adam_beta1": 0.5, "adam_beta2": 0.8, "adam_epsilon": 1e-3}
PLAIN: dict[str, Any] = {"max_steps": 3, "batch_size": 4, "learning_rate": 5e-3}
SUCCEEDED = Outcome(kind=OutcomeKind.SUCCEEDED)


def test_steps_are_those_of_torchs_adamw_with_the_numbers_of_the_job(tmp_path: Path) -> None:
    """On two ranks, against transformers and PEFT as released, on one, whose optimizer is
    PyTorch's.
    """
    base = save_chat_base(tmp_path / "base")
    data = save_chats(tmp_path / "train.jsonl", 4)
    training = {
        **PLAIN,
        **ADAM,
        "lr_scheduler_type": "constant",
        "warmup_ratio": 0.0,
        "weight_decay": 0.1,
    }
    spec = spec_for(
        base, data, ranks=2, precision={"compute": "fp32"}, lora={"r": 2}, training=training
    )
    run = RunDir(tmp_path / "run")
    run.write("spec.json", spec)
    assert run_attempt(run, 1, 2) == SUCCEEDED

    model = reference(base, spec)
    named = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(initial_adapter(plain_name(name), tuple(parameter.shape), spec.seed))
    stock = torch.optim.AdamW(named.values(), lr=5e-3, betas=(0.5, 0.8), eps=1e-3, weight_decay=0.1)
    samples = list(file_samples(load_tokenizer(spec.model.path), data))
    batch = collate(samples, torch.device("cpu"))
    found = []
    for _ in range(3):  # each of all four samples
        logits = model(input_ids=batch.ids).logits.float().flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits[batch.places], batch.targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(named.values(), 1.0)
        stock.step()
        stock.zero_grad()
        found.append(loss.item())
    assert list(losses(run).values()) == pytest.approx(found, rel=1e-5)
    stored = adapter(run)
    for name, parameter in named.items():
        torch.testing.assert_close(
            stored[name.replace(".default", "")], parameter.detach(), rtol=0, atol=1e-6
        )


@pytest.mark.slow
def test_what_changes_a_step_changes_the_adapter(tmp_path: Path) -> None:
    """Schedules, weight decay and LoRA+ have tests of their own (test_training_state), by the same
    options.
    """
    base = save_chat_base(tmp_path / "base")
    data = save_chats(tmp_path / "train.jsonl", 11)

    def trained(name: str, **training: Any) -> dict[str, torch.Tensor]:
        own = {"seed": training.pop("seed")} if "seed" in training else {}
        spec = spec_for(
            base, data, precision={"compute": "fp32"}, lora={"r": 2}, training={**PLAIN, **training}
        )
        run = RunDir(tmp_path / name)
        run.write("spec.json", spec.model_copy(update=own))
        assert run_attempt(run, 1, 1) == SUCCEEDED
        return adapter(run)

    def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())

    plain = trained("plain")
    assert same(trained("again"), plain)
    assert not same(trained("noise", neftune_noise_alpha=100.0), plain)
    assert not same(trained("seed", seed=8), plain)
    assert not same(
        trained("grouped", group_by_length=True, packing=False), trained("padded", packing=False)
    )


@pytest.mark.slow
def test_the_same_samples_are_set_aside_on_any_ranks_and_after_a_resume(tmp_path: Path) -> None:
    training = {"max_steps": 4, "batch_size": 4, "learning_rate": 5e-3, "eval_steps": 1}
    base = save_chat_base(tmp_path / "base")
    data = save_chats(tmp_path / "train.jsonl", 21)
    options: dict[str, Any] = {
        "precision": {"compute": "fp32"},
        "lora": {"r": 2},
        "checkpoint": {"save_steps": 2},
    }

    def job(name: str, seed: int = 7) -> RunDir:
        run = RunDir(tmp_path / name)
        spec = spec_for(base, data, training=training, validation_split=0.25, **options)
        run.write("spec.json", spec.model_copy(update={"seed": seed}))
        return run

    runs = {world: job(f"on-{world}") for world in (1, 2, 3)}
    for world, run in runs.items():
        assert run_attempt(run, 1, world) == SUCCEEDED
    columns = ("train_loss", "valid_loss", "tokens")
    truth = {column: losses(runs[1], column) for column in columns}
    assert list(truth["valid_loss"]) == [1, 2, 3, 4]
    for world in (2, 3):
        for column in columns:
            assert losses(runs[world], column) == pytest.approx(truth[column], rel=1e-5), (
                world,
                column,
            )
    runs[3].path("result.json").unlink(missing_ok=True)
    assert run_attempt(runs[3], 2, 2, checkpoint="step-2-a1") == SUCCEEDED
    for column in columns:
        assert losses(runs[3], column) == pytest.approx(truth[column], rel=1e-5), column

    other = job("other-seed", seed=8)
    assert run_attempt(other, 1, 1) == SUCCEEDED
    assert losses(other, "valid_loss")[1] != pytest.approx(truth["valid_loss"][1], rel=1e-5), (
        "which ones follows from the seed"
    )
