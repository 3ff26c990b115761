"""Environments of type `openenv`: OpenEnv's WebSocket `<url>/ws`, one connection and one session of
the server for each rollout.

    {"type": "reset", "data": {…}}  {"type": "step", "data": ACTION}         from here
    {"type": "observation", "data": {"observation": {…}, "reward": …, "done": …}}
    {"type": "error", "data": {"message": …, "code": …}}                     from there
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

from ft_service.agents.addresses import Access
from ft_service.agents.open_rollouts import AnsweredCall, OpenRollout
from ft_service.agents.playing import Message, Opening, Opens, Turn
from ft_service.agents.running import AgentError
from ft_service.agents.shown_text import cut_text
from ft_service.graders.grades import NO_JSON, parsed
from ft_service.host.pinned_transport import Allowance, AllowanceUsedError
from ft_service.host.signed_post import SignedMessage, trusted_context
from ft_service.host.webhook_receiver import AddressError, Receiver, find_address
from ft_service.spec.environments import OpenEnvEnvironment

MOST_MESSAGE = 2**20
"""Bytes of one message."""
MOST_BYTES = 16 * 1024**2
MOST_VALUES = 2**19
"""Of all messages of a rollout together."""
INVALID = "VALIDATION_ERROR"
"""The server's code for an action that is none of the environment's: the model's doing."""
CLOSE_SECONDS = 2.0
_NOT_RESET = ("messages", "tools")
"""Keys of an item that are no parameters of a reset."""


