"""The page's client of the API: requests within this process, with the session of the page's
visitor.

The page reads no store and moves no job by itself: what it can do, a client can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import quote

import httpx2
from fastapi import Depends, Request
from starlette.types import Receive, Scope, Send

from api.http.middleware import INNER

QueryValue = str | int | Sequence[str] | None
OF_VISITOR = (b"cookie", b"host", b"x-csrf-token", b"x-forwarded-proto")
"""Headers of a visitor's request that the API gets too."""
OF_KEY = (b"authorization", b"host", b"x-forwarded-proto")
"""Headers of a request with an API key that the API gets too."""


class ApiError(Exception):
    """An error answer of the API, with OpenAI's error object."""

    def __init__(self, status: int, error: dict[str, Any], retry_after: int | None = None) -> None:
        """`retry_after`: seconds until the same request may succeed; None: the API does not say."""
        super().__init__(str(error.get("message")))
        self.status = status
        self.error = error
        self.message = str(error.get("message"))
        self.retry_after = retry_after


@dataclass(frozen=True)
class InnerApi:
    """The API with the rights of the visitor's session, or of a request's key.

    A query value of None leaves the parameter out. Every method raises ApiError.
    """

    request: Request
    passed: Sequence[bytes] = OF_VISITOR
    """Headers of the request that the API gets too."""

    async def get(self, path: str, **query: QueryValue) -> Any:
        """Return the JSON of the answer."""
        return (await self._send("GET", path, query)).json()

    async def find(self, path: str, **query: QueryValue) -> Any | None:
        """Return the JSON of the answer; None for a 404."""
        try:
            return await self.get(path, **query)
        except ApiError as error:
            if error.status != 404:
                raise
            return None

    async def text(self, path: str, **query: QueryValue) -> str:
        """Return an answer that is plain text."""
        return (await self._send("GET", path, query)).text

    async def post(self, path: str, body: Any = None, key: str | None = None) -> Any:
        """Return the JSON of the answer. The visitor's request must hold the session's token.

        `key`: of idempotency: a repeated request has the first one's answer.
        """
        return (await self._send("POST", path, body=body, key=key)).json()

    async def upload(self, name: str, content: bytes) -> Any:
        """Return the JSON of a new data file.

        The visitor's request must hold the session's token.
        """
        parts = {"purpose": (None, "fine-tune"), "file": (name, content)}
        return (await self._send("POST", "/v1/files", parts=parts)).json()

    async def delete(self, path: str) -> Any:
        """Return the JSON of the answer. The visitor's request must hold the session's token."""
        return (await self._send("DELETE", path)).json()

    async def _send(
        self,
        method: str,
        path: str,
        query: dict[str, QueryValue] | None = None,
        body: Any = None,
        parts: Any = None,
        key: str | None = None,
    ) -> httpx2.Response:
        """`parts`: those of a multipart form, by name, in place of a JSON body."""
        outer = self.request
        url = f"{outer.url.scheme}://page{quote(path, safe='/:')}"
        params = {name: value for name, value in (query or {}).items() if value is not None}
        headers = [(name, value) for name, value in outer.headers.raw if name in self.passed]
        if key is not None:
            headers.append((b"idempotency-key", key.encode()))
        content = {"json": body} if parts is None else {"files": parts}
        request = httpx2.Request(method, url, params=params or None, headers=headers, **content)
        answer = await httpx2.ASGITransport(self._app).handle_async_request(request)
        await answer.aread()
        if answer.is_error:
            wait = answer.headers.get("retry-after", "")
            raise ApiError(
                answer.status_code, answer.json()["error"], int(wait) if wait.isdecimal() else None
            )
        return answer

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.request.app(
            {**scope, "client": self.request.scope.get("client"), INNER: True}, receive, send
        )


def _inner_api(request: Request) -> InnerApi:
    return InnerApi(request)


Api = Annotated[InnerApi, Depends(_inner_api)]
