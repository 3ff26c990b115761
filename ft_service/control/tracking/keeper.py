"""Keeps the process that sends metrics elsewhere (ft_service/tracking), as long as there are jobs that ask for it."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
import uuid

from ft_service.control.tracking.door import NAMES, configured, installed
from ft_service.control.tracking.orders import Orders, environment, sdk_folder
from ft_service.errors import UnavailableError
from ft_service.meters import Meters
from ft_service.settings import Settings
from ft_service.store.sql import Store

log = logging.getLogger("ft_service.control.tracking")

POLL_SECONDS = 2.0
FIRST_RESTART_SECONDS = 1.0
MAX_RESTART_SECONDS = 60.0
GRACE_SECONDS = 5.0


def run(settings: Settings, store: Store, meters: Meters, stop: threading.Event) -> None:
    """Until `stop` is set. Where nothing is configured there is nothing to do, and no job to do it for."""
    for kind in configured(settings):
        if not installed(kind):
            log.warning("the package for %s is missing: pip install 'ft-service[%s]'", NAMES[kind], kind)
    if not any(installed(kind) for kind in configured(settings)):
        return
    keeper = Keeper(settings, store)
    while not stop.is_set():
        try:
            keeper.look()
        except UnavailableError as error:
            log.warning("%s", error.message)
        stop.wait(POLL_SECONDS)
    keeper.stop()


class Keeper:
    """At most one process, which ends with the thread that started it. For one thread."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self._settings = settings
        self._store = store
        self._owner = uuid.uuid4().hex
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._start_at = 0.0
        self._pause = FIRST_RESTART_SECONDS

    @property
    def pid(self) -> int | None:
        """Of the process; None: there is none."""
        return self._process.pid if self._process else None

    def look(self) -> None:
        """Start the process if there is something to send; note its end. Raises UnavailableError if the database is away."""
        if self._process is not None:
            if self._process.poll() is None:
                return
            self._ended(self._process.returncode)
        if time.monotonic() >= self._start_at and self._store.has_undelivered():
            self._start()

    def stop(self) -> None:
        """Have it let go of what it has, and end."""
        if self._process is not None:
            _close(self._process)
            try:
                self._process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def _ended(self, code: int) -> None:
        assert self._process is not None
        _close(self._process)
        self._process = None
        lived = time.monotonic() - self._started_at
        if code == 0 or lived > MAX_RESTART_SECONDS:
            self._pause = FIRST_RESTART_SECONDS
        else:
            self._pause = min(2 * self._pause, MAX_RESTART_SECONDS)
        self._start_at = time.monotonic() + self._pause
        if code:
            log.warning("the process that sends metrics has ended with code %d; the next in %g seconds", code, self._pause)

    def _start(self) -> None:
        orders = Orders.of(self._settings)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ft_service.control.tracking", self._owner, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment(os.environ, sdk_folder(self._settings)),
            cwd=self._settings.home,
            start_new_session=True,  # a terminal's Ctrl-C is for us
        )
        self._started_at = time.monotonic()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(orders.model_dump_json().encode() + b"\n")
            self._process.stdin.flush()


def _close(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
