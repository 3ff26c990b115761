"""Repeated POSTs: a request that the client sends again because it did not see the answer must not create a second object.

OpenAI's client sends no idempotency key; it counts its tries in `x-stainless-retry-count`. So a request is a repeat if that
count is above 0 and the same object was created in the same project a short while ago; a deliberate second request has a count
of 0. With `Idempotency-Key`, the id of the job or sweep is derived from the key, so that the database admits only one. Both
work across restarts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from ft_service.control.sweep_admission import PREFIX
from ft_service.errors import ConflictError, NotFoundError, SpecError
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Job
from ft_service.store.records import File, Principal, Sweep, UploadPart
from ft_service.store.sql import Store

Created = TypeVar("Created", Job, Sweep)

WINDOW_SECONDS = 40 * 60
"""The client gives up after three tries of ten minutes each and the waits between them."""
_NEWEST = 100
"""Newest rows that are compared."""
_MAX_KEY = 255


def once(earlier: Callable[[], Created | None], create: Callable[[], Created]) -> tuple[Created, bool]:
    """Return what an earlier try of a request created, or create it; and whether it was created now.

    Raises ConflictError as `create`, unless a try that arrived at the same time caused it.
    """
    if (created := earlier()) is not None:
        return created, False
    try:
        return create(), True
    except ConflictError:
        if (created := earlier()) is None:
            raise
        return created, False


def keyed_job_id(key: str | None, principal: Principal) -> str | None:
    """Return the job id of an `Idempotency-Key`; None without one. Raises SpecError if the key is too long."""
    if not key:
        return None
    if len(key) > _MAX_KEY:
        raise SpecError(f"Idempotency-Key: longer than {_MAX_KEY} characters.", param="Idempotency-Key")
    return "ftjob-" + hashlib.sha256(f"{principal.project_id}\n{key}".encode()).hexdigest()[:24]


def keyed_sweep_id(key: str | None, principal: Principal) -> str | None:
    """Return the sweep id of an `Idempotency-Key`, as `keyed_job_id`."""
    job_id = keyed_job_id(key, principal)
    return job_id and job_id.replace("ftjob-", PREFIX)


def earlier_job(store: Store, principal: Principal, job_id: str | None, headers: Mapping[str, str], body: Any) -> Job | None:
    """Return the job that an earlier try of this request created. `job_id`: that of its key; None: it has no key.

    Raises SpecError if the key was used for another body.
    """
    if job_id is not None:
        return _of_key("job", lambda: store.jobs.get_job(principal.project_id, job_id), body)
    if not is_retry(headers):
        return None
    jobs = store.jobs.list_jobs(principal.project_id, limit=_NEWEST).data
    # A user who has cancelled a job has seen it, so this request is a new one whose first try did not arrive.
    return _newest(store, (job for job in jobs if not job.sweep_id and job.reason is not Reason.USER_CANCELLED), body)


def earlier_sweep(
    store: Store, principal: Principal, sweep_id: str | None, headers: Mapping[str, str], body: Any
) -> Sweep | None:
    """Return the sweep that an earlier try of this request created, as `earlier_job`."""
    if sweep_id is not None:
        return _of_key("sweep", lambda: store.sweeps.get_sweep(principal.project_id, sweep_id), body)
    if not is_retry(headers):
        return None
    sweeps = store.sweeps.list_sweeps(principal.project_id, limit=_NEWEST).data
    return _newest(store, (sweep for sweep in sweeps if sweep.cancelled_at is None), body)


def repeated_file(headers: Mapping[str, str], store: Store, principal: Principal, new: File) -> File | None:
    """Return the file of the same name and contents that an earlier try of a request created."""
    if not is_retry(headers):
        return None
    since = store.now() - WINDOW_SECONDS
    files = store.files.list_files(principal.project_id, limit=_NEWEST, purpose=new.purpose).data
    same = (file for file in files if (file.sha256, file.filename) == (new.sha256, new.filename))
    return next((file for file in same if file.created_at >= since), None)


def repeated_part(headers: Mapping[str, str], store: Store, new: UploadPart) -> UploadPart | None:
    """Return the part of an upload with the same contents that an earlier try of a request created."""
    if not is_retry(headers):
        return None
    parts = store.uploads.list_parts(new.project_id, new.upload_id)
    return next((part for part in reversed(parts) if (part.bytes, part.sha256) == (new.bytes, new.sha256)), None)


def is_retry(headers: Mapping[str, str]) -> bool:
    """Return whether the client says that it has sent this request before."""
    count = headers.get("x-stainless-retry-count", "0")
    return count.isdecimal() and int(count[:9]) > 0


def _newest(store: Store, candidates: Iterable[Created], body: Any) -> Created | None:
    since = store.now() - WINDOW_SECONDS
    return next((created for created in candidates if created.created_at >= since and created.request == body), None)


def _of_key(noun: str, find: Callable[[], Created], body: Any) -> Created | None:
    try:
        created = find()
    except NotFoundError:
        return None
    if created.request != body:
        message = f"Idempotency-Key: this key was used with another body. Send a new key for a new {noun}."
        raise SpecError(message, param="Idempotency-Key", code="idempotency_key_reused")
    return created
