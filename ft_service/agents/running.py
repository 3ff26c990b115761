"""Rollouts that run at once, each within its time, and how they have ended.

Whatever an agent or an environment does (fails, hangs, lies about its reward, never ends), its
rollout ends with a reward, without one, or with an error of a kind.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ft_service.agents.open_rollouts import OpenRollout
from ft_service.errors import FtError
from ft_service.graders.grades import MOST_REWARD, as_reward
from ft_service.shared_work.places import Kind, Places
from ft_service.spec.environments import Environment

AgentErrorKind = Literal[
    "agent_unreachable",
    "agent_failed",
    "agent_timeout",
    "agent_reward_invalid",
    "agent_no_reward",
    "agent_no_calls",
    "agent_flood",
    "environment_unreachable",
    "environment_failed",
    "environment_timeout",
    "environment_reward_invalid",
    "environment_flood",
    "environment_no_room",
]
"""unreachable: no connection, or no answer that HTTP knows; failed: a status other than 2xx, or an
answer that is none of the protocol's; timeout: no end within deadline_seconds; reward_invalid: an
answer that is no reward, or one beyond MOST_REWARD; no_reward: neither the environment nor a grader
gives one; no_calls: the model was never called, so there is nothing to learn; flood: too many calls
were refused, or too many bytes were sent; no_room: the first prompt leaves no room for an answer.
"""
LOOK_SECONDS = 0.2

ROLLOUTS = Places(Kind(name="rollouts", places=256, of_project=64))
"""Rollouts with an environment, which may take minutes."""

Wanted = Sequence[tuple[OpenRollout, Mapping[str, Any]]]
"""Rollouts, each with its item."""
Rewards = float | Sequence[float] | None
"""The reward of a rollout; with process supervision, that of each of its answered calls, in their
order; None: the grader gives it.
"""
RunOne = Callable[[OpenRollout, Mapping[str, Any]], Awaitable[Rewards]]
"""Run a rollout, and return its rewards. Raises AgentError."""


class AgentError(Exception):
    """A rollout has no reward since its agent, or its environment, is at fault."""

    def __init__(self, kind: AgentErrorKind, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind: AgentErrorKind = kind
        self.detail = detail[:2000].encode(errors="replace").decode()


@dataclass(frozen=True)
class EndedRollout:
    """How a rollout has ended."""

    rollout: OpenRollout
    reward: float | None = None
    """None: the grader gives it, or something is at fault."""
    rewards: Sequence[float] = ()
    """With process supervision: those of its answered calls, of which `reward` is the sum."""
    error: AgentError | None = None
    unserved: FtError | None = None
    """Why the sampler has not answered its newest call, so that its end says nothing; None: it
    has.
    """
    seconds: float = 0.0


class Counterpart(Protocol):
    """What a model acts with in the rollouts of a project: an agent, or an environment."""

    @property
    def options(self) -> Environment: ...

    @property
    def project(self) -> str: ...

    def connected(self) -> AbstractAsyncContextManager[RunOne]:
        """Give what runs one rollout. Raises AgentError if none can be, and FtError if the address
        is not allowed any more, or the secret is gone.
        """
        ...


def run_rollouts(
    counterpart: Counterpart, wanted: Wanted, look: Callable[[], object]
) -> list[EndedRollout]:
    """Run rollouts, several at once. Blocks.

    `look`: called now and then; what it raises ends all of them, and is raised.
    """
    return asyncio.run(_run(counterpart, wanted, look))


async def _run(
    counterpart: Counterpart, wanted: Wanted, look: Callable[[], object]
) -> list[EndedRollout]:
    at_once = asyncio.Semaphore(counterpart.options.concurrency)

    async def run_one(rollout: OpenRollout, item: Mapping[str, Any], run: RunOne) -> EndedRollout:
        async with at_once, ROLLOUTS.held(counterpart.project):
            return await _ended(rollout, item, run)

    try:
        async with counterpart.connected() as run:
            tasks = [asyncio.create_task(run_one(*one, run)) for one in wanted]
            try:
                while not all(task.done() for task in tasks):
                    await asyncio.wait(tasks, timeout=LOOK_SECONDS)
                    await asyncio.to_thread(look)
                return [task.result() for task in tasks]
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
    except AgentError as failed:
        return [EndedRollout(rollout, error=failed) for rollout, _ in wanted]


async def _ended(rollout: OpenRollout, item: Mapping[str, Any], run: RunOne) -> EndedRollout:
    began = time.perf_counter()
    rollout.start()
    given: Rewards = None
    error = None
    try:
        given = await run(rollout, item)
    except AgentError as failed:
        error = failed
    finally:
        rollout.close()
    seconds = time.perf_counter() - began
    of_calls = given if isinstance(given, Sequence) else ()
    return EndedRollout(
        rollout,
        math.fsum(given) if isinstance(given, Sequence) else given,
        of_calls,
        error,
        rollout.unserved if error is not None else None,
        seconds,
    )


def checked_reward(given: Any, kind: AgentErrorKind) -> float:
    """A number as a reward. Raises AgentError of the kind for anything else."""
    reward = as_reward(given)
    if reward is None or abs(reward) > MOST_REWARD:
        limit = f"a finite number from {-MOST_REWARD:g} to {MOST_REWARD:g}"
        raise AgentError(kind, f"the reward is not {limit}")
    return reward


def checked_rewards(given: Sequence[Any], kind: AgentErrorKind) -> list[float]:
    """Numbers as the rewards of calls, of which neither one nor the sum is beyond MOST_REWARD.

    Raises AgentError of the kind.
    """
    rewards = [checked_reward(own, kind) for own in given]
    checked_reward(math.fsum(rewards), kind)
    return rewards
