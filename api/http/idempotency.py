"""Repeated POSTs: a request that the client sends again because it did not see the answer must not
create a second object.

OpenAI's client sends no idempotency key; it counts its tries in `x-stainless-retry-count`. So a
request is a repeat if that count is above 0 and the same object was created in the same project a
short while ago; a deliberate second request has a count of 0. With `Idempotency-Key`, the id of
what is created is derived from the key, so that the database admits only one. The bytes of files
and parts are on the disk under their ids, where two tries would write over each other's: their ids
are drawn, and the digest of the key is stored beside them, once. All of it works across restarts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

from fastapi import Request

from api.http.gone_clients import refuse_without_client
from ft_service.errors import ConflictError, NotFoundError, SpecError
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Job
from ft_service.store.evals import Eval, EvalRun
from ft_service.store.records import (
    ApiKey,
    File,
    Principal,
    Project,
    Scope,
    Sweep,
    TenantLimits,
    Upload,
    UploadPart,
    WebhookEndpoint,
)
from ft_service.store.sql import Store

Created = TypeVar(
    "Created",
    Job,
    Sweep,
    File,
    Upload,
    UploadPart,
    WebhookEndpoint,
    Eval,
    EvalRun,
    Project,
    tuple[ApiKey, str],
)
Requested = TypeVar("Requested", Job, Sweep)

WINDOW_SECONDS = 40 * 60
"""The client gives up after three tries of ten minutes each and the waits between them."""
_NEWEST = 100
"""Newest rows that are compared."""
_NEWEST_EVALS = 20
"""The same of evals and their runs, which hold whole bodies."""
_HEADER = "Idempotency-Key"
_MAX_KEY = 255


def once(
    earlier: Callable[[], Created | None], create: Callable[[], Created]
) -> tuple[Created, bool]:
    """Return what an earlier try of a request created, or create it; and whether it was created
    now.

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


def last_look(request: Request, earlier: Callable[[], Created | None]) -> Callable[[], None]:
    """Return a check for the moment before `create` stores its object, which may be long after the
    request came. It raises ConflictError if another try of the request was faster, HTTPException if
    the client is gone, whose next try may be.
    """

    def look() -> None:
        refuse_without_client(request)
        if earlier() is not None:
            raise ConflictError("Another try of this request was faster.")

    return look


def key_digest(key: str | None, *owners: str) -> str | None:
    """Return the digest of an `Idempotency-Key`; None without one.

    `owners`: ids of what a key is unique in, the project's first. Raises SpecError if the key is
    too long.
    """
    if not key:
        return None
    if len(key) > _MAX_KEY:
        raise SpecError(f"{_HEADER}: longer than {_MAX_KEY} characters.", param=_HEADER)
    return hashlib.sha256("\n".join((*owners, key)).encode()).hexdigest()


def keyed_id(prefix: str, key: str | None, principal: Principal, *owners: str) -> str | None:
    """Return the id of what a request with an `Idempotency-Key` creates; None without one.

    `owners`: what the key is unique in, below the caller's project. Raises SpecError as
    `key_digest`.
    """
    digest = key_digest(key, principal.project_id, *owners)
    return digest and prefix + digest[:24]


def earlier_job(
    store: Store, principal: Principal, job_id: str | None, headers: Mapping[str, str], body: Any
) -> Job | None:
    """Return the job that an earlier try of this request created.

    `job_id`: that of its key; None: it has no key.

    Raises SpecError if the key was used for another body.
    """
    if job_id is not None:
        return _of_key(
            "job",
            _found(store.jobs.get_job, principal.project_id, job_id),
            lambda job: job.request == body,
        )
    if not is_retry(headers):
        return None
    jobs = store.jobs.list_jobs(principal.project_id, limit=_NEWEST).data
    # A user who has cancelled a job has seen it, so this request is a new one whose first try did
    # not arrive.
    return _newest(
        store,
        (job for job in jobs if not job.sweep_id and job.reason is not Reason.USER_CANCELLED),
        body,
    )


