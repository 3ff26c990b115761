"""Rollouts of an environment that has no agent: the model answers, the environment answers, in
turns, until either has ended it or a budget is used up.

The calls of the model are begun and recorded as those of agents (open_rollouts.py); what the
environment says is only read.
"""

from __future__ import annotations

import asyncio
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
from ft_service.agents.running import AgentError, RunOne, checked_reward
from ft_service.data.chat_line import parse_conversation
from ft_service.data.line_errors import LineError
from ft_service.errors import FtError, SpecError
from ft_service.serving.token_sampler import Sampler
from ft_service.spec.environments import McpEnvironment, OpenEnvEnvironment

NO_ROOM = "context_length_exceeded"
"""The sampler's code for a conversation that leaves no room for an answer."""
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

            async def run(rollout: OpenRollout, item: Mapping[str, Any]) -> float | None:
                limit = f"deadline_seconds = {self.options.deadline_seconds:g}"
                try:
                    async with asyncio.timeout(max(0.0, rollout.seconds_left)):
                        async with opens(rollout) as episode:
                            return await _played(
                                rollout, episode, item, self.sampler, has_grader=self.has_grader
                            )
                except TimeoutError:
                    why = f"the rollout has not ended in {limit}"
                    raise AgentError("environment_timeout", why) from None

            yield run


async def _played(
    rollout: OpenRollout,
    episode: Episode,
    item: Mapping[str, Any],
    sampler: Sampler,
    *,
    has_grader: bool,
) -> float | None:
    """The reward of a rollout; None: the grader gives it. Raises AgentError."""
    if item.get("tools"):
        why = "the prompt's line offers tools, which nothing carries out: leave them out"
        raise AgentError("environment_failed", why)
    opening = await episode.begin(item)
    messages = list(opening.messages)
    tally = _Tally()
    tally.add(opening.reward)
    turn = Turn(ends=opening.ends)
    while not turn.ends:
        said = await _asked(rollout, messages, opening.tools, sampler)
        if said is None:
            break
        turn = await episode.answer(said)
        tally.add(turn.reward)
        tally.refused += turn.is_refused
        messages += [said.message, *turn.messages]
        rollout.ending = turn.messages
    if not rollout.answered:
        why = "the prompt leaves no room for an answer within training.max_length, or the "
        why += "environment has ended before one"
        raise AgentError("environment_no_room", why)
    return tally.reward(has_grader=has_grader)


@dataclass
class _Tally:
    """The rewards of an episode's steps."""

    rewards: list[float] = field(default_factory=list[float])
    refused: int = 0

    def add(self, reward: float | None) -> None:
        """Raises AgentError for one that is none."""
        if reward is not None:
            self.rewards.append(checked_reward(reward, "environment_reward_invalid"))

    def reward(self, *, has_grader: bool) -> float | None:
        """Their sum. Without any it is the grader's, and without a grader 0 where the model has not
        found an action: that is to be learned.
        """
        if not self.rewards:
            return None if has_grader or not self.refused else 0.0
        return checked_reward(sum(self.rewards), "environment_reward_invalid")


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
        deliver,
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
