"""Object storage through fsspec: objects below one URL, each written whole or not at all.

It gives the operations that a run directory needs: put, put-if-absent, get, list. Nothing else is used.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ft_service.errors import FtError, SpecError, UnavailableError

PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}
"""Scheme of a URL → the package that speaks it."""


class ObjectStore:
    """Objects below a URL such as `s3://bucket/prefix`. Methods raise UnavailableError if the storage does not answer."""

    def __init__(self, url: str, **options: Any) -> None:
        """`options`: the file system's own. Raises SpecError for another scheme, and if its package is not installed."""
        scheme, _, rest = url.partition("://")
        package = PACKAGES.get(scheme)
        if package is None or not rest.strip("/"):
            raise SpecError(f"FT_STORAGE = {url!r}: expected s3://bucket/prefix or gs://bucket/prefix.", param="FT_STORAGE")
        try:
            importlib.import_module(package)
        except ModuleNotFoundError:
            message = f"FT_STORAGE = {url!r}: {package} is not installed: pip install 'ft-service[{scheme}]'."
            raise SpecError(message, param="FT_STORAGE") from None
        self.url = url.rstrip("/")
        self._root = rest.strip("/")
        fsspec = importlib.import_module("fsspec")
        # Others write here too: a listing that was kept would hide it.
        self._fs: Any = fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True, **options)

    def get(self, key: str, most: int | None = None) -> bytes | None:
        """The bytes of an object, the first `most` (None: all of them). None: there is no such object."""
        with self._spoken():
            try:
                if most is None:
                    return self._fs.cat_file(self._path(key))
                return self._fs.cat_file(self._path(key), start=0, end=most)
            except FileNotFoundError:
                return None
            except Exception:
                if most is None or self._fs.info(self._path(key))["size"]:  # of nothing there is no range to give
                    raise
                return b""

    def put(self, key: str, body: bytes) -> None:
        with self._spoken():
            self._fs.pipe_file(self._path(key), body)

    def put_if_absent(self, key: str, body: bytes) -> bool:
        """Write, unless the key exists. True if this call wrote it."""
        with self._spoken():
            try:
                self._fs.pipe_file(self._path(key), body, mode="create")
            except FileExistsError:
                return False
            return True

    def list(self, prefix: str) -> dict[str, int]:
        """Key → size in bytes of every object below a folder."""
        base = self._path(prefix)
        with self._spoken():
            objects = self._fs.find(base, detail=True)
        return {path[len(self._root) + 1 :]: info["size"] for path, info in objects.items() if path.startswith(f"{base}/")}

    def size(self, key: str) -> int | None:
        """Size in bytes. None: there is no such object."""
        with self._spoken():
            try:
                return self._fs.info(self._path(key))["size"]
            except FileNotFoundError:
                return None

    def upload(self, path: Path, key: str) -> None:
        with self._spoken():
            self._fs.put_file(str(path), self._path(key))

    def upload_if_absent(self, path: Path, key: str) -> bool:
        """Upload, unless the key exists. True if this call uploaded it."""
        with self._spoken():
            try:
                self._fs.put_file(str(path), self._path(key), mode="create")
            except FileExistsError:
                return False
            return True

    def download(self, key: str, path: Path) -> None:
        """Download into a file that appears whole. Raises FileNotFoundError if there is no such object."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".tmp-{path.name}")
        with self._spoken():
            self._fs.get_file(self._path(key), str(partial))
        partial.replace(path)

    def remove(self, key: str) -> None:
        with self._spoken(), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(key))

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    @contextlib.contextmanager
    def _spoken(self) -> Iterator[None]:
        """The many errors of the clients below as one of ours."""
        try:
            yield
        except (FileNotFoundError, FileExistsError, FtError):
            raise
        except Exception as error:
            raise UnavailableError(f"{self.url} cannot be used: {type(error).__name__}: {error}") from error
