"""Periodic work of a service in a thread of its own, whose errors end neither the loop nor the
turns of other items.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

from ft_service.errors import FtError, UnavailableError

log = logging.getLogger(__name__)

MOST_SECONDS = 60.0
"""Longest pause after errors, unless the usual one is longer."""


class Interval:
    """A task that is due again some seconds after it was last done. For one thread."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = 0.0

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._next

    def restart(self, seconds: float | None = None) -> None:
        """Note that the task was done. `seconds`: until it is due again; None: as always."""
        self._next = time.monotonic() + (self._seconds if seconds is None else seconds)


def every(seconds: float, work: Callable[[], object], stop: threading.Event, what: str) -> None:
    """Call `work` every `seconds` until `stop` is set, and at least once unless it already is.

    An error does not end the loop: it is logged with `what`, such as "handing over tuned models",
    and each further error in a row doubles the pause, up to MOST_SECONDS. An UnavailableError is
    logged without its traceback.
    """
    failures = 0
    while not stop.is_set():
        pause = seconds
        try:
            work()
            failures = 0
        except Exception as error:
            pause = max(seconds, min(seconds * 2**failures, MOST_SECONDS))
            failures = min(failures + 1, 30)
            message = "%s has failed; the next try is in %g seconds"
            if isinstance(error, UnavailableError):
                log.warning(f"{message}: %s", what, pause, error.message)
            else:
                log.exception(message, what, pause)
        stop.wait(pause)


@contextlib.contextmanager
def log_errors(what: str) -> Iterator[None]:
    """Log an OSError or FtError of one item of a loop with `what`, such as "removing run 7", so
    that the others get their turn.

    An UnavailableError is raised: what does not answer (the database, object storage) is missing
    for every item.
    """
    try:
        yield
    except UnavailableError:
        raise
    except (OSError, FtError) as error:
        log.warning("%s has failed: %s", what, error)
