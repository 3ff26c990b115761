"""Pulls that the server makes: what was asked for, how far each is, and why one has failed.

    <model folder>/.pulls/pull-<id>.json    Pull, beside the folder that its files arrive in
    <model folder>/.pulls/pulls.lock        held while one of them is changed
    <model folder>/.pulls/running.lock      held by the server that fetches (pull_runner.py)

    queued → fetching → found                        only looked up: all but the weights is here
    queued → fetching (→ verifying) → done           fetched; the base is in its place
              └→ stopped, failed → queued            go_on: it goes on with what has arrived

All servers that see the folder of models show the same pulls, and so does one that was started
again: a pull whose server has ended waits for the next one.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from ft_service.bases import hub
from ft_service.control.bases.pulling import folder_for, pull_folder
from ft_service.errors import LimitError, NotFoundError, SpecError
from ft_service.host.lifetime import exclusive, is_locked
from ft_service.ids import new_id
from ft_service.rundir.directory import RunDir
from ft_service.settings import Settings

State = Literal["queued", "fetching", "found", "done", "failed", "stopped"]
"""States in which pulls are kept."""
ShownState = Literal[State, "verifying"]
PREFIX = "pull-"
WAITING: frozenset[State] = frozenset({"queued", "fetching"})
"""States of pulls that a server has work with."""
MOST_WAITING = 20
MOST_KEPT = 50
"""Pulls that are listed. The oldest that are done make room for new ones."""
_ID = re.compile(rf"{PREFIX}[A-Za-z0-9]{{1,64}}")
_CHANGES = "pulls.lock"
_RUNNING = "running.lock"


class Pull(BaseModel):
    """A base that the server fetches, or looks up."""

    model_config = ConfigDict(frozen=True)

    id: str
    repository: str
    revision: str
    """As it was named: `main` unless another one was."""
    name: str
    """The base's name here."""
    look: bool
    """Whether only its small files are wanted, with which it is described and planned."""
    anyway: bool = False
    """Whether its weights are wanted even if it cannot be tuned here."""
    state: State = "queued"
    created_at: float
    commit: str | None = None
    """The commit that is fetched. None: it was not looked up yet."""
    staged: str | None = None
    """Name of the folder in which its files arrive."""
    licence: str | None = None
    bytes: int | None = None
    """Bytes of all files that are fetched."""
    trainable: bool | None = None
    """Whether it can be tuned here. None: its small files do not say it, or are not here."""
    why_not: str | None = None
    error: str | None = None
    """Why it has failed or was stopped."""
    code: str | None = None
    began_at: float | None = None
    """When this try began to fetch."""
    began_with: int = 0
    """Bytes that were here then."""


