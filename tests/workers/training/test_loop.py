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
from workers.data.micro_batches import MicroBatchLimits
from workers.job.training_state import JobState, Validations
from workers.layers.dropout import key_of
from workers.model.head import set_works_in_chunks
from workers.model.multimodal import causal_model
from workers.output.report import Reporter
from workers.ranks.runtime import Runtime
from workers.training import loop
from workers.training.context import StopRequest
from workers.training.loop import DeviceEvent, Schedule, StepBegun, Trainer, _together
from workers.training.step import Sums, forward_backward

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


def schedule(**changes: Any) -> Schedule:
    given = {"total_steps": 20, "steps_per_epoch": 6, "eval_steps": None, "save_steps": 8}
    return Schedule(**given | changes)


def happens(test: Any) -> list[int]:
    return [step for step in range(1, 21) if test(step)]


def test_each_thing_happens_at_its_steps() -> None:
    none = Validations()
    usual = schedule(rungs=(5, 12))
    assert happens(usual.counts_at) == [6, 12, 18, 20]
    assert happens(usual.validates_at) == [5, 6, 12, 18, 20]
    assert happens(schedule(eval_steps=7).validates_at) == [7, 14, 20]
    assert happens(lambda step: usual.saves_at(step, none)) == [8, 16]
    kept = schedule(keep_every=5, keeps_best=True)
    best = SimpleNamespace(best_step=3)
    assert happens(lambda step: kept.saves_at(step, best)) == [3, 5, 8, 10, 15, 16, 20]  # type: ignore[arg-type]
    assert happens(lambda step: usual.saves_at(step, best)) == [8, 16]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("step", "without", "patience", "ends"),
    [
        (19, 9, None, False),
        (20, 0, None, True),
        (21, 0, None, True),
        (5, 1, 2, False),
        (5, 2, 2, True),
    ],
)
def test_training_ends_at_its_last_step_or_with_its_patience(
    step: int, without: int, patience: int | None, ends: bool
) -> None:
    validations: Any = SimpleNamespace(without_progress=without)
    assert schedule(patience=patience).ends_at(step, validations) is ends


def test_numbers_of_one_step_are_told_together_by_their_names() -> None:
    before: Any = SimpleNamespace(mean_loss=2.5)
    assert _together({"a": 1.0}, {"a": 2.0}, {"b": 3.0}, before) == {
        "a": 1.0,
        "valid_a": 2.0,
        "b": 3.0,
        loop.BEFORE_VALID_LOSS: 2.5,
    }
    assert _together({"a": 1.0}, None, None, None) == {"a": 1.0}
    assert _together(None, None, None, None) is None


class Stepping(Trainer):
    """A loop whose steps are counted, and which notes what it does."""

    def _begin(self, began: Any) -> Any:
        self.job.step += 1
        self.noted.append(f"begin {self.job.step}")  # type: ignore[attr-defined]
        return SimpleNamespace(step=self.job.step, ended=began)

    def _check(self, begun: Any) -> Any:
        return Sums(1.0, 1, 1), 0.5

    def _validate(self) -> Any:
        self.noted.append(f"validate at {self.job.step}")  # type: ignore[attr-defined]
        return Sums(2.0, 1, 1)

    def _validated(self, begun: Any, before: Any) -> Any:
        self.noted.append(f"read {begun.step}{' and before' if before else ''}")  # type: ignore[attr-defined]

    def _report(
        self, begun: Any, numbers: Any, valid: Any, answered: Any = None, before: Any = None
    ) -> Any:  # type: ignore[override]
        self.noted.append(f"late {begun.step}{' and before' if before else ''}")  # type: ignore[attr-defined]


def stepping(*, late: bool, stops_at: int | None = None, valid: int = 0, **changes: Any) -> Any:
    job = SimpleNamespace(step=0, validations=Validations())
    noted: list[str] = []
    agreed = SimpleNamespace(agreed=lambda: job.step == stops_at)
    saver = SimpleNamespace(
        save=lambda job, metrics: noted.append(f"save {job.step}"),
        save_last=lambda job, metrics: noted.append(f"last {job.step}") or f"step-{job.step}",
    )
    context = SimpleNamespace(
        stop=agreed, runtime=SimpleNamespace(reads_late=late, device=torch.device("cpu"))
    )
    given = {"total_steps": 4, "steps_per_epoch": 9, "save_steps": 2, **changes}
    trainer: Any = Stepping(
        context,  # type: ignore[arg-type]
        job,  # type: ignore[arg-type]
        (),  # type: ignore[arg-type]
        range(valid),  # type: ignore[arg-type]
        schedule(**given),
        saver,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
    )
    object.__setattr__(trainer, "noted", noted)
    return trainer


def test_a_step_is_read_before_the_next_begins_or_behind_it() -> None:
    early = stepping(late=False)
    assert early.fit() is None
    assert early.noted == [
        *("begin 1", "read 1", "begin 2", "read 2", "save 2"),
        *("begin 3", "read 3", "begin 4", "read 4", "last 4"),
    ]
    behind = stepping(late=True)
    assert behind.fit() is None
    assert behind.noted == [
        *("begin 1", "begin 2", "late 1", "read 2", "save 2"),
        *("begin 3", "begin 4", "late 3", "read 4", "last 4"),
    ]


