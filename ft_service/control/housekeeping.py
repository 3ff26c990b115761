"""What has expired goes: the bytes of deleted and expired files that no unfinished job needs, parts of ended uploads; and, less
often, adapters of deleted models and what is older than the operator keeps it (FT_KEEP_…_DAYS)."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Sequence

from ft_service.bases import cache_folder
from ft_service.control import pruning
from ft_service.control.webhook_delivery import GIVE_UP_SECONDS, KEEP_SECONDS
from ft_service.data import token_folder
from ft_service.logs import fields
from ft_service.meters import Meters
from ft_service.settings import Settings
from ft_service.storage.locations import Places
from ft_service.store.sql import Store

log = logging.getLogger("ft_service.housekeeping")

SWEEP_SECONDS = 60.0
RETAIN_SECONDS = 900.0


def run(settings: Settings, store: Store, meters: Meters, stop: threading.Event) -> None:
    """Sweep now and then until `stop` is set. What fails is tried again by the next sweep."""
    retained_at = -RETAIN_SECONDS
    while not stop.is_set():
        try:
            sweep(settings, store)
            if time.monotonic() - retained_at >= RETAIN_SECONDS:
                retained_at = time.monotonic()
                retain(settings, store)
        except Exception:
            log.exception("a sweep failed; the next is in %g seconds", SWEEP_SECONDS)
        stop.wait(SWEEP_SECONDS)


def sweep(settings: Settings, store: Store) -> None:
    """Everything that is due. Any number of servers may do it at once. Raises UnavailableError and OSError."""
    places = Places.of(settings)
    store.keep_reserve()
    while file_ids := store.freeable_files():
        free(places, store, file_ids)
    _remove_parts(settings, store)
    store.forget_deliveries(KEEP_SECONDS, GIVE_UP_SECONDS)


def retain(settings: Settings, store: Store) -> None:
    """Everything that has reached its age. What belongs to nothing is left to `ft prune`: it may be a person's."""
    cache, tokens = cache_folder.folder_of(os.environ, settings.home), token_folder.folder_of(os.environ, settings.home)
    for removal in pruning.plan_pruning(settings, store, pruning.Limits.from_settings(settings), cache=cache, tokens=tokens):
        if pruning.remove(removal, settings, store):
            job = {"job_id": removal.job.id} if removal.job else {}
            log.info("removed %s: %s", removal.path, removal.why, extra=fields(bytes=removal.bytes, **job))


def free(places: Places, store: Store, file_ids: Sequence[str]) -> None:
    """Remove the bytes and tokens of files, then note that they are gone: a crash between the two only repeats the first."""
    for sha256 in store.digests_of_files(file_ids):
        places.remove_tokens(sha256)
    for file_id in file_ids:
        places.remove(file_id)
    store.mark_freed(file_ids)


def _remove_parts(settings: Settings, store: Store) -> None:
    """What uploads that are no longer pending have left. Folders are listed first: those of uploads made since are not."""
    folders = list(settings.uploads_dir.glob("*"))
    pending = store.pending_uploads() if folders else set()
    for folder in folders:
        if folder.name not in pending:
            shutil.rmtree(folder)
