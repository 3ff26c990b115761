"""A proxy before PostgreSQL whose connections fall silent: what is sent is taken, and nothing is
answered or ended, as by a pooler whose server is lost.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import make_url


class SilentProxy:
    """Before a server on a Unix socket."""

    def __init__(self, url: str) -> None:
        """`url`: of a database there."""
        behind = make_url(url)
        (self._server,) = (
            path
            for path in Path(str(behind.query["host"])).glob(".s.PGSQL.*")
            if path.suffix != ".lock"
        )
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        self.url = behind.set(host="127.0.0.1", port=port, query={}).render_as_string(
            hide_password=False
        )
        """The same database, through the proxy."""
        self.accepted = 0
        """Connections so far."""
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._silent: list[socket.socket] = []
        self._silenced = threading.Event()
        self._all = False
        self._told, self._ours = socket.socketpair()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def silence(self, *, later_too: bool = False) -> None:
        """Let all present connections fall silent.

        `later_too`: and those that are made from now on.
        """
        self._all = later_too
        self._silenced.clear()
        self._told.send(b"s")
        assert self._silenced.wait(60)

    def close(self) -> None:
        self._told.close()
        self._thread.join()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._ours, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    ready = key.fileobj
                    assert isinstance(ready, socket.socket)
                    if ready is self._ours:
                        if not ready.recv(1):
                            return self._end()
                        self._fall_silent(selector)
                    elif ready is self._listener:
                        self._accept(selector)
                    elif ready in self._pairs:
                        self._pass_on(selector, ready)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        client, _ = self._listener.accept()
        self.accepted += 1
        if self._all:
            self._silent.append(client)
            return
        server = socket.socket(socket.AF_UNIX)
        server.connect(str(self._server))
        self._pairs |= {client: server, server: client}
        for one in (client, server):
            selector.register(one, selectors.EVENT_READ)

    def _pass_on(self, selector: selectors.BaseSelector, ready: socket.socket) -> None:
        other = self._pairs[ready]
        data = b""
        with contextlib.suppress(OSError):
            data = ready.recv(65536)
            other.sendall(data)
        if data:
            return
        for one in (ready, other):
            selector.unregister(one)
            del self._pairs[one]
            one.close()

    def _fall_silent(self, selector: selectors.BaseSelector) -> None:
        for one in self._pairs:
            selector.unregister(one)
        self._silent += self._pairs
        self._pairs.clear()
        self._silenced.set()

    def _end(self) -> None:
        for one in (*self._pairs, *self._silent, self._listener, self._ours):
            one.close()


@contextmanager
def silent_proxy(url: str) -> Iterator[SilentProxy]:
    proxy = SilentProxy(url)
    try:
        yield proxy
    finally:
        proxy.close()