class PullFolder:
    """The pulls of a folder of models. Every method may be called by several servers at once."""

    def __init__(self, models: Path) -> None:
        self.models = models
        self.path = models / hub.STAGED
        self._documents = RunDir(self.path)

    @classmethod
    def of(cls, settings: Settings) -> PullFolder | None:
        """The folder that this service fetches into; None: it has none."""
        folder = pull_folder(settings.model_folders())
        return None if folder is None else cls(folder)

    @property
    def running_lock(self) -> Path:
        """Held by the server that fetches."""
        return self.path / _RUNNING

    def pulls(self) -> list[Pull]:
        """All pulls, the newest first."""
        found = (
            self._documents.readable(path.name, Pull) for path in self.path.glob(f"{PREFIX}*.json")
        )
        return sorted((pull for pull in found if pull), key=lambda pull: -pull.created_at)

    def find(self, pull_id: str) -> Pull:
        """A pull by its id. Raises NotFoundError."""
        pull = self._documents.readable(f"{pull_id}.json", Pull) if _ID.fullmatch(pull_id) else None
        if pull is None:
            raise NotFoundError(f"There is no pull {pull_id[:80]!r}.")
        return pull

    def progress(self, pull: Pull) -> tuple[ShownState, int]:
        """Its state as it is now, and how many bytes of its files are here. One whose server has
        ended waits; one that has all of its files is compared with the hub's digests.
        """
        staged = self.staged(pull)
        arrived = 0 if staged is None else hub.held(staged)
        if pull.state == "done":
            return "done", pull.bytes or 0
        if pull.state == "fetching" and not is_locked(self.running_lock):
            return "queued", arrived
        if pull.state == "fetching" and pull.bytes is not None and arrived >= pull.bytes:
            return "verifying", arrived
        return pull.state, arrived

    def staged(self, pull: Pull) -> Path | None:
        """The folder in which its files arrive; None: there is none now."""
        folder = None if pull.staged is None else self.path / pull.staged
        return folder if folder is not None and folder.is_dir() else None

    def add(self, model: str, name: str | None, *, look: bool, anyway: bool) -> Pull:
        """Ask for a base. A pull of it that is not done goes on.

        `model`: ORG/NAME[@REVISION]; `name`: its name here, None: ORG/NAME. Raises SpecError,
        LimitError.
        """
        repository, revision = hub.parse_name(model)
        called = repository if name is None else name
        folder_for(called, [self.models], field="name")
        if (self.models / called).exists():
            raise SpecError(
                f"There is a base {called} already: train on it, or give this one another name.",
                param="model",
                code="model_exists",
            )
        with self._changing():
            there = self.pulls()
            unfinished = [pull for pull in there if pull.state != "done"]
            same = (repository, revision, called)
            for pull in unfinished:
                if (pull.repository, pull.revision, pull.name) == same:
                    return self._asked_again(pull, look=look, anyway=anyway)
                if called == pull.name or repository == pull.repository:
                    raise SpecError(
                        f"{pull.id} fetches {pull.repository}@{pull.revision} as {pull.name} "
                        "already: wait until it is done, or remove it.",
                        param="model",
                        code="pull_exists",
                    )
            if len(unfinished) >= MOST_KEPT:
                raise LimitError(
                    f"{len(unfinished)} pulls are not done, and at most {MOST_KEPT} are kept. "
                    "Remove those that are not needed.",
                    code="queue_limit",
                )
            self._require_turn(there)
            for old in [pull for pull in there if pull.state == "done"][MOST_KEPT - 1 :]:
                self._document(old).unlink(missing_ok=True)
            return self._write(
                Pull(
                    id=new_id(PREFIX),
                    repository=repository,
                    revision=revision,
                    name=called,
                    look=look,
                    anyway=anyway,
                    created_at=time.time(),
                )
            )

    def go_on(self, pull_id: str, *, anyway: bool = False) -> Pull:
        """Fetch a base that was looked up, or go on with a pull that was stopped or has failed.

        Raises NotFoundError, SpecError if it is done, LimitError.
        """
        self.find(pull_id)  # before anything is written
        with self._changing():
            pull = self.find(pull_id)
            if pull.state == "done":
                raise SpecError(f"{pull.id} is done: {pull.name} is here.", code="pull_is_done")
            return self._asked_again(pull, look=False, anyway=anyway)

    def stop(self, pull_id: str) -> Pull:
        """Stop a pull that waits or runs, and keep what has arrived.

        Raises NotFoundError, SpecError if it does neither.
        """
        self.find(pull_id)  # before anything is written
        with self._changing():
            pull = self.find(pull_id)
            if pull.state == "stopped":
                return pull
            if pull.state not in WAITING:
                raise SpecError(
                    f"{pull.id} is {pull.state}: only a pull that waits or runs can be stopped.",
                    code="pull_is_over",
                )
            return self._write(pull.model_copy(update={"state": "stopped", "error": None}))

    def remove(self, pull_id: str) -> None:
        """Forget a pull, with what has arrived unless it is done; a base that is here stays.

        Raises NotFoundError.
        """
        self.find(pull_id)  # before anything is written
        with self._changing():
            pull = self.find(pull_id)
            self._document(pull).unlink(missing_ok=True)
        self.remove_staged(pull)

    def remove_staged(self, pull: Pull) -> None:
        if pull.state != "done" and (staged := self.staged(pull)) is not None:
            shutil.rmtree(staged, ignore_errors=True)

    def change(self, pull: Pull, expected: Collection[State], **changes: object) -> Pull | None:
        """Change a pull; None: its state is none of those expected, or it was removed."""
        with self._changing():
            now = self._documents.readable(f"{pull.id}.json", Pull)
            if now is None or now.state not in expected:
                return None
            return self._write(now.model_copy(update=changes))

    def _asked_again(self, pull: Pull, *, look: bool, anyway: bool) -> Pull:
        if pull.state in WAITING or (look and pull.state == "found"):
            changes = {"look": pull.look and look, "anyway": pull.anyway or anyway}
        else:
            self._require_turn(self.pulls())
            changes = {"look": look, "anyway": anyway, "state": "queued"}
            changes |= {"error": None, "code": None}
        return self._write(pull.model_copy(update=changes))

    def _require_turn(self, pulls: Sequence[Pull]) -> None:
        waiting = sum(pull.state in WAITING for pull in pulls)
        if waiting >= MOST_WAITING:
            raise LimitError(
                f"{waiting} pulls wait, and at most {MOST_WAITING} may. Wait until one is done, or "
                "stop one.",
                code="queue_limit",
            )

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock on the pulls. Raises SpecError for a folder that cannot be written."""
        try:
            with exclusive(self.path / _CHANGES):
                yield
        except OSError as error:
            raise SpecError(
                f"{self.models} cannot be written: {error.strerror or error}. Bases are fetched "
                "into it: make it writable for the service, or name another folder first in "
                "FT_MODELS.",
                param="FT_MODELS",
                code="models_not_writable",
            ) from None

    def _write(self, pull: Pull) -> Pull:
        self._documents.write(f"{pull.id}.json", pull)
        return pull

    def _document(self, pull: Pull) -> Path:
        return self.path / f"{pull.id}.json"


def staged_bases(settings: Settings) -> Iterator[tuple[str, Path]]:
    """(name, folder with all files but the weights) of every base that is not here yet, as far as
    it was looked up.
    """
    folder = PullFolder.of(settings)
    if folder is None:
        return
    for pull in folder.pulls():
        if pull.state != "done" and (staged := folder.staged(pull)) is not None:
            yield pull.name, staged
