"""Rollouts of an environment that has no agent: the model answers, the environment answers, in
turns, until either has ended it or a budget is used up.

The calls of the model are begun and recorded as those of agents (open_rollouts.py); what the
environment says is only read.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from ft_service.agents.addresses import Access
from ft_service.agents.open_rollouts import (
    TOKENS_USED,
    TURNS_USED,
    AnsweredCall,
    CallUnderWay,
    OpenRollout,
    when_served,
)
from ft_service.agents.running import AgentError, Rewards, RunOne, checked_reward, checked_rewards
from ft_service.data.chat_line import parse_conversation
from ft_service.data.line_errors import LineError
from ft_service.errors import FtError, SpecError
from ft_service.serving.token_sampler import Sampler
from ft_service.spec.environments import McpEnvironment, OpenEnvEnvironment

NO_ROOM = "context_length_exceeded"
"""The sampler's code for a conversation that leaves no room for an answer."""
_INVALID = "environment_reward_invalid"
_ENDS = (TURNS_USED, TOKENS_USED, NO_ROOM)
Message = Mapping[str, Any]
Part = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """What an environment says to an answer."""

    messages: Sequence[Message] = ()
    reward: float | None = None
    ends: bool = False
    is_refused: bool = False
    """Whether the answer was no action that the environment takes."""


@dataclass(frozen=True)
class Opening:
    """The beginning of a rollout."""

    messages: Sequence[Message]
    tools: Sequence[Any] = ()
    reward: float | None = None
    ends: bool = False


class Episode(Protocol):
    """An environment's side of one rollout. Its calls raise AgentError."""

    async def begin(self, item: Mapping[str, Any]) -> Opening: ...

    async def answer(self, said: AnsweredCall) -> Turn: ...


class Opens(Protocol):
    """Opens the environment's side of a rollout. Raises AgentError."""

    def __call__(self, rollout: OpenRollout) -> AbstractAsyncContextManager[Episode]: ...


class Connects(Protocol):
    """Finds the environment of a project, and gives what opens its side of rollouts.

    Raises AgentError, and FtError if the address is not allowed any more.
    """

    def __call__(self, options: Any, access: Access, /) -> AbstractAsyncContextManager[Opens]: ...


@dataclass(frozen=True, kw_only=True)
class Playing:
    """An environment without an agent, for the rollouts of a project."""

    options: McpEnvironment | OpenEnvEnvironment
    access: Access
    sampler: Sampler
    connects: Connects
    has_grader: bool = False

    @property
    def project(self) -> str:
        return self.access.project

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[RunOne]:
        """Give what plays one rollout."""
        async with self.connects(self.options, self.access) as opens:

            async def run(rollout: OpenRollout, item: Mapping[str, Any]) -> Rewards:
                limit = f"deadline_seconds = {self.options.deadline_seconds:g}"
                try:
                    async with asyncio.timeout(max(0.0, rollout.seconds_left)):
                        async with opens(rollout) as episode:
                            tally = await _played(rollout, episode, item, self.sampler)
                            return self._rewards(tally)
                except TimeoutError:
                    why = f"the rollout has not ended in {limit}"
                    raise AgentError("environment_timeout", why) from None

            yield run

    def _rewards(self, tally: Tally) -> Rewards:
        """Raises AgentError."""
        if getattr(self.options, "supervision", "outcome") == "process":
            return tally.of_calls()
        return tally.reward(has_grader=self.has_grader)


async def _played(
    rollout: OpenRollout, episode: Episode, item: Mapping[str, Any], sampler: Sampler
) -> Tally:
    """The rewards of a rollout. Raises AgentError."""
    if item.get("tools"):
        why = "the prompt's line offers tools, which nothing carries out: leave them out"
        raise AgentError("environment_failed", why)
    opening = await episode.begin(item)
    messages = list(opening.messages)
    tally = Tally(_checked(opening.reward))
    turn = Turn(ends=opening.ends)
    while not turn.ends:
        said = await _asked(rollout, messages, opening.tools, sampler)
        if said is None:
            break
        turn = await episode.answer(said)
        tally.steps.append(_checked(turn.reward))
        tally.refused += turn.is_refused
        messages += [said.message, *turn.messages]
        rollout.ending = turn.messages
    if not rollout.answered:
        why = "the prompt leaves no room for an answer within training.max_length, or the "
        why += "environment has ended before one"
        raise AgentError("environment_no_room", why)
    return tally


@dataclass
class Tally:
    """The rewards of an episode, None where none is given."""

    opening: float | None = None
    """Before the first answer, so that it is no call's."""
    steps: list[float | None] = field(default_factory=list[float | None])
    """Those of the answers to the model's calls, in their order."""
    refused: int = 0
    """Answers that were no action."""

    def reward(self, *, has_grader: bool) -> float | None:
        """The sum of all. Without any it is the grader's, and without a grader 0 where the model
        has not found an action: that is to be learned. Raises AgentError.
        """
        known = [reward for reward in (self.opening, *self.steps) if reward is not None]
        if not known:
            return None if has_grader or not self.refused else 0.0
        return checked_reward(math.fsum(known), _INVALID)

    def of_calls(self) -> list[float] | None:
        """The reward of each call, 0 where its step has none; None: no step has one, though the
        model has found actions. Raises AgentError.
        """
        if all(reward is None for reward in self.steps) and not self.refused:
            return None
        return checked_rewards([reward or 0.0 for reward in self.steps], _INVALID)


def _checked(reward: Any) -> float | None:
    """Raises AgentError for one that is none."""
    return None if reward is None else checked_reward(reward, _INVALID)


async def _asked(
    rollout: OpenRollout, messages: Sequence[Message], tools: Sequence[Any], sampler: Sampler
) -> AnsweredCall | None:
    """The model's answer; None: a budget is used up. Raises AgentError."""
    try:
        call = rollout.begin(_order(messages, tools), list(messages), {})
    except SpecError:  # a budget is used up
        return None
    try:
        parts = await when_served(rollout, lambda: _parts(rollout, call, sampler))
        return rollout.end(call, parts)
    except FtError as error:
        if error.code in _ENDS:
            return None
        raise AgentError("environment_failed", error.message) from None
    finally:
        rollout.drop(call)


def _order(messages: Sequence[Message], tools: Sequence[Any]) -> dict[str, Any]:
    """Raises AgentError."""
    try:
        parsed, offered, _ = parse_conversation(list(messages), list(tools))
    except LineError as error:
        raise AgentError("environment_failed", f"{error.field} {error.reason}") from None
    return {"messages": parsed, "tools": offered, "max_tokens": None}


async def _parts(rollout: OpenRollout, call: CallUnderWay, sampler: Sampler) -> list[Part]:
    """All parts of an answer. Raises the FtError that it ends with."""
    loop = asyncio.get_running_loop()
    queued: asyncio.Queue[Part] = asyncio.Queue()

    def deliver(part: Part) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(queued.put_nowait, part)

    ticket = sampler.submit(
        rollout.model.model,
        call.order,
        call.told(deliver),
        project_id=rollout.project_id,
        on_processor=True,
    )
    parts: list[Part] = []
    try:
        while not parts or parts[-1]["kind"] != "done":
            parts.append(await queued.get())
            if parts[-1]["kind"] == "error":
                raise parts[-1]["error"]
        return parts
    finally:
        sampler.cancel(ticket)
