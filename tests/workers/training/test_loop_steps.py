"""What a step and a validation of the loop do, and with what, on parts that note it."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from workers.data.batches import BatchOrder
from workers.job.training_state import Validations
from workers.ranks.runtime import TrainingError
from workers.training import loop
from workers.training.loop import DeviceEvent, Schedule, StepBegun, Trainer
from workers.training.step import Sums

CPU = torch.device("cpu")
NOTHING: Any = None


def test_seconds_on_a_cpu_are_those_of_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(loop.time, "perf_counter", lambda: now[0])
    first = DeviceEvent(CPU)
    now[0] = 12.5
    second = DeviceEvent(CPU)
    second.wait()
    assert (second.since(first), first.since(second)) == (2.5, -2.5)
    for own in (first, second):  # one moment of a GPU, and one of a processor
        own._event = SimpleNamespace(elapsed_time=lambda later: 3000.0)  # type: ignore[assignment]
        assert second.since(first) == (2.5 if own is first else 3.0)


@pytest.mark.parametrize("best", ["neither", "keep_best", "load_best_model_at_end"])
def test_a_schedule_is_that_of_the_spec(best: str) -> None:
    asked: list[Any] = []
    training = SimpleNamespace(
        **{"batch": 4, "epochs": 3, "max_steps": None, "eval_steps": 7},
        early_stopping_patience=2,
        load_best_model_at_end=best == "load_best_model_at_end",
    )
    checkpoint = SimpleNamespace(
        interval=lambda *given: asked.append(given) or 5,
        keep_every=6,
        keep_best=best == "keep_best",
    )
    spec: Any = SimpleNamespace(
        training=training, checkpoint=checkpoint, rung_steps=lambda steps: (steps,)
    )
    assert Schedule.of(spec, 10) == Schedule(9, 3, 7, 5, 6, best != "neither", 2, (9,))
    assert asked == [(3, 9)]


class Objective:
    """Items of two samples of 3 and 4 tokens."""

    samples = SimpleNamespace(lengths=torch.tensor([3, 4] * 6).numpy())

    def __len__(self) -> int:
        return 6

    def members(self, items: Any) -> list[int]:
        return [2 * i + side for i in items for side in (0, 1)]

    def divisor(self, items: Any) -> int:
        return 100 + len(items)

    def read(self, sums: Any, items: Any) -> Sums:
        return Sums(sums[0], int(sums[1]), 10 * len(items))


def trainer_of(noted: list[Any], monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    """A trainer whose parts note what they are given; `changes`: of the spec."""
    training = SimpleNamespace(max_grad_norm=0.5, early_stopping_threshold=0.25)
    spec = SimpleNamespace(
        training=training, distributed=SimpleNamespace(prefetch=changes.pop("prefetch", None))
    )
    model = nn.Identity()
    gradients = object()

    def update(rate: float, norm: float) -> torch.Tensor:
        noted.append(("update", rate, norm))
        job.step += 1
        return torch.tensor(2.0)

    validations = Validations()
    job = SimpleNamespace(step=1, trained_tokens=50, update=update, validations=validations)
    watch = SimpleNamespace(after_step=lambda rate: noted.append(("watch", rate)))
    runtime = SimpleNamespace(spec=spec, world=2, device=CPU)
    reporter = SimpleNamespace(metrics=lambda own: noted.append(("report", own.step)))
    context = SimpleNamespace(runtime=runtime, model=model, gradients=gradients, reporter=reporter)
    given = {"total_steps": 8, "steps_per_epoch": 4, "eval_steps": 2, "save_steps": 8}
    parts: Any = (context, job, Objective(), Objective())
    own: Any = Trainer(*parts, Schedule(**given | changes), NOTHING, watch)  # type: ignore[arg-type]
    own.__dict__["_order"] = BatchOrder(6, 2, 0)
    monkeypatch.setattr(Trainer, "_unrounded", lambda self: True)
    monkeypatch.setattr(
        Trainer, "_mine", lambda self, data, items, step=None: ("mine", data, items, step)
    )
    return own


@pytest.mark.parametrize("prefetch", [None, 2])
def test_a_step_trains_on_its_items_with_its_rate(
    prefetch: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[Any] = []
    own = trainer_of(noted, monkeypatch, prefetch=prefetch)
    monkeypatch.setattr(loop, "gather_first", lambda model: noted.append(("gather", model)))
    rates: list[Any] = []
    monkeypatch.setattr(loop, "learning_rate_at", lambda *given: rates.append(given) or 0.125)
    losses: list[Any] = []
    monkeypatch.setattr(loop, "loss_with_baseline", lambda *given: losses.append(given) or "loss")

    @contextmanager
    def unrounded(model: Any, wanted: bool) -> Any:
        noted.append(("unrounded", model, wanted))
        yield
        noted.append("rounded")

    def step(model: Any, mine: Any, divisor: int, world: int, **more: Any) -> torch.Tensor:
        noted.append((model, mine, divisor, world, more))
        return torch.tensor([6.0, 3.0], dtype=torch.float64)

    monkeypatch.setattr(loop, "unrounded", unrounded)
    monkeypatch.setattr(loop, "forward_backward", step)
    began = DeviceEvent(CPU)
    begun = own._begin(began)
    items = BatchOrder(6, 2, 0).of_step(1)
    model, options = own.context.model, own.runtime.spec.training
    more = {"loss_of": "loss", "gradients": own.context.gradients}
    assert noted == [
        *([("gather", model)] if prefetch else []),
        ("unrounded", model, True),
        (model, ("mine", own.train, items, 1), 102, 2, more),
        "rounded",
        ("update", 0.125, 0.5),
    ]
    assert rates == [(1, 8, options)]
    assert losses == [(model, own.train, items, 2, own._mine)]
    assert (begun.step, begun.rate, begun.items, begun.began) == (2, 0.125, items, began)
    assert (begun.tokens, begun.trained_tokens, own.job.trained_tokens) == (14, 64, 64)
    assert (begun.numbers.tolist(), begun.numbers.dtype) == ([6, 3, 2], torch.float64)
    sums, norm = own._check(begun)
    assert (sums, norm, noted[-1]) == (Sums(6.0, 3, 20), 2.0, ("watch", 0.125))
    own.job.step = 2
    broken = StepBegun(2, 0.1, items, 1, 1, torch.tensor([float("nan"), 0, 1]), began, began)
    with pytest.raises(TrainingError, match="At step 2 the loss"):
        own._check(broken)
    assert noted[-1] == ("watch", 0.125), "its numbers are looked at first"


def test_a_validation_is_of_all_items_at_rest_and_without_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = trainer_of([], monkeypatch)
    model = own.context.model
    seen: list[Any] = []

    def evaluate(*given: Any) -> torch.Tensor:
        seen.append((given, model.training))
        return torch.tensor([5.0, 2.0], dtype=torch.float64)

    monkeypatch.setattr(loop, "evaluate", evaluate)
    monkeypatch.setattr(loop, "loss_with_baseline", lambda *given: ("loss", model.training))
    assert own._validate() == Sums(5.0, 2, 60)
    given = (model, ("mine", own.valid, list(range(6)), None), 2, ("loss", False))
    assert seen == [(given, False)]
    assert model.training


@pytest.mark.parametrize(
    ("step", "valid", "rungs", "losses"),
    [
        (1, True, (), []),
        (2, True, (), [1.0]),
        (2, False, (), []),
        (3, True, (3,), [1.0]),
        (8, True, (), [1.0]),
    ],
)
def test_a_validation_counts_at_its_steps_and_at_rungs_is_only_made(
    step: int,
    valid: bool,
    rungs: tuple[int, ...],
    losses: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One whose loss has fallen by less than the threshold is no progress."""
    noted: list[Any] = []
    own = trainer_of(noted, monkeypatch, rungs=rungs)
    object.__setattr__(own, "valid", Objective() if valid else ())
    monkeypatch.setattr(Trainer, "_validate", lambda self: Sums(10.0, 0, 10))
    reported: list[Any] = []
    monkeypatch.setattr(Trainer, "_report", lambda self, *given: reported.append(given) or "!")
    monkeypatch.setattr(Trainer, "_check", lambda self, begun: "numbers")
    monkeypatch.setattr(Trainer, "_answered", lambda self, validated: {"asked": float(validated)})
    own.job.step = step
    own.job.validations = Validations(undercut=1.2, best_loss=1.2)
    begun: Any = SimpleNamespace()
    assert own._validated(begun, "before") == "!"
    read = Sums(10.0, 0, 10) if losses else None
    assert reported == [(begun, "numbers", read, {"asked": float(bool(losses))}, "before")]
    found = own.job.validations
    assert (found.last_step, found.last_loss) == ((step, 1.0) if losses else (0, None))
    assert found.without_progress == int(bool(losses) and step not in rungs)
    assert own._pauses is bool(losses or step == 8)


@pytest.mark.parametrize(
    ("step", "validated", "on_validation", "known", "answered"),
    [
        (4, True, True, {"m": 1.0}, {"evaluation/m": 1.0}),
        (4, True, True, None, {}),
        (4, True, False, {"m": 1.0}, None),
        (4, False, True, {"m": 1.0}, None),
        (8, False, False, {"m": 1.0}, {"evaluation/m": 1.0}),
    ],
)
def test_answers_are_asked_for_at_validations_that_want_them_and_at_the_end(
    step: int,
    validated: bool,
    on_validation: bool,
    known: Any,
    answered: dict[str, float] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = trainer_of([], monkeypatch)
    asked: list[Any] = []

    def at(step: int, *, last: bool) -> Any:
        asked.append((step, last))
        return known

    own.job.step = step
    assert own._answered(validated=validated) == {}, "nobody is asked"
    object.__setattr__(own, "evaluator", SimpleNamespace(on_validation=on_validation, at=at))
    assert own._answered(validated=validated) == (answered or {})
    assert asked == ([] if answered is None else [(step, step == 8)])
