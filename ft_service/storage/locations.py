"""Locations of files: below FT_HOME on this host or a shared volume, or on object storage
(FT_STORAGE).

With FT_STORAGE, the service's processes share only the database and the objects. An object's key is
its path below FT_HOME. A file is downloaded to that path before it is read, so paths in a spec are
valid on every node.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from ft_service.bases import cache_folder
from ft_service.bases.describing import DESCRIPTIONS
from ft_service.data import token_folder
from ft_service.rundir.attempt import ATTEMPTS
from ft_service.rundir.checkpoints import CHECKPOINT_ADAPTER, checkpoint_key, marker_key
from ft_service.rundir.directory import (
    MOST_BYTES,
    RunDir,
    UnreadableDocumentError,
    sync_folder,
)
from ft_service.rundir.engine import ENGINES, data_folder
from ft_service.rundir.project_runs import RUNS, move_run, remove_run, run_root
from ft_service.settings import Settings
from ft_service.storage.object_store import ObjectStore

UPLOADS = "uploads"
"""Folder of the parts of uploads that are not completed, in a folder for each upload."""


class ObjectRunDir(RunDir):
    """Run directory on object storage.

    Documents are read and written there; `root` contains copies of what `path` returned.
    """

    def __init__(self, objects: ObjectStore, prefix: str, root: Path) -> None:
        super().__init__(root)
        self._objects = objects
        self._prefix = prefix

    def path(self, key: str) -> Path:
        """Return the path of a current copy of a file, or of a folder with its contents."""
        full = f"{self._prefix}/{key}"
        sizes = self._objects.list(full)
        if not sizes and (size := self._objects.size(full)) is not None:
            sizes = {full: size}
        for name, size in sizes.items():
            if ".." in name.split("/"):  # not written by the service
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
        """Return None: object storage checks the objects itself, and the process that downloads a
        file checks its digest.
        """
        return None


class Places:
    """Paths of the run directories and data files of one service."""

    def __init__(
        self,
        home: Path,
        objects: ObjectStore | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`objects`: None: everything is below `home`, which all processes share. `environment`:
        may set other folders of this host (FT_TOKENS)."""
        self.files_dir = home / "files"
        self.tokens_dir = token_folder.folder_of(environment or {}, home)
        """Folder for the tokens of data files, on this host or the volume; None: they are not
        kept.
        """
        self._home = home
        self._runs_dir = home / RUNS
        self.engines_dir = home / ENGINES
        """Folder of the engines' directories, at the path that their ranks have."""
        self._cache_dir = cache_folder.folder_of(environment or {}, home) or home / "cache"
        self._uploads_dir = home / UPLOADS
        self._objects = objects
        self._lock = threading.Lock()

    @property
    def objects(self) -> ObjectStore | None:
        """Object storage; None: everything is below FT_HOME."""
        return self._objects

    @classmethod
    def of(cls, settings: Settings) -> Places:
        """Return the places of the settings. Raises SpecError if FT_STORAGE is not a usable URL."""
        return cls(
            settings.home, ObjectStore(settings.storage) if settings.storage else None, os.environ
        )

    def run(self, job_id: str) -> RunDir:
        """Return the run directory of a job. Raises FtError as `run_root`."""
        if self._objects is None:
            return RunDir(run_root(self._home, job_id))
        return ObjectRunDir(self._objects, f"runs/{job_id}", self._runs_dir / job_id)

    def run_of_project(self, project_id: str, job_id: str) -> RunDir:
        """Return the run directory of a job, which does not run, after moving it to the folder of
        its project.
        """
        return RunDir(move_run(self._home, project_id, job_id))

    def engine(self, engine_id: str) -> RunDir:
        """Return the directory of an engine, which is a run directory."""
        root = self.engines_dir / engine_id
        if self._objects is None:
            return RunDir(root)
        return ObjectRunDir(self._objects, f"{ENGINES}/{engine_id}", root)

    def engine_ids(self) -> set[str]:
        """Return the names of what is in the folder of the engines' directories."""
        if self._objects is not None:
            return set(self._objects.names(ENGINES))
        return {path.name for path in self.engines_dir.glob("*")}

    def remove_engine(self, engine_id: str) -> None:
        """Remove the directory of an engine, which has ended, and what its ranks were shown.

        Raises OSError and UnavailableError.
        """
        root = self.engines_dir / engine_id
        shutil.rmtree(data_folder(root), ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(root)
        if self._objects is not None:
            for key in self._objects.list(f"{ENGINES}/{engine_id}"):
                self._objects.remove(key)

    def remove_run(self, job_id: str) -> None:
        """Remove the run directory of a job, which is over, if it exists. Raises OSError."""
        remove_run(self._home, job_id)
        if self._objects is not None:
            for key in self._objects.list(f"{RUNS}/{job_id}"):
                self._objects.remove(key)

    def descriptions(self) -> RunDir:
        """Return the folder of descriptions of bases, which are documents as in a run directory."""
        root = self._cache_dir / DESCRIPTIONS
        return (
            RunDir(root)
            if self._objects is None
            else ObjectRunDir(self._objects, DESCRIPTIONS, root)
        )

    def whole_run(self, job_id: str, checkpoint: str) -> Path:
        """Download the files needed to convert a checkpoint to an adapter, and return the path of
        the run directory.
        """
        run = self.run(job_id)
        if self._objects is None:
            return run.root
        folder = checkpoint_key(checkpoint)
        if run.list(
            f"{folder}/{CHECKPOINT_ADAPTER}"
        ):  # the adapter was written with the checkpoint
            keys = [marker_key(checkpoint), f"{folder}/{CHECKPOINT_ADAPTER}"]
        else:
            keys = [folder, "spec.json", "origins.json", ATTEMPTS]
        for key in keys:
            run.path(key)
        return run.root

    def share(self, folder: Path) -> None:
        """Upload a folder that was written in a run directory, for workers."""
        if self._objects is not None:
            for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                self._objects.upload(path, f"runs/{path.relative_to(self._runs_dir).as_posix()}")

    def file(self, file_id: str) -> Path:
        """Return the path of a stored file, which may not exist."""
        path = self.files_dir / file_id
        if self._objects is not None:
            with (
                self._lock
            ):  # the downloads of two requests for one file must not share a temporary file
                if not path.is_file() and self._objects.size(f"files/{file_id}") is not None:
                    self._objects.download(f"files/{file_id}", path)
        return path

    def fetched(self, path: Path) -> Path:
        """Return a path of a spec after downloading its contents: a stored file, or a part of a run
        directory.
        """
        if path.parent == self.files_dir:
            return self.file(path.name)
        if self._objects is not None and path.is_relative_to(self._runs_dir):
            job_id, _, key = path.relative_to(self._runs_dir).as_posix().partition("/")
            return self.run(job_id).path(key)
        return path

    def keep(self, file_id: str) -> None:
        """Upload a file that was written below `files_dir`. Call it before its record is stored."""
        if self._objects is not None:
            self._objects.upload(self.files_dir / file_id, f"files/{file_id}")

    def arrival_folder(self, upload_id: str) -> Path:
        """Return the folder for a part of an upload while it arrives. On object storage it is not
        the upload's own, which the process that ends the upload would not find.
        """
        return self._uploads_dir / upload_id if self._objects is None else self.files_dir

    def keep_part(self, upload_id: str, part_id: str, path: Path) -> None:
        """Keep a received part of an upload, durably, where every process finds it.

        Raises FileNotFoundError if the upload's folder is gone, since it has just ended, and
        UnavailableError.
        """
        if self._objects is not None:
            self._objects.upload(path, f"{UPLOADS}/{upload_id}/{part_id}")
            return
        path.rename(self._uploads_dir / upload_id / part_id)
        sync_folder(self._uploads_dir / upload_id)

    @contextlib.contextmanager
    def opened_part(self, upload_id: str, part_id: str) -> Iterator[BinaryIO]:
        """Open a part for reading. Raises FileNotFoundError if it is gone, and UnavailableError."""
        if self._objects is None:
            with (self._uploads_dir / upload_id / part_id).open("rb") as part:
                yield part
            return
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / part_id
            self._objects.download(f"{UPLOADS}/{upload_id}/{part_id}", copy)
            with copy.open("rb") as part:
                yield part

    def remove_part(self, upload_id: str, part_id: str) -> None:
        if self._objects is not None:
            self._objects.remove(f"{UPLOADS}/{upload_id}/{part_id}")
        else:
            (self._uploads_dir / upload_id / part_id).unlink(missing_ok=True)

    def uploads_with_parts(self) -> set[str]:
        """Return the ids of the uploads of which there are parts, and the names of what else is in
        their folder, such as the `lost+found` of a volume.
        """
        if self._objects is not None:
            return set(self._objects.names(UPLOADS))
        return {path.name for path in self._uploads_dir.glob("*")}

    def remove_parts(self, upload_id: str) -> None:
        """Remove the parts of an upload that has ended. Raises OSError, UnavailableError."""
        if self._objects is None:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self._uploads_dir / upload_id)
            return
        for key in self._objects.list(f"{UPLOADS}/{upload_id}"):
            self._objects.remove(key)

    def share_tokens(self, sha256: str) -> None:
        """Upload the tokens of a data file, if they are kept, for workers."""
        if self._objects is None or self.tokens_dir is None:
            return
        for entry in token_folder.entries_of(self.tokens_dir, sha256):
            prefix = f"{token_folder.IN_HOME}/{entry.name}"
            sizes = self._objects.list(prefix)
            for path in sorted(entry.iterdir()):
                if sizes.get(f"{prefix}/{path.name}") != path.stat().st_size:
                    self._objects.upload(path, f"{prefix}/{path.name}")

    def remove_tokens(self, sha256: str) -> None:
        """Remove the tokens of a data file, if there are any."""
        token_folder.remove_entries(self.tokens_dir, sha256)
        if self._objects is not None:
            for key in self._objects.list(token_folder.IN_HOME):
                if key.startswith(f"{token_folder.IN_HOME}/{sha256}."):
                    self._objects.remove(key)

    def remove(self, file_id: str) -> None:
        """Remove a file, if it exists."""
        (self.files_dir / file_id).unlink(missing_ok=True)
        if self._objects is not None:
            self._objects.remove(f"files/{file_id}")
