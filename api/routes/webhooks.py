"""`/v1/webhook_endpoints` and `/v1/webhook_event_types`: receivers of messages about the end of
jobs.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Header, Query, Request
from fastapi.responses import Response
from pydantic import Field

from api.http import idempotency
from api.http.auth import Caller
from api.http.dependencies import After, JsonBody, Svc, body_schema, parse_body
from api.http.routing import keyed_router, written
from api.http.threads import in_thread
from api.wire.views import Deleted, ListView, Seconds, View, list_view
from ft_service.control.webhook_delivery import TRY_SECONDS, DeliveryError
from ft_service.errors import LimitError, SpecError
from ft_service.host.webhook_receiver import parse_receiver
from ft_service.ids import new_id
from ft_service.spec import Strict
from ft_service.store.records import WebhookEndpoint
from ft_service.store.webhooks import EVENT_TYPES, event_body

router = keyed_router("/v1", "webhooks")

PREFIX = "we_"
KEPT_SECONDS = 24 * 3600.0
"""Validity of an old secret after a rotation that keeps it."""

EventType = Literal[
    "fine_tuning.job.succeeded", "fine_tuning.job.failed", "fine_tuning.job.cancelled"
]
EventTypes = Annotated[list[EventType], Field(min_length=1, max_length=len(EVENT_TYPES))]
Name = Annotated[str, Field(min_length=1, max_length=255)]
Url = Annotated[str, Field(min_length=1, max_length=2048, json_schema_extra={"format": "uri"})]


class WebhookRequest(Strict):
    """A new receiver, and the events that it gets."""

    event_types: EventTypes
    name: Name
    url: Url
    """HTTPS, on the public internet, unless the operator has set FT_WEBHOOK_ALLOW_PRIVATE."""


class WebhookUpdate(Strict):
    """Changes to a receiver; None: no change."""

    event_types: EventTypes | None = None
    """The complete new list of events."""
    name: Name | None = None
    url: Url | None = None


class RotateRequest(Strict):
    """The end of the old secret."""

    keep_old_secret_active_for_24_hours: bool = False
    """Sign deliveries with both secrets for a day."""


class WebhookTest(Strict):
    """The event of the sample."""

    event_type: EventType


class WebhookView(View):
    id: str
    object: Literal["webhook_endpoint"] = "webhook_endpoint"
    created_at: Seconds
    event_types: list[str]
    name: str
    signing_secret_hint: str
    url: str
    updated_at: Seconds


class WebhookSecretView(WebhookView):
    signing_secret: str
    """Only in the answers to create and rotate_secret."""


class DeletedWebhookView(Deleted):
    object: Literal["webhook_endpoint.deleted"] = "webhook_endpoint.deleted"


class WebhookTestView(View):
    object: Literal["webhook_endpoint.test"] = "webhook_endpoint.test"
    event_type: str
    status_code: int
    success: Literal[True] = True
    """The receiver answered, with `status_code`."""
    webhook_endpoint_id: str


class EventTypesView(View):
    object: Literal["list"] = "list"
    data: list[str]


@router.get("/webhook_event_types")
def list_event_types(caller: Caller) -> EventTypesView:
    return EventTypesView(data=list(EVENT_TYPES))


@router.post("/webhook_endpoints", openapi_extra=body_schema(WebhookRequest))
def create(
    request: Request,
    body: JsonBody,
    caller: Caller,
    services: Svc,
    idempotency_key: Annotated[str | None, Header()] = None,
) -> WebhookSecretView:
    """The answer holds the signing secret, which is not shown again."""
    given = parse_body(body, WebhookRequest)
    parse_receiver(given.url, allow_private=services.settings.webhook_allow_private)
    keyed_id = idempotency.keyed_id(PREFIX, idempotency_key, caller)
    new = WebhookEndpoint(
        id=keyed_id or new_id(PREFIX),
        project_id=caller.project_id,
        name=given.name,
        url=given.url,
        event_types=list(dict.fromkeys(given.event_types)),
    )
    endpoint, _ = idempotency.once(
        lambda: idempotency.earlier_webhook(services.store, new, keyed_id, request.headers),
        lambda: services.store.webhooks.add_webhook(new),
    )
    return _secret_view(endpoint)


@router.get("/webhook_endpoints", response_model=ListView[WebhookView])
def list_endpoints(
    caller: Caller,
    services: Svc,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> Any:
    """Newest first."""
    page = services.store.webhooks.list_webhooks(caller.project_id, after=after, limit=limit)
    return list_view([_view(endpoint) for endpoint in page.data], page.has_more)


@router.get("/webhook_endpoints/{webhook_endpoint_id}")
def retrieve(webhook_endpoint_id: str, caller: Caller, services: Svc) -> WebhookView:
    return _view(services.store.webhooks.get_webhook(caller.project_id, webhook_endpoint_id))


@router.post("/webhook_endpoints/{webhook_endpoint_id}", openapi_extra=body_schema(WebhookUpdate))
def update(webhook_endpoint_id: str, body: JsonBody, caller: Caller, services: Svc) -> WebhookView:
    """Change a receiver. Deliveries that still wait go to the new address."""
    changes = parse_body(body, WebhookUpdate).model_dump(exclude_none=True)
    if "url" in changes:
        parse_receiver(changes["url"], allow_private=services.settings.webhook_allow_private)
    if "event_types" in changes:
        changes["event_types"] = list(dict.fromkeys(changes["event_types"]))
    return _view(
        services.store.webhooks.update_webhook(caller.project_id, webhook_endpoint_id, **changes)
    )


@router.delete("/webhook_endpoints/{webhook_endpoint_id}")
def delete(webhook_endpoint_id: str, caller: Caller, services: Svc) -> DeletedWebhookView:
    services.store.webhooks.delete_webhook(caller.project_id, webhook_endpoint_id)
    return DeletedWebhookView(id=webhook_endpoint_id)


@router.post(
    "/webhook_endpoints/{webhook_endpoint_id}/rotate_secret",
    openapi_extra=body_schema(RotateRequest),
)
def rotate_secret(
    webhook_endpoint_id: str, body: JsonBody, caller: Caller, services: Svc
) -> WebhookSecretView:
    """The answer holds the new signing secret, which is not shown again."""
    keep = parse_body(body, RotateRequest).keep_old_secret_active_for_24_hours
    seconds = KEPT_SECONDS if keep else 0.0
    return _secret_view(
        services.store.webhooks.rotate_webhook_secret(
            caller.project_id, webhook_endpoint_id, keep_seconds=seconds
        )
    )


@router.post(
    "/webhook_endpoints/{webhook_endpoint_id}/test",
    response_model=WebhookTestView,
    openapi_extra=body_schema(WebhookTest),
)
async def test(webhook_endpoint_id: str, body: JsonBody, caller: Caller, services: Svc) -> Response:
    """Send a sample once, now.

    The answer holds the receiver's status. A project may have a few tests running at once.
    """
    kind = parse_body(body, WebhookTest).event_type
    endpoint = await in_thread(
        services.store.webhooks.get_webhook, caller.project_id, webhook_endpoint_id
    )
    sample = event_body(kind, "ftjob-sample", await in_thread(services.store.now))
    if not services.webhook_tests.has_room(caller.project_id):  # another's server may be slow
        message = "Other tests of webhook endpoints are running. Wait until they have ended."
        raise LimitError(message, code="too_many_at_once", retry_after=TRY_SECONDS)
    try:
        status = await services.webhook_tests.send(endpoint, new_id("wh_"), sample)
    except DeliveryError as error:
        message = f"url = {endpoint.url!r}: the receiver was not reached: {error}."
        raise SpecError(message, param="url", code="receiver_not_reached") from None
    return written(
        WebhookTestView(event_type=kind, status_code=status, webhook_endpoint_id=endpoint.id)
    )


def _view(endpoint: WebhookEndpoint) -> WebhookView:
    return WebhookView.of(endpoint, signing_secret_hint=f"whsec_...{endpoint.secret[-4:]}")


def _secret_view(endpoint: WebhookEndpoint) -> WebhookSecretView:
    return WebhookSecretView.of(_view(endpoint), signing_secret=endpoint.secret)