def earlier_sweep(
    store: Store, principal: Principal, sweep_id: str | None, headers: Mapping[str, str], body: Any
) -> Sweep | None:
    """Return the sweep that an earlier try of this request created, as `earlier_job`."""
    if sweep_id is not None:
        found = _found(store.sweeps.get_sweep, principal.project_id, sweep_id)
        return _of_key("sweep", found, lambda sweep: sweep.request == body)
    if not is_retry(headers):
        return None
    sweeps = store.sweeps.list_sweeps(principal.project_id, limit=_NEWEST).data
    return _newest(store, (sweep for sweep in sweeps if sweep.cancelled_at is None), body)


def earlier_upload(store: Store, new: Upload, key: str | None) -> Upload | None:
    """Return the upload that an earlier try of a request with this key created.

    Raises SpecError as `earlier_job`.
    """
    if key is None:
        return None
    return _of_key(
        "upload",
        _found(store.uploads.get_upload, new.project_id, new.id),
        lambda upload: _announced(upload) == _announced(new),
    )


def earlier_webhook(
    store: Store, new: WebhookEndpoint, key: str | None, headers: Mapping[str, str]
) -> WebhookEndpoint | None:
    """Return the webhook endpoint that an earlier try of this request created, with its secret.

    Raises SpecError as `earlier_job`.
    """

    def is_same(found: WebhookEndpoint) -> bool:
        return (found.name, found.url, found.event_types) == (new.name, new.url, new.event_types)

    if key is not None:
        return _of_key(
            "webhook endpoint", _found(store.webhooks.get_webhook, new.project_id, new.id), is_same
        )
    if not is_retry(headers):
        return None
    since = store.now() - WINDOW_SECONDS
    endpoints = store.webhooks.list_webhooks(new.project_id, limit=_NEWEST).data
    return next(
        (found for found in endpoints if found.created_at >= since and is_same(found)), None
    )


def earlier_eval(
    store: Store, new: Eval, key: str | None, headers: Mapping[str, str]
) -> Eval | None:
    """Return the eval that an earlier try of this request created.

    Raises SpecError as `earlier_job`.
    """

    def is_same(found: Eval) -> bool:
        return (found.data_source_config, found.testing_criteria) == (
            new.data_source_config,
            new.testing_criteria,
        )

    if key is not None:
        return _of_key("eval", _found(store.evals.get_eval, new.project_id, new.id), is_same)
    if not is_retry(headers):
        return None
    newest = store.evals.list_evals(new.project_id, after=None, limit=_NEWEST_EVALS, order="desc")
    since = store.now() - WINDOW_SECONDS
    return next((own for own in newest.data if own.created_at >= since and is_same(own)), None)


def earlier_eval_run(
    store: Store, new: EvalRun, key: str | None, headers: Mapping[str, str]
) -> EvalRun | None:
    """Return the run of an eval that an earlier try of this request created, as `earlier_eval`."""

    def is_same(found: EvalRun) -> bool:
        return (found.data_source, found.name) == (new.data_source, new.name)

    if key is not None:
        get = partial(_run_of_eval, store, new.eval_id)
        return _of_key("run", _found(get, new.project_id, new.id), is_same)
    if not is_retry(headers):
        return None
    newest = store.evals.list_runs(
        new.project_id,
        new.eval_id,
        status=None,
        after=None,
        limit=_NEWEST_EVALS,
        order="desc",
    )
    since = store.now() - WINDOW_SECONDS
    return next((own for own in newest.data if own.created_at >= since and is_same(own)), None)


def _run_of_eval(store: Store, eval_id: str, project_id: str, run_id: str) -> EvalRun:
    return store.evals.get_run(project_id, eval_id, run_id)


def earlier_project(
    store: Store, project_id: str | None, name: str, limits: TenantLimits
) -> Project | None:
    """Return the project that an earlier try of a request with this key created.

    Raises SpecError as `earlier_job`.
    """
    if project_id is None:
        return None
    try:
        found = store.projects.get_project(project_id)
    except NotFoundError:
        return None
    return _of_key(
        "project", found, lambda project: (project.name, project.limits) == (name, limits)
    )


