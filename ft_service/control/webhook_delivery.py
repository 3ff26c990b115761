"""Delivery of webhook messages, signed according to Standard Webhooks.

Users choose the receivers, so a connection goes to exactly the address that was checked
(ft_service/host/webhook_receiver.py), no redirect is followed, and no proxy or credential of the
environment is used. FT_WEBHOOK_ALLOW_PRIVATE permits receivers in private networks.

A failure affects only its own message, and each project has a limit of concurrent tries, so that
its hanging receivers delay no other project.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from concurrent.futures import Future
from functools import partial

from ft_service.errors import FtError
from ft_service.host.signed_post import SignedMessage, signed_post
from ft_service.host.webhook_receiver import (
    AddressInfos,
    Receiver,
    address_of,
    look_up,
    parse_receiver,
)
from ft_service.meters import Meters
from ft_service.settings import Settings
from ft_service.shared_work.losses import pause_seconds
from ft_service.store.records import Delivery, WebhookEndpoint
from ft_service.store.sql import Store

log = logging.getLogger("ft_service.webhooks")

TRY_SECONDS = 15.0
"""Limit of a try, from the lookup of the name to the status of the answer."""
POLL_SECONDS = 1.0
AT_ONCE = 64
"""Limit of concurrent tries."""
AT_ONCE_OF_PROJECT = 8
"""Limit of one project's concurrent tries."""
FIRST_RETRY_SECONDS = 5.0
MAX_RETRY_SECONDS = 6 * 3600.0
GIVE_UP_SECONDS = 72 * 3600.0
KEEP_SECONDS = 7 * 24 * 3600.0
"""How long the record of a finished delivery is kept."""
_LEASE_SECONDS = 4 * TRY_SECONDS
_END_SECONDS = 3.0
"""How long current tries may continue after the service was asked to stop."""
_MAX_ERROR = 500


class DeliveryError(Exception):
    """The message could not be delivered; the text says why."""


class Sender:
    """Sends messages, with limits of concurrent tries in total and per project.

    A try counts until its lookup of the name has ended too, which cannot be interrupted.
    """

    def __init__(self, *, allow_private: bool, at_once: int, at_once_of_project: int) -> None:
        self._allow_private = allow_private
        self._at_once = at_once
        self._of_project = at_once_of_project
        self._guard = threading.Lock()
        self._busy: Counter[str] = Counter()

    def under_way(self) -> dict[str, int]:
        """Project → number of its current tries."""
        with self._guard:
            return dict(self._busy)

    def has_room(self, project_id: str) -> bool:
        """Whether a try of this project may begin."""
        busy = self.under_way()
        return sum(busy.values()) < self._at_once and busy.get(project_id, 0) < self._of_project

    async def send(self, endpoint: WebhookEndpoint, message_id: str, body: str) -> int:
        """Send a message. Returns the status of the answer, whose body is not read.

        Raises DeliveryError for every failure.
        """
        looked_up: Future[AddressInfos] | None = None
        self._count(endpoint.project_id, 1)
        try:
            async with asyncio.timeout(TRY_SECONDS):
                receiver = parse_receiver(endpoint.url, allow_private=self._allow_private)
                looked_up = look_up(receiver)
                addresses = await asyncio.wrap_future(looked_up)
                address = address_of(receiver, addresses, allow_private=self._allow_private)
                return await _post(receiver, address, endpoint, message_id, body)
        except TimeoutError:
            raise DeliveryError(f"no answer within {TRY_SECONDS:g} seconds") from None
        except FtError as error:
            raise DeliveryError(error.message) from error
        except (
            Exception
        ) as error:  # libraries raise many kinds of errors for addresses that users invent
            raise DeliveryError((str(error) or type(error).__name__)[:_MAX_ERROR]) from error
        finally:
            if looked_up is None:
                self._count(endpoint.project_id, -1)
            else:
                looked_up.add_done_callback(lambda _: self._count(endpoint.project_id, -1))

    def _count(self, project_id: str, by: int) -> None:
        with self._guard:
            self._busy[project_id] += by
            self._busy += Counter()  # drops counts of zero


