"""Records of steps: what was sampled and graded, stored before anything is trained on it.

rollouts/step-000001.jsonl.zst     the record's head, then a line for each group of answers, then
one for each validation prompt

A record is written once and says all that the step's commands are made of, so that a service that
is killed makes the same ones again. The record behind the last step ends the job.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from pydantic import BaseModel, ConfigDict

from ft_service.data.answer_format import Answer
from ft_service.errors import DataError
from ft_service.graders.grades import Sample
from ft_service.rundir.directory import RunDir, UnreadableDocumentError

FOLDER = "rollouts"
MOST_BYTES = 256 * 1024**2
"""Limit of a record, compressed and expanded."""
AGENT_ERRORS = ("agent_", "environment_")
"""Beginnings of the kinds of errors of agents and environments (ft_service/agents/running.py),
which no grader's has.
"""
_NAME = re.compile(r"step-([0-9]{6,9})\.jsonl\.zst")


class Line(BaseModel):
    """A part of a record that is stored as a line of JSON."""

    model_config = ConfigDict(frozen=True)


class TrainedRow(Line):
    """Tokens of a rollout of which those that were sampled are learned."""

    tokens: Sequence[int]
    sampled: Sequence[tuple[int, int]]
    """Where its answers begin and end, in their order: [begin, end)."""
    calls: Sequence[int] = ()
    """Numbers of its rollout's calls, from 0, whose answers these are. Empty: it is no rollout's.
    """
    texts: Sequence[tuple[str, bool]] = ()
    """For people: its texts with special tokens, in their order, each with whether it is
    sampled. Empty: they were not kept.
    """

    @property
    def answered(self) -> list[int]:
        """Its sampled tokens."""
        return [token for begin, end in self.sampled for token in self.tokens[begin:end]]

    def of_sampled(self, values: Sequence[float]) -> list[float]:
        """Of values of all tokens from the first sampled one on, those of the sampled ones."""
        first = self.sampled[0][0]
        return [
            value for begin, end in self.sampled for value in values[begin - first : end - first]
        ]


class Trajectory(Line):
    """How a rollout with an environment went: several calls of the model."""

    rows: Sequence[TrainedRow] = ()
    """Their sampled tokens, one row after the other, are the answer's `tokens`."""
    messages: Sequence[Mapping[str, Any]] = ()
    """The conversation of the last call with its answer, as in OpenAI's chat completions."""
    calls: Sequence[Mapping[str, Any]] = ()
    """Of each call: the `message` that it answered, its `finish_reason`, `prompt_tokens` and
    `completion_tokens`.
    """
    rewards: Sequence[float] = ()
    """With process supervision: the reward of each call. Empty: the rollout has one."""
    rewritten: int = 0
    """Calls behind the first whose history was another one, so that each began a row."""
    refused: Mapping[str, int] = {}
    """Code → number of the agent's requests that were refused with it."""
    seconds: float = 0.0


class TaughtTokens(Line):
    """What a teacher that a server answers for thinks of an answer's tokens, at temperature 1."""

    own: Sequence[float]
    """Log-probability of each token, in nats."""
    words: Sequence[Sequence[int]]
    """At each token's place the top_k tokens that the teacher finds likeliest, these first."""
    logprobs: Sequence[Sequence[float]]
    """Theirs, in nats."""


class SampledAnswer(Line):
    """One answer with its grade."""

    tokens: Sequence[int]
    """Those that were drawn, the one that ends it included."""
    logprobs: Sequence[float]
    """The sampler's, in nats."""
    text: str
    reasoning: str = ""
    calls: Sequence[Mapping[str, Any]] = ()
    """Calls of tools: name and arguments."""
    truncated: bool
    """Whether it was cut off at its longest length."""
    reward: float | None = None
    """None: the grader has failed."""
    errors: Mapping[str, str] = {}
    """Kind of the grader's error → text about it."""
    scores: Mapping[str, float] = {}
    """Name → score of each single grader."""
    reference: Sequence[float] | None = None
    """Log-probabilities of the tokens by the model that training started from; None: not asked
    for.
    """
    taught: TaughtTokens | None = None
    """None: no server is asked about a teacher."""
    trajectory: Trajectory | None = None
    """With an environment: the calls that `tokens` are the answers to, and text, reasoning and
    calls those of the last one.
    """

    @property
    def sample(self) -> Sample:
        """The answer as graders get it."""
        sample = Answer(self.text, self.reasoning, self.calls).sample(truncated=self.truncated)
        if self.trajectory is None:
            return sample
        return replace(sample, messages=self.trajectory.messages, calls=self.trajectory.calls)

    def rows(self, prompt: Sequence[int]) -> Sequence[TrainedRow]:
        """The rows that are trained on. `prompt`: the tokens of an answer without environment."""
        if self.trajectory is not None:
            return self.trajectory.rows
        whole = [*prompt, *self.tokens]
        return [TrainedRow(tokens=whole, sampled=[(len(prompt), len(whole))])]


