"""`/v1/pulls`: bases that the server fetches from the hub, for whoever runs the service."""

from __future__ import annotations

import time
from typing import Annotated, Literal

from fastapi.responses import JSONResponse, Response
from pydantic import Field

from api.http.auth import Operator
from api.http.dependencies import (
    JsonBody,
    OptionalJsonBody,
    Services,
    Svc,
    body_schema,
    parse_body,
)
from api.http.routing import keyed_router
from api.routes.tuning.plans import PLAN
from api.wire.views import ListView, Seconds, View, list_view
from ft_service.control.admission import planning
from ft_service.control.bases.base_pulls import Pull, PullFolder, ShownState
from ft_service.control.bases.pulling import NO_FOLDER
from ft_service.errors import NotFoundError, SpecError
from ft_service.spec import Strict

router = keyed_router("/v1/pulls", "pulls")

_LEAST_SECONDS = 2.0
"""Time after which a speed is known."""


class PullRequest(Strict):
    """A base to fetch."""

    model: Annotated[str, Field(min_length=1, max_length=300)]
    """ORG/NAME or ORG/NAME@REVISION, as the hub names it."""
    name: Annotated[str, Field(min_length=1, max_length=300)] | None = None
    """Its name here. None: ORG/NAME."""
    look: bool = False
    """Fetch all but the weights only: then its size, its licence and whether it can be tuned are
    known, and jobs on it can be planned.
    """
    anyway: bool = False
    """Fetch its weights even if it cannot be tuned here."""


class PullResumption(Strict):
    """A pull that goes on."""

    anyway: bool = False
    """Fetch its weights even if it cannot be tuned here."""


class PullView(View):
    id: str
    object: Literal["pull"] = "pull"
    created_at: Seconds
    model: str
    """ORG/NAME on the hub."""
    revision: str
    name: str
    """Its name here."""
    commit: str | None
    """null: it was not looked up yet."""
    licence: str | None
    state: ShownState
    look: bool
    bytes: int | None
    """Bytes of all its files; null: it was not looked up yet."""
    bytes_done: int
    """Of these, bytes that are here."""
    seconds_left: int | None
    """At the speed of this try; null: not known."""
    trainable: bool | None
    """Whether it can be tuned here; null: its small files do not say it, or are not here yet."""
    why_not: str | None
    error: str | None
    """Why it has failed or was stopped."""
    code: str | None


class DeletedPullView(View):
    id: str
    object: Literal["pull.deleted"] = "pull.deleted"
    deleted: Literal[True] = True


@router.get("")
def list_pulls(caller: Operator, services: Svc) -> ListView[PullView]:
    """Not in OpenAI's API. List the bases that were asked for, the newest first. For admin keys of
    the first project, as all of `/v1/pulls`.
    """
    folder = PullFolder.of(services.settings)
    views = [_view(pull, folder) for pull in folder.pulls()] if folder else []
    return list_view(views, has_more=False)


@router.post("", openapi_extra=body_schema(PullRequest))
def pull(body: JsonBody, caller: Operator, services: Svc) -> PullView:
    """Not in OpenAI's API. Fetch a base from the hub (HF_ENDPOINT), as `ft pull` does, into the
    first folder of FT_MODELS. It is fetched in the background, after those that were asked for
    before. A pull of it that was stopped or has failed goes on.
    """
    given = parse_body(body, PullRequest)
    folder = _folder(services)
    before = folder.pulls()
    made = folder.add(given.model, given.name, look=given.look, anyway=given.anyway)
    if made not in before:
        services.store.audit.note(caller.project_id, "pull.started", made.id, model=made.repository)
    return _view(made, folder)


@router.get("/{pull_id}")
def retrieve_pull(pull_id: str, caller: Operator, services: Svc) -> PullView:
    """Not in OpenAI's API. A base that was asked for, and how far it is."""
    folder = _existing(services, pull_id)
    return _view(folder.find(pull_id), folder)


@router.get("/{pull_id}/plan", responses=PLAN)
def plan_pull(pull_id: str, caller: Operator, services: Svc) -> Response:
    """Not in OpenAI's API. Plan a job without options on a base that was looked up, as
    `POST /v1/fine_tuning/plan` does.
    """
    pull = _existing(services, pull_id).find(pull_id)
    context = services.admission(caller)
    return JSONResponse(planning.plan_body({"model": pull.name}, context, services.places))


@router.post("/{pull_id}/resume", openapi_extra=body_schema(PullResumption, required=False))
def resume_pull(pull_id: str, body: OptionalJsonBody, caller: Operator, services: Svc) -> PullView:
    """Not in OpenAI's API. Fetch the weights of a base that was looked up, or go on with a pull
    that was stopped or has failed, where it was.
    """
    given = parse_body({} if body is None else body, PullResumption)
    folder = _existing(services, pull_id)
    before = folder.find(pull_id)
    made = folder.go_on(pull_id, anyway=given.anyway)
    if made != before:
        services.store.audit.note(caller.project_id, "pull.resumed", made.id, model=made.repository)
    return _view(made, folder)


@router.post("/{pull_id}/stop")
def stop_pull(pull_id: str, caller: Operator, services: Svc) -> PullView:
    """Not in OpenAI's API. Stop a pull that waits or runs. What has arrived is kept."""
    folder = _existing(services, pull_id)
    before = folder.find(pull_id)
    made = folder.stop(pull_id)
    if made != before:
        services.store.audit.note(caller.project_id, "pull.stopped", made.id, model=made.repository)
    return _view(made, folder)


@router.delete("/{pull_id}")
def delete_pull(pull_id: str, caller: Operator, services: Svc) -> DeletedPullView:
    """Not in OpenAI's API. Remove a pull from the list, with what has arrived of it. A base that is
    here already stays.
    """
    folder = _existing(services, pull_id)
    folder.remove(pull_id)
    services.store.audit.note(caller.project_id, "pull.deleted", pull_id)
    return DeletedPullView(id=pull_id)


def _folder(services: Services) -> PullFolder:
    folder = PullFolder.of(services.settings)
    if folder is None:
        raise SpecError(NO_FOLDER, param="FT_MODELS")
    return folder


def _existing(services: Services, pull_id: str) -> PullFolder:
    """Return the folder of a pull. Raises NotFoundError if there is no such pull."""
    folder = PullFolder.of(services.settings)
    if folder is None:
        raise NotFoundError(f"There is no pull {pull_id[:80]!r}.")
    folder.find(pull_id)
    return folder


def _view(pull: Pull, folder: PullFolder) -> PullView:
    state, done = folder.progress(pull)
    left = _seconds_left(pull, done) if state == "fetching" else None
    return PullView.of(pull, model=pull.repository, state=state, bytes_done=done, seconds_left=left)


def _seconds_left(pull: Pull, done: int) -> int | None:
    if pull.bytes is None or pull.began_at is None:
        return None
    seconds = time.time() - pull.began_at
    arrived = done - pull.began_with
    if seconds < _LEAST_SECONDS or arrived <= 0:
        return None
    return int(max(0, pull.bytes - done) * seconds / arrived)
