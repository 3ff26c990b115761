"""A file of the public web that a user names: fetched within bounds, from exactly the address that
was checked (webhook_receiver.py).

Every redirect is a URL that is checked anew. No proxy, credential or cookie of this host is used.
"""

from __future__ import annotations

import time
from concurrent.futures import wait

import httpx2

from ft_service.errors import FtError
from ft_service.host.webhook_receiver import Receiver, address_of, look_up, parse_receiver

MOST_REDIRECTS = 3
_AGENT = "ft-service-images"


class FetchError(FtError):
    """A file could not be fetched; the text says why, after its name."""

    code = "not_fetched"


def fetch_public(url: str, most_bytes: int, seconds: float, *, allow_private: bool) -> bytes:
    """The body that a GET of a URL answers.

    Raises FetchError for anything else than at most `most_bytes` within `seconds`, redirects
    included. `allow_private`: as in `parse_receiver`.
    """
    due = time.monotonic() + seconds
    for _ in range(1 + MOST_REDIRECTS):
        try:
            receiver = parse_receiver(url, allow_private=allow_private)
            address = _address(receiver, due, allow_private=allow_private)
            found = _got(receiver, address, most_bytes, due)
        except FetchError:
            raise
        except FtError as error:
            raise FetchError(f"cannot be fetched: {error.message}") from None
        except httpx2.TimeoutException:
            raise _late(seconds) from None
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, UnicodeError, ValueError) as error:
            raise FetchError(f"cannot be fetched: {error or type(error).__name__}") from None
        if isinstance(found, bytes):
            return found
        if time.monotonic() >= due:
            raise _late(seconds)
        url = found
    raise FetchError(f"is redirected more than {MOST_REDIRECTS} times")


def require_public(url: str, seconds: float, *, allow_private: bool) -> None:
    """Raise FetchError for a URL that `fetch_public` would not begin to fetch, or whose name is not
    found within `seconds`.
    """
    try:
        receiver = parse_receiver(url, allow_private=allow_private)
        _address(receiver, time.monotonic() + seconds, allow_private=allow_private)
    except FetchError:
        raise
    except FtError as error:
        raise FetchError(f"cannot be fetched: {error.message}") from None
    except (OSError, UnicodeError) as error:
        raise FetchError(f"cannot be fetched: {error or type(error).__name__}") from None


def _late(seconds: float) -> FetchError:
    return FetchError(f"was not there within {seconds:g} seconds")


def _address(receiver: Receiver, due: float, *, allow_private: bool) -> str:
    looked_up = look_up(receiver)
    if wait([looked_up], max(0.0, due - time.monotonic())).not_done:
        raise FetchError(f"cannot be fetched: the name {receiver.host} was not found in time")
    return address_of(receiver, looked_up.result(), allow_private=allow_private)


def _got(receiver: Receiver, address: str, most_bytes: int, due: float) -> bytes | str:
    """The body of the answer, or the URL that it redirects to."""
    left = max(0.1, due - time.monotonic())
    headers = {
        "host": receiver.url.netloc.decode(),
        "user-agent": _AGENT,
        "accept-encoding": "identity",
    }
    with httpx2.Client(trust_env=False, timeout=left) as client:
        pinned = client.build_request(
            "GET",
            receiver.url.copy_with(host=address),
            headers=headers,
            extensions={"sni_hostname": receiver.host},
        )
        answer = client.send(pinned, stream=True, follow_redirects=False)
        try:
            if answer.is_redirect and "location" in answer.headers:
                return str(receiver.url.join(answer.headers["location"]))
            if answer.status_code != 200:
                raise FetchError(f"is not there: {receiver.host} answered {answer.status_code}")
            body = bytearray()
            for part in answer.iter_raw():
                body += part
                if len(body) > most_bytes:
                    raise FetchError(f"has more than {most_bytes:,} bytes: make it smaller")
                if time.monotonic() >= due:
                    raise FetchError("was not there in time: its server sends too slowly")
            return bytes(body)
        finally:
            answer.close()