@dataclass
class _Session:
    """One rollout's side of the environment."""

    socket: Any
    options: OpenEnvEnvironment
    allowance: Allowance
    seed: int

    async def begin(self, item: Mapping[str, Any]) -> Opening:
        given = {name: value for name, value in item.items() if name not in _NOT_RESET}
        data = await self._asked({"type": "reset", "data": {"seed": self.seed, **given}})
        messages = list(item["messages"])
        said = self._shown(data)
        if messages and messages[-1]["role"] == "user" and isinstance(messages[-1]["content"], str):
            last = messages.pop()  # templates want the roles to take turns
            said = f"{last['content']}\n\n{said}"
        return Opening([*messages, _of_user(said)], (), _reward(data), _is_done(data))

    async def answer(self, said: AnsweredCall) -> Turn:
        action = self._action(said.text)
        if action is None:
            told = _of_user("error: the answer is not an action, an object in JSON")
            return Turn([told], is_refused=True)
        data = await self._asked({"type": "step", "data": action})
        told = _of_user(self._shown(data))
        return Turn([told], _reward(data), _is_done(data), is_refused="error" in data)

    def _action(self, text: str) -> dict[str, Any] | None:
        """The action of an answer; None: it is none."""
        if self.options.action_field is not None:
            return {self.options.action_field: text}
        action = parsed(text)
        return action if isinstance(action, dict) else None

    def _shown(self, data: Mapping[str, Any]) -> str:
        """What the model reads of an observation."""
        if "error" in data:
            return cut_text(f"error: {data['error']}", self.options.max_answer_bytes)
        observation = data.get("observation")
        name = self.options.observation_field
        if name is not None:
            if not isinstance(observation, dict) or name not in observation:
                known = (
                    ", ".join(map(str, observation)) if isinstance(observation, dict) else "none"
                )
                why = f"observation_field = {name!r}: the observation has the fields {known[:500]}"
                raise AgentError("environment_failed", why)
            observation = observation[name]
        text = observation if isinstance(observation, str) else _json(observation)
        return cut_text(text, self.options.max_answer_bytes)

    async def _asked(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The data of the answer to a message, or {"error": why} for an action that is none.

        Raises AgentError.
        """
        try:
            await self.socket.send(_json(message))
            raw = await self.socket.recv()
        except Exception as error:  # whatever a server does to a connection
            why = f"the connection was lost: {type(error).__name__}: {error}"
            raise AgentError("environment_unreachable", why) from None
        answer = self._parsed(raw)
        data = answer.get("data")
        match answer.get("type"):
            case "observation" if isinstance(data, dict):
                return data
            case "error" if isinstance(data, dict):
                if data.get("code") == INVALID and message["type"] == "step":
                    return {"error": str(data.get("message"))}
                why = f"{data.get('code')}: {data.get('message')}"
                raise AgentError("environment_failed", why)
            case other:
                why = f"the answer is of the type {str(other)[:100]!r}, and no observation"
                raise AgentError("environment_failed", why)

    def _parsed(self, raw: str | bytes) -> dict[str, Any]:
        body = raw.encode() if isinstance(raw, str) else raw
        try:
            self.allowance.take(body)
        except AllowanceUsedError:
            why = f"the server has sent more than {MOST_BYTES:,} bytes, or {MOST_VALUES:,} values, "
            raise AgentError("environment_flood", why + "in a rollout") from None
        answer = parsed(raw)
        if answer is NO_JSON or not isinstance(answer, dict):
            raise AgentError("environment_failed", "the answer is no object in JSON")
        return answer


@dataclass(frozen=True)
class _Server:
    """A server, for all rollouts of a step."""

    options: OpenEnvEnvironment
    receiver: Receiver
    address: str
    secrets: Sequence[str]

    @asynccontextmanager
    async def opened(self, rollout: OpenRollout) -> AsyncIterator[_Session]:
        """Give a connection for a rollout. Raises AgentError."""
        try:
            socket = await self._connected(rollout)
        except Exception as error:  # libraries raise many kinds for servers of users
            why = f"{type(error).__name__}: {error}"
            raise AgentError("environment_unreachable", why) from None
        try:
            allowance = Allowance(MOST_BYTES, MOST_VALUES)
            yield _Session(socket, self.options, allowance, rollout.prompt_seed)
        finally:
            await _closed(socket)

    async def _connected(self, rollout: OpenRollout) -> Any:
        from websockets.asyncio.client import connect

        class PinnedConnection(connect):
            """One that follows no redirect, which could lead to another address."""

            def process_redirect(self, exc: Exception) -> Exception | str:
                return exc

        url = self._url()
        is_secure = url.scheme == "wss"
        secure = {"ssl": trusted_context(), "server_hostname": self.receiver.host}
        message = SignedMessage(rollout.id, b"", self.secrets)
        return await PinnedConnection(
            str(url),
            host=self.address,
            port=self.receiver.port,
            proxy=None,
            compression=None,
            max_size=MOST_MESSAGE,
            ping_interval=None,
            close_timeout=CLOSE_SECONDS,
            user_agent_header="ft-service-rollouts",
            additional_headers=message.headers(int(time.time())) if self.secrets else {},
            **(secure if is_secure else {}),
        )

    def _url(self) -> httpx2.URL:
        url = self.receiver.url
        path = url.path.rstrip("/") + "/ws"
        return url.copy_with(scheme="wss" if url.scheme == "https" else "ws", path=path)


async def _closed(socket: Any) -> None:
    """End a connection; a server that does not answer is left."""
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await socket.send('{"type": "close"}')
            await socket.close()
    except Exception:  # it is lost already
        socket.transport.abort()


@asynccontextmanager
async def open_envs(options: OpenEnvEnvironment, access: Access) -> AsyncIterator[Opens]:
    """Give what opens a connection for a rollout, by an address that is found once."""
    receiver, secrets = await access.receiver(options)
    try:
        address = await find_address(receiver, allow_private=access.allow_private)
    except AddressError as error:
        raise AgentError("environment_unreachable", str(error)) from None
    yield _Server(options, receiver, address, secrets).opened


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False).encode(errors="replace").decode()


def _of_user(text: str) -> Message:
    return {"role": "user", "content": text}


def _reward(data: Mapping[str, Any]) -> Any:
    """A step's reward as it is given; True counts as 1."""
    given = data.get("reward")
    return float(given) if isinstance(given, bool) else given


def _is_done(data: Mapping[str, Any]) -> bool:
    return data.get("done") is True
