"""What happens to every request, whatever its route: a request id, sane headers, and an answer even to a bug."""

from __future__ import annotations

import logging

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import internal_error
from ft_service.ids import new_id

log = logging.getLogger("ft_service.api")


class RequestContext:
    """ASGI middleware. Stands outside everything else, so that no answer leaves without `x-request-id`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = new_id("req_")
        started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers["x-content-type-options"] = "nosniff"
                headers.setdefault("cache-control", "no-store")
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except Exception:
            log.exception("%s %s failed, request %s", scope["method"], scope["path"], request_id)
            if started:  # the answer is half sent: closing the connection is all that tells the client
                raise
            await internal_error(request_id)(scope, receive, send_with_headers)