class Deliveries:
    """Delivers due messages: as many at once as the Sender allows, with projects in turn.

    For one event loop.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        meters: Meters | None = None,
        *,
        at_once_of_project: int = AT_ONCE_OF_PROJECT,
    ) -> None:
        self._store = store
        self._meters = meters or Meters()
        self._of_project = at_once_of_project
        allow_private = settings.webhook_allow_private
        self._sender = Sender(
            allow_private=allow_private, at_once=AT_ONCE, at_once_of_project=at_once_of_project
        )
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self) -> int:
        """Begin due deliveries within the limits.

        Returns their number. Raises UnavailableError if the database does not answer.
        """
        busy = self._sender.under_way()
        room = AT_ONCE - sum(busy.values())
        if room <= 0:
            return 0
        claim = partial(
            self._store.webhooks.claim_deliveries, limit=room, lease_seconds=_LEASE_SECONDS
        )
        batch = await asyncio.to_thread(claim, of_project=self._of_project, under_way=busy)
        for delivery in batch:
            task = asyncio.create_task(self._deliver(delivery))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        await asyncio.sleep(0)  # lets all tasks begin, so that the sender counts them
        return len(batch)

    @property
    def is_idle(self) -> bool:
        """Whether no delivery is running."""
        return not self._tasks

    async def wait(self, seconds: float) -> None:
        """Wait until a running delivery is done, at most `seconds`."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)

    async def finish(self, seconds: float | None = None) -> None:
        """Wait for running deliveries, at most `seconds`.

        The rest is cancelled, and repeated once its lease has ended.
        """
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _deliver(self, delivery: Delivery) -> None:
        """Try a delivery, and store the result."""
        error = await self._try(delivery)
        retry = retry_after(delivery.tries, delivery.age_seconds) if error else None
        if error:
            log.warning(
                "webhook %s to %s, try %d: %s",
                delivery.id,
                delivery.endpoint.id,
                delivery.tries,
                error,
            )
        if error and retry is None:
            self._meters.webhooks_given_up.inc()
        try:
            await asyncio.to_thread(
                self._store.webhooks.settle_delivery, delivery, error=error, retry_seconds=retry
            )
        except Exception:  # it is repeated once its lease has ended
            log.exception("the result of webhook %s cannot be stored", delivery.id)

    async def _try(self, delivery: Delivery) -> str | None:
        """The error; None: it was delivered."""
        try:
            status = await self._sender.send(delivery.endpoint, delivery.id, delivery.body)
        except DeliveryError as error:
            return str(error)
        return None if 200 <= status < 300 else f"the receiver answered {status}"


def retry_after(tries: int, age_seconds: float) -> float | None:
    """Seconds until the next try of a delivery that has failed `tries` times; None: give up."""
    delay = pause_seconds(tries, first=FIRST_RETRY_SECONDS, longest=MAX_RETRY_SECONDS)
    return delay if age_seconds + delay <= GIVE_UP_SECONDS else None


def run(settings: Settings, store: Store, meters: Meters, stop: threading.Event) -> None:
    """Deliver messages until `stop` is set.

    A try interrupted by the end of the process is repeated.
    """
    asyncio.run(_run(Deliveries(settings, store, meters), stop))


async def _run(deliveries: Deliveries, stop: threading.Event) -> None:
    while not stop.is_set():
        begun = 0
        try:
            begun = await deliveries.begin()
        except Exception:
            log.exception("deliveries cannot be read")
        if not begun and deliveries.is_idle:
            await asyncio.to_thread(stop.wait, POLL_SECONDS)
        elif not begun:
            await deliveries.wait(POLL_SECONDS)
    await deliveries.finish(_END_SECONDS)


async def _post(
    receiver: Receiver, address: str, endpoint: WebhookEndpoint, message_id: str, body: str
) -> int:
    message = SignedMessage(message_id, body.encode(), secrets_of(endpoint))
    async with signed_post(
        receiver, address, message, "ft-service-webhooks", TRY_SECONDS
    ) as answer:
        return answer.status_code


def secrets_of(endpoint: WebhookEndpoint) -> list[str]:
    """The secrets that sign messages to an endpoint: two while an old one is still valid."""
    return [endpoint.secret, *([endpoint.old_secret] if endpoint.old_secret else [])]
