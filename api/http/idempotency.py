"""Repeated POSTs: one that the client sends again because it did not see the answer must not become a second job or file.

OpenAI's client sends no idempotency key; it counts its tries in `x-stainless-retry-count`. So a request is a repeat when that
count is above 0 and the same thing was created in the same project a short while ago; a deliberate second request counts 0.
With `Idempotency-Key`, the job's id follows from the key, so that the database itself admits only one. Both hold over restarts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from ft_service.control.sweeps.admission import PREFIX
from ft_service.errors import NotFoundError, SpecError
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Job
from ft_service.store.records import File, Principal, UploadPart
from ft_service.store.sql import Store
from ft_service.store.sweeps.records import Sweep

WINDOW_SECONDS = 40 * 60
"""The client gives up after three tries of ten minutes each and the waits between them."""
_LOOKED_AT = 100
"""Newest rows that are compared."""
_MAX_KEY = 255


def keyed_job_id(key: str | None, principal: Principal) -> str | None:
    """The job id that an `Idempotency-Key` stands for; None without one. Raises SpecError if the key is too long."""
    if not key:
        return None
    if len(key) > _MAX_KEY:
        raise SpecError(f"Idempotency-Key: longer than {_MAX_KEY} characters.", param="Idempotency-Key")
    return "ftjob-" + hashlib.sha256(f"{principal.project_id}\n{key}".encode()).hexdigest()[:24]


def keyed_job(store: Store, principal: Principal, job_id: str, body: Any) -> Job | None:
    """The job that was created under a key before. Raises SpecError if that was for another body."""
    try:
        job = store.get_job(principal.project_id, job_id)
    except NotFoundError:
        return None
    if job.request != body:
        raise _reused("job")
    return job


def repeated_job(store: Store, principal: Principal, body: Any) -> Job | None:
    """The job that an earlier try of a request (`is_retry`) created."""
    since = store.now() - WINDOW_SECONDS
    jobs = store.list_jobs(principal.project_id, limit=_LOOKED_AT).data
    # Whoever has cancelled a job has seen it: what comes now is a new wish, whose first try did not get here.
    open_ones = (job for job in jobs if job.sweep_id is None and job.reason is not Reason.USER_CANCELLED)
    return next((job for job in open_ones if job.created_at >= since and job.request == body), None)


def keyed_sweep_id(key: str | None, principal: Principal) -> str | None:
    """As `keyed_job_id`, of a sweep."""
    job_id = keyed_job_id(key, principal)
    return job_id and job_id.replace("ftjob-", PREFIX)


def earlier_sweep(
    store: Store, principal: Principal, sweep_id: str | None, headers: Mapping[str, str], body: Any
) -> Sweep | None:
    """The sweep that this very request, or an earlier try of it, created. `sweep_id`: of its key; None: it has none.

    Raises SpecError if the key was used for another body.
    """
    if sweep_id is None:
        if not is_retry(headers):
            return None
        since = store.now() - WINDOW_SECONDS
        sweeps = store.list_sweeps(principal.project_id, limit=_LOOKED_AT).data
        open_ones = (sweep for sweep in sweeps if sweep.cancelled_at is None)
        return next((sweep for sweep in open_ones if sweep.created_at >= since and sweep.request == body), None)
    try:
        sweep = store.get_sweep(principal.project_id, sweep_id)
    except NotFoundError:
        return None
    if sweep.request != body:
        raise _reused("sweep")
    return sweep


def repeated_file(headers: Mapping[str, str], store: Store, principal: Principal, new: File) -> File | None:
    """The file that an earlier try of a request created: of the same name and contents."""
    if not is_retry(headers):
        return None
    since = store.now() - WINDOW_SECONDS
    files = store.list_files(principal.project_id, limit=_LOOKED_AT, purpose=new.purpose).data
    same = (file for file in files if (file.sha256, file.filename) == (new.sha256, new.filename))
    return next((file for file in same if file.created_at >= since), None)


def repeated_part(headers: Mapping[str, str], store: Store, new: UploadPart) -> UploadPart | None:
    """The part of an upload that an earlier try of a request created: of the same contents."""
    if not is_retry(headers):
        return None
    parts = store.list_parts(new.project_id, new.upload_id)
    return next((part for part in reversed(parts) if (part.bytes, part.sha256) == (new.bytes, new.sha256)), None)


def _reused(noun: str) -> SpecError:
    message = f"Idempotency-Key: this key was used with another body. Send a new key for a new {noun}."
    return SpecError(message, param="Idempotency-Key", code="idempotency_key_reused")


def is_retry(headers: Mapping[str, str]) -> bool:
    """Whether the client says that it has sent this request before."""
    count = headers.get("x-stainless-retry-count", "0")
    return count.isdecimal() and int(count[:9]) > 0
