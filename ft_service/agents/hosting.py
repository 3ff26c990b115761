"""A Python function as an agent at an address of this host (`ft rollout serve`).

    async def rollout(client, item):
        answer = await client.chat.completions.create(model="", messages=item["messages"])
        return float(item["answer"] in answer.choices[0].message.content)

`client` is an openai.AsyncOpenAI that calls the model of this rollout. The function returns the
reward, a list with that of each call that was answered (supervision = process), or None to leave it
to the job's grader.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path

from ft_service.agents.rollout_handler import Calls, RolloutFunction, RolloutHandler
from ft_service.errors import SpecError, UnavailableError


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

    handler = partial(RolloutHandler, Calls(function, openai), secret)
    try:
        server = ThreadingHTTPServer((bind, port), handler)
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
