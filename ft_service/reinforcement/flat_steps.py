"""Steps from which nothing can be learned: in none of their groups do the rewards differ. Pure."""

from __future__ import annotations

from ft_service.reinforcement.advantages import advantages, step_advantages
from ft_service.reinforcement.step_records import AnsweredPrompt, SampledAnswer, StepRecord

TOLD_AFTER = 3
"""Flat steps in a row after which the job's user is told, once until a step is not flat."""
_SHOWN = 200
"""Characters of an answer that are told."""


def is_flat(group: AnsweredPrompt) -> bool:
    """Whether a group's rewards are the same, so that none of its answers is better than
    another.
    """
    of_calls = group.rewards_of_calls
    if of_calls is not None:
        return not any(map(any, step_advantages(of_calls, "none")))
    return not any(advantages(group.rewards, "none"))


def flat_steps(groups: list[AnsweredPrompt], before: int) -> int:
    """The number of flat steps in a row up to a step with these groups, which follows on `before`
    of them.
    """
    return before + 1 if groups and all(map(is_flat, groups)) else 0


def flat_text(record: StepRecord) -> str | None:
    """What the job's user is told with a step's record, with two of its answers. None: nothing."""
    step = record.head.step
    count = record.head.flat_steps
    if count != TOLD_AFTER:
        return None
    group = record.groups[0]
    shown = "; ".join(f"{_words(answer)!r}: {_reward(answer)}" for answer in group.answers[:2])
    return (
        f"Steps {step - count + 1} to {step}: in none of their groups of answers do the rewards "
        "differ, so that nothing is "
        f"learned from them. Two answers to prompt {group.prompt + 1} and their rewards: {shown}. "
        "If right answers get the "
        "same reward as wrong ones, mend the grader; else give prompts of which the model answers "
        "some rightly, more "
        "num_generations, or a higher temperature."
    )


def _words(answer: SampledAnswer) -> str:
    words = answer.sample.output_text or " ".join(str(call) for call in answer.calls)
    return words if len(words) <= _SHOWN else f"{words[:_SHOWN]}…"


def _reward(answer: SampledAnswer) -> str:
    return "no reward" if answer.reward is None else f"{answer.reward:g}"
