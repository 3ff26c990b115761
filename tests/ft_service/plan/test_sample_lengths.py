from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ft_service.data.data_file import Counts
from ft_service.data.statistics import items_of_steps
from ft_service.plan.sample_lengths import PROMPT_TOKENS, SampleLengths
from tests.support.bases import save_base, spec_on


@pytest.mark.parametrize(
    ("training", "tokens"),
    [
        ({"n_epochs": 2, "batch_size": 4}, 2 * 1001),
        ({"max_steps": 3, "batch_size": 4}, 10 * 101),
        ({"max_steps": 2, "batch_size": 64}, 20 * 101),
    ],
)
def test_a_training_takes_the_tokens_of_its_epochs_or_steps(
    training: dict[str, Any], tokens: int, tmp_path: Path
) -> None:
    assert (
        SampleLengths(1001, 10).of_training(spec_on(save_base(tmp_path), training=training))
        == tokens
    )


def test_the_last_step_of_an_epoch_takes_the_samples_that_are_left() -> None:
    assert [items_of_steps(steps, 4, 10) for steps in range(5)] == [0, 4, 8, 10, 14]
    assert items_of_steps(3, 64, 10) == 30


def test_samples_that_are_not_counted_have_no_mean(tmp_path: Path) -> None:
    guessed = SampleLengths.of_size(5000)
    assert (guessed.tokens, guessed.mean) == (1000, None)
    spec = spec_on(
        save_base(tmp_path), training={"max_steps": 1, "batch_size": 1, "max_length": 64}
    )
    assert guessed.of_training(spec) == 64


def test_answers_of_a_student_are_as_long_as_the_mean_of_it_and_its_teacher(
    tmp_path: Path,
) -> None:
    """Five prompts, of 10 tokens and behind the context of 30: each gets two answers of 8."""
    given = {"num_generations": 2, "max_completion_length": 8}
    section = {"with_context": "x", "answers": "student", "hyperparameters": given}
    method = {"type": "distillation", "distillation": section}
    spec = spec_on(save_base(tmp_path), method=method, training={"max_length": 64})
    counts = Counts(samples=10, pairs=5, tokens=5 * (10 + 30), longest=30)
    lengths = SampleLengths.of_prompts(counts, spec)
    assert (lengths.samples, lengths.mean, lengths.longest) == (10, 20 + 8, 30 + 8)


@pytest.mark.parametrize(
    ("max_steps", "reinforces", "samples", "tokens"),
    [
        (None, True, None, 2 * 3 * 3 * (PROMPT_TOKENS + 10)),
        (None, True, 6, 2 * 3 * PROMPT_TOKENS),
        (None, False, None, 2 * 3 * PROMPT_TOKENS),
        (5, True, None, 5 * 4 * 3 * 64),
        (5, False, None, 5 * 4 * 3 * 64),
        (1, True, 6, 6 * PROMPT_TOKENS // 2),
    ],
)
def test_prompts_that_were_not_counted_get_their_answers_once_an_epoch(
    max_steps: int | None, reinforces: bool, samples: int | None, tokens: int
) -> None:
    """Two epochs of three prompts, to each of which there are three answers of at most 10."""
    spec: Any = SimpleNamespace(
        training=SimpleNamespace(max_steps=max_steps, epochs=2, batch=4, max_length=64),
        reinforcement=object() if reinforces else None,
        samples_of_item=3,
        longest_rollout=10,
    )
    assert SampleLengths(3 * PROMPT_TOKENS, samples).of_training(spec) == tokens


@pytest.mark.parametrize(("image_tokens", "longest"), [(0, 0), (1, 9)])
def test_lengths_are_those_that_were_counted(image_tokens: int, longest: int) -> None:
    counts = Counts(samples=3, tokens=10, longest=longest, image_tokens=image_tokens)
    found = SampleLengths.counted(counts)
    assert found == SampleLengths(10, 3, longest or None, with_images=image_tokens > 0)
    assert found.mean == 4


@pytest.mark.parametrize(
    ("context", "pairs", "lengths"),
    [
        (None, 0, SampleLengths(41, 5, 7)),
        (None, 3, SampleLengths(41, 10, 7)),
        ("x", 3, SampleLengths(21, 5, 7)),
    ],
)
def test_lengths_of_data_leave_out_what_is_set_aside_and_take_the_mean_of_student_and_teacher(
    context: str | None, pairs: int, lengths: SampleLengths
) -> None:
    counts = Counts(samples=9, tokens=99, longest=7, pairs=pairs)
    statistics: Any = SimpleNamespace(items=5, training=SimpleNamespace(tokens=41))
    spec: Any = SimpleNamespace(context=context)
    assert SampleLengths.of_data(counts, statistics, spec) == lengths
