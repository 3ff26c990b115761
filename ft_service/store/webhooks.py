"""Webhook endpoints and deliveries.

A job's end stores its deliveries in the same transaction, so that none is lost or invented.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    FromClause,
    RowMapping,
    Select,
    and_,
    case,
    delete,
    func,
    insert,
    select,
    update,
)

from ft_service.errors import SpecError
from ft_service.ids import new_id
from ft_service.jobs.states import TERMINAL, Job
from ft_service.store.database import StorePart, database_time, is_over
from ft_service.store.records import Delivery, Page, WebhookEndpoint
from ft_service.store.rows import Listing, columns_of, not_found, page
from ft_service.store.tables import UNSENT, webhook_deliveries, webhook_endpoints
from ft_service.store.tenants.audit import record

EVENT_TYPES = tuple(f"fine_tuning.job.{state}" for state in sorted(TERMINAL, reverse=True))
MAX_ENDPOINTS = 100
SECRET_BYTES = 32


def longest_wait(tries: int) -> float:
    """Upper bound of how far `next_try_at` lies ahead after so many tries: a lease, or the pause of
    ft_service/control/webhook_delivery.py."""
    return max(120.0, min(5.0 * 2 ** min(tries, 20), 6 * 3600.0))


ENDPOINT = columns_of(WebhookEndpoint, webhook_endpoints)
_DELIVERY = [
    webhook_deliveries.c[name] for name in ("id", "project_id", "body", "created_at", "tries")
]


class WebhookStore(StorePart):
    """Webhook endpoints and deliveries."""

    def add_webhook(self, endpoint: WebhookEndpoint) -> WebhookEndpoint:
        """Store an endpoint with a new secret.

        Raises SpecError if the project has MAX_ENDPOINTS already.
        """
        mine = webhook_endpoints.c.project_id == endpoint.project_id
        with self._database.writing() as connection:
            if (
                connection.scalars(
                    select(func.count()).select_from(webhook_endpoints).where(mine)
                ).one()
                >= MAX_ENDPOINTS
            ):
                raise SpecError(
                    f"This project has {MAX_ENDPOINTS} webhook endpoints. Delete one first."
                )
            now = connection.scalars(select(database_time())).one()
            row = {
                "id": endpoint.id,
                "project_id": endpoint.project_id,
                "name": endpoint.name,
                "url": endpoint.url,
                "event_types": endpoint.event_types,
                "secret": _new_secret(),
                "created_at": now,
                "updated_at": now,
            }
            record(
                connection, endpoint.project_id, "webhook.created", endpoint.id, url=endpoint.url
            )
            stored = (
                connection.execute(insert(webhook_endpoints).values(row).returning(*ENDPOINT))
                .mappings()
                .one()
            )
            return _endpoint(stored, now)

    def get_webhook(self, project_id: str, endpoint_id: str) -> WebhookEndpoint:
        with self._database.reading() as connection:
            return _get(connection, project_id, endpoint_id)

    def list_webhooks(
        self, project_id: str, *, after: str | None = None, limit: int = 20
    ) -> Page[WebhookEndpoint]:
        """A project's endpoints, newest first."""
        mine = webhook_endpoints.c.project_id == project_id
        listing = Listing(webhook_endpoints.c.position, webhook_endpoints.c.id, [mine])
        with self._database.reading() as connection:
            query = listing.apply(connection, select(*ENDPOINT).where(mine), after)
            now = connection.scalars(select(database_time())).one()
            return page(connection, query, limit, lambda row: _endpoint(row, now))

    def update_webhook(self, project_id: str, endpoint_id: str, **changes: Any) -> WebhookEndpoint:
        """Change name, url or event_types. Equal values leave `updated_at` unchanged."""
        with self._database.writing() as connection:
            old = _get(connection, project_id, endpoint_id, lock=True)
            if replace(old, **changes) != old:
                _update(connection, endpoint_id, **changes)
                record(connection, project_id, "webhook.updated", endpoint_id, **changes)
            return _get(connection, project_id, endpoint_id)

    def rotate_webhook_secret(
        self, project_id: str, endpoint_id: str, *, keep_seconds: float
    ) -> WebhookEndpoint:
        """Give an endpoint a new secret.

        Deliveries are signed with the old one too for `keep_seconds`.
        """
        with self._database.writing() as connection:
            old = _get(connection, project_id, endpoint_id, lock=True)
            kept = {"old_secret": None, "old_secret_expires_at": None}
            if keep_seconds:
                kept = {
                    "old_secret": old.secret,
                    "old_secret_expires_at": database_time() + keep_seconds,
                }
            _update(connection, endpoint_id, secret=_new_secret(), **kept)
            record(connection, project_id, "webhook.secret_rotated", endpoint_id)
            return _get(connection, project_id, endpoint_id)

    def delete_webhook(self, project_id: str, endpoint_id: str) -> None:
        """Delete an endpoint with its undelivered messages."""
        with self._database.writing() as connection:
            _get(connection, project_id, endpoint_id, lock=True)
            connection.execute(
                delete(webhook_deliveries).where(webhook_deliveries.c.endpoint_id == endpoint_id)
            )
            connection.execute(
                delete(webhook_endpoints).where(webhook_endpoints.c.id == endpoint_id)
            )
            record(connection, project_id, "webhook.deleted", endpoint_id)

    def claim_deliveries(
        self,
        *,
        limit: int,
        lease_seconds: float,
        of_project: int | None = None,
        under_way: Mapping[str, int] | None = None,
    ) -> list[Delivery]:
        """Claim due deliveries for `lease_seconds`; each claim counts as a try.

        Projects take turns, and within a project its endpoints, each with its oldest delivery
        first. `of_project`: limit of deliveries of one project at once; None: `limit`. `under_way`:
        project → its current deliveries.
        """
        with (
            self._database.reading() as connection
        ):  # most searches find nothing, and need not wait for writers
            ids = list(
                connection.scalars(_in_turn(of_project or limit, under_way or {}).limit(limit))
            )
        if not ids:
            return []
        columns = webhook_deliveries.c
        claim = update(webhook_deliveries).where(columns.id.in_(ids), _due())
        claim = claim.values(tries=columns.tries + 1, next_try_at=database_time() + lease_seconds)
        with self._database.writing() as connection:
            rows = (
                connection.execute(claim.returning(*_DELIVERY, columns.endpoint_id))
                .mappings()
                .all()
            )
            return [_delivery(connection, dict(row)) for row in rows]

    def settle_delivery(
        self, delivery: Delivery, *, error: str | None, retry_seconds: float | None
    ) -> None:
        """Store the result of a try.

        `error`: None if it was delivered. `retry_seconds`: until the next try; None: no further
        try.

        Without effect if another process has claimed the delivery since.
        """
        columns = webhook_deliveries.c
        over = error is None or retry_seconds is None
        values: dict[str, Any] = {"error": error, "finished_at": database_time() if over else None}
        if not over:
            values["next_try_at"] = database_time() + retry_seconds
        mine = (columns.id == delivery.id, columns.tries == delivery.tries, UNSENT)
        with self._database.writing() as connection:
            connection.execute(update(webhook_deliveries).where(*mine).values(values))

    def forget_deliveries(self, older_than_seconds: float, give_up_seconds: float) -> None:
        """Remove records of finished deliveries, and give up those that wait for longer than
        `give_up_seconds`, tried or not."""
        columns = webhook_deliveries.c
        now = database_time()
        late = update(webhook_deliveries).where(
            UNSENT,
            columns.created_at <= now - give_up_seconds,
            is_over(columns.next_try_at, _longest(webhook_deliveries)),
        )
        with self._database.writing() as connection:
            connection.execute(
                late.values(
                    finished_at=now, error=func.coalesce(columns.error, "it waited for too long")
                )
            )
            connection.execute(
                delete(webhook_deliveries).where(columns.finished_at <= now - older_than_seconds)
            )


