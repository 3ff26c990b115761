"""Steps whose rewards do not differ are counted, and told once."""

from __future__ import annotations

import pytest

from ft_service.reinforcement.flat_steps import TOLD_AFTER, flat_steps, flat_text
from ft_service.reinforcement.step_records import (
    AnsweredPrompt,
    RecordHead,
    SampledAnswer,
    StepRecord,
)


def group(*rewards: float | None) -> AnsweredPrompt:
    answers = [
        SampledAnswer(tokens=[1], logprobs=[-1], text=f"a{n}" * 300, truncated=False, reward=r)
        for n, r in enumerate(rewards)
    ]
    return AnsweredPrompt(prompt=4, text="?", answers=answers)


@pytest.mark.parametrize(
    ("groups", "before", "count"),
    [
        ([group(0, 0), group(1, 1)], 0, 1),
        ([group(0.3, 0.1 + 0.2)], 6, 7),
        ([group(0, 0), group(1, 0)], 6, 0),
        ([group(None, 1)], 1, 2),
        ([], 2, 0),
    ],
)
def test_steps_in_a_row(groups: list[AnsweredPrompt], before: int, count: int) -> None:
    assert flat_steps(groups, before) == count


def test_a_spell_is_told_at_its_third_step() -> None:
    texts = [
        flat_text(
            StepRecord(
                head=RecordHead(step=10, first_seq=0, sampled_from=9, groups=1, flat_steps=n),
                groups=[group(0.5, None)],
            )
        )
        for n in range(TOLD_AFTER + 3)
    ]
    assert [n for n, text in enumerate(texts) if text] == [TOLD_AFTER]
    told = texts[TOLD_AFTER]
    assert told is not None
    assert told.startswith("Steps 8 to 10: ")
    assert f"prompt 5 and their rewards: '{'a0' * 100}…': 0.5; '{'a1' * 100}…': no reward." in told
