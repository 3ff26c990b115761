"""Agents at an address of the user's: a POST begins a rollout, and its answer, within the rollout's
time, ends it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from ft_service.agents import running
from ft_service.agents.addresses import Access
from ft_service.agents.open_rollouts import OpenRollout, OpenRollouts
from ft_service.agents.running import (
    AgentError,
    Rewards,
    RunOne,
    checked_reward,
    checked_rewards,
)
from ft_service.graders.asking import Post, signed_posts
from ft_service.graders.grades import NO_JSON, GradingError, parsed
from ft_service.host.webhook_receiver import Receiver
from ft_service.spec.environments import EndpointEnvironment

TRIES = 3
"""Tries of an agent that has not called the model yet: a server that starts again misses none."""
RETRY_SECONDS = 1.0
"""Wait before the second try; twice as long before the third."""
_RETRIED = (408, 425, 429, 500, 502, 503, 504)


@dataclass(frozen=True, kw_only=True)
class AgentEndpoint:
    """An environment of type `endpoint`, for the rollouts of a project."""

    options: EndpointEnvironment
    access: Access
    model: str
    """Name of the base, for clients that want one."""
    opened: OpenRollouts

    @property
    def project(self) -> str:
        return self.access.project

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[RunOne]:
        """Give what has the agent run a rollout, whose name is looked up once."""
        receiver, secrets = await self.access.receiver(self.options)
        private = self.access.allow_private
        try:
            async with signed_posts(
                receiver, secrets, allow_private=private, agent="ft-service-rollouts"
            ) as post:

                async def run(rollout: OpenRollout, item: Mapping[str, Any]) -> Rewards:
                    self.opened.open(rollout)
                    try:
                        return await self._rewards(rollout, item, post, receiver)
                    finally:
                        self.opened.close(rollout)

                yield run
        except GradingError as error:  # the name of its host is not found
            raise AgentError("agent_unreachable", error.detail) from None

    async def _rewards(
        self, rollout: OpenRollout, item: Mapping[str, Any], post: Post, receiver: Receiver
    ) -> Rewards:
        """Raises AgentError."""
        asked = asyncio.create_task(self._asked(rollout, item, post, receiver))
        try:
            while not asked.done():
                if rollout.seconds_left <= 0:
                    limit = f"deadline_seconds = {self.options.deadline_seconds:g}"
                    raise AgentError(
                        "agent_timeout", f"{receiver.host} has not answered in {limit}"
                    )
                if rollout.is_flooded:
                    codes = ", ".join(f"{code} {count}" for code, count in rollout.refused.items())
                    raise AgentError("agent_flood", f"calls that were refused: {codes}")
                await asyncio.wait(
                    [asked], timeout=min(running.LOOK_SECONDS, max(0.0, rollout.seconds_left))
                )
            answer = asked.result()
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
        rollout.close()  # calls that the agent has not waited for have no reward
        if not rollout.answered:
            raise AgentError("agent_no_calls", "the agent has not called the model")
        if self.options.supervision == "process":
            return _read_rewards(answer, len(rollout.answered))
        return _read_reward(answer)

    async def _asked(
        self, rollout: OpenRollout, item: Mapping[str, Any], post: Post, receiver: Receiver
    ) -> dict[str, Any]:
        """The agent's answer. Raises AgentError."""
        body = json.dumps(self._message(rollout, item), ensure_ascii=False).encode(
            errors="backslashreplace"
        )
        for number in range(TRIES):
            if number:
                await asyncio.sleep(RETRY_SECONDS * 2 ** (number - 1))
            is_last = number == TRIES - 1
            try:
                status, answer = await post(rollout.id, body, self.options.deadline_seconds)
            except GradingError as error:  # an answer that is too long
                raise AgentError("agent_reward_invalid", error.detail) from None
            except Exception as error:  # libraries raise many kinds for addresses of users
                if is_last or rollout.was_called:
                    why = f"{type(error).__name__}: {error}"
                    raise AgentError("agent_unreachable", why) from None
                continue
            if 200 <= status < 300:
                return _object(parsed(answer))
            if status not in _RETRIED or is_last or rollout.was_called:
                raise AgentError("agent_failed", f"{receiver.host} answered {status}")
        raise AssertionError("the last try has ended")

    def _message(self, rollout: OpenRollout, item: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "rollout_id": rollout.id,
            "item": dict(item),
            "base_url": self.opened.url_of(rollout),
            "api_key": rollout.key,
            "model": self.model,
            "max_turns": rollout.budget.turns,
            "max_tokens": rollout.budget.tokens,
            "deadline": time.time() + rollout.seconds_left,
        }


def _object(answer: Any) -> dict[str, Any]:
    """Raises AgentError."""
    if answer is NO_JSON or not isinstance(answer, dict):
        raise AgentError("agent_reward_invalid", 'the answer is not {"reward": number} or {}')
    return answer


def _read_reward(answer: Mapping[str, Any]) -> float | None:
    """The reward of a rollout, None: the agent gives none. Raises AgentError."""
    if "rewards" in answer:
        why = "the answer has rewards of single calls: add them up, or give the job "
        why += "environment.supervision = process"
        raise AgentError("agent_reward_invalid", why)
    given = answer.get("reward")
    if given is None:
        return None
    return checked_reward(given, "agent_reward_invalid")


def _read_rewards(answer: Mapping[str, Any], calls: int) -> list[float]:
    """The rewards of so many answered calls. Raises AgentError."""
    given = answer.get("rewards")
    if "reward" in answer or not isinstance(given, list) or len(given) != calls:
        found = f"{len(given)} rewards" if isinstance(given, list) else f"no {'rewards'!r}"
        found += " and a reward of all" if "reward" in answer else ""
        why = f"the answer has {found}, and {calls} calls were answered: environment.supervision "
        why += '= process needs {"rewards": [number, …]} with one for each, in their order'
        raise AgentError("agent_reward_invalid", why)
    return checked_rewards(given, "agent_reward_invalid")