def earlier_api_key(
    store: Store, project_id: str, key_id: str | None, name: str, scope: Scope, seconds: int | None
) -> tuple[ApiKey, str] | None:
    """Return the API key that an earlier try of a request with this key created.

    `seconds`: its lifetime; None: without end. Its secret was in the lost answer and is not stored,
    so that it gets another one. Raises SpecError as `earlier_job`, and if the API key is in use
    already.
    """
    if key_id is None:
        return None
    try:
        found = store.keys.get_key(project_id, key_id)
    except NotFoundError:
        return None
    end = found.own_end
    lifetime = None if end is None else round(end - found.created_at)
    if seconds is None and store.keys.max_days is not None:
        lifetime = None  # the key has the longest life, as it had at the first try
    if (found.name, found.scope, lifetime) != (name, scope, seconds):
        raise _other_body("API key")
    renewed = store.keys.replace_secret(project_id, key_id)
    if renewed is None:
        raise _refused(
            f"the API key that it made, {key_id}, was used or revoked since. Send a new key."
        )
    return renewed


def earlier_file(
    store: Store, new: File, seconds: int | None, headers: Mapping[str, str]
) -> File | None:
    """Return the file that an earlier try of this request created: by its key, else by its name and
    contents. `seconds`: its lifetime; None: without end.

    Raises SpecError if the key was used for another file, or if its file is gone.
    """
    if new.idempotency_key is None and not is_retry(headers):
        return None
    file = store.files.earlier_file(new, WINDOW_SECONDS)
    if new.idempotency_key is None or file is None:
        return file
    _of_key("file", file, lambda file: _contents(file) == (new.filename, new.sha256, seconds))
    if not store.files.find_files([file.id]):
        raise _refused(
            f"the file of this key, {file.id}, was deleted or has expired. Send a new key."
        )
    return file


def earlier_part(store: Store, new: UploadPart, headers: Mapping[str, str]) -> UploadPart | None:
    """Return the part that an earlier try of this request created: by its key, else by its
    contents. Raises SpecError as `earlier_job`.
    """
    if new.idempotency_key is None and not is_retry(headers):
        return None
    return _of_key("part", store.uploads.earlier_part(new), lambda part: part.sha256 == new.sha256)


def is_retry(headers: Mapping[str, str]) -> bool:
    """Return whether the client says that it has sent this request before."""
    count = headers.get("x-stainless-retry-count", "0")
    return count.isdecimal() and int(count[:9]) > 0


def _newest(store: Store, candidates: Iterable[Requested], body: Any) -> Requested | None:
    since = store.now() - WINDOW_SECONDS
    return next(
        (
            created
            for created in candidates
            if created.created_at >= since and created.request == body
        ),
        None,
    )


def _found(get: Callable[[str, str], Created], project_id: str, object_id: str) -> Created | None:
    try:
        return get(project_id, object_id)
    except NotFoundError:
        return None


def _of_key(
    noun: str, created: Created | None, is_same: Callable[[Created], bool]
) -> Created | None:
    """Return what was created with a key.

    Raises SpecError if this request asks for something else.
    """
    if created is not None and not is_same(created):
        raise _other_body(noun)
    return created


def _other_body(noun: str) -> SpecError:
    return _refused(f"this key was used with another body. Send a new key for a new {noun}.")


def _refused(why: str) -> SpecError:
    return SpecError(f"{_HEADER}: {why}", param=_HEADER, code="idempotency_key_reused")


def _contents(file: File) -> tuple[str, str, int | None]:
    """Return name, digest and lifetime of a file."""
    lifetime = None if file.expires_at is None else round(file.expires_at - file.created_at)
    return file.filename, file.sha256, lifetime


def _announced(upload: Upload) -> tuple[str, str, int, int | None]:
    return upload.filename, upload.purpose, upload.bytes, upload.file_seconds
