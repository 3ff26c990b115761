"""Errors in a line of a data file, in JSON's terms."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self

from ft_service.errors import DataError
from ft_service.wording import kind, shown_value

OF_FILES = ", or leave the line out"
"""Advice at the end of reasons that is for lines of files alone."""


class LineError(DataError):
    """A line cannot be trained on.

    `field`: dotted place in the line; empty: the whole line. `reason`: why.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}" if field else reason)
        self.field = field
        self.reason = reason


class ImageError(LineError):
    """A line has a picture that cannot be used: the line may be skipped (data.images).

    `passing`: another try may find the picture.
    """

    def __init__(self, field: str, reason: str, *, passing: bool = False) -> None:
        super().__init__(field, reason)
        self.passing = passing

    def at(self, place: str) -> ImageError:
        """The same of the picture at this place."""
        return ImageError(place, self.reason, passing=self.passing)


@dataclass(frozen=True)
class Fault:
    """The reason why a line cannot be trained on."""

    line: int
    """Line number from 1; 0: the fault is the whole file's."""
    field: str
    """Dotted place in the line; empty: the whole line."""
    reason: str
    last_line: int = 0
    """The last line of a range of which one is at fault, and it is not known which; 0: it is
    `line`.
    """
    over_limit: bool = False
    """A limit on time or memory was exceeded; on another host it may not be."""
    of_image: bool = False
    """A picture cannot be used, and nothing else is known to be wrong."""
    passing: bool = False
    """As of an ImageError."""

    @classmethod
    def of(cls, line: int, error: LineError) -> Self:
        of_image = isinstance(error, ImageError)
        passing = isinstance(error, ImageError) and error.passing
        return cls(line, error.field, error.reason, of_image=of_image, passing=passing)

    def __str__(self) -> str:
        return self.text("line")

    def text(self, word: str) -> str:
        """The fault as one sentence.

        `word`: the name of the file's records, such as line or row.
        """
        several = self.last_line > self.line
        place = (
            f"{word}s {self.line} to {self.last_line}: "
            if several
            else f"{word} {self.line}: "
            if self.line
            else ""
        )
        return f"{place}{self.field} {self.reason}" if self.field else f"{place}{self.reason}"


def refuse_keys(
    given: Mapping[str, Any], known: Collection[str], refused: Mapping[str, str], prefix: str
) -> None:
    """Raise LineError for an unknown key, and for a key that is refused with a reason."""
    for key in refused:  # in this order: the keys that say most about a format come first
        if key in given:
            raise LineError(prefix + key, refused[key])
    for key in given:
        if key not in known:
            raise LineError(
                prefix + shown_value(key).strip("'"),
                f"is not a known key; known are {', '.join(sorted(known))}",
            )


def text_of(value: Any, place: str) -> str:
    """The value, if it is a string that can be written as UTF-8. Raises LineError."""
    if not isinstance(value, str):
        raise LineError(place, f"must be a string, not {kind(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise LineError(
            place, f"holds half of a surrogate pair at character {error.start + 1}"
        ) from None
    return value


def json_of(value: Any, place: str) -> Any:
    """The value, if it can be written as JSON in UTF-8.

    Raises LineError: tables hold dates and bytes, and JSON that is read may hold half of a
    surrogate pair.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise LineError(place, "holds half of a surrogate pair") from None
    except TypeError as error:
        raise LineError(
            place, f"cannot be written as JSON: {error}. Make it text or a number, or leave it out"
        ) from None
    except (ValueError, RecursionError):
        raise LineError(place, "is nested too deeply") from None
    return value


def required(given: Mapping[str, Any], key: str, prefix: str = "") -> Any:
    """The value of a key. `prefix`: the place of the object in the line, with a dot.

    Raises LineError if it is missing.
    """
    if key not in given:
        raise LineError(prefix + key, "is required")
    return given[key]


def not_utf8(byte: int, place: str) -> str:
    """The reason for refusing text in another encoding than UTF-8.

    `place`: of the first byte at fault.
    """
    return f"is not UTF-8: byte 0x{byte:02x} at {place}. Save the file as UTF-8 (Excel: CSV UTF-8)"
