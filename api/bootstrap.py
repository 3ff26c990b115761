"""The first start of a service: its project, its first key, and the credentials file for the local
command line.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from ft_service.errors import ConflictError, SpecError
from ft_service.host.running_servers import write_private
from ft_service.settings import Settings
from ft_service.store.records import NewKey, Principal
from ft_service.store.sql import Store

log = logging.getLogger(__name__)

PROJECT = "default"


def prepare(settings: Settings, store: Store) -> str | None:
    """Create the project and, in a database without keys, the first admin key, which is written to
    the credentials file.

    With FT_LAUNCHER = kubernetes there is no such file, since FT_HOME is on a volume that worker
    pods mount too: an old one is removed, and the first key comes from FT_BOOTSTRAP_KEY_FILE.

    Return the key if it was created now. Raises SpecError if FT_BOOTSTRAP_KEY_FILE cannot be read,
    holds too short a key, or is needed and not set.
    """
    store.projects.ensure_project(PROJECT, settings.organization)
    store.projects.name_organization(PROJECT, settings.organization)
    if ended := store.keys.end_old_keys():
        log.warning(
            "%d keys would have lived longer than FT_MAX_KEY_DAYS = %g: they end so long after they "
            "were made",
            ended,
            settings.max_key_days,
        )
    path = settings.home / "credentials"
    if settings.launcher == "kubernetes":
        for left in (path, *settings.home.glob(f".{path.name}-*")):
            left.unlink(missing_ok=True)
        return None if store.keys.has_keys() else _first_key(store, _needed_key(settings))
    if store.keys.has_keys():
        key = _known_key(path, store)
        if key:
            _write_credentials(path, key)
        return None
    given = _given_key(settings)
    key = _first_key(store, given)
    if known := key or given:
        _write_credentials(path, known)
    return key


def local_holder(settings: Settings, store: Store) -> Principal | None:
    """Return the holder of the key in the credentials file; None without a key that is valid
    here.
    """
    key = _known_key(settings.home / "credentials", store)
    return None if key is None else store.keys.authenticate(key)


def _first_key(store: Store, secret: str | None) -> str | None:
    """Create the first key and return it; None if another server has done so with the same secret
    meanwhile.
    """
    try:
        _, key = store.keys.create_key(
            NewKey(project_id=PROJECT, name="first admin key", scope="admin", secret=secret)
        )
    except ConflictError:
        return None
    return key


def _needed_key(settings: Settings) -> str:
    key = _given_key(settings)
    if key is None:
        raise SpecError(
            "FT_BOOTSTRAP_KEY_FILE is not set, and the database holds no key: with FT_LAUNCHER = "
            "kubernetes you create the "
            "first admin key yourself, as the Secret ft-admin-key; it is written nowhere else.",
            param="FT_BOOTSTRAP_KEY_FILE",
        )
    return key


def _given_key(settings: Settings) -> str | None:
    path = settings.bootstrap_key_file
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(
            f"FT_BOOTSTRAP_KEY_FILE = {path}: {error}", param="FT_BOOTSTRAP_KEY_FILE"
        ) from None


def _known_key(path: Path, store: Store) -> str | None:
    """Return the key in the credentials file if it is valid here; the file may be missing, or
    belong to another service.
    """
    try:
        key = json.loads(path.read_text(encoding="utf-8"))["api_key"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return key if isinstance(key, str) and store.keys.authenticate(key) else None


def _write_credentials(path: Path, key: str) -> None:
    write_private(path, json.dumps({"api_key": key}) + "\n")
