"""The requests that `ft rollout serve` answers: each is one rollout of a Python function."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler
from typing import Any

from ft_service.host.signed_post import is_signed

MOST_BYTES = 64 * 1024**2
"""Longest request: a line of a data file, and what is around it."""
_NEEDED = ("item", "base_url", "api_key", "deadline")

Returned = float | Sequence[float] | None
"""The reward; of each call that was answered, in their order; None: it is left to the grader."""
RolloutFunction = Callable[[Any, Mapping[str, Any]], Awaitable[Returned]]


class Calls:
    """Calls of a function, each with a client of its own."""

    def __init__(self, function: RolloutFunction, openai: Any) -> None:
        """`openai`: the package."""
        self._function = function
        self._openai = openai
        # It takes many times what the other parts of a client do.
        self._trusted = ssl.create_default_context()

    async def rewards(self, message: Mapping[str, Any]) -> Returned:
        """The rewards of a rollout. Raises whatever the function does, TimeoutError too late."""
        async with (
            asyncio.timeout(max(0.0, message["deadline"] - time.time())),
            self._openai.AsyncOpenAI(
                base_url=message["base_url"],
                api_key=message["api_key"],
                http_client=self._openai.DefaultAsyncHttpxClient(verify=self._trusted),
            ) as client,
        ):
            return await self._function(client, message["item"])


class RolloutHandler(BaseHTTPRequestHandler):
    """One connection."""

    def __init__(self, calls: Calls, secret: str, *connection: Any) -> None:
        """`secret`: by which requests must be signed; empty: they are not checked."""
        self._calls = calls
        self._secret = secret
        super().__init__(*connection)

    def do_POST(self) -> None:
        status, answer = self._answer()
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _answer(self) -> tuple[int, dict[str, Any]]:
        length = int(self.headers.get("content-length") or 0)
        if length > MOST_BYTES:
            return 413, {"error": f"The body has more than {MOST_BYTES:,} bytes."}
        body = self.rfile.read(length)
        headers = {name.lower(): value for name, value in self.headers.items()}
        if self._secret and not is_signed(headers, body, self._secret, time.time()):
            return 401, {"error": "The request is not signed by the secret of this agent."}
        message = _message(body)
        if message is None:
            return 400, {"error": f"The body is no object with {', '.join(_NEEDED)}."}
        try:
            return 200, _told(asyncio.run(self._calls.rewards(message)))
        except Exception as error:  # whatever a user's function raises
            traceback.print_exc()
            return 500, {"error": f"{type(error).__name__}: {error}"}

    def log_message(self, format: str, *args: object) -> None:
        pass


def _told(returned: Returned) -> dict[str, Any]:
    """The answer to a request. Raises TypeError, ValueError for what is no reward."""
    if returned is None:
        return {}
    if isinstance(returned, Sequence) and not isinstance(returned, str):
        return {"rewards": list(map(float, returned))}
    return {"reward": float(returned)}


def _message(body: bytes) -> Mapping[str, Any] | None:
    """None: it is not what begins a rollout."""
    try:
        message = json.loads(body)
    except ValueError:
        return None
    is_whole = isinstance(message, dict) and all(name in message for name in _NEEDED)
    return message if is_whole and isinstance(message["deadline"], int | float) else None
