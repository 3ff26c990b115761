"""Inputs of graders and their grades.

A grader that fails gives an error of a kind, which is counted, and reward 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NoReturn

ErrorKind = Literal[
    "formula_parse_error",
    "sample_parse_error",
    "invalid_variable_error",
    "unresponsive_reward_error",
    "other_error",
    "python_grader_server_error",
    "python_grader_runtime_error",
    "model_grader_server_error",
    "model_grader_refusal_error",
    "model_grader_parse_error",
    "endpoint_grader_server_error",
    "endpoint_grader_parse_error",
]
"""OpenAI's names, and two for endpoints. sample_parse_error: the answer lacks what a template
names; invalid_variable_error: the item does; unresponsive_reward_error: no time was left;
other_error: texts are too long or need too much memory, or the reward is beyond MOST_REWARD.
server_error: the process or server that grades failed; parse_error: its answer is no reward.
"""
MOST_REWARD = 1e12
"""Largest reward, and the largest below 0: sums and squares of larger ones would exceed numbers of
32 bits, in which ranks train.
"""

NO_JSON = object()
"""The value of text that is not JSON."""
MOST_DETAIL = 2000
"""Longest text about an error, in characters."""


class GradingError(Exception):
    """An answer cannot be graded."""

    def __init__(self, kind: ErrorKind, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind: ErrorKind = kind
        # Tracebacks and answers of servers may hold halves of surrogate pairs, which no record and
        # no answer can.
        self.detail = detail[:MOST_DETAIL].encode(errors="replace").decode()


@dataclass(frozen=True)
class Sample:
    """An answer of a model."""

    output_text: str
    output_tools: Sequence[Mapping[str, Any]] = ()
    """Its calls of tools, as in OpenAI's chat completions: `{"id", "type", "function": {"name",
    "arguments"}}`.
    """
    finish_reason: str = "stop"
    reasoning: str = ""
    """Its thoughts, which are no part of output_text."""
    messages: Sequence[Mapping[str, Any]] = ()
    """With an environment: the conversation whose last message the answer is."""
    calls: Sequence[Mapping[str, Any]] = ()
    """With an environment: what each call of the model has answered, with its finish_reason and
    numbers of tokens.
    """

    @cached_property
    def output_json(self) -> Any:
        """The text as JSON; NO_JSON: it is not."""
        return parsed(self.output_text)

    @property
    def choices(self) -> list[dict[str, Any]]:
        """The answer as chat completions have it."""
        calls = {"tool_calls": list(self.output_tools)} if self.output_tools else {}
        thoughts = {"reasoning_content": self.reasoning} if self.reasoning else {}
        message = {"role": "assistant", "content": self.output_text, **thoughts, **calls}
        return [{"index": 0, "message": message, "finish_reason": self.finish_reason}]

    def as_dict(self) -> dict[str, Any]:
        """The sample as graders that are no templates get it; output_json is null for text that is
        not JSON.
        """
        return {
            "output_text": self.output_text,
            "output_json": None if self.output_json is NO_JSON else self.output_json,
            "output_tools": list(self.output_tools),
            "choices": self.choices,
            **({"messages": list(self.messages)} if self.messages else {}),
            **({"calls": list(self.calls)} if self.calls else {}),
        }


@dataclass(frozen=True)
class Case:
    """An answer to grade, and the other keys of its prompt's line."""

    sample: Sample
    item: Mapping[str, Any]

    def as_json(self) -> bytes:
        """`{"sample", "item"}` as python and endpoint graders get it. Raises GradingError."""
        whole = written({"sample": self.sample.as_dict(), "item": dict(self.item)})
        # Half of a surrogate pair is written as JSON escapes it.
        return whole.encode(errors="backslashreplace")


@dataclass(frozen=True)
class Score:
    """What one single grader gives for a case."""

    value: float = 0.0
    error: ErrorKind | None = None
    detail: str = ""
    """Text about the error."""
    model: str | None = None
    """The model that a server says has graded."""
    usage: Mapping[str, int] = field(default_factory=dict)
    """That model's tokens: prompt_tokens, completion_tokens, total_tokens."""
    seconds: float = 0.0

    @classmethod
    def failed(cls, error: GradingError) -> Score:
        return cls(error=error.kind, detail=error.detail)


@dataclass(frozen=True)
class Grade:
    """What a grader gives for a case."""

    reward: float
    """From -MOST_REWARD to MOST_REWARD.

    0 where there is an error: whether such an answer is trained on is the caller's choice.
    """
    errors: Mapping[ErrorKind, str] = field(default_factory=dict)
    """Kind → text about the first of that kind."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Name → score of each single grader that has one."""
    sub_rewards: Mapping[str, float] = field(default_factory=dict)
    """The same of a multi grader; empty for another one."""
    seconds: float = 0.0
    """Time of all single graders."""
    sampled_model: str | None = None
    """The last model that graded; None: none did."""
    usage: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Model as the grader names it → its tokens."""


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def parsed(text: str | bytes) -> Any:
    """JSON; NO_JSON for what is not, such as NaN, which Python reads all the same."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return NO_JSON


def written(value: Any) -> str:
    """A value as JSON. Raises GradingError for one that JSON cannot hold: Python reads more than it
    can write.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        why = "a value is nested too deeply, or holds a number that is not finite"
        raise GradingError("sample_parse_error", why) from None


def as_reward(value: Any) -> float | None:
    """A finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
