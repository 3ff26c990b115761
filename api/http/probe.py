"""HTTP endpoints of a process without the API: `/livez` and `/readyz` for its cluster, and metrics
at every other path.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from ft_service.errors import SpecError
from ft_service.host.port_owner import holder
from ft_service.meters import HANGING_SECONDS, STALLED_SECONDS, Meters

_LIMITS = {"/livez": HANGING_SECONDS, "/readyz": STALLED_SECONDS}
"""Path → age of the reconciler's last turn from which it answers 503."""

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


@contextlib.contextmanager
def serving(port: int, address: str, meters: Meters) -> Iterator[int]:
    """Serve in threads while the block runs.

    Yield the port, which is chosen for 0. Raises SpecError if the port is taken.
    """
    kind = _Server6 if ":" in address else ThreadingWSGIServer
    try:
        server = make_server(address, port, application(meters), kind, handler_class=_Silent)
    except OSError as error:
        raise SpecError(
            _cannot_listen(port, address, error), param="FT_METRICS_PORT", code="cannot_listen"
        ) from None
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def _cannot_listen(port: int, address: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"Port {port} of {address} is in use by {holder(port)}. Stop that, or set "
            "FT_METRICS_PORT to another port."
        )
    return (
        f"Metrics cannot be served on {address} (FT_BIND), port {port} (FT_METRICS_PORT): "
        f"{error.strerror or error}."
    )


def application(meters: Meters) -> Application:
    """Return the WSGI application."""
    metrics = make_wsgi_app(meters.registry)

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        limit = _LIMITS.get(environ["PATH_INFO"])
        if limit is None:
            return metrics(environ, start_response)
        age = meters.turn_age()
        status = "200 OK" if age < limit else "503 Service Unavailable"
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"The reconciler's last turn began {age:.0f} seconds ago.\n".encode()]

    return answer


class _Server6(ThreadingWSGIServer):
    address_family = socket.AF_INET6


class _Silent(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass
