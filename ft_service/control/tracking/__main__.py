"""The process that sends metrics: `python -m ft_service.control.tracking OWNER PARENT`, with its Orders as a line on stdin.

It ends when stdin does, when there was nothing to do for a while, when something went wrong that only its end puts right, and
with its parent. Runs that are open then stay open for W&B: the next process goes on with them.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ft_service import logs
from ft_service.control.tracking.orders import Orders
from ft_service.control.tracking.points import RunDescription
from ft_service.control.tracking.sender import LEASE_SECONDS, Run, RunError, Sender
from ft_service.errors import UnavailableError
from ft_service.host.lifetime import die_with_parent
from ft_service.store.sql import open_store

log = logging.getLogger("ft_service.control.tracking")

IDLE_SECONDS = 60.0
"""Without anything to look after, until the process ends and frees its memory."""
AGAIN = 75
"""Exit code: to be started again."""


def main(arguments: Sequence[str]) -> int:
    owner, parent = arguments
    die_with_parent(int(parent))
    orders = Orders.model_validate_json(sys.stdin.readline())
    logs.configure(orders.log_level, orders.log_format)
    shutil.rmtree(orders.folder, ignore_errors=True)
    orders.folder.mkdir(mode=0o700, parents=True)
    sender = Sender(open_store(orders.database_url), partial(_open, orders), owner)
    try:
        return _send(sender, orders.turn_seconds)
    except UnavailableError as error:
        log.warning("%s", error.message)
        return AGAIN
    finally:
        _end_children()
        shutil.rmtree(orders.folder, ignore_errors=True)


def _open(orders: Orders, run: RunDescription) -> Run:
    """A run of the kind that the job asks for. Its package is imported when the first is. Raises RunError."""
    if run.kind == "mlflow":
        if orders.mlflow_tracking_uri is None:
            raise RunError("the server has no FT_MLFLOW_TRACKING_URI any more", clean=True)
        from ft_service.control.tracking.mlflow_run import MlflowAccount, MlflowRun

        own = MlflowAccount(orders.mlflow_tracking_uri, orders.mlflow_token, orders.transmit_seconds)
        own.enter()
        return MlflowRun(own, run)
    if run.kind == "trackio":
        if orders.trackio_url is None:
            raise RunError("the server has no FT_TRACKIO_URL any more", clean=True)
        from ft_service.control.tracking.trackio_run import TrackioAccount, TrackioRun

        place = TrackioAccount(orders.trackio_url, orders.trackio_token, orders.transmit_seconds)
        place.enter()
        return TrackioRun(place, run)
    if orders.api_key is None:
        raise RunError("the server has no FT_WANDB_API_KEY any more", clean=True)
    from ft_service.control.tracking.wandb_run import Account, WandbRun

    return WandbRun(Account(orders.base_url, orders.api_key, orders.folder, orders.transmit_seconds), run)


def _send(sender: Sender, turn_seconds: float) -> int:
    sender.release()  # what the process before had, which is gone
    busy_at = time.monotonic()
    while not (sender.broken or sender.spent):
        signal.alarm(int(LEASE_SECONDS))  # a turn that hangs in the SDK ends the process
        if sender.turn():
            busy_at = time.monotonic()
        idle = time.monotonic() - busy_at > IDLE_SECONDS
        if idle or select.select([sys.stdin], [], [], turn_seconds)[0]:
            sender.release()
            return 0
    sender.release()
    return AGAIN if sender.broken else 0


def _end_children() -> None:
    """The SDK's own process would end by itself, but as nobody's child: in a container nobody would reap it."""
    for path in Path("/proc/self/task").glob("*/children"):
        for pid in map(int, path.read_text().split()):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


if __name__ == "__main__":
    # Not by way of the interpreter's end, where the SDK would wait for its runs and end them.
    code = AGAIN
    try:
        code = main(sys.argv[1:])
    except Exception:
        log.exception("sending metrics has failed")
    finally:
        os._exit(code)
