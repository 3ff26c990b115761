"""Agents at an address of the user's: a POST begins a rollout, and its answer, within the rollout's
time, ends it.

Whatever an agent does (fails, hangs, lies about its reward, never ends), its rollout ends with a
reward, without one, or with an error of a kind.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ft_service.agents.open_rollouts import OpenRollout, OpenRollouts
from ft_service.errors import FtError, UnavailableError
from ft_service.graders.asking import Post, signed_posts
from ft_service.graders.grades import MOST_REWARD, NO_JSON, GradingError, as_reward, parsed
from ft_service.host.webhook_receiver import Receiver, parse_receiver
from ft_service.shared_work.places import Kind, Places
from ft_service.spec.environments import EndpointEnvironment

AgentErrorKind = Literal[
    "agent_unreachable",
    "agent_failed",
    "agent_timeout",
    "agent_reward_invalid",
    "agent_no_reward",
    "agent_no_calls",
    "agent_flood",
]
"""unreachable: no connection, or no answer that HTTP knows; failed: a status other than 2xx;
timeout: no answer within deadline_seconds; reward_invalid: an answer that is no reward, or one
beyond MOST_REWARD; no_reward: neither the agent nor a grader gives one; no_calls: the model was
never called, so there is nothing to learn; flood: too many calls were refused.
"""
TRIES = 3
"""Tries of an agent that has not called the model yet: a server that starts again misses none."""
RETRY_SECONDS = 1.0
"""Wait before the second try; twice as long before the third."""
LOOK_SECONDS = 0.2
_RETRIED = (408, 425, 429, 500, 502, 503, 504)

AGENTS = Places(Kind(name="rollouts of agents", places=256, of_project=64))
"""Requests to users' agents, which may take as long as a rollout."""


