"""Webhook endpoints and what is delivered to them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from ft_service.control import webhook_delivery
from ft_service.control.webhook_delivery import (
    AT_ONCE_OF_PROJECT,
    Deliveries,
    DeliveryError,
    Sender,
    retry_after,
)
from ft_service.host import webhook_receiver
from ft_service.ids import new_id
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Phase, State
from ft_service.jobs.user_actions import Verb
from ft_service.meters import Meters
from ft_service.store.records import JobChange, NewKey, WebhookEndpoint
from tests.support.creating import create_job
from tests.support.records import new_job
from tests.support.rest.receiver import Receiver, hanging, receiving
from tests.support.rest.service import Service, put, wait_until

ALL: list[Any] = [
    "fine_tuning.job.succeeded",
    "fine_tuning.job.failed",
    "fine_tuning.job.cancelled",
]


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
        deliveries = Deliveries(service.settings, service.store)
        tries = 0
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
        query = (
            "SELECT tries, error FROM webhook_deliveries WHERE finished_at IS NULL ORDER BY "
            "position"
        )
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
    assert shown.model_dump() == {
        key: value for key, value in made.model_dump().items() if key != "signing_secret"
    }
    second = client.webhooks.create(name="b", url="https://example.com", event_types=ALL)
    assert [endpoint.id for endpoint in client.webhooks.list(limit=1)] == [second.id, made.id]
    assert made.signing_secret not in client.webhooks.list().model_dump_json()
    assert client.webhooks.event_types.list().data == ALL

    changed = client.webhooks.update(made.id, name="c", event_types=[ALL[2]])
    assert (changed.name, changed.event_types, changed.url) == ("c", [ALL[2]], made.url)
    rotated = client.webhooks.rotate_secret(made.id)
    assert rotated.signing_secret != made.signing_secret
    deleted = client.webhooks.delete(made.id)
    assert (deleted.id, deleted.object, deleted.deleted) == (
        made.id,
        "webhook_endpoint.deleted",
        True,
    )
    for ask in (client.webhooks.retrieve, client.webhooks.delete, client.webhooks.rotate_secret):
        with pytest.raises(openai.NotFoundError):
            ask(made.id)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (
            {"state": State.SUCCEEDED, "reason": Reason.SUCCEEDED, "finished_at": 1e9},
            "fine_tuning.job.succeeded",
        ),
        (
            {"state": State.FAILED, "reason": Reason.INVALID_FILE, "finished_at": 1e9},
            "fine_tuning.job.failed",
        ),
        (None, "fine_tuning.job.cancelled"),
    ],
)
def test_the_end_of_a_job_is_told_once_and_the_client_believes_it(
    service: Service,
    client: openai.OpenAI,
    receiver: Receiver,
    training_file: str,
    change: dict[str, Any] | None,
    kind: str,
) -> None:
    job_id = client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    secret = client.webhooks.create(
        name="a", url=f"{receiver.url}/hook", event_types=ALL
    ).signing_secret
    client.webhooks.create(
        name="b", url=receiver.url, event_types=[other for other in ALL if other != kind]
    )
    put(service, job_id, state=State.RUNNING, phase=Phase.TRAINING, attempt=1, host="h")
    deliver(service)
    assert receiver.arrived.empty()

    if change is None:
        client.fine_tuning.jobs.cancel(job_id)
        client.fine_tuning.jobs.cancel(job_id)
    put(service, job_id, **{"phase": None, **(change or {})})
    deliver(service)

    arrived = receiver.arrived.get(timeout=60)
    assert receiver.arrived.empty()
    assert (arrived.path, arrived.headers["content-type"]) == ("/hook", "application/json")
    event = client.webhooks.unwrap(arrived.body, arrived.headers, secret=secret)
    assert event.type == kind
    data: Any = event.data
    assert data.id == job_id
    assert event.created_at == client.fine_tuning.jobs.retrieve(job_id).finished_at
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(arrived.body + b" ", arrived.headers, secret=secret)


def test_a_change_that_is_undone_tells_nobody(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    job_id = client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    client.webhooks.create(name="a", url="https://example.com", event_types=ALL)
    claim = service.store.leases.claim(host="h", owner="test", lease_seconds=60.0, idle_seconds=0.0)
    assert claim is not None
    client.fine_tuning.jobs.pause(job_id)  # so that what was claimed has changed

    assert not service.store.leases.apply(
        claim, JobChange(job=replace(claim.job, state=State.FAILED))
    )
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
    first = receiver.arrived.get(timeout=60)
    second = receiver.arrived.get(timeout=60)
    assert receiver.arrived.empty(), "no redirect is followed"
    assert (first.headers["webhook-id"], first.body) == (second.headers["webhook-id"], second.body)


def test_what_is_too_old_is_given_up(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    client.webhooks.create(name="a", url="http://127.0.0.1:1", event_types=ALL)
    client.fine_tuning.jobs.cancel(
        client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    )
    service.sql("UPDATE webhook_deliveries SET created_at = 1")

    deliver(service)

    assert waiting(service) == []


CANNOT_BE_SENT_TO = (
    "https://256.1.1.1/",
    "https://0177.0.0.1/",
    "https://127.1/",
    "https://2130706433/",
    "https://0x7f000001/",
    "https://0x7f.1/",
    "https://1.2.3/",
    "https://example.123/",
    "https://example.0x1/",
    "https://1.2.3.4.5/",
    "https://example..com/",
    "https://.example.com/",
    "https://example.com./",
    f"https://{'a' * 64}.com/",
    f"https://{'a.' * 130}com/",
    "https://-example.com/",
    "https://example-.com/",
    "https://exa%41mple.com/",
    "https://a b.com/",
    "https://example.com\\evil.com/",
    "https://*.example.com/",
    "https://[::1].example.com/",
    "https://[fe80::1%25eth0]/",
    "https://[v1.a]/",
    "https://[::g]/",
    "https://example.com:0/",
    "https://example.com:65536/",
    "https://example.com:port/",
    "https://user@example.com/",
    "https:example.com",
    "https:///example.com",
    "//example.com",
    "https://exämple.com/",
    "https://example.com/\x7f",
    "https://",
    "",
    "x" * 5000,
)


def test_a_url_that_nothing_could_be_sent_to_is_refused_when_it_is_given(
    service: Service, client: openai.OpenAI, subtests: pytest.Subtests
) -> None:
    made = client.webhooks.create(name="a", url="https://example.com:8443/a?b=c", event_types=ALL)
    for url in CANNOT_BE_SENT_TO:
        for path, body in (("", {"name": "a", "event_types": ALL}), (f"/{made.id}", {})):
            with subtests.test(url=url[:40], path=path):
                answer = service.http(
                    "POST", f"/v1/webhook_endpoints{path}", json=body | {"url": url}
                )
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "url")
    assert [endpoint.url for endpoint in client.webhooks.list()] == [made.url]


def add_for(service: Service, project: str, url: str, deliveries: int = 1) -> WebhookEndpoint:
    """An endpoint of a project, with so many deliveries to it that are due.

    The URL is not checked, as an earlier version's.
    """
    service.store.projects.ensure_project(project, "local")
    endpoint = service.store.webhooks.add_webhook(
        WebhookEndpoint(id=new_id("we_"), project_id=project, name="a", url=url, event_types=ALL)
    )
    for _ in range(deliveries):
        service.store.jobs.request(
            project, create_job(service.store, new_job(project_id=project)).id, Verb.CANCEL
        )
    return endpoint


def test_what_one_delivery_raises_is_its_own_failure(
    service: Service, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    post = webhook_delivery._post

    async def fail(receiver: Any, address: str, endpoint: WebhookEndpoint, *message: str) -> int:
        if receiver.url.path == "/bug":
            raise KeyError("something unexpected\0")
        return await post(receiver, address, endpoint, *message)

    monkeypatch.setattr(webhook_delivery, "_post", fail)
    # Longer than all of them take together.
    monkeypatch.setattr(webhook_delivery, "FIRST_RETRY_SECONDS", 100.0)
    bad = [*CANNOT_BE_SENT_TO[:5], f"{receiver.url}/bug", f"http://{'x' * 63}.invalid"]
    for url in bad:
        add_for(service, "rival", url)
    good = [add_for(service, project, receiver.url) for project in ("rival", "default")]

    tries = deliver(service)

    left = waiting(service)
    assert len(left) == len(bad) * (len(bad) + 1) // 2 + len(bad), (
        "each endpoint gets its jobs and those after it"
    )
    assert all(tried == 1 and error for tried, error in left), "they wait for their next try"
    assert receiver.arrived.qsize() == 2 == tries - len(left), good
    service.sql("UPDATE webhook_deliveries SET created_at = 1")
    make_due(service)
    deliver(service)
    assert waiting(service) == [], "and are given up in the end"


def test_receivers_that_hang_take_nobody_elses_turn(service: Service, receiver: Receiver) -> None:
    """More than may be under way of all projects, and due for longer."""

    async def delivered() -> dict[str, int]:
        deliveries = Deliveries(service.settings, service.store)
        await deliveries.begin()
        add_for(service, "default", receiver.url, 3)
        while receiver.arrived.qsize() < 3:
            await deliveries.begin()
            await deliveries.wait(0.05)
        busy = deliveries._sender.under_way()
        await deliveries.finish(0.0)
        return busy

    with hanging() as (url, _):
        add_for(service, "rival", url, webhook_delivery.AT_ONCE + 8)
        assert asyncio.run(delivered()).get("rival") == AT_ONCE_OF_PROJECT
    assert all(tried <= 1 and error is None for tried, error in waiting(service)), (
        "what was ended is made again"
    )


def test_the_thread_beside_the_server_delivers_until_it_is_stopped(
    service: Service, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook_delivery, "_END_SECONDS", 0.1)
    stop = threading.Event()
    thread = threading.Thread(
        target=webhook_delivery.run, args=(service.settings, service.store, Meters(), stop)
    )
    thread.start()
    try:
        with hanging() as (url, _):
            add_for(service, "rival", "https://256.1.1.1/")
            add_for(service, "rival", url)
            add_for(service, "default", receiver.url)
            assert receiver.arrived.get(timeout=30).headers["webhook-id"].startswith("wh_")
            stop.set()
            thread.join(30)
            assert not thread.is_alive()
    finally:
        stop.set()
        thread.join()


def test_a_lookup_that_hangs_counts_until_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(webhook_receiver.socket, "getaddrinfo", lambda *_, **__: over.wait() and [])
    monkeypatch.setattr(webhook_delivery, "TRY_SECONDS", 0.01)
    sender = Sender(allow_private=True, at_once=2, at_once_of_project=1)
    endpoint = WebhookEndpoint(
        id="we_",
        project_id="p",
        name="a",
        url="https://example.com",
        event_types=ALL,
        secret="whsec_",
    )
    try:
        with pytest.raises(DeliveryError, match="no answer"):
            asyncio.run(sender.send(endpoint, "wh_", "{}"))
        assert (sender.under_way(), sender.has_room("p"), sender.has_room("q")) == (
            {"p": 1},
            False,
            True,
        )
    finally:
        over.set()
    wait_until(lambda: sender.has_room("p"))
    assert sender.under_way() == {}


def test_waits_grow_and_end() -> None:
    assert [retry_after(tries, 0.0) for tries in (1, 2, 3, 40, 5000)] == [
        5.0,
        10.0,
        20.0,
        21600.0,
        21600.0,
    ]
    assert retry_after(3, 72 * 3600.0 - 20) == 20.0
    assert retry_after(3, 72 * 3600.0 - 19) is None


def test_after_a_rotation_both_secrets_may_be_valid(
    service: Service, client: openai.OpenAI, receiver: Receiver
) -> None:
    made = client.webhooks.create(name="a", url=receiver.url, event_types=ALL)
    kept = client.webhooks.rotate_secret(made.id, keep_old_secret_active_for_24_hours=True)

    def believed(secret: str) -> bool:
        assert client.webhooks.test(made.id, event_type=ALL[0]).status_code == 200
        arrived = receiver.arrived.get(timeout=60)
        try:
            return (
                client.webhooks.unwrap(arrived.body, arrived.headers, secret=secret).type == ALL[0]
            )
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
    made = client.webhooks.create(
        name="a", url=f"http://receiver.invalid:{port}/hook", event_types=ALL
    )
    asked: list[str] = []

    def resolve(host: str, port: int, **_: Any) -> Any:
        asked.append(host)
        return [(2, 1, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(webhook_receiver.socket, "getaddrinfo", resolve)
    for _ in range(2):
        assert client.webhooks.test(made.id, event_type=ALL[0]).status_code == 200
        assert receiver.arrived.get(timeout=60).headers["host"] == f"receiver.invalid:{port}"
    assert asked == ["receiver.invalid"] * 2


class TestPublicOnly:
    @pytest.fixture
    def configure(self, configure: dict[str, Any]) -> dict[str, Any]:
        return configure | {"webhook_allow_private": False}

    def test_private_addresses_are_refused_when_given(
        self, service: Service, subtests: pytest.Subtests
    ) -> None:
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
        assert service.store.webhooks.list_webhooks("default").data == []

    def test_and_when_a_name_turns_out_to_stand_for_one(
        self, service: Service, client: openai.OpenAI, receiver: Receiver
    ) -> None:
        made = client.webhooks.create(
            name="a", url=f"https://localhost:{receiver.url.rsplit(':', 1)[1]}", event_types=ALL
        )
        with pytest.raises(
            openai.BadRequestError, match="localhost resolves to an address that is not public"
        ):
            client.webhooks.test(made.id, event_type=ALL[0])
        assert receiver.arrived.empty()


def test_wrong_bodies_are_refused_by_name(
    service: Service, client: openai.OpenAI, subtests: pytest.Subtests
) -> None:
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
        (
            f"/{made.id}/rotate_secret",
            {"keep_old_secret_active_for_24_hours": "yes"},
            "keep_old_secret_active_for_24_hours",
        ),
        (f"/{made.id}/test", {"event_type": "response.completed"}, "event_type"),
    ):
        with subtests.test(path=path, body=body):
            answer = service.http("POST", f"/v1/webhook_endpoints{path}", content=json.dumps(body))
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_another_projects_endpoints_do_not_exist(service: Service, client: openai.OpenAI) -> None:
    service.store.projects.ensure_project("other", "rival")
    other = service.client(
        service.store.keys.create_key(NewKey(project_id="other", name="k", scope="user"))[1]
    )
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
