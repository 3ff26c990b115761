"""Texts of a step's answers with their rewards, for people: kept apart from the tokens that the
step's commands are made of.

rollouts/step-000001.texts.jsonl.zst     what the step is, then a line for each prompt, then one for
each validation prompt

They follow from the step's record and are written behind it. A view reads only these files, each of
which has a limit in bytes, and begins no further step once it has parsed MOST_READ.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ft_service.reinforcement.step_records import (
    FOLDER,
    AnsweredPrompt,
    Line,
    RecordHead,
    SampledAnswer,
    StepRecord,
    Trajectory,
    compressed,
    expanded,
    mean_reward,
    parse_record,
    record_key,
    record_lines,
    recorded_steps,
)
from ft_service.rundir.directory import RunDir, UnreadableDocumentError

MOST_SHOWN = 100
"""Prompts of a file, and answers of each, whose texts are kept."""
MOST_BYTES = 8 * 1024**2
"""Limit of the texts of a step, expanded. Half of it is for the prompts that are trained on."""
_MOST_FACTS = 64 * 1024
MOST_READ = 16 * 1024**2
"""Bytes that are parsed for a view, after which it begins no further step."""


class TrajectoryTexts(Line):
    """A rollout with an environment as it is shown."""

    messages: Sequence[Mapping[str, Any]] = ()
    calls: Sequence[Mapping[str, Any]] = ()
    rewards: Sequence[float] = ()
    rows: int
    """Number of rows that were trained on."""
    row_texts: Sequence[Sequence[tuple[str, bool]]] = ()
    """Of each row: its texts, each with whether it is learned."""
    rewritten: int
    refused: Mapping[str, int] = {}
    seconds: float

    @classmethod
    def of(cls, trajectory: Trajectory) -> TrajectoryTexts:
        others = ("rows", "row_texts")
        same = {name: getattr(trajectory, name) for name in cls.model_fields if name not in others}
        texts = [row.texts for row in trajectory.rows if row.texts]
        return cls(**same, rows=len(trajectory.rows), row_texts=texts)


class AnswerTexts(Line):
    """One answer as it is shown."""

    text: str
    reasoning: str = ""
    calls: Sequence[Mapping[str, Any]] = ()
    tokens: int
    """Number of its tokens."""
    truncated: bool
    reward: float | None = None
    errors: Mapping[str, str] = {}
    scores: Mapping[str, float] = {}
    trajectory: TrajectoryTexts | None = None

    @classmethod
    def of(cls, answer: SampledAnswer) -> AnswerTexts:
        others = ("tokens", "trajectory")
        same = {name: getattr(answer, name) for name in cls.model_fields if name not in others}
        way = None if answer.trajectory is None else TrajectoryTexts.of(answer.trajectory)
        return cls(**same, tokens=len(answer.tokens), trajectory=way)


class PromptTexts(Line):
    """A prompt with the first of its answers."""

    prompt: int
    text: str
    answers: Sequence[AnswerTexts]


class StepTexts(Line):
    """The first prompts of a step, with what is known of all of them."""

    head: RecordHead
    prompts_total: int
    validation_total: int
    mean_reward: float | None = None
    valid_mean_reward: float | None = None
    prompts: Sequence[PromptTexts] = ()
    validation: Sequence[PromptTexts] = ()

    @classmethod
    def of(cls, record: StepRecord) -> StepTexts:
        """The texts of a record, cut to MOST_SHOWN and MOST_BYTES."""
        return cls(
            head=record.head,
            prompts_total=len(record.groups),
            validation_total=len(record.validation),
            mean_reward=mean_reward(record.answers),
            valid_mean_reward=record.valid_mean_reward,
            prompts=list(_kept(record.groups)),
            validation=list(_kept(record.validation)),
        )

    def first(self, most: int) -> StepTexts:
        """The first prompts, and answers of each."""
        prompts, validation = (
            [_first(own, most) for own in part[:most]] for part in (self.prompts, self.validation)
        )
        return self.model_copy(update={"prompts": prompts, "validation": validation})


def write_texts(run: RunDir, record: StepRecord) -> None:
    """Store the texts of a record that is written, unless they are there. Raises OSError."""
    key = texts_key(record.head.step)
    if run.has(key):
        return
    texts = StepTexts.of(record)
    counts = {"prompts_kept": len(texts.prompts), "validation_kept": len(texts.validation)}
    facts = {**texts.model_dump(mode="json", exclude={"prompts", "validation"}), **counts}
    lines = [
        json.dumps(facts),
        *(own.model_dump_json(exclude_none=True) for own in (*texts.prompts, *texts.validation)),
    ]
    run.put_if_absent(key, compressed("".join(f"{line}\n" for line in lines).encode()))


def read_texts(run: RunDir, steps: Iterable[int], most: int) -> Iterator[StepTexts]:
    """Yield the texts of steps, in their order: the first `most` prompts of each file, and answers
    of each prompt. It ends early once MOST_READ bytes are parsed. Left out are steps that are gone,
    and those whose record is larger than that and has no texts, since it is older than they are.
    Raises UnreadableDocumentError for a file that is none.
    """
    left = MOST_READ
    for step in steps:
        if left <= 0:
            return
        texts, parsed = _read(run, step, most)
        left -= parsed
        if texts is not None:
            yield texts


def texts_key(step: int) -> str:
    return f"{FOLDER}/step-{step:06d}.texts.jsonl.zst"


def _read(run: RunDir, step: int, most: int) -> tuple[StepTexts | None, int]:
    """The texts of a step, and the bytes that were parsed for them."""
    key = texts_key(step)
    body = run.get(key, MOST_BYTES)
    if body is None:
        return _from_record(run, step, most)
    try:
        lines = expanded(body, MOST_BYTES + _MOST_FACTS)
        if lines is None:
            raise ValueError("they have more bytes than are written")
        facts = json.loads(lines[0])
        prompts = lines[1 : 1 + facts["prompts_kept"]][:most]
        validation = lines[1 + facts["prompts_kept"] :][:most]
        read = {"prompts": _parsed(prompts, most), "validation": _parsed(validation, most)}
        texts = StepTexts.model_validate({**facts, **read})
    except (ValueError, LookupError, TypeError) as error:
        raise UnreadableDocumentError(
            key, f"it has no texts of a step ({type(error).__name__})"
        ) from None
    return texts, sum(map(len, (lines[0], *prompts, *validation)))


def _from_record(run: RunDir, step: int, most: int) -> tuple[StepTexts | None, int]:
    """The same for a record that has no texts yet, or never gets them, since the job has ended."""
    lines = record_lines(run, step, MOST_READ)
    if lines is None:
        return None, 0
    return StepTexts.of(parse_record(step, lines)).first(most), sum(map(len, lines))


def _parsed(lines: Iterable[bytes], most: int) -> list[PromptTexts]:
    return [_first(PromptTexts.model_validate_json(line), most) for line in lines]


def _first(prompt: PromptTexts, most: int) -> PromptTexts:
    return prompt.model_copy(update={"answers": prompt.answers[:most]})


def _kept(prompts: Sequence[AnsweredPrompt]) -> Iterator[PromptTexts]:
    """The texts of the first prompts and answers, until half of MOST_BYTES is used."""
    left = MOST_BYTES // 2
    for prompt in prompts[:MOST_SHOWN]:
        left -= len(json.dumps(prompt.text))
        answers: list[AnswerTexts] = []
        for answer in prompt.answers[:MOST_SHOWN]:
            texts = AnswerTexts.of(answer)
            left -= len(texts.model_dump_json().encode())
            if left < 0:
                break
            answers.append(texts)
        if left < 0 and not answers:
            return
        yield PromptTexts(prompt=prompt.prompt, text=prompt.text, answers=answers)


def remove_records(run: RunDir, keep: int) -> None:
    """Remove all but the newest records, with their texts."""
    for step in recorded_steps(run)[:-keep]:
        for key in (record_key(step), texts_key(step)):
            run.path(key).unlink(missing_ok=True)
