"""A POST to a receiver that a user has chosen, signed according to Standard Webhooks: webhooks,
graders of type endpoint, and agents.

The connection goes to exactly the address that was checked (webhook_receiver.py), no redirect is
followed, and no proxy or credential of the environment is used.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ssl
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache

import httpx2

from ft_service.host.webhook_receiver import Receiver

MOST_SKEW_SECONDS = 300.0
"""Age of a signature, and difference of clocks, up to which it is taken."""


@dataclass(frozen=True)
class SignedMessage:
    """A JSON message and the secrets that sign it."""

    id: str
    """The same for every try, so that a receiver can leave out repetitions."""
    body: bytes
    secrets: Sequence[str] = field(repr=False)
    """`whsec_…`; each gives a signature."""

    def headers(self, timestamp: int) -> dict[str, str]:
        """The three headers of a signed message. `timestamp`: seconds since 1970."""
        signed = f"{self.id}.{timestamp}.".encode() + self.body
        return {
            "webhook-id": self.id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": " ".join(
                f"v1,{_signature(secret, signed)}" for secret in self.secrets
            ),
        }


@asynccontextmanager
async def signed_post(
    receiver: Receiver, address: str, message: SignedMessage, agent: str, seconds: float
) -> AsyncIterator[httpx2.Response]:
    """Send a message to an address of a receiver, and give the answer, whose body is not read yet.

    `agent`: the user agent; `seconds`: limit on each wait for the network, not on the whole. Raises
    httpx2.HTTPError.
    """
    headers = {
        "content-type": "application/json",
        "accept-encoding": "identity",
        "host": receiver.url.netloc.decode(),
        "user-agent": agent,
        **message.headers(int(time.time())),
    }
    async with httpx2.AsyncClient(
        trust_env=False, timeout=seconds, verify=trusted_context()
    ) as client:
        pinned = client.build_request(
            "POST",
            receiver.url.copy_with(host=address),
            content=message.body,
            headers=headers,
            extensions={"sni_hostname": receiver.host},
        )
        answer = await client.send(pinned, stream=True, follow_redirects=False)
        try:
            yield answer
        finally:
            await answer.aclose()


@cache
def trusted_context() -> ssl.SSLContext:
    """What is trusted: to read it takes 65 ms of a processor, many times what a message takes."""
    return httpx2.create_ssl_context(trust_env=False)


def is_signed(headers: Mapping[str, str], body: bytes, secret: str, now: float) -> bool:
    """Whether a request that was received is signed by a secret, at most MOST_SKEW_SECONDS ago.

    `headers`: by their names in lower case; `now`: seconds since 1970.
    """
    message_id = headers.get("webhook-id", "")
    stamp = headers.get("webhook-timestamp", "")
    if not stamp.isdecimal() or abs(now - int(stamp)) > MOST_SKEW_SECONDS:
        return False
    expected = "v1," + _signature(secret, f"{message_id}.{stamp}.".encode() + body)
    given = headers.get("webhook-signature", "").split()
    return any(hmac.compare_digest(expected.encode(), one.encode()) for one in given)


def _signature(secret: str, signed: bytes) -> str:
    key = base64.b64decode(secret.removeprefix("whsec_"))
    return base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