@pytest.mark.parametrize("late", [False, True])
def test_a_stop_saves_what_was_done_and_at_the_last_step_training_is_done(late: bool) -> None:
    stopped = stepping(late=late, stops_at=3)
    assert stopped.fit() == "step-3"
    assert stopped.noted[-1] == "last 3"
    assert "begin 4" not in stopped.noted
    assert stepping(late=late, stops_at=4).fit() is None


@pytest.mark.parametrize(
    ("late", "first"), [(False, "read 1 and before"), (True, "late 1 and before")]
)
def test_the_validation_before_the_first_step_is_told_with_it_and_once(
    late: bool, first: str
) -> None:
    trainer = stepping(late=late, valid=1)
    trainer.fit()
    assert trainer.noted[0] == "validate at 0"
    assert [note for note in trainer.noted if note.endswith("before")] == [first]
    resumed = stepping(late=late, valid=1)
    resumed.job.step = 2
    resumed.fit()
    assert not any("before" in note or "validate" in note for note in resumed.noted)


def reporting(spec: Any) -> tuple[Any, list[Any]]:
    """A loop's part that reports, and what it has told."""
    told: list[Any] = []
    reporter = SimpleNamespace(
        metrics=told.append, message=told.append, heartbeat=lambda: told.append("alive")
    )
    runtime = SimpleNamespace(spec=spec, rank=0, world=1, device=torch.device("cpu"), context=None)
    context: Any = SimpleNamespace(
        reporter=reporter, runtime=runtime, limits=MicroBatchLimits(tokens=9)
    )
    nothing: Any = None
    job: Any = SimpleNamespace(step=0)
    steps = schedule(total_steps=8, steps_per_epoch=4)
    return Trainer(context, job, nothing, nothing, steps, nothing, nothing), told


def moment(seconds: float) -> DeviceEvent:
    """The end of work on a device that counts milliseconds."""
    made = DeviceEvent(torch.device("cpu"))
    elapsed = lambda later: 1000 * (later.at - seconds)  # noqa: E731
    made._event = SimpleNamespace(at=seconds, elapsed_time=elapsed)  # type: ignore[assignment]
    return made


def test_a_step_is_reported_with_all_its_numbers() -> None:
    trainer, told = reporting(None)
    begun = StepBegun(6, 0.25, [1], 30, 90, torch.zeros(0), moment(2.0), moment(3.5))
    made = trainer._report(begun, (Sums(6.0, 3, 4), 0.5), Sums(10.0, 1, 5), {"a": 1.0}, None)
    assert told == [made]
    assert made.model_dump(exclude_none=True) == {
        **{"step": 6, "total_steps": 8, "train_loss": 1.5, "train_mean_token_accuracy": 0.75},
        **{"valid_loss": 2.0, "valid_mean_token_accuracy": 0.2, "learning_rate": 0.25},
        **{"grad_norm": 0.5, "tokens": 30, "trained_tokens": 90, "step_seconds": 1.5},
        **{"epoch": 1.5, "more": {"a": 1.0}},
    }
    alone = trainer._report(begun, (Sums(6.0, 3, 4), 0.5), None)
    assert (alone.valid_loss, alone.valid_mean_token_accuracy, alone.more) == (None, None, None)


@pytest.mark.parametrize(
    ("served_as", "expected", "messages"),
    [("nf4", [True] * 4 + [False] * 4, 1), (None, [False] * 8, 0)],
)
def test_layers_are_rounded_from_a_step_on_which_is_told_once(
    served_as: str | None, expected: list[bool], messages: int
) -> None:
    precision = SimpleNamespace(served_as=served_as, served_from_step=0.5)
    trainer, told = reporting(SimpleNamespace(precision=precision))
    found: list[bool] = []
    for trainer.job.step in range(8):
        found.append(trainer._unrounded())
    assert (found, len(told)) == (expected, messages)
    assert all(text.startswith("From step 5 of 8 on") for text in told)


@pytest.mark.parametrize(
    ("dropout", "noise", "step", "random"),
    [(0.0, None, 3, False), (0.1, None, 3, True), (0.0, 5.0, 3, True), (0.1, 5.0, None, False)],
)
def test_samples_have_keys_where_a_step_has_something_random(
    dropout: float, noise: float | None, step: int | None, random: bool
) -> None:
    lora = SimpleNamespace(lora_dropout=dropout)
    training = SimpleNamespace(neftune_noise_alpha=noise)
    trainer, told = reporting(SimpleNamespace(lora=lora, training=training, seed=7))
    objective: Any = SimpleNamespace(
        members=list,
        share_out=lambda items, world, limits: [[[0]], [[1]]],
        micro_batch=lambda members, device, keys, packed: (members, keys),
    )
    keys = [[key_of("sample", 7, step, item)] if random else None for item in (4, 5)]
    assert list(trainer._mine(objective, [4, 5], step)) == [([4], keys[0]), ([5], keys[1])]
    assert told == ["alive"] * 2