class AgentError(Exception):
    """A rollout has no reward since its agent is at fault."""

    def __init__(self, kind: AgentErrorKind, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind: AgentErrorKind = kind
        self.detail = detail[:2000].encode(errors="replace").decode()


@dataclass(frozen=True)
class EndedRollout:
    """How a rollout has ended."""

    rollout: OpenRollout
    reward: float | None = None
    """None: the agent leaves it to the grader, or is at fault."""
    error: AgentError | None = None
    unserved: FtError | None = None
    """Why the sampler has not answered its newest call, so that its end says nothing; None: it
    has.
    """
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class AgentEndpoint:
    """An environment of type `endpoint`, for the rollouts of a project."""

    environment: EndpointEnvironment
    project: str
    model: str
    """Name of the base, for clients that want one."""
    secrets: Callable[[str], Sequence[str]]
    """Valid secrets of a webhook endpoint by its id. Raises FtError."""
    allow_private: bool
    opened: OpenRollouts

    def run(
        self, wanted: Sequence[tuple[OpenRollout, Mapping[str, Any]]], look: Callable[[], object]
    ) -> list[EndedRollout]:
        """Run rollouts, each with its item, several at once. Blocks.

        `look`: called now and then; what it raises ends all of them, and is raised.
        """
        return asyncio.run(self._run(wanted, look))

    async def _run(
        self, wanted: Sequence[tuple[OpenRollout, Mapping[str, Any]]], look: Callable[[], object]
    ) -> list[EndedRollout]:
        receiver, secrets = await self._receiver()
        at_once = asyncio.Semaphore(self.environment.concurrency)

        async def run_one(
            rollout: OpenRollout, item: Mapping[str, Any], post: Post
        ) -> EndedRollout:
            async with at_once, AGENTS.held(self.project):
                return await self._ended(rollout, item, post, receiver)

        try:
            async with signed_posts(
                receiver, secrets, allow_private=self.allow_private, agent="ft-service-rollouts"
            ) as post:
                tasks = [asyncio.create_task(run_one(*one, post)) for one in wanted]
                try:
                    while not all(task.done() for task in tasks):
                        await asyncio.wait(tasks, timeout=LOOK_SECONDS)
                        await asyncio.to_thread(look)
                    return [task.result() for task in tasks]
                finally:
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
        except GradingError as error:  # the name of its host is not found
            failed = AgentError("agent_unreachable", error.detail)
            return [EndedRollout(rollout, error=failed) for rollout, _ in wanted]

    async def _receiver(self) -> tuple[Receiver, Sequence[str]]:
        """Raises FtError: the address is not allowed any more, or the secret is gone."""
        environment = self.environment
        secrets = await asyncio.to_thread(self.secrets, environment.webhook_endpoint_id)
        return parse_receiver(environment.url, allow_private=self.allow_private), secrets

    async def _ended(
        self, rollout: OpenRollout, item: Mapping[str, Any], post: Post, receiver: Receiver
    ) -> EndedRollout:
        began = time.perf_counter()
        rollout.start()
        self.opened.open(rollout)
        reward = None
        error = None
        try:
            reward = await self._reward(rollout, item, post, receiver)
        except AgentError as failed:
            error = failed
        finally:
            self.opened.close(rollout)
        return EndedRollout(
            rollout,
            reward,
            error,
            rollout.unserved if error is not None else None,
            time.perf_counter() - began,
        )

    async def _reward(
        self, rollout: OpenRollout, item: Mapping[str, Any], post: Post, receiver: Receiver
    ) -> float | None:
        """Raises AgentError."""
        asked = asyncio.create_task(self._asked(rollout, item, post, receiver))
        try:
            while not asked.done():
                if rollout.seconds_left <= 0:
                    limit = f"deadline_seconds = {self.environment.deadline_seconds:g}"
                    raise AgentError(
                        "agent_timeout", f"{receiver.host} has not answered in {limit}"
                    )
                if rollout.is_flooded:
                    codes = ", ".join(f"{code} {count}" for code, count in rollout.refused.items())
                    raise AgentError("agent_flood", f"calls that were refused: {codes}")
                await asyncio.wait(
                    [asked], timeout=min(LOOK_SECONDS, max(0.0, rollout.seconds_left))
                )
            reward = asked.result()
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
        if not rollout.answered:
            raise AgentError("agent_no_calls", "the agent has not called the model")
        return reward

    async def _asked(
        self, rollout: OpenRollout, item: Mapping[str, Any], post: Post, receiver: Receiver
    ) -> float | None:
        """The reward that the agent answers, None: it gives none. Raises AgentError."""
        body = json.dumps(self._message(rollout, item), ensure_ascii=False).encode(
            errors="backslashreplace"
        )
        for number in range(TRIES):
            if number:
                await asyncio.sleep(RETRY_SECONDS * 2 ** (number - 1))
            is_last = number == TRIES - 1
            try:
                status, answer = await post(rollout.id, body, self.environment.deadline_seconds)
            except GradingError as error:  # an answer that is too long
                raise AgentError("agent_reward_invalid", error.detail) from None
            except Exception as error:  # libraries raise many kinds for addresses of users
                if is_last or rollout.was_called:
                    why = f"{type(error).__name__}: {error}"
                    raise AgentError("agent_unreachable", why) from None
                continue
            if 200 <= status < 300:
                return _read_reward(parsed(answer))
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


def check_agent(
    environment: EndpointEnvironment,
    secrets: Callable[[str], Sequence[str]],
    *,
    allow_private: bool,
) -> None:
    """Raise FtError, naming the field from `environment` on, for an address that is not allowed or
    a webhook endpoint that is not there.
    """
    try:
        parse_receiver(environment.url, allow_private=allow_private)
    except FtError as error:
        raise type(error)(
            f"environment.{error.message}", param="environment.url", code=error.code
        ) from None
    try:
        secrets(environment.webhook_endpoint_id)
    except UnavailableError:
        raise
    except FtError as error:
        raise type(error)(
            f"environment.webhook_endpoint_id: {error.message}",
            param="environment.webhook_endpoint_id",
        ) from None


def _read_reward(answer: Any) -> float | None:
    """Raises AgentError."""
    if answer is NO_JSON or not isinstance(answer, dict):
        raise AgentError("agent_reward_invalid", 'the answer is not {"reward": number} or {}')
    given = answer.get("reward")
    if given is None:
        return None
    reward = as_reward(given)
    if reward is None or abs(reward) > MOST_REWARD:
        limit = f"a finite number from {-MOST_REWARD:g} to {MOST_REWARD:g}"
        raise AgentError("agent_reward_invalid", f"the reward is not {limit}")
    return reward
