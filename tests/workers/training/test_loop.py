"""The loop's order of work: what a step may not wait for, and that reading its numbers late does
not change them.
"""

from __future__ import annotations

import errno
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import PropertyMock, patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ft_service.rundir.attempt import Attempt
from ft_service.rundir.checkpoints import complete_checkpoints
from ft_service.rundir.directory import RunDir, UnreadableDocumentError
from ft_service.rundir.documents import Control, Desired, Outcome, OutcomeKind
from ft_service.spec import JobSpec
from tests.support.ranks import run_on_ranks
from tests.support.training.attempts import adapter, attempt_on_rank, losses, run_attempt
from tests.support.training.models import save_chat_base, save_chats, save_tiny_llama, spec_for
from tests.support.training.parity import batches_of, constructed, samples
from workers.base.load import adapters
from workers.job.training_state import JobState
from workers.model.head import set_works_in_chunks
from workers.model.multimodal import causal_model
from workers.output.report import Reporter
from workers.ranks.runtime import Runtime
from workers.training.context import StopRequest
from workers.training.step import forward_backward

READS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "is_nonzero",
    "equal",
    "unique_consecutive",
}
"""Operators for whose result, or its shape, the host has to wait for a GPU."""


class Reads(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in READS:
            self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


def reads_of_a_step(rank: int, world: int, spec: JobSpec, chunks: bool) -> Counter[str]:
    built = constructed(spec, world)
    job = JobState(dict(adapters(built.peft_model)), spec.training)
    data = samples()
    keys = list(range(len(data))) if spec.lora.lora_dropout else None
    set_works_in_chunks(causal_model(built.peft_model), chunks)
    with Reads() as reads:
        sums = forward_backward(
            built.peft_model, batches_of(data, rank, world, spec, keys), 50, world
        )
        job.update(1e-3, 1.0)
        assert not reads.found
        float(sums[0])
    return reads.found


@pytest.mark.parametrize("chunks", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_nothing_waits_between_the_first_and_the_last_work_of_a_step(
    chunks: bool, dropout: float, tmp_path: Path
) -> None:
    lora = {"r": 4, "lora_dropout": dropout}
    spec = spec_for(save_tiny_llama(tmp_path / "base"), precision={"default": "nf4"}, lora=lora)
    [found] = run_on_ranks(reads_of_a_step, 1, spec, chunks)
    assert found.total() == 1, "the sums, which the test reads"


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> JobSpec:
    folder = tmp_path_factory.mktemp("job")
    return spec_for(
        save_chat_base(folder / "base"),
        save_chats(folder / "train.jsonl", 11),
        valid=save_chats(folder / "valid.jsonl", 5),
        ranks=2,
        precision={"compute": "fp32"},
        training={"max_steps": 7, "batch_size": 5, "learning_rate": 5e-3, "eval_steps": 3},
        checkpoint={"save_steps": 4},
        lora={"r": 4},
    )


def late_attempt(rank: int, world: int, root: str, attempt: int) -> Outcome:
    """An attempt as on GPUs: the next step is begun before the last one's numbers are read.

    With each micro-batch it can tell that it goes on, as the first steps may take longer than a job
    may be silent.
    """
    with (
        patch.object(Runtime, "reads_late", PropertyMock(return_value=True)),
        patch.object(Reporter, "heartbeat", autospec=True) as told,
    ):
        outcome = attempt_on_rank(rank, world, root, attempt)
    weights = 12
    assert told.call_count >= weights + 2
    return outcome


def late(run: RunDir, spec: JobSpec, ranks: int) -> Outcome:
    run.write("spec.json", spec)
    return run_attempt(run, 1, ranks, on_rank=late_attempt)


def test_numbers_that_are_read_late_are_the_same(spec: JobSpec, tmp_path: Path) -> None:
    early = RunDir(tmp_path / "early")
    behind = RunDir(tmp_path / "late")
    early.write("spec.json", spec)
    assert run_attempt(early, 1, 1) == late(behind, spec, 1) == Outcome(kind=OutcomeKind.SUCCEEDED)
    for column in (
        "train_loss",
        "valid_loss",
        "grad_norm",
        "tokens",
        "trained_tokens",
        "train_accuracy",
    ):
        assert losses(behind, column) == losses(early, column), column
    assert list(losses(behind)) == list(range(1, 8))
    assert list(losses(behind, "valid_loss")) == [3, 6, 7]
    assert complete_checkpoints(behind) == complete_checkpoints(early) == ["step-4-a1", "step-7-a1"]
    for name, tensor in adapter(early).items():
        assert torch.equal(adapter(behind)[name], tensor), name


def test_a_stop_is_agreed_on_while_the_next_step_is_on_its_way(
    spec: JobSpec, tmp_path: Path
) -> None:
    run = RunDir(tmp_path)
    Attempt(run, 1).write_control(Control(generation=2, desired=Desired.PAUSE))
    assert late(run, spec, 2) == Outcome(kind=OutcomeKind.STOPPED, checkpoint="step-2-a1")


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ESTALE, "Stale file handle"), UnreadableDocumentError("control", "torn")],
)
def test_a_request_that_cannot_be_read_ends_no_rank_by_itself_and_is_read_again(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = SimpleNamespace(stop=None)
    start = SimpleNamespace(attempt=1)
    stop = StopRequest(SimpleNamespace(rank=0, run=RunDir(tmp_path), start=start, groups=groups))  # pyright: ignore
    monkeypatch.setattr("workers.training.context.POLL_SECONDS", 0.0)
    with patch.object(Attempt, "read_control", side_effect=error):
        assert not stop.agreed()
    Attempt(RunDir(tmp_path), 1).write_control(Control(generation=2, desired=Desired.PAUSE))
    assert stop.agreed()
    with patch.object(Attempt, "read_control", side_effect=error):
        assert stop.agreed(), "what was asked for counts on"
