"""Receivers of webhooks: the same function checks a user's URL when it is given and again at every
delivery.

A URL that could not be delivered to is refused when it is given. Every delivery resolves the name
again, every address of the name must be public (public_addresses.py), and the connection goes to
exactly the address that was checked.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import httpx2

from ft_service.errors import FtError, SpecError
from ft_service.host.public_addresses import is_public

LOOKUP_SECONDS = 10.0
"""Time for the lookup of a name that `find_address` waits for."""
_MAX_URL = 2048
_MAX_NAME = 253
_PORTS = {"http": 80, "https": 443}
_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_NUMBER = re.compile(r"([0-9]+|0x[0-9a-f]*)")
"""Last label with which browsers and resolvers read a name as an IPv4 address: 127.1, 2130706433,
0x7f.1.
"""

AddressInfos = list[tuple[Any, ...]]
"""Result of socket.getaddrinfo."""


class NotPublicError(FtError):
    """A name resolves to an address that is not public."""

    code = "private_address"


class AddressError(Exception):
    """No address to connect to was found."""


@dataclass(frozen=True)
class Receiver:
    """Server that a message can be sent to."""

    url: httpx2.URL
    host: str
    """Name, or address without brackets."""
    port: int


def parse_receiver(url: str, *, allow_private: bool) -> Receiver:
    """Return the receiver of a URL.

    Raises SpecError if nothing can be delivered to it, as far as that is known without resolving
    its name.

    `allow_private`: also accept plain HTTP, and literal addresses that are not public.
    """
    shown = f"url = {url if len(url) <= 80 else url[:77] + '...'!r}"
    schemes = ("https", "http") if allow_private else ("https",)
    if len(url) > _MAX_URL or not (url.isascii() and url.isprintable()):
        raise SpecError(
            f"{shown}: must be printable ASCII, of at most {_MAX_URL} characters.", param="url"
        )
    try:
        parsed = httpx2.URL(url)
        scheme = parsed.scheme
        host = parsed.host
        port = parsed.port
    except (httpx2.InvalidURL, ValueError) as error:
        raise SpecError(f"{shown}: is not a URL: {error}.", param="url") from None
    if scheme not in schemes or not host:
        raise SpecError(
            f"{shown}: must begin with {' or '.join(f'{s}://' for s in schemes)} and a host.",
            param="url",
        )
    if parsed.userinfo or parsed.fragment:
        raise SpecError(
            f"{shown}: must have neither a user name nor a fragment. Leave it out.", param="url"
        )
    port = _PORTS[scheme] if port is None else port
    if not 1 <= port <= 65535:
        raise SpecError(f"{shown}: port {port} is not one from 1 to 65535.", param="url")
    address = _literal(host)
    if address is None:
        _check_name(host, shown)
    elif not allow_private and not is_public(address):
        message = (
            f"{shown}: {host} is not a public address, and FT_WEBHOOK_ALLOW_PRIVATE is not set."
        )
        raise SpecError(message, param="url", code="private_address")
    return Receiver(parsed, host, port)


def look_up(receiver: Receiver) -> Future[AddressInfos]:
    """Resolve a receiver's addresses with the system's resolver.

    The future ends with OSError or UnicodeError if there are none.

    It runs in a thread of its own, since a lookup cannot be interrupted: slow name servers of one
    receiver must not delay others. The caller counts lookups until they are done.
    """
    future: Future[AddressInfos] = Future()
    # it cannot be cancelled any more: `done` means that the thread has ended
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            future.set_result(
                socket.getaddrinfo(receiver.host, receiver.port, type=socket.SOCK_STREAM)
            )
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=work, name="webhook-lookup", daemon=True).start()
    return future


def address_of(receiver: Receiver, infos: AddressInfos, *, allow_private: bool) -> str:
    """Return the address to connect to.

    Raises NotPublicError if one of the addresses is not public.
    """
    addresses = [str(entry[4][0]) for entry in infos]
    for address in addresses:
        if not allow_private and not is_public(ipaddress.ip_address(address.partition("%")[0])):
            # without the address: who may set a receiver need not learn those of an internal
            # network
            raise NotPublicError(f"{receiver.host} resolves to an address that is not public")
    return addresses[0]


async def find_address(receiver: Receiver, *, allow_private: bool) -> str:
    """Return the address to connect to. Raises AddressError."""
    looked_up = look_up(receiver)
    try:
        async with asyncio.timeout(LOOKUP_SECONDS):
            infos = await asyncio.wrap_future(looked_up)
        return address_of(receiver, infos, allow_private=allow_private)
    except TimeoutError:
        why = f"the name {receiver.host} was not found within {LOOKUP_SECONDS:g} seconds"
        raise AddressError(why) from None
    except (FtError, OSError, UnicodeError) as error:
        raise AddressError(str(error)) from None


def _literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that a host is; None: it is a name, or invalid."""
    if "%" in host:  # a zone, which is valid on one host only
        return None
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _check_name(host: str, shown: str) -> None:
    """Raise SpecError for what is neither an address nor the name of a host."""
    if _NUMBER.fullmatch(host.rpartition(".")[2]):
        message = (
            f"{shown}: {host[:80]} ends in a number and is not an IPv4 address: write it as "
            "four numbers from 0 to 255."
        )
        raise SpecError(message, param="url")
    if len(host) > _MAX_NAME or not _NAME.fullmatch(host):
        message = (
            f"{shown}: {host[:80]!r} is not the name of a host: at most {_MAX_NAME} characters, "
            "in parts between dots of 1 "
            "to 63 letters, digits, hyphens and underscores."
        )
        raise SpecError(message, param="url")
