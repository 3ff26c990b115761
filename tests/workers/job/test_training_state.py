from __future__ import annotations

import pytest
import torch

from ft_service.spec import TrainingOptions
from workers.job.training_state import learning_rate_at


def rates(**options: object) -> list[float]:
    parsed = TrainingOptions.model_validate({"learning_rate": 1.0, **options})
    return [learning_rate_at(step, 10, parsed) for step in range(10)]


def test_linear_with_warmup() -> None:
    assert rates(lr_scheduler_type="linear", warmup_ratio=0.2) == pytest.approx(
        [0.5, 1.0, 1.0, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]
    )


def test_cosine_falls_from_one_towards_zero() -> None:
    found = rates(lr_scheduler_type="cosine", warmup_ratio=0.0)
    assert found[0] == 1.0
    assert found[5] == pytest.approx(0.5)
    assert found == sorted(found, reverse=True)
    assert found[-1] > 0


@pytest.mark.parametrize("least", [0.0, 0.1])
def test_the_rate_falls_as_in_transformers(least: float) -> None:
    """Step n + 1 of a warm-up of transformers is step n here: its first step has the rate 0."""
    from transformers import get_scheduler

    adam = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    for name, theirs, kwargs in (
        ("cosine", "cosine_with_min_lr", {"min_lr_rate": least}),
        ("linear", "polynomial", {"lr_end": least, "power": 1.0}),
        (
            "warmup_stable_decay",
            "warmup_stable_decay",
            {"num_decay_steps": 4, "min_lr_ratio": least, "decay_type": "linear"},
        ),
    ):
        schedule = get_scheduler(theirs, adam, 2, 10, scheduler_specific_kwargs=kwargs)
        factor = schedule.lr_lambdas[0]  # type: ignore[attr-defined]
        found = rates(
            lr_scheduler_type=name,
            warmup_steps=2,
            min_lr_ratio=least,
            **({"decay_ratio": 0.4} if "stable" in name else {}),
        )
        assert found[:2] == [0.5, 1.0]
        assert found[2:] == pytest.approx([factor(step) for step in range(2, 10)], abs=1e-12), name


def test_a_rate_that_does_not_fall_to_zero_ends_above_its_least() -> None:
    found = rates(lr_scheduler_type="cosine", warmup_ratio=0.0, min_lr_ratio=0.25)
    assert (found[0], found[5]) == (1.0, pytest.approx(0.25 + 0.75 * 0.5))
    assert 0.25 < found[-1] < 0.27
    assert rates(min_lr_ratio=0.0) == rates()


def test_constant() -> None:
    assert rates(lr_scheduler_type="constant", warmup_ratio=0.0) == [1.0] * 10


def test_warm_up_by_steps() -> None:
    assert rates(lr_scheduler_type="constant", warmup_steps=4) == [
        0.25,
        0.5,
        0.75,
        1,
        1,
        1,
        1,
        1,
        1,
        1,
    ]
    assert rates(warmup_steps=0) == rates(warmup_ratio=0.0)
    assert rates(warmup_steps=20)[-1] == 0.5, "more than the job has: it only rises"


def test_stable_until_the_decay() -> None:
    stable = rates(lr_scheduler_type="warmup_stable_decay", warmup_steps=2, decay_ratio=0.4)
    assert stable == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])
    assert rates(lr_scheduler_type="warmup_stable_decay", warmup_steps=0) == [1.0] * 10, (
        "a tenth of ten steps is the last"
    )
    overlapping = rates(lr_scheduler_type="warmup_stable_decay", warmup_steps=5, decay_ratio=0.8)
    assert overlapping == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1, 0.8, 0.6, 0.4, 0.2]), (
        "it falls from where the rate has risen to"
    )