class AnsweredPrompt(Line):
    """A prompt with its group of answers."""

    prompt: int
    """Its number in the training or in the validation file, from 0."""
    ids: Sequence[int] = ()
    """Tokens of a prompt that is trained on."""
    teacher_ids: Sequence[int] = ()
    """What the ranks' teacher reads in their place: the prompt behind its context. Empty: the same.
    """
    text: str
    """The prompt's last message."""
    answers: Sequence[SampledAnswer]

    @property
    def rewards(self) -> list[float | None]:
        return [answer.reward for answer in self.answers]

    @property
    def rewards_of_calls(self) -> list[Sequence[float]] | None:
        """With process supervision: of each answer the rewards of its calls; of one without a
        reward, none. None: answers have one reward each.
        """
        ways = [answer.trajectory for answer in self.answers]
        found = [() if way is None else way.rewards for way in ways]
        return found if any(found) else None


class RecordHead(Line):
    """Facts about a step."""

    step: int
    """From 1; one more than the job has: the record ends the job."""
    first_seq: int
    """Number of the first command that follows from it."""
    sampled_from: int
    """Number of steps after which the sampled weights were saved."""
    temperature: float = 1.0
    """Of the answers' log-probabilities.

    Up to 0.2 they were those at 1, whatever was drawn from.
    """
    groups: int
    """Number of lines with answers to train on."""
    flat_steps: int = 0
    """Steps in a row, up to this one, in none of whose groups the rewards differ
    (flat_steps.py).
    """
    saves: bool = False
    """Whether a checkpoint is due before the step."""
    ends: bool = False
    sampling_seconds: float = 0.0
    grading_seconds: float = 0.0
    time: float = 0.0
    """Seconds since the epoch."""


class StepRecord(Line):
    """A step's record."""

    head: RecordHead
    groups: Sequence[AnsweredPrompt] = ()
    validation: Sequence[AnsweredPrompt] = ()

    @property
    def answers(self) -> list[SampledAnswer]:
        """The answers to train on, of all groups."""
        return [answer for group in self.groups for answer in group.answers]

    @property
    def valid_mean_reward(self) -> float | None:
        """None: not evaluated, or no answer has a reward."""
        return mean_reward([answer for prompt in self.validation for answer in prompt.answers])


def mean_reward(answers: Sequence[SampledAnswer]) -> float | None:
    """The mean of the rewards that there are; None: there are none."""
    known = [answer.reward for answer in answers if answer.reward is not None]
    return fmean(known) if known else None


def record_key(step: int) -> str:
    return f"{FOLDER}/step-{step:06d}.jsonl.zst"


def recorded_steps(run: RunDir) -> list[int]:
    """Steps with a record, in order."""
    folder = run.path(FOLDER)
    names = (entry.name for entry in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def write_record(run: RunDir, record: StepRecord) -> bool:
    """Store a record unless the step has one.

    Returns whether it is new. Raises OSError, and DataError for one that is larger than what is
    read.
    """
    lines = [record.head, *record.groups, *record.validation]
    body = "".join(line.model_dump_json(exclude_none=True) + "\n" for line in lines).encode()
    if len(body) > MOST_BYTES:
        raise DataError(
            f"The {len(record.answers):,} answers of step {record.head.step} take {len(body):,} "
            "bytes, and a record has at "
            f"most {MOST_BYTES:,}. Give another job a lower batch_size, num_generations or "
            "max_completion_length."
        )
    return run.put_if_absent(record_key(record.head.step), compressed(body))


def read_record(run: RunDir, step: int) -> StepRecord | None:
    """Raises UnreadableDocumentError for a file that is none."""
    lines = record_lines(run, step, MOST_BYTES)
    return None if lines is None else parse_record(step, lines)


def record_lines(run: RunDir, step: int, most: int) -> list[bytes] | None:
    """The lines of a step's record; None: it has none, or one of more than `most` bytes.

    Raises UnreadableDocumentError for a file that is none.
    """
    key = record_key(step)
    if (run.size(key) or 0) > most or (body := run.get(key, most)) is None:
        return None
    try:
        return expanded(body, most)
    except ValueError as error:
        raise _no_record(step, error) from None


def parse_record(step: int, lines: Sequence[bytes]) -> StepRecord:
    """Raises UnreadableDocumentError."""
    try:
        head = RecordHead.model_validate_json(lines[0])
        prompts = [AnsweredPrompt.model_validate_json(line) for line in lines[1:]]
    except (ValueError, IndexError) as error:
        raise _no_record(step, error) from None
    return StepRecord(head=head, groups=prompts[: head.groups], validation=prompts[head.groups :])


def _no_record(step: int, error: Exception) -> UnreadableDocumentError:
    return UnreadableDocumentError(
        record_key(step), f"it is no record of a step ({type(error).__name__})"
    )


def compressed(body: bytes) -> bytes:
    import zstandard  # not every process that knows records writes them

    return zstandard.ZstdCompressor(level=6).compress(body)


def expanded(body: bytes, most: int) -> list[bytes] | None:
    """The lines of what was compressed; None: they have more than `most` bytes.

    Raises ValueError for anything else.
    """
    import zstandard

    try:
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(body)) as reader:
            text = reader.read(most + 1)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None
    return None if len(text) > most else text.removesuffix(b"\n").split(b"\n")
