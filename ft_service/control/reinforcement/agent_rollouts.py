"""Answers of reinforcement learning with an environment: rollouts by an agent, made into what a
step's record holds of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ft_service.agents.open_rollouts import OpenRollout, RolloutBudget, RolloutModel
from ft_service.agents.running import Counterpart, EndedRollout, run_rollouts
from ft_service.errors import FtError
from ft_service.reinforcement.prompt_file import PromptTokens
from ft_service.reinforcement.schedule import seed_of
from ft_service.reinforcement.step_records import SampledAnswer, TrainedRow, Trajectory
from ft_service.reinforcement.trajectories import rows_of
from ft_service.serving.preview import PreviewModel
from ft_service.spec import JobSpec
from ft_service.store.records import NewEvent

MOST_TEXT = 65_536
"""Characters of a trajectory's conversation, as JSON, that its record keeps."""


@dataclass
class AgentRollouts:
    """The rollouts of one job. For one thread."""

    spec: JobSpec
    model: PreviewModel
    counterpart: Counterpart
    look: Callable[[], object]
    """Raises what ends the job's sampling, now and then."""
    refused: Callable[[FtError, float], object]
    """Called with why the sampler does not answer, and for how many seconds; raises after long."""
    tell: Callable[[NewEvent], object]
    _unserved_since: float | None = None
    _told: set[str] = field(default_factory=set[str])
    """Parameters of sampling of which the user was told."""

    def answers(
        self, adapter: str, prompts: Sequence[tuple[int, PromptTokens]], count: int, step: int
    ) -> list[SampledAnswer]:
        """`count` answers to each prompt, in their order, with the rewards that the agent gives.

        `step`: of the seeds. A rollout whose sampler has not answered is run again. Raises what
        `look` and `refused` raise, and FtError if the agent may not be asked.
        """
        wanted = [(number, prompt, n) for number, prompt in prompts for n in range(count)]
        found: dict[int, EndedRollout] = {}
        while left := [place for place in range(len(wanted)) if place not in found]:
            opened = [
                self._opened(adapter, step, number, n)
                for number, _, n in map(wanted.__getitem__, left)
            ]
            items = [agent_item(wanted[place][1]) for place in left]
            given = list(zip(opened, items, strict=True))
            ended = run_rollouts(self.counterpart, given, self._looks(opened))
            pairs = zip(left, ended, strict=True)
            found |= {place: own for place, own in pairs if own.unserved is None}
        self._tell_of_sampling(found.values())
        return [answer_of(found[place]) for place in range(len(wanted))]

    def _opened(self, adapter: str, step: int, number: int, n: int) -> OpenRollout:
        spec = self.spec
        seed = seed_of(seed_of(spec.seed, step, number), step, n)
        environment = self.counterpart.options
        assert spec.reinforcement is not None, "the job's method is reinforcement"
        model = RolloutModel(
            model=self.model,
            adapter=adapter,
            temperature=spec.reinforcement.temperature,
            seed=seed,
        )
        budget = RolloutBudget(
            turns=environment.max_turns,
            tokens=environment.max_tokens,
            longest_answer=spec.longest_answer,
            window=spec.training.max_length,
            seconds=environment.deadline_seconds,
        )
        same_for_prompt = seed_of(spec.seed, 0, number) % 2**31
        return OpenRollout(self.counterpart.project, model, budget, same_for_prompt)

    def _looks(self, opened: Sequence[OpenRollout]) -> Callable[[], None]:
        def look() -> None:
            self.look()
            waits = [own.unserved for own in opened if own.unserved is not None]
            if not waits:
                # Not where all were just opened again since none was served.
                if any(own.answered for own in opened):
                    self._unserved_since = None
                return
            now = time.monotonic()
            since = self._unserved_since
            self._unserved_since = now if since is None else since
            self.refused(waits[0], now - self._unserved_since)

        return look

    def _tell_of_sampling(self, ended: Iterable[EndedRollout]) -> None:
        """Tell the job's user once what the agent asks for, and does not get."""
        asked = {name: value for own in ended for name, value in own.rollout.sampling.items()}
        new = {name: value for name, value in asked.items() if name not in self._told}
        if not new:
            return
        self._told |= new.keys()
        shown = ", ".join(f"{name} = {value}" for name, value in sorted(new.items()))
        options = self.spec.reinforcement
        assert options is not None, "the job's method is reinforcement"
        message = (
            f"The agent asks for {shown}. What is trained is the model that is drawn from, so "
            f"answers are drawn at the job's temperature, {options.temperature:g}, from all "
            "tokens, by seeds of the job."
        )
        self.tell(NewEvent(level="warn", message=message))


def agent_item(prompt: PromptTokens) -> dict[str, Any]:
    """What an agent gets of a prompt: its line."""
    tools = {"tools": list(prompt.offered)} if prompt.offered else {}
    return {**prompt.item, "messages": list(prompt.messages), **tools}


def answer_of(ended: EndedRollout) -> SampledAnswer:
    """A rollout as the record of its step holds it, before it is graded and its texts are cut."""
    rollout = ended.rollout
    answered = list(rollout.answered)
    rows, logprobs = rows_of([own.recorded for own in answered])
    newest = answered[-1] if answered else None
    messages = [] if newest is None else [*rollout.messages, newest.message, *rollout.ending]
    calls = [
        {
            "message": own.message,
            "finish_reason": own.finish_reason,
            "prompt_tokens": len(own.recorded.prompt),
            "completion_tokens": len(own.recorded.tokens),
        }
        for own in answered
    ]
    trajectory = Trajectory(
        rows=rows,
        messages=messages,
        calls=calls,
        rewards=list(ended.rewards),
        rewritten=max(0, len(rows) - 1),
        refused=dict(rollout.refused),
        seconds=ended.seconds,
    )
    error = ended.error
    return SampledAnswer(
        tokens=[token for row in rows for token in row.answered],
        logprobs=logprobs,
        text="" if newest is None else newest.text,
        reasoning="" if newest is None else newest.reasoning,
        calls=[] if newest is None else newest.calls,
        truncated=any(own.recorded.truncated for own in answered),
        reward=ended.reward if error is None else None,
        errors={} if error is None else {error.kind: error.detail},
        trajectory=trajectory,
    )


def cut(trajectory: Trajectory) -> Trajectory:
    """A trajectory as its record keeps it: the first messages of its conversation, and the last
    one, up to MOST_TEXT characters; as many of its rows' texts; of each call its numbers.
    """
    numbers = ("finish_reason", "prompt_tokens", "completion_tokens")
    calls = [{name: call[name] for name in numbers if name in call} for call in trajectory.calls]
    *first, last = trajectory.messages or ({},)
    kept: list[Mapping[str, Any]] = []
    left = MOST_TEXT - len(json.dumps(last))
    for message in first:
        left -= len(json.dumps(message))
        if left < 0:
            break
        kept.append(message)
    shown = [*kept, last] if trajectory.messages and len(json.dumps(last)) <= MOST_TEXT else kept
    rows = list(_with_cut_texts(trajectory.rows))
    return trajectory.model_copy(update={"messages": shown, "calls": calls, "rows": rows})


def _with_cut_texts(rows: Sequence[TrainedRow]) -> Iterator[TrainedRow]:
    left = MOST_TEXT
    for row in rows:
        texts: list[tuple[str, bool]] = []
        for text, learned in row.texts:
            if left > 0:
                texts.append((text[:left], learned))
            left -= len(text)
        yield row.model_copy(update={"texts": texts})
