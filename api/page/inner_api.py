"""The page's way to the API: requests within this process, in the name of whoever looks at the page.

The page reads no store and moves no job by itself: what it can do, a client can.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import quote, urlencode

from fastapi import Depends, Request
from starlette.types import Message

from api.http.middleware import INNER

Query = Mapping[str, str | int | Sequence[str] | None]
_PASSED = (b"cookie", b"host", b"x-csrf-token", b"x-forwarded-proto")


class ApiError(Exception):
    """The API's refusal, with OpenAI's error object."""

    def __init__(self, status: int, error: dict[str, Any]) -> None:
        super().__init__(str(error.get("message")))
        self.status = status
        self.error = error
        self.message = str(error.get("message"))


@dataclass(frozen=True)
class InnerApi:
    """The API as the browser's session may use it."""

    request: Request

    async def get(self, path: str, **query: str | int | Sequence[str] | None) -> Any:
        """The answer's JSON. `query`: None leaves a parameter out. Raises ApiError."""
        return await self._ask("GET", path, query, None)

    async def find(self, path: str, **query: str | int | Sequence[str] | None) -> Any | None:
        """As `get`; None if there is no such thing."""
        try:
            return await self.get(path, **query)
        except ApiError as error:
            if error.status != 404:
                raise
            return None

    async def post(self, path: str, body: Any = None) -> Any:
        """The answer's JSON. The session's token must be in the browser's request. Raises ApiError."""
        return await self._ask("POST", path, {}, body)

    async def delete(self, path: str) -> Any:
        """As `post`."""
        return await self._ask("DELETE", path, {}, None)

    async def text(self, path: str, **query: str | int | Sequence[str] | None) -> str:
        """An answer that is plain text. Raises ApiError."""
        return (await self._send("GET", path, query, None)).decode(errors="replace")

    async def _ask(self, method: str, path: str, query: Query, body: Any) -> Any:
        return json.loads(await self._send(method, path, query, body))

    async def _send(self, method: str, path: str, query: Query, body: Any) -> bytes:
        content = b"" if body is None else json.dumps(body).encode()
        sent, status, answer = False, 0, b""

        async def receive() -> Message:
            nonlocal sent
            if sent:
                return {"type": "http.disconnect"}
            sent = True
            return {"type": "http.request", "body": content, "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status, answer
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                answer += message.get("body", b"")

        await self.request.app(self._scope(method, path, query, content), receive, send)
        if status >= 400:
            raise ApiError(status, json.loads(answer)["error"])
        return answer

    def _scope(self, method: str, path: str, query: Query, content: bytes) -> dict[str, Any]:
        outer = self.request.scope
        headers = [(name, value) for name, value in outer["headers"] if name in _PASSED]
        if content:
            headers += [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        given = {name: value for name, value in query.items() if value is not None}
        kept = ("asgi", "http_version", "scheme", "server", "client")
        return {
            **{name: outer[name] for name in kept if name in outer},
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": quote(path, safe="/:%").encode(),
            "query_string": urlencode(given, doseq=True).encode(),
            "root_path": "",
            "headers": headers,
            "state": {},
            INNER: True,
        }


def _inner_api(request: Request) -> InnerApi:
    return InnerApi(request)


Api = Annotated[InnerApi, Depends(_inner_api)]