def _due() -> ColumnElement[bool]:
    return and_(UNSENT, is_over(webhook_deliveries.c.next_try_at, _longest(webhook_deliveries)))


def _longest(deliveries: FromClause) -> ColumnElement[float]:
    """`longest_wait` as an expression."""
    tries = deliveries.c.tries
    return case(
        *((tries <= number, longest_wait(number)) for number in range(13)), else_=longest_wait(13)
    )


def _in_turn(of_project: int, under_way: Mapping[str, int]) -> Select[tuple[str]]:
    """Ids of due deliveries, in the order in which to make them.

    No more of an endpoint are read than may be under way, so that a long queue of one is never read
    as a whole.
    """
    columns = webhook_deliveries.c
    its = webhook_deliveries.alias()
    first = select(its.c.id).where(
        its.c.endpoint_id == webhook_endpoints.c.id, its.c.finished_at.is_(None)
    )
    first = (
        first.where(is_over(its.c.next_try_at, _longest(its)))
        .order_by(its.c.position)
        .limit(of_project)
    )
    of_endpoint = func.row_number().over(
        partition_by=columns.endpoint_id, order_by=columns.position
    )
    due = select(columns.id, columns.project_id, columns.position, of_endpoint.label("turn"))
    due = due.join_from(
        webhook_endpoints, webhook_deliveries, columns.id.in_(first.correlate(webhook_endpoints))
    ).subquery()
    in_project = func.row_number().over(
        partition_by=due.c.project_id, order_by=(due.c.turn, due.c.position)
    )
    busy = case(dict(under_way), value=due.c.project_id, else_=0) if under_way else 0
    ranked = select(due.c.id, due.c.position, (in_project + busy).label("turn")).subquery()
    return (
        select(ranked.c.id)
        .where(ranked.c.turn <= of_project)
        .order_by(ranked.c.turn, ranked.c.position)
    )


