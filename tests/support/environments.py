"""Servers of environments on this host: tools by MCP, and games by OpenEnv's WebSocket."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from mcp.server.mcpserver import MCPServer
from websockets.sync.server import ServerConnection, serve

from tests.support.attempts import wait_for


@contextmanager
def tools_served(server: MCPServer) -> Iterator[str]:
    """The URL of an MCP server."""
    app = server.streamable_http_app()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        web = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
        thread = threading.Thread(target=web.run, args=([listener],), name="mcp")
        thread.start()
        try:
            wait_for(lambda: web.started)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
        finally:
            web.should_exit = True
            thread.join()


Data = dict[str, Any]
Answers = Callable[[str, Data], Data]
"""By the type of a message and its data: the data of an observation; or the whole answer, with a
type.
"""


@contextmanager
def game_served(
    new: Callable[[], Answers], connected: Callable[[dict[str, str]], object] = bool
) -> Iterator[str]:
    """The URL of a server that plays a new game on each connection.

    `connected`: called with the headers of each, by their names in lower case.
    """

    def play(connection: ServerConnection) -> None:
        assert connection.request is not None
        headers = connection.request.headers
        connected({name.lower(): value for name, value in headers.raw_items()})
        answers = new()
        for raw in connection:
            message = json.loads(raw)
            if message["type"] == "close":
                return
            data = answers(message["type"], message.get("data", {}))
            answer = data if "type" in data else {"type": "observation", "data": data}
            connection.send(json.dumps(answer))

    with serve(play, "127.0.0.1", 0, compression=None) as server:
        thread = threading.Thread(target=server.serve_forever, name="openenv")
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            thread.join()


def seen(text: str, reward: float | None = None, *, done: bool = False) -> Data:
    """An observation with a field `text`."""
    return {"observation": {"text": text}, "reward": reward, "done": done}
