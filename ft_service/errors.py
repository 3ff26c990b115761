"""Every error that a user of the service can see.

FtError
├── SpecError            the request or spec is wrong: names the field, the value, the limit (HTTP
                         400, exit code 64)
├── DataError            the contents of a data file are wrong: names file, line and reason (job
                         fails, exit code 64)
├── NotFoundError        no such file, job or model in this project (HTTP 404)
├── AuthError            missing, malformed, unknown or expired API key (HTTP 401)
├── ForbiddenError       the key is valid but may not do this (HTTP 403)
├── LimitError           the project or the key has reached a limit (HTTP 429)
├── ConflictError        another request changed the same object first; a retry may help (HTTP 409)
├── OtherVersionError    another version of the service made it, with options that this one does not
                         know (HTTP 409)
└── UnavailableError     a part the service needs does not answer (HTTP 503)
"""

from __future__ import annotations

from typing import Any


class FtError(Exception):
    """Base class. `code` is stable and machine readable; `param` is the dotted name of the wrong
    field, or None.
    """

    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        """Have pickle restore what an error holds, as it goes from rank to rank: by default it
        calls the class with the message alone, and some classes take something else.
        """
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[FtError], args: tuple[Any, ...], held: dict[str, Any]) -> FtError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(held)
    return error


class SpecError(FtError):
    """The request or the spec is wrong."""

    code = "invalid_value"


class DataError(FtError):
    """A data file's contents are wrong."""

    code = "invalid_file_format"


class NotFoundError(FtError):
    """The file, job or model does not exist in this project."""

    code = "not_found"


class AuthError(FtError):
    """The API key is missing or wrong."""

    code = "invalid_api_key"


class ForbiddenError(FtError):
    """The API key may not do this."""

    code = "insufficient_permissions"


class LimitError(FtError):
    """The project, or the key, has reached a limit."""

    code = "limit_exceeded"

    def __init__(
        self, message: str, *, code: str | None = None, retry_after: float | None = None
    ) -> None:
        """`retry_after`: seconds after which the same request succeeds; None: waiting does not
        help.
        """
        super().__init__(message, code=code)
        self.retry_after = retry_after


class ConflictError(FtError):
    """Another request changed it first."""

    code = "conflict"


class OtherVersionError(FtError):
    """Another version of the service made it, with options that this one does not know.

    A retry helps under that version.
    """

    code = "made_by_other_version"


class UnavailableError(FtError):
    """A part of the service does not answer.

    `retry_after`: seconds after which a retry may help; None: waiting does not help.
    """

    code = "unavailable"
    is_lost = True
    """Whether the same request may be answered later; False: it is what ended the part that should
    answer.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = 1,
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.retry_after = retry_after


def is_lost(error: BaseException) -> bool:
    """Whether the host or another part of the service is at fault, and not what was asked for: it
    may be done later.
    """
    return isinstance(error, UnavailableError) and error.is_lost