def announce(connection: Connection, job: Job) -> None:
    """Store the deliveries for an ended job within the transaction that changed its state; other
    jobs need none.
    """
    if job.state not in TERMINAL:
        return
    kind = f"fine_tuning.job.{job.state}"
    query = select(webhook_endpoints.c.id, webhook_endpoints.c.event_types)
    endpoints = connection.execute(
        query.where(webhook_endpoints.c.project_id == job.project_id)
    ).all()
    subscribed = [endpoint.id for endpoint in endpoints if kind in endpoint.event_types]
    if not subscribed:
        return
    body = event_body(kind, job.id, job.finished_at or 0.0)
    rows = [_new_delivery(job.project_id, endpoint_id, body) for endpoint_id in subscribed]
    connection.execute(insert(webhook_deliveries).values(created_at=database_time()), rows)


def event_body(kind: str, job_id: str, created_at: float) -> str:
    """Body of OpenAI's webhook event, as it is signed and sent."""
    event = {
        "id": new_id("evt_"),
        "object": "event",
        "created_at": int(created_at),
        "type": kind,
        "data": {"id": job_id},
    }
    return json.dumps(event)


def _new_delivery(project_id: str, endpoint_id: str, body: str) -> dict[str, Any]:
    return {
        "id": new_id("wh_"),
        "project_id": project_id,
        "endpoint_id": endpoint_id,
        "body": body,
        "tries": 0,
        "next_try_at": 0.0,
    }


def _new_secret() -> str:
    return "whsec_" + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def _get(
    connection: Connection, project_id: str, endpoint_id: str, *, lock: bool = False
) -> WebhookEndpoint:
    columns = webhook_endpoints.c
    query = select(*ENDPOINT, database_time().label("now")).where(
        columns.id == endpoint_id, columns.project_id == project_id
    )
    row = connection.execute(query.with_for_update() if lock else query).mappings().one_or_none()
    if row is None:
        raise not_found("webhook endpoint", endpoint_id)
    values = dict(row)
    return _endpoint(values, values.pop("now"))


def _endpoint(row: RowMapping | dict[str, Any], now: float) -> WebhookEndpoint:
    endpoint = WebhookEndpoint(**row)
    if endpoint.old_secret_expires_at is None or endpoint.old_secret_expires_at > now:
        return endpoint
    return replace(endpoint, old_secret=None, old_secret_expires_at=None)


def _update(connection: Connection, endpoint_id: str, **values: Any) -> None:
    mine = webhook_endpoints.c.id == endpoint_id
    connection.execute(
        update(webhook_endpoints).where(mine).values(**values, updated_at=database_time())
    )


def _delivery(connection: Connection, row: dict[str, Any]) -> Delivery:
    endpoint = _get(connection, row["project_id"], row.pop("endpoint_id"))
    now = connection.scalars(select(database_time())).one()
    return Delivery(endpoint=endpoint, age_seconds=now - row.pop("created_at"), **row)
