"""A Python function as an agent at an address of this host (`ft rollout serve`).

    async def rollout(client, item):
        answer = await client.chat.completions.create(model="", messages=item["messages"])
        return float(item["answer"] in answer.choices[0].message.content)

`client` is an openai.AsyncOpenAI that calls the model of this rollout. The function returns the
reward, or None to leave it to the job's grader.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import ssl
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ft_service.errors import SpecError, UnavailableError
from ft_service.host.signed_post import is_signed

MOST_BYTES = 64 * 1024**2
"""Longest request: a line of a data file, and what is around it."""
_NEEDED = ("item", "base_url", "api_key", "deadline")

RolloutFunction = Callable[[Any, Mapping[str, Any]], Awaitable[float | None]]


def load_function(path: Path) -> RolloutFunction:
    """Return the function `rollout` of a Python file. Raises SpecError."""
    spec = importlib.util.spec_from_file_location("agent", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise SpecError(f"{path}: is no Python file.", param="agent")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise SpecError(
            f"{path}: cannot be loaded: {type(error).__name__}: {error}", param="agent"
        ) from error
    function = getattr(module, "rollout", None)
    if not inspect.iscoroutinefunction(function):
        raise SpecError(
            f"{path}: has no function `async def rollout(client, item)`. Define it; it returns the "
            "reward, or None to leave it to the job's grader.",
            param="agent",
        )
    return function


@contextmanager
def hosting(
    function: RolloutFunction, *, bind: str = "127.0.0.1", port: int = 0, secret: str = ""
) -> Iterator[str]:
    """Serve a function as an agent while the block runs, and give its URL.

    Each rollout has a thread. `port`: 0: any free one. `secret`: `whsec_…`, by which requests must
    be signed; empty: they are not checked. Raises UnavailableError if the port is taken or the
    package openai is missing.
    """
    try:
        import openai
    except ModuleNotFoundError:
        raise UnavailableError(
            "Agents call the model by the package openai, which is missing: pip install openai."
        ) from None

    trusted = ssl.create_default_context()  # takes many times what the other parts of a client do

    async def rewarded(message: Mapping[str, Any]) -> float | None:
        async with (
            asyncio.timeout(max(0.0, message["deadline"] - time.time())),
            openai.AsyncOpenAI(
                base_url=message["base_url"],
                api_key=message["api_key"],
                http_client=openai.DefaultAsyncHttpxClient(verify=trusted),
            ) as client,
        ):
            return await function(client, message["item"])

    class Handler(BaseHTTPRequestHandler):
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
            if secret and not is_signed(headers, body, secret, time.time()):
                return 401, {"error": "The request is not signed by the secret of this agent."}
            message = _message(body)
            if message is None:
                return 400, {"error": f"The body is no object with {', '.join(_NEEDED)}."}
            try:
                reward = asyncio.run(rewarded(message))
            except Exception as error:  # whatever a user's function raises
                traceback.print_exc()
                return 500, {"error": f"{type(error).__name__}: {error}"}
            return 200, {} if reward is None else {"reward": float(reward)}

        def log_message(self, format: str, *args: object) -> None:
            pass

    try:
        server = ThreadingHTTPServer((bind, port), Handler)
    except OSError as error:
        raise UnavailableError(f"{bind}, port {port}: {error.strerror or error}.") from None
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1})
        thread.start()
        try:
            yield f"http://{bind}:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def _message(body: bytes) -> Mapping[str, Any] | None:
    """None: it is not what begins a rollout."""
    try:
        message = json.loads(body)
    except ValueError:
        return None
    is_whole = isinstance(message, dict) and all(name in message for name in _NEEDED)
    return message if is_whole and isinstance(message["deadline"], int | float) else None
