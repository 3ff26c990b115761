"""`/v1/fine_tuning/checkpoints/{model}/permissions`: which other projects may use a tuned model. For admin keys only."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Query
from pydantic import Field

from api.http.auth import Admin
from api.http.dependencies import After, JsonBody, Svc, body_schema, parse_body
from api.http.routing import keyed_router
from api.wire.views import DeletedPermissionView, ListView, PermissionView, list_view, permission_view
from ft_service.control import tuned_models
from ft_service.spec import Strict

router = keyed_router("/v1/fine_tuning/checkpoints/{fine_tuned_model_checkpoint:path}/permissions", "fine-tuning")

Limit = Annotated[int, Query(ge=1, le=100)]


class PermissionRequest(Strict):
    """Who may use the model."""

    project_ids: Annotated[list[Annotated[str, Field(min_length=1, max_length=255)]], Field(min_length=1, max_length=100)]


@router.post("", response_model=ListView[PermissionView], openapi_extra=body_schema(PermissionRequest))
def create(fine_tuned_model_checkpoint: str, body: JsonBody, caller: Admin, services: Svc) -> Any:
    """Let projects use a tuned model or a checkpoint of one: find it, and send chat completions to it."""
    asked = parse_body(body, PermissionRequest)
    tuned = tuned_models.find_own(fine_tuned_model_checkpoint, caller.project_id, services.store)
    tuned_models.refuse_pruned(tuned, services.places)
    granted = services.store.grant(caller.project_id, tuned.name, asked.project_ids)
    return list_view([permission_view(permission) for permission in granted], has_more=False)


@router.get("", response_model=ListView[PermissionView])
def list_permissions(
    fine_tuned_model_checkpoint: str,
    caller: Admin,
    services: Svc,
    after: After = None,
    limit: Limit = 10,
    order: Literal["ascending", "descending"] = "descending",
    project_id: str | None = None,
) -> Any:
    """By creation. `project_id`: only this project's."""
    model = tuned_models.find_own(fine_tuned_model_checkpoint, caller.project_id, services.store).name
    page = services.store.list_permissions(
        caller.project_id,
        model,
        after=after,
        limit=limit,
        order="asc" if order == "ascending" else "desc",
        grantee=project_id,
    )
    return list_view([permission_view(permission) for permission in page.data], page.has_more)


@router.delete("/{permission_id}")
def delete(fine_tuned_model_checkpoint: str, permission_id: str, caller: Admin, services: Svc) -> DeletedPermissionView:
    services.store.revoke(caller.project_id, fine_tuned_model_checkpoint, permission_id)
    return DeletedPermissionView(id=permission_id)
