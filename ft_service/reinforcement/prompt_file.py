"""The prompts of a job as tokens, with their items: a file of the run directory that the job's
ranks write once.

The ranks tokenise, with the versions and the chat template that they train with; the service
samples from these very tokens.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ft_service.data.answer_format import Answer, AnswerFormat
from ft_service.errors import DataError
from ft_service.rundir.directory import RunDir, unfinished

PROMPTS = "rollouts/prompts.jsonl"
"""Its first line is the header, then one line for each prompt."""

_OF_SOME = ("messages", "offered", "teacher_ids")
"""Keys that stand only where there is something in them."""


@dataclass(frozen=True)
class PromptTokens:
    """A prompt."""

    ids: Sequence[int]
    item: Mapping[str, Any]
    """The other keys of its line."""
    text: str
    """What the user sees of it: its last message."""
    tools: bool = False
    """Whether it offers tools, so that answers may call them."""
    closing: str = ""
    """Text that closes the thought which the prompt opens; empty: it opens none."""
    messages: Sequence[Mapping[str, Any]] = ()
    """The conversation, for an agent; empty without an environment."""
    offered: Sequence[Mapping[str, Any]] = ()
    """The tools that it offers, for an agent."""
    teacher_ids: Sequence[int] = ()
    """The prompt behind the teacher's context; empty: the teacher reads `ids`."""


@dataclass(frozen=True)
class PromptHeader:
    """Facts about all prompts."""

    ends: Sequence[int]
    """Tokens that end an answer."""
    training: int
    """Number of prompts to train on, which come first."""
    validation: int
    answers: AnswerFormat = field(default_factory=AnswerFormat)

    @classmethod
    def of_json(cls, value: dict[str, Any]) -> PromptHeader:
        """The header of its fields; those of the format stand beside the others in files of
        ft-service 0.2.
        """
        counts = {name: value[name] for name in ("ends", "training", "validation")}
        return cls(**counts, answers=AnswerFormat.of_json(value.get("answers", value)))

    def read(self, text: str, prompt: PromptTokens) -> Answer:
        """The parts of an answer to a prompt.

        `text`: with special tokens, without the token that ends it.
        """
        return self.answers.read(text, tools=prompt.tools, closing=prompt.closing)


def write_prompts(run: RunDir, header: PromptHeader, prompts: Iterable[PromptTokens]) -> None:
    """Write the file. Raises OSError."""
    path = run.path(PROMPTS)
    path.parent.mkdir(parents=True, exist_ok=True)
    being_written = unfinished(path)
    with being_written.open("w", encoding="utf-8") as file:
        file.write(json.dumps(asdict(header)) + "\n")
        for prompt in prompts:
            line = asdict(prompt)
            line |= {name: list(map(int, line[name])) for name in ("ids", "teacher_ids")}
            line = {name: line[name] for name in line if line[name] or name not in _OF_SOME}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    being_written.replace(path)


class PromptFile:
    """The file, open to be read; a prompt is read when it is asked for.

    8 bytes of memory for each prompt.
    """

    def __init__(self, run: RunDir) -> None:
        """Raises FileNotFoundError if the ranks have not written it yet."""
        self._path = run.path(PROMPTS)
        places = []
        with self._path.open("rb") as file:
            head = json.loads(file.readline())
            place = file.tell()
            for line in file:
                places.append(place)
                place += len(line)
        self.header = PromptHeader.of_json(head)
        if len(places) != self.header.training + self.header.validation:
            raise DataError(
                f"{PROMPTS}: it has {len(places)} prompts, and its header says otherwise."
            )
        self._places = np.array(places, dtype=np.int64)

    def training(self, index: int) -> PromptTokens:
        return self._read(index)

    def validation(self, index: int) -> PromptTokens:
        return self._read(self.header.training + index)

    def _read(self, number: int) -> PromptTokens:
        with self._path.open("rb") as file:
            file.seek(int(self._places[number]))
            return PromptTokens(**json.loads(file.readline()))
