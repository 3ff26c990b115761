"""The loop that fetches bases which the page or the API asked for, one after the other.

Each is fetched by processes of its own (pull_process.py), which end with the server. The next
server goes on with a pull that was being fetched; one whose process was killed is stopped, and goes
on when somebody says so.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ft_service.bases import hub
from ft_service.bases.describing import Descriptions
from ft_service.control.bases.base_pulls import WAITING, Pull, PullFolder, State
from ft_service.control.bases.pulling import described, refusal
from ft_service.errors import FtError, UnavailableError, is_lost
from ft_service.host.environment import NETWORK
from ft_service.host.helper_process import Program, run_once
from ft_service.host.lifetime import try_lock
from ft_service.host.loops import every
from ft_service.meters import Meters
from ft_service.settings import Settings
from ft_service.store.sql import Store

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
WORKER = (sys.executable, "-P", "-m", "ft_service.control.bases.pull_process")
FETCHING: tuple[State, ...] = ("fetching",)
NICENESS = 5
HUB = ("HF_ENDPOINT", "HF_TOKEN", "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_*", "HF_XET_*")
"""Variables of the hub's library."""
KEPT = "What has arrived is kept: go on with it."


@dataclass(frozen=True)
class Puller:
    """What fetches bases into a folder."""

    folder: PullFolder
    descriptions: Descriptions
    command: Sequence[str] = WORKER

    def fetch_all(self, stop: Callable[[], bool]) -> None:
        """Fetch all bases that were asked for, the oldest first, unless another server does.

        `stop`: returns True once the server ends.
        """
        if not any(pull.state in WAITING for pull in self.folder.pulls()):
            return
        lock = try_lock(self.folder.running_lock)
        if lock is None:
            return
        try:
            for pull in reversed(self.folder.pulls()):
                if pull.state in WAITING and not stop():
                    self._fetch(pull, stop)
        finally:
            os.close(lock)

    def _fetch(self, pull: Pull, stop: Callable[[], bool]) -> None:
        began = self.folder.change(pull, WAITING, state="fetching", error=None, code=None)
        if began is None:
            return
        try:
            self._go_through(began, stop)
        except FtError as error:
            self._end_with(began, error, stop)
        except OSError as error:
            self._end_with(began, UnavailableError(f"Its process cannot be started: {error}"), stop)

    def _go_through(self, pull: Pull, stop: Callable[[], bool]) -> None:
        target = self.folder.models / pull.name
        if pull.commit is not None and hub.is_there(target, pull.repository, pull.commit):
            # The process before was killed before it could say so.
            self.folder.change(pull, FETCHING, state="done")
            return
        staged = self.folder.staged(pull)
        if staged is None:
            looked = self._ask("look", pull, stop)
            pull = pull.model_copy(update=looked)
            staged = self.folder.path / looked["staged"]
            if self.folder.change(pull, FETCHING, **looked) is None:
                self._clear(pull)
                return
        refused = refusal(staged, partial(described, descriptions=self.descriptions))
        facts = {"trainable": refused is None, "why_not": refused and refused.message}
        now = {"began_at": time.time(), "began_with": hub.held(staged)}
        judged = self.folder.change(pull, FETCHING, **facts, **now)
        if judged is None:
            return
        if refused is not None and not judged.anyway and not judged.look:
            self.folder.remove_staged(judged)
            raise FtError(f"{refused.message} No weights were fetched.", code=refused.code)
        if judged.look:
            self.folder.change(judged, FETCHING, state="found")
            return
        self._ask("fetch", judged, stop)
        self.folder.change(judged, FETCHING, state="done")
        log.info("%s was fetched into %s", judged.repository, self.folder.models / judged.name)

    def _ask(self, what: str, pull: Pull, stop: Callable[[], bool]) -> Any:
        program = Program(
            command=self.command,
            niceness=NICENESS,
            needs=(*NETWORK, *HUB),
            variables={"PYTHONSAFEPATH": "1", "HF_HUB_DISABLE_TELEMETRY": "1"},
        )
        asked = {"repository", "revision", "commit", "name"}
        request = {"do": what, "models": str(self.folder.models), **pull.model_dump(include=asked)}
        return run_once(program, request, stop=lambda: stop() or self._is_over(pull))

    def _clear(self, pull: Pull) -> None:
        """Remove what has arrived of a pull that was removed meanwhile."""
        if all(each.id != pull.id for each in self.folder.pulls()):
            self.folder.remove_staged(pull)

    def _is_over(self, pull: Pull) -> bool:
        """Whether somebody has stopped or removed it."""
        now = next((each for each in self.folder.pulls() if each.id == pull.id), None)
        return now is None or now.state != "fetching"

    def _end_with(self, pull: Pull, error: FtError, stop: Callable[[], bool]) -> None:
        if self._is_over(pull):
            self._clear(pull)
        elif stop():
            self.folder.change(pull, FETCHING, state="queued")
        elif is_lost(error):
            words = f"{error.message.rstrip('.')}. {KEPT}"
            self.folder.change(pull, FETCHING, state="stopped", error=words, code=error.code)
        else:
            self.folder.change(pull, FETCHING, state="failed", error=error.message, code=error.code)


def run(
    settings: Settings,
    store: Store,
    meters: Meters,
    stop: threading.Event,
    *,
    descriptions: Descriptions,
) -> None:
    """Fetch bases until `stop` is set."""
    folder = PullFolder.of(settings)
    if folder is not None:
        puller = Puller(folder, descriptions)
        every(POLL_SECONDS, lambda: puller.fetch_all(stop.is_set), stop, "fetching bases")
