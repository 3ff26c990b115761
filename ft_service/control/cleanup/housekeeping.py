"""Removal of expired data: bytes of deleted and expired files that no unfinished job needs, parts
of ended uploads, kept chats, and deleted jobs and projects; less often, adapters of deleted models
and data older than the operator's age limits (FT_KEEP_…_DAYS).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from itertools import islice

from ft_service.bases import cache_folder
from ft_service.control.cleanup import erasing, pruning
from ft_service.control.webhook_delivery import GIVE_UP_SECONDS, KEEP_SECONDS
from ft_service.data import token_folder
from ft_service.engines.engine_directory import PREFIX
from ft_service.errors import UnavailableError
from ft_service.host.loops import Interval, every, log_errors
from ft_service.logs import fields
from ft_service.meters import Meters
from ft_service.settings import Settings
from ft_service.storage.locations import Places
from ft_service.store.records import UPLOAD_PREFIX
from ft_service.store.sql import Store

log = logging.getLogger("ft_service.housekeeping")

EXPIRE_SECONDS = 60.0
RETAIN_SECONDS = 900.0
RETAIN_OBJECTS_SECONDS = 86_400.0
"""The same with FT_STORAGE, where looking at an old job is a request that is paid for."""
MOST_ERASURES = 1000
"""Steps of erasure in a row, after which what else expires has its turn."""
ERASURE_REST_SECONDS = 0.02
"""Pause after each of them, in which others write to the database."""
KEEP_ENGINE_SECONDS = 7 * 86_400.0
"""How long the directory of an ended engine is kept, for its logs."""


def run(settings: Settings, store: Store, meters: Meters, stop: threading.Event) -> None:
    """Remove expired data now and then until `stop` is set.

    What fails is tried again the next time.
    """
    retention = Interval(RETAIN_OBJECTS_SECONDS if settings.storage else RETAIN_SECONDS)

    def clean_up() -> None:
        remove_expired(settings, store)
        for _ in islice(erasing.erase(settings, store, Places.of(settings)), MOST_ERASURES):
            if stop.wait(ERASURE_REST_SECONDS):
                return
        if retention.is_due:
            retention.restart()
            retain(settings, store)

    every(EXPIRE_SECONDS, clean_up, stop, "removing expired data")


def remove_expired(settings: Settings, store: Store) -> None:
    """Remove everything that has expired, except what cannot be removed now, which is logged.

    Several servers may do it at once. Raises UnavailableError.
    """
    places = Places.of(settings)
    store.keep_reserve()
    while (file_ids := store.files.freeable_files()) and free(places, store, file_ids):
        pass
    _remove_parts(places, store)
    remove_ended_engines(store, places)
    store.webhooks.forget_deliveries(KEEP_SECONDS, GIVE_UP_SECONDS)
    while store.chats.forget_chats():
        pass


def retain(settings: Settings, store: Store) -> None:
    """Remove everything older than its age limit, except what cannot be removed now, which is
    logged. Files without an owner are left to `ft prune`: they may be a person's. Raises
    UnavailableError.
    """
    if settings.keep_audit_days is not None:
        store.audit.forget_audit(settings.keep_audit_days * pruning.DAY_SECONDS)
    cache = cache_folder.folder_of(os.environ, settings.home)
    tokens = token_folder.folder_of(os.environ, settings.home)
    for removal in pruning.plan_pruning(
        settings, store, pruning.RetentionLimits.from_settings(settings), cache=cache, tokens=tokens
    ):
        with log_errors(f"removing {removal.path}"):
            if pruning.remove(removal, store):
                job = {"job_id": removal.job.id} if removal.job else {}
                log.info(
                    "removed %s: %s",
                    removal.path,
                    removal.why,
                    extra=fields(bytes=removal.bytes, **job),
                )


def remove_ended_engines(store: Store, places: Places) -> None:
    """Remove the directories of engines that ended more than KEEP_ENGINE_SECONDS ago, except those
    that cannot be removed now, which is logged. Raises UnavailableError.
    """
    there = [name for name in places.engine_ids() if name.startswith(PREFIX)]
    for engine_id in store.engines.ended_engines(there, KEEP_ENGINE_SECONDS) if there else ():
        with log_errors(f"removing the directory of {engine_id}"):
            places.remove_engine(engine_id)


def free(places: Places, store: Store, file_ids: Sequence[str]) -> bool:
    """Remove the bytes and tokens of files, then mark them as freed: after a crash in between, the
    removal is repeated. So is that of a file which cannot be removed now, which is logged. False if
    none could be removed.
    """
    freed: list[str] = []
    for file_id in file_ids:
        with log_errors(f"removing the bytes of {file_id}"):
            for sha256 in store.files.digests_of_files([file_id]):
                places.remove_tokens(sha256)
            places.remove(file_id)
            freed.append(file_id)
    store.files.mark_freed(freed)
    return bool(freed)


def remove_unrecorded(places: Places, store: Store, file_id: str) -> None:
    """Remove the bytes of a file whose record could not be stored.

    They stay if it was stored all the same, since the connection was lost behind the commit; and,
    for `ft prune`, if the database cannot say.
    """
    try:
        recorded = file_id in store.files.find_files([file_id])
    except UnavailableError:
        log.warning("it is not known whether the file %s was stored; its bytes stay", file_id)
        return
    if not recorded:
        places.remove(file_id)


def _remove_parts(places: Places, store: Store) -> None:
    """Remove the parts of uploads that are no longer pending.

    They are listed first, so that newer uploads are not touched; nor is anything else that is
    there, such as the `lost+found` of a volume.
    """
    uploads = [name for name in places.uploads_with_parts() if name.startswith(UPLOAD_PREFIX)]
    pending = store.uploads.pending_uploads() if uploads else set()
    for upload_id in uploads:
        if upload_id not in pending:
            with log_errors(f"removing the parts of {upload_id}"):
                places.remove_parts(upload_id)
