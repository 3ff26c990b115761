"""What a model answered to held-out prompts before training and after, from what the API says of a job. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ft_service.rundir.evaluations import asked

BEFORE = "Before training"
_TOLD = re.compile(r"Evaluation after step (\d+), \d+ prompts: (.*)\.", re.DOTALL)
_SCORE = re.compile(r"(\w+) ([\d.]+) \(before: ([\d.]+)\)")
_ASKED = re.compile(r"Asked: (.*?)\nExpected: (.*?)\nBefore: (.*?)\nAfter: (.*)", re.DOTALL)


@dataclass(frozen=True)
class Answered:
    """A prompt, and the answers to it."""

    turns: tuple[tuple[str, str], ...]
    """The prompt: who says what; of bare text nobody does."""
    reference: str | None
    """The expected answer; None: none is known."""
    before: str
    after: str | None
    """At the step that is shown; None: there is none yet."""


@dataclass(frozen=True)
class Answers:
    """Answers side by side."""

    steps: tuple[int, ...]
    """At which the model was asked during training, rising."""
    shown: int | None
    """The one whose answers these are; None: only those before training are known."""
    scores: Mapping[str, tuple[float | None, ...]]
    """Name of a metric → its mean before training, and at each step."""
    prompts: tuple[Answered, ...]


def from_evaluations(evaluations: Sequence[Mapping[str, Any]], step: int | None) -> Answers | None:
    """Of a job's evaluations as the API lists them. `step`: which one is shown; None, or none of them: the newest."""
    of_step = {one["step"]: one for one in sorted(evaluations, key=lambda one: one["step"])}
    if not of_step:
        return None
    steps = tuple(number for number in of_step if number)
    shown = step if step in steps else (steps[-1] if steps else None)
    newest = of_step[shown or 0]
    columns = [newest["base_metrics"] or newest["metrics"], *(of_step[number]["metrics"] for number in steps)]
    names = list(dict.fromkeys(name for column in columns for name in column))
    prompts = (
        Answered(asked(one["prompt"], one["messages"]), one["reference"], one["base"], one["tuned"])
        for one in newest["samples"]
    )
    return Answers(steps, shown, {name: tuple(column.get(name) for column in columns) for name in names}, tuple(prompts))


def from_messages(messages: Sequence[str]) -> Answers | None:
    """Of the event messages of a job of earlier versions, the oldest first: the last time that it was asked. None: it was
    asked nothing, or not yet after training."""
    found = [(place, match) for place, text in enumerate(messages) if (match := _TOLD.fullmatch(text))]
    if not found:
        return None
    begin, told = found[-1]
    step = int(told[1])
    scores = {name: (float(before), float(after)) for name, after, before in _SCORE.findall(told[2])}
    found_asked = [match.groups() for text in messages[begin:] if (match := _ASKED.fullmatch(text))]
    return Answers((step,), step, scores, tuple(Answered((("", prompt),), *texts) for prompt, *texts in found_asked))
