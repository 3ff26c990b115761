"""Webhook endpoints and what is delivered to them."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from ft_service.control import webhook_delivery, webhook_receiver
from ft_service.control.webhook_delivery import Deliveries, retry_after
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Phase, State
from ft_service.store.records import JobChange
from tests.support.rest.receiver import Receiver, receiving
from tests.support.rest.service import Service, put

ALL: list[Any] = ["fine_tuning.job.succeeded", "fine_tuning.job.failed", "fine_tuning.job.cancelled"]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def configure(configure: dict[str, Any]) -> dict[str, Any]:
    return configure | {"webhook_allow_private": True}


def deliver(service: Service) -> int:
    """Deliver what is due; how many tries that took."""

    async def all_due() -> int:
        deliveries, tries = Deliveries(service.settings, service.store), 0
        while begun := await deliveries.begin():
            tries += begun
            await deliveries.finish()
        return tries

    return asyncio.run(all_due())


def make_due(service: Service) -> None:
    service.sql("UPDATE webhook_deliveries SET next_try_at = 0")


def waiting(service: Service) -> list[tuple[int, str | None]]:
    """Tries and last error of what was neither delivered nor given up."""
    with service.store.reading() as connection:
        query = "SELECT tries, error FROM webhook_deliveries WHERE finished_at IS NULL ORDER BY position"
        return [(row.tries, row.error) for row in connection.exec_driver_sql(query)]


def test_endpoints_are_made_read_changed_and_deleted(client: openai.OpenAI) -> None:
    made = client.webhooks.create(name="a", url="https://example.com/hook?x=1", event_types=ALL[:2])

    assert made.signing_secret.startswith("whsec_")
    assert (made.object, made.name, made.url, made.event_types) == (
        "webhook_endpoint",
        "a",
        "https://example.com/hook?x=1",
        ALL[:2],
    )
    assert made.signing_secret_hint == f"whsec_...{made.signing_secret[-4:]}"
    assert made.updated_at == made.created_at
    shown = client.webhooks.retrieve(made.id)
    assert shown.model_dump() == {key: value for key, value in made.model_dump().items() if key != "signing_secret"}
    second = client.webhooks.create(name="b", url="https://example.com", event_types=ALL)
    assert [endpoint.id for endpoint in client.webhooks.list(limit=1)] == [second.id, made.id]
    assert made.signing_secret not in client.webhooks.list().model_dump_json()
    assert client.webhooks.event_types.list().data == ALL

    changed = client.webhooks.update(made.id, name="c", event_types=[ALL[2]])
    assert (changed.name, changed.event_types, changed.url) == ("c", [ALL[2]], made.url)
    rotated = client.webhooks.rotate_secret(made.id)
    assert rotated.signing_secret != made.signing_secret
    deleted = client.webhooks.delete(made.id)
    assert (deleted.id, deleted.object, deleted.deleted) == (made.id, "webhook_endpoint.deleted", True)
    for ask in (client.webhooks.retrieve, client.webhooks.delete, client.webhooks.rotate_secret):
        with pytest.raises(openai.NotFoundError):
            ask(made.id)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"state": State.SUCCEEDED, "reason": Reason.SUCCEEDED, "finished_at": 1e9}, "fine_tuning.job.succeeded"),
        ({"state": State.FAILED, "reason": Reason.INVALID_FILE, "finished_at": 1e9}, "fine_tuning.job.failed"),
        (None, "fine_tuning.job.cancelled"),
    ],
)
def test_the_end_of_a_job_is_told_once_and_the_client_believes_it(
    service: Service, client: openai.OpenAI, receiver: Receiver, training_file: str, change: dict[str, Any] | None, kind: str
) -> None:
    job_id = client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    secret = client.webhooks.create(name="a", url=f"{receiver.url}/hook", event_types=ALL).signing_secret
    client.webhooks.create(name="b", url=receiver.url, event_types=[other for other in ALL if other != kind])
    put(service, job_id, state=State.RUNNING, phase=Phase.TRAINING, attempt=1, host="h")
    deliver(service)
    assert receiver.arrived.empty()

    if change is None:
        client.fine_tuning.jobs.cancel(job_id)
        client.fine_tuning.jobs.cancel(job_id)
    put(service, job_id, **{"phase": None, **(change or {})})
    deliver(service)

    arrived = receiver.arrived.get(timeout=10)
    assert receiver.arrived.empty()
    assert (arrived.path, arrived.headers["content-type"]) == ("/hook", "application/json")
    event = client.webhooks.unwrap(arrived.body, arrived.headers, secret=secret)
    assert event.type == kind
    data: Any = event.data
    assert data.id == job_id
    assert event.created_at == client.fine_tuning.jobs.retrieve(job_id).finished_at
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(arrived.body + b" ", arrived.headers, secret=secret)


def test_a_change_that_is_undone_tells_nobody(service: Service, client: openai.OpenAI, training_file: str) -> None:
    job_id = client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    client.webhooks.create(name="a", url="https://example.com", event_types=ALL)
    claim = service.store.claim(host="h", owner="test", lease_seconds=60.0, idle_seconds=0.0)
    assert claim is not None
    client.fine_tuning.jobs.pause(job_id)  # so that what was claimed has changed

    assert not service.store.apply(claim, JobChange(job=replace(claim.job, state=State.FAILED)))
    assert waiting(service) == []


def test_what_does_not_arrive_is_tried_again_with_the_same_id(
    service: Service, client: openai.OpenAI, receiver: Receiver, training_file: str
) -> None:
    made = client.webhooks.create(name="a", url=receiver.url, event_types=ALL)
    job_id = client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    receiver.answer = lambda _: (302, {"location": f"{receiver.url}/elsewhere"}, iter(()))
    client.fine_tuning.jobs.cancel(job_id)
    deliver(service)
    assert waiting(service) == [(1, "the receiver answered 302")]
    assert not deliver(service), "it waits for its next try"

    client.webhooks.update(made.id, url="http://127.0.0.1:1")
    make_due(service)
    deliver(service)
    assert waiting(service)[0][0] == 2

    receiver.answer = lambda _: (204, {}, iter(()))
    client.webhooks.update(made.id, url=receiver.url)
    make_due(service)
    deliver(service)

    assert waiting(service) == []
    first, second = receiver.arrived.get(timeout=10), receiver.arrived.get(timeout=10)
    assert receiver.arrived.empty(), "no redirect is followed"
    assert (first.headers["webhook-id"], first.body) == (second.headers["webhook-id"], second.body)


def test_what_is_too_old_is_given_up(service: Service, client: openai.OpenAI, training_file: str) -> None:
    client.webhooks.create(name="a", url="http://127.0.0.1:1", event_types=ALL)
    client.fine_tuning.jobs.cancel(client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id)
    service.sql("UPDATE webhook_deliveries SET created_at = 1")

    deliver(service)

    assert waiting(service) == []


def test_waits_grow_and_end() -> None:
    assert [retry_after(tries, 0.0) for tries in (1, 2, 3, 40, 5000)] == [5.0, 10.0, 20.0, 21600.0, 21600.0]
    assert retry_after(3, 72 * 3600.0 - 20) == 20.0
    assert retry_after(3, 72 * 3600.0 - 19) is None


def test_after_a_rotation_both_secrets_may_be_valid(service: Service, client: openai.OpenAI, receiver: Receiver) -> None:
    made = client.webhooks.create(name="a", url=receiver.url, event_types=ALL)
    kept = client.webhooks.rotate_secret(made.id, keep_old_secret_active_for_24_hours=True)

    def believed(secret: str) -> bool:
        assert client.webhooks.test(made.id, event_type=ALL[0]).status_code == 200
        arrived = receiver.arrived.get(timeout=10)
        try:
            return client.webhooks.unwrap(arrived.body, arrived.headers, secret=secret).type == ALL[0]
        except openai.InvalidWebhookSignatureError:
            return False

    assert (believed(made.signing_secret), believed(kept.signing_secret)) == (True, True)
    service.sql("UPDATE webhook_endpoints SET old_secret_expires_at = 1")
    assert (believed(made.signing_secret), believed(kept.signing_secret)) == (False, True)
    newest = client.webhooks.rotate_secret(made.id)
    assert (believed(kept.signing_secret), believed(newest.signing_secret)) == (False, True)


def test_a_test_says_what_the_receiver_answered(client: openai.OpenAI, receiver: Receiver) -> None:
    made = client.webhooks.create(name="a", url=receiver.url, event_types=[ALL[0]])
    receiver.answer = lambda _: (418, {}, iter(()))

    result = client.webhooks.test(made.id, event_type=ALL[1])

    assert (result.object, result.event_type, result.status_code, result.success) == (
        "webhook_endpoint.test",
        ALL[1],
        418,
        True,
    )
    assert result.webhook_endpoint_id == made.id
    client.webhooks.update(made.id, url="http://127.0.0.1:1")
    with pytest.raises(openai.BadRequestError) as caught:
        client.webhooks.test(made.id, event_type=ALL[1])
    assert caught.value.code == "receiver_not_reached"


def test_the_name_is_looked_up_for_every_try_and_pinned(
    client: openai.OpenAI, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = receiver.url.rsplit(":", 1)[1]
    made = client.webhooks.create(name="a", url=f"http://receiver.invalid:{port}/hook", event_types=ALL)
    asked: list[str] = []

    def resolve(host: str, port: int, **_: Any) -> Any:
        asked.append(host)
        return [(2, 1, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(webhook_receiver.socket, "getaddrinfo", resolve)
    for _ in range(2):
        assert client.webhooks.test(made.id, event_type=ALL[0]).status_code == 200
        assert receiver.arrived.get(timeout=10).headers["host"] == f"receiver.invalid:{port}"
    assert asked == ["receiver.invalid"] * 2


class TestPublicOnly:
    @pytest.fixture
    def configure(self, configure: dict[str, Any]) -> dict[str, Any]:
        return configure | {"webhook_allow_private": False}

    def test_private_addresses_are_refused_when_given(self, service: Service, subtests: pytest.Subtests) -> None:
        for url in (
            "http://example.com",
            "ftp://example.com",
            "https://",
            "https://[::1]/",
            "https://127.0.0.1/",
            "https://10.0.0.1/",
            "https://169.254.169.254/latest/meta-data",
            "https://[::ffff:127.0.0.1]/",
            "https://[64:ff9b::7f00:1]/",
            "https://user:password@example.com/",
            "https://example.com:99999/",
            "https://example.com/#a",
            "https://exa\tmple.com/",
            "https://[",
            "x" * 5000,
        ):
            with subtests.test(url=url[:40]):
                body = {"name": "a", "url": url, "event_types": ALL}
                answer = service.http("POST", "/v1/webhook_endpoints", json=body)
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "url")
        assert service.store.list_webhooks("default").data == []

    def test_and_when_a_name_turns_out_to_stand_for_one(
        self, service: Service, client: openai.OpenAI, receiver: Receiver
    ) -> None:
        made = client.webhooks.create(name="a", url=f"https://localhost:{receiver.url.rsplit(':', 1)[1]}", event_types=ALL)
        with pytest.raises(openai.BadRequestError, match="not a public address"):
            client.webhooks.test(made.id, event_type=ALL[0])
        assert receiver.arrived.empty()


def test_wrong_bodies_are_refused_by_name(service: Service, client: openai.OpenAI, subtests: pytest.Subtests) -> None:
    made = client.webhooks.create(name="a", url="https://example.com", event_types=ALL)
    good = {"name": "a", "url": "https://example.com", "event_types": ALL}
    for path, body, param in (
        ("", {**good, "event_types": []}, "event_types"),
        ("", {**good, "event_types": ["batch.completed"]}, "event_types.0"),
        ("", {**good, "name": ""}, "name"),
        ("", {**good, "secret": "x"}, "secret"),
        ("", {"name": "a", "url": "https://example.com"}, "event_types"),
        (f"/{made.id}", {"url": "http:/"}, "url"),
        (f"/{made.id}", {"event_types": ["x"]}, "event_types.0"),
        (f"/{made.id}/rotate_secret", {"keep_old_secret_active_for_24_hours": "yes"}, "keep_old_secret_active_for_24_hours"),
        (f"/{made.id}/test", {"event_type": "response.completed"}, "event_type"),
    ):
        with subtests.test(path=path, body=body):
            answer = service.http("POST", f"/v1/webhook_endpoints{path}", content=json.dumps(body))
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_another_projects_endpoints_do_not_exist(service: Service, client: openai.OpenAI) -> None:
    service.store.ensure_project("other", "rival")
    other = service.client(service.store.create_key(project_id="other", name="k", scope="user")[1])
    made = client.webhooks.create(name="a", url="https://example.com", event_types=ALL)
    assert list(other.webhooks.list()) == []
    for ask in (
        other.webhooks.retrieve,
        other.webhooks.delete,
        other.webhooks.rotate_secret,
        lambda id: other.webhooks.update(id, name="b"),
        lambda id: other.webhooks.test(id, event_type=ALL[0]),
    ):
        with pytest.raises(openai.NotFoundError):
            ask(made.id)
