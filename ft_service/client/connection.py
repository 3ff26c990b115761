"""Address and key of the server, from arguments, environment and FT_HOME; and the errors of the
connection.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from ft_service.errors import (
    AuthError,
    ConflictError,
    DataError,
    ForbiddenError,
    FtError,
    NotFoundError,
    SpecError,
    UnavailableError,
)
from ft_service.host.running_servers import living_servers

START_HINT = (
    "Start one with `ft serve` or `make serve`, or name another with FT_BASE_URL and FT_API_KEY."
)


LOGINS = "logins"
"""File in FT_HOME with the keys of `ft login`."""
_KEY = re.compile(r"[!-~]+")
"""Characters that a header can send, of which every key consists."""


@dataclass(frozen=True)
class Connection:
    """Address of a server with its version (`http://127.0.0.1:8000/v1`), and the key for it."""

    base_url: str
    api_key: str = field(repr=False)


def find_connection(
    environ: Mapping[str, str],
    home: Path,
    *,
    base_url: str | None = None,
    api_key: str | None = None,
) -> Connection:
    """Return the server and key from the arguments, then FT_BASE_URL/FT_API_KEY, then
    OPENAI_BASE_URL/OPENAI_API_KEY, then `home`: the newest running server of its `server.json`, or
    the one of the newest `ft login`, and the key of a login there or in its `credentials`.

    A key is sent only to the address that it belongs to: a login's to its server, the credentials
    file's key to the home's servers, and OPENAI_API_KEY (usually that of OpenAI's cloud) only to an
    address that was given and at which nobody has logged in.
    Raises FtError if no server is known, AuthError if there is no key or one that no server can
    know, and SpecError if an address or the credentials file is invalid.
    """
    given = base_url or environ.get("FT_BASE_URL") or environ.get("OPENAI_BASE_URL")
    logins = kept_logins(home)
    key = api_key or environ.get("FT_API_KEY")
    if not key and given:
        login = logins.get(address_of(given))
        key = login["key"] if login else environ.get("OPENAI_API_KEY")
    if key and not _KEY.fullmatch(key):
        raise AuthError(
            "The API key (FT_API_KEY) has white space or characters beyond ASCII, which no key "
            "has: copy it whole."
        )
    if given and key:
        return Connection(address_of(given), key)
    ours = _local_key(home / "credentials")
    known = [address_of(server.url) for server in living_servers(home)]
    address = address_of(given) if given else next(iter([*known, *reversed(logins)]), None)
    if address is None:
        raise FtError(_no_server(home, ours), code="no_server")
    if not key and address in logins:
        key = logins[address]["key"]
    key = key or (ours if address in known else None)
    if key is None:
        raise AuthError(
            f"There is no API key for {given or address}: set FT_API_KEY, or `ft login`."
        )
    return Connection(address, key)


def find_address(environ: Mapping[str, str], home: Path, given: str | None) -> str:
    """Return the server to log in at: the given one, then FT_BASE_URL and OPENAI_BASE_URL, then a
    running server of `home`, then that of the newest login.

    Raises FtError if none is known, SpecError for what is no address.
    """
    named = given or environ.get("FT_BASE_URL") or environ.get("OPENAI_BASE_URL")
    if named:
        return address_of(named)
    known = [server.url for server in living_servers(home)]
    address = next(iter([*known, *reversed(kept_logins(home))]), None)
    if address is None:
        raise FtError(
            "No server is known: give its address, such as ft login https://ft.example.com, or set "
            "FT_BASE_URL.",
            code="no_server",
        )
    return address_of(address)


def kept_logins(home: Path) -> dict[str, dict[str, Any]]:
    """Return the logins of `home` by address, the newest last. Raises SpecError for a file of
    another kind.
    """
    path = home / LOGINS
    try:
        logins = json.loads(path.read_text(encoding="utf-8"))
        if not all(isinstance(login["key"], str) for login in logins.values()):
            raise TypeError
        return logins
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise SpecError(f"{path} is not a file of logins: remove it, and `ft login`.") from None


def _no_server(home: Path, key: str | None) -> str:
    if key is not None:
        return f"No server is running that keeps its state in {home}. {START_HINT}"
    return (
        f"No server is known: {home / 'credentials'} does not exist. Is FT_HOME right? (`make` "
        f"sets it to .ft.) {START_HINT}"
    )


def _local_key(path: Path) -> str | None:
    """Return the key of a credentials file; None: there is no such file."""
    try:
        key = json.loads(path.read_text(encoding="utf-8"))["api_key"]
        if not isinstance(key, str):
            raise TypeError
        return key
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError):
        raise SpecError(
            f"{path} is not a credentials file: remove it, and make a key with `ft keys create`."
        ) from None


def address_of(text: str) -> str:
    """Return a server's address with its version (`/v1`). Raises SpecError."""
    try:
        url = httpx2.URL(text)
    except (httpx2.InvalidURL, ValueError):
        url = httpx2.URL()
    if url.scheme not in ("http", "https") or not url.host:
        raise SpecError(
            f"base_url = {text!r}: not an address such as http://127.0.0.1:8000/v1.",
            param="base_url",
        )
    return str(url.copy_with(path=url.path.rstrip("/") or "/v1"))


def is_loopback(base_url: str) -> bool:
    """Return whether a server is this host's own, which a proxy from the environment cannot
    reach.
    """
    return httpx2.URL(base_url).host in ("127.0.0.1", "localhost", "::1")


BY_STATUS: dict[int, type[FtError]] = {
    400: SpecError,
    401: AuthError,
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    413: SpecError,
    422: SpecError,
    502: UnavailableError,
    503: UnavailableError,
    504: UnavailableError,
}


def error_of(answer: httpx2.Response) -> FtError:
    """The error that the server raised, rebuilt: the class from code and status, the text and field
    from the body.
    """
    try:
        error = answer.json()["error"]
        message = str(error["message"])
        code = error.get("code")
        param = error.get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        return not_ours(answer)
    kind = DataError if code == DataError.code else BY_STATUS.get(answer.status_code, FtError)
    return kind(message, param=param, code=code)


@contextlib.contextmanager
def reaching(base_url: str) -> Iterator[None]:
    """Convert errors of the connection to UnavailableError, and text that is not UTF-8 to
    SpecError.
    """
    try:
        yield
    except (httpx2.ConnectError, httpx2.ConnectTimeout):
        raise UnavailableError(
            f"No server answers at {base_url}. {START_HINT}", code="no_server"
        ) from None
    except httpx2.TransportError as error:
        reason = str(error) or type(error).__name__
        raise UnavailableError(
            f"The connection to {base_url} broke ({reason}): try again."
        ) from None
    except (
        UnicodeEncodeError
    ):  # Python reads bytes of the command line and of stdin that are no UTF-8 as surrogates
        raise SpecError(
            "The text is not UTF-8, and was not sent. Is the terminal's encoding UTF-8?"
        ) from None


def not_ours(answer: httpx2.Response) -> FtError:
    """Return the error for a response that is not one of this service."""
    kind = UnavailableError if answer.status_code >= 500 else FtError
    address = answer.request.url.copy_with(query=None)
    return kind(
        f"{address} answered {answer.status_code} in an unknown format. Is FT_BASE_URL right?"
    )
