"""Object storage through fsspec: objects below one URL, each written whole or not at all, with the
operations that a run directory needs.
"""

from __future__ import annotations

import contextlib
import importlib
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ft_service.errors import FtError, SpecError, UnavailableError

PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}
"""Scheme of a URL → package that implements it."""


CONNECT_SECONDS = 5
SILENT_SECONDS = 15
"""Longest silence within an answer of S3. With the tries, an operation fails within two minutes."""
_TRIES = 3
"""Tries by s3fs, in each of which botocore asks twice."""
_RIGHTS = {
    "reading": "s3:GetObject (storage.objects.get)",
    "writing": "s3:PutObject (storage.objects.create)",
    "listing": "s3:ListBucket (storage.objects.list)",
    "removing": "s3:DeleteObject (storage.objects.delete)",
}
"""What is done → the right to it on S3 and on Google's storage."""


@dataclass(frozen=True)
class StoredObject:
    """What the storage tells of an object."""

    bytes: int
    changed_at: float | None
    """When it was written, in seconds since the epoch by the storage's clock; None: untold."""

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> StoredObject:
        """From fsspec's description: s3fs and gcsfs name the time differently."""
        at = info.get("LastModified", info.get("mtime"))
        return cls(info["size"], at.timestamp() if isinstance(at, datetime) else None)


class ObjectStore:
    """Objects below a URL such as `s3://bucket/prefix`.

    Methods raise UnavailableError if the storage does not answer.
    """

    def __init__(self, url: str, **options: Any) -> None:
        """`options`: those of fsspec's file system. Raises SpecError for another scheme, and if its
        package is not installed."""
        scheme, _, rest = url.partition("://")
        package = PACKAGES.get(scheme)
        if package is None or not rest.strip("/"):
            raise SpecError(
                f"FT_STORAGE = {url!r}: expected s3://bucket/prefix or gs://bucket/prefix.",
                param="FT_STORAGE",
            )
        try:
            importlib.import_module(package)
        except ModuleNotFoundError:
            message = (
                f"FT_STORAGE = {url!r}: {package} is not installed: pip install "
                f"'ft-service[{scheme}]'."
            )
            raise SpecError(message, param="FT_STORAGE") from None
        self.url = url.rstrip("/")
        self._root = rest.strip("/")
        fsspec = importlib.import_module("fsspec")
        if scheme == "s3":
            bounds = {"connect_timeout": CONNECT_SECONDS, "read_timeout": SILENT_SECONDS}
            tries = {"retries": {"max_attempts": 1}}
            options["config_kwargs"] = bounds | tries | options.get("config_kwargs", {})
        # A cached listing would hide what other processes write.
        self._fs: Any = fsspec.filesystem(
            scheme, use_listings_cache=False, skip_instance_cache=True, **options
        )
        if scheme == "s3":
            self._fs.retries = _TRIES

    def get(self, key: str, most: int | None = None) -> bytes | None:
        """Return the first `most` bytes of an object (None: all); None: it does not exist."""
        with self._errors("reading", key):
            try:
                if most is None:
                    return self._fs.cat_file(self._path(key))
                return self._fs.cat_file(self._path(key), start=0, end=most)
            except FileNotFoundError:
                return None
            except Exception:
                if (
                    most is None or self._fs.info(self._path(key))["size"]
                ):  # an empty object has no range
                    raise
                return b""

    def put(self, key: str, body: bytes) -> None:
        with self._errors("writing", key):
            self._fs.pipe_file(self._path(key), body)

    def put_if_absent(self, key: str, body: bytes) -> bool:
        """Write an object unless the key exists. True if this call wrote it."""
        with self._errors("writing", key):
            try:
                self._fs.pipe_file(self._path(key), body, mode="create")
            except FileExistsError:
                return False
            return True

    def list(self, prefix: str) -> dict[str, int]:
        """Return key → size in bytes of every object below a folder."""
        return {key: found.bytes for key, found in self.entries(prefix).items()}

    def entries(self, prefix: str) -> dict[str, StoredObject]:
        """Return key → size and age of every object below a folder."""
        base = self._path(prefix).rstrip("/")
        with self._errors("listing", prefix):
            objects = self._fs.find(base, detail=True)
        return {
            path[len(self._root) + 1 :]: StoredObject.of(info)
            for path, info in objects.items()
            if path.startswith(f"{base}/")
        }

    def entry(self, key: str) -> StoredObject | None:
        """Return size and age of an object; None: it does not exist."""
        with self._errors("reading", key):
            try:
                return StoredObject.of(self._fs.info(self._path(key)))
            except FileNotFoundError:
                return None

    def names(self, prefix: str) -> list[str]:
        """Return the names directly below a folder, of objects and of folders."""
        base = self._path(prefix).rstrip("/")
        with self._errors("listing", prefix):
            try:
                paths = self._fs.ls(base, detail=False)
            except FileNotFoundError:
                return []
        return sorted(
            path[len(base) + 1 :].rstrip("/") for path in paths if path.startswith(f"{base}/")
        )

    def size(self, key: str) -> int | None:
        """Return the size of an object in bytes; None: it does not exist."""
        found = self.entry(key)
        return None if found is None else found.bytes

    def upload(self, path: Path, key: str) -> None:
        with self._errors("writing", key):
            self._fs.put_file(str(path), self._path(key))

    def upload_if_absent(self, path: Path, key: str) -> bool:
        """Upload a file unless the key exists. True if this call uploaded it."""
        with self._errors("writing", key):
            try:
                self._fs.put_file(str(path), self._path(key), mode="create")
            except FileExistsError:
                return False
            return True

    def download(self, key: str, path: Path) -> None:
        """Download an object to a file that appears complete or not at all.

        Raises FileNotFoundError if it does not exist.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        # Two requests may download one object at once.
        partial = path.with_name(f".tmp-{uuid.uuid4().hex}")
        try:
            with self._errors("reading", key):
                self._fs.get_file(self._path(key), str(partial))
            partial.replace(path)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{self.url} holds no {key}") from error
        finally:
            partial.unlink(missing_ok=True)

    def remove(self, key: str) -> None:
        with self._errors("removing", key), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(key))

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    @contextlib.contextmanager
    def _errors(self, doing: str, key: str) -> Iterator[None]:
        """Convert the errors of fsspec's clients to UnavailableError."""
        try:
            yield
        except (FileNotFoundError, FileExistsError, FtError):
            raise
        except Exception as error:
            if isinstance(error, PermissionError) or str(error).startswith("Forbidden"):
                raise UnavailableError(
                    f"{self.url} denies {doing} {key}: {str(error)[:500]} Its credentials are wrong "
                    f"or have expired, or lack {_RIGHTS[doing]} there.",
                    code="storage_denied",
                ) from error
            raise UnavailableError(
                f"{self.url} cannot be used: {doing} {key}: {type(error).__name__}: {error}"
            ) from error
