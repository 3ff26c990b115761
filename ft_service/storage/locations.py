"""The places of files, decided here alone: below FT_HOME on this host or a shared volume, or on object storage (FT_STORAGE).

With FT_STORAGE the service's processes share nothing but the database and the objects: every key is a path below FT_HOME, and
a file that is read is fetched to that very path. Paths that a spec names are therefore right on every node.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path

from ft_service.data import token_folder
from ft_service.rundir.attempt import ATTEMPTS
from ft_service.rundir.checkpoints import CHECKPOINT_ADAPTER, checkpoint_key, marker_key
from ft_service.rundir.directory import MOST_BYTES, RunDir, UnreadableDocumentError
from ft_service.settings import Settings
from ft_service.storage.object_store import ObjectStore


class ObjectRunDir(RunDir):
    """A run directory on object storage. Documents are read and written there; `root` holds copies of what `path` returned."""

    def __init__(self, objects: ObjectStore, prefix: str, root: Path) -> None:
        super().__init__(root)
        self._objects = objects
        self._prefix = prefix

    def path(self, key: str) -> Path:
        """The path of a current copy of the file, or of the folder with all that is below it."""
        full = f"{self._prefix}/{key}"
        sizes = self._objects.list(full)
        if not sizes and (size := self._objects.size(full)) is not None:
            sizes = {full: size}
        for name, size in sizes.items():
            if ".." in name.split("/"):  # of no process of ours
                continue
            copy = self.root / name.removeprefix(f"{self._prefix}/")
            if not copy.is_file() or copy.stat().st_size != size:
                self._objects.download(name, copy)
        return self.root / key

    def get(self, key: str, most: int = MOST_BYTES) -> bytes | None:
        body = self._objects.get(f"{self._prefix}/{key}", most + 1)
        if body is not None and len(body) > most:
            raise UnreadableDocumentError(key, f"it has more than {most:,} bytes")
        return body

    def has(self, key: str) -> bool:
        return self._objects.get(f"{self._prefix}/{key}", 1) is not None

    def put(self, key: str, body: bytes) -> None:
        self._objects.put(f"{self._prefix}/{key}", body)

    def put_if_absent(self, key: str, body: bytes) -> bool:
        return self._objects.put_if_absent(f"{self._prefix}/{key}", body)

    def list(self, prefix: str) -> list[str]:
        below = self._objects.list(f"{self._prefix}/{prefix}")
        return sorted(name.removeprefix(f"{self._prefix}/") for name in below)

    def size(self, key: str) -> int | None:
        return self._objects.size(f"{self._prefix}/{key}")

    def digest(self, key: str) -> str | None:
        """None: storage keeps what was written, and the process that fetches the file checks its digest."""
        return None


class Places:
    """Run directories and data files of one service."""

    def __init__(self, home: Path, objects: ObjectStore | None = None, environment: Mapping[str, str] | None = None) -> None:
        """`objects` None: everything is below `home`, which all processes share. `environment`: may name other folders of this
        host's own (FT_TOKENS)."""
        self.files_dir = home / "files"
        self.tokens_dir = token_folder.folder_of(environment or {}, home)
        """Where the tokens of data files are kept, on this host or the volume; None: nowhere."""
        self._runs_dir = home / "runs"
        self._objects = objects
        self._lock = threading.Lock()

    @classmethod
    def of(cls, settings: Settings) -> Places:
        """Places by the settings. Raises SpecError if FT_STORAGE is no usable URL."""
        return cls(settings.home, ObjectStore(settings.storage) if settings.storage else None, os.environ)

    def run(self, job_id: str) -> RunDir:
        """The run directory of a job."""
        root = self._runs_dir / job_id
        return RunDir(root) if self._objects is None else ObjectRunDir(self._objects, f"runs/{job_id}", root)

    def whole_run(self, job_id: str, checkpoint: str) -> Path:
        """The folder of a run directory with everything in it that making a checkpoint's adapter needs."""
        run = self.run(job_id)
        if self._objects is None:
            return run.root
        folder = checkpoint_key(checkpoint)
        if run.list(f"{folder}/{CHECKPOINT_ADAPTER}"):  # it holds its adapter itself
            keys = [marker_key(checkpoint), f"{folder}/{CHECKPOINT_ADAPTER}"]
        else:
            keys = [folder, "spec.json", "origins.json", ATTEMPTS]
        for key in keys:
            run.path(key)
        return run.root

    def share(self, folder: Path) -> None:
        """Put a folder that was made in a run directory here where workers find it."""
        if self._objects is not None:
            for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                self._objects.upload(path, f"runs/{path.relative_to(self._runs_dir).as_posix()}")

    def file(self, file_id: str) -> Path:
        """The path of a stored file's bytes; there may be no such file."""
        path = self.files_dir / file_id
        if self._objects is not None:
            with self._lock:  # the downloads of two requests for one file must not share a temporary file
                if not path.is_file() and self._objects.size(f"files/{file_id}") is not None:
                    self._objects.download(f"files/{file_id}", path)
        return path

    def fetched(self, path: Path) -> Path:
        """A path that a spec names, with its contents in place: a stored file, or something of a run directory."""
        if path.parent == self.files_dir:
            return self.file(path.name)
        if self._objects is not None and path.is_relative_to(self._runs_dir):
            job_id, _, key = path.relative_to(self._runs_dir).as_posix().partition("/")
            return self.run(job_id).path(key)
        return path

    def keep(self, file_id: str) -> None:
        """Put a file that was written below `files_dir` where every process finds it. Call it before its record is stored."""
        if self._objects is not None:
            self._objects.upload(self.files_dir / file_id, f"files/{file_id}")

    def share_tokens(self, sha256: str) -> None:
        """Put the tokens of a data file, if they are kept, where workers find them."""
        if self._objects is None or self.tokens_dir is None:
            return
        for entry in token_folder.entries_of(self.tokens_dir, sha256):
            prefix = f"{token_folder.IN_HOME}/{entry.name}"
            there = self._objects.list(prefix)
            for path in sorted(entry.iterdir()):
                if there.get(f"{prefix}/{path.name}") != path.stat().st_size:
                    self._objects.upload(path, f"{prefix}/{path.name}")

    def remove_tokens(self, sha256: str) -> None:
        """Remove what a data file was made into. Repeating it does nothing."""
        token_folder.remove_entries(self.tokens_dir, sha256)
        if self._objects is not None:
            for key in self._objects.list(token_folder.IN_HOME):
                if key.startswith(f"{token_folder.IN_HOME}/{sha256}."):
                    self._objects.remove(key)

    def remove(self, file_id: str) -> None:
        """Remove the bytes of a file. Repeating it does nothing."""
        (self.files_dir / file_id).unlink(missing_ok=True)
        if self._objects is not None:
            self._objects.remove(f"files/{file_id}")
