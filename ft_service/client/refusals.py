"""What a server refused, and that none was reached, as the errors of `ft_service.errors`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import httpx2

from ft_service.client.connection import START_HINT
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
    """The error that the server raised, rebuilt: the class from code and status, the text and field from the body."""
    try:
        error = answer.json()["error"]
        message, code, param = str(error["message"]), error.get("code"), error.get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        return not_ours(answer)
    kind = DataError if code == DataError.code else BY_STATUS.get(answer.status_code, FtError)
    return kind(message, param=param, code=code)


@contextlib.contextmanager
def reaching(base_url: str) -> Iterator[None]:
    """Turn errors on the way to a server into UnavailableError."""
    try:
        yield
    except (httpx2.ConnectError, httpx2.ConnectTimeout):
        raise UnavailableError(f"No server answers at {base_url}. {START_HINT}", code="no_server") from None
    except httpx2.TransportError as error:
        reason = str(error) or type(error).__name__
        raise UnavailableError(f"The connection to {base_url} broke ({reason}): try again.") from None


def not_ours(answer: httpx2.Response) -> FtError:
    """The error for an answer in a shape that no server of ours gives."""
    kind = UnavailableError if answer.status_code >= 500 else FtError
    address = answer.request.url.copy_with(query=None)
    return kind(f"{address} answered {answer.status_code} in no shape that this client knows. Is FT_BASE_URL right?")
