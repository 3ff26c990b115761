"""The first start of a service: its project, its first key, and the credentials file that the local command line reads."""

from __future__ import annotations

import json
from pathlib import Path

from ft_service.errors import SpecError
from ft_service.host.servers import write_private
from ft_service.settings import Settings
from ft_service.store.records import Principal
from ft_service.store.sql import Store

PROJECT = "default"


def prepare(settings: Settings, store: Store) -> str | None:
    """Make the project and, in a database without any key, the first admin key, which the credentials file then holds. Where
    the server is, `server.json` says (ft_service/host/servers.py).

    With FT_LAUNCHER = kubernetes there is no such file, since FT_HOME lies on a volume that worker pods mount too: one that an
    earlier version left is removed, and the first key comes from FT_BOOTSTRAP_KEY_FILE.

    Returns the key if it was made now. Raises SpecError if FT_BOOTSTRAP_KEY_FILE cannot be read, holds too short a key, or is
    needed and not set.
    """
    store.ensure_project(PROJECT, settings.organization)
    path = settings.home / "credentials"
    if settings.launcher == "kubernetes":
        for left in (path, *settings.home.glob(f".{path.name}-*")):
            left.unlink(missing_ok=True)
        return None if store.has_keys() else _first_key(store, _needed_key(settings))
    if store.has_keys():
        key = _known_key(path, store)
        if key:
            _write_credentials(path, key)
        return None
    key = _first_key(store, _given_key(settings))
    _write_credentials(path, key)
    return key


def local_holder(settings: Settings, store: Store) -> Principal | None:
    """Who holds the key of the credentials file; None: there is none that opens this service."""
    key = _known_key(settings.home / "credentials", store)
    return None if key is None else store.authenticate(key)


def _first_key(store: Store, secret: str | None) -> str:
    _, key = store.create_key(project_id=PROJECT, name="first admin key", scope="admin", secret=secret)
    return key


def _needed_key(settings: Settings) -> str:
    key = _given_key(settings)
    if key is None:
        raise SpecError(
            "FT_BOOTSTRAP_KEY_FILE is not set, and the database holds no key: with FT_LAUNCHER = kubernetes the first admin "
            "key is one that you make, as the Secret ft-admin-key; it is written nowhere else.",
            param="FT_BOOTSTRAP_KEY_FILE",
        )
    return key


def _given_key(settings: Settings) -> str | None:
    path = settings.bootstrap_key_file
    if path is None:
        return None
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"FT_BOOTSTRAP_KEY_FILE = {path}: {error}", param="FT_BOOTSTRAP_KEY_FILE") from None


def _known_key(path: Path, store: Store) -> str | None:
    """The key of the credentials file, if it opens this service; the file may be gone, or somebody else's."""
    try:
        key = json.loads(path.read_text())["api_key"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return key if isinstance(key, str) and store.authenticate(key) else None


def _write_credentials(path: Path, key: str) -> None:
    write_private(path, json.dumps({"api_key": key}) + "\n")
