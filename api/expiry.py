"""`expires_after` of files and uploads: OpenAI's object with an anchor and a number of seconds."""

from __future__ import annotations

from collections.abc import Mapping

from ft_service.errors import SpecError

ANCHOR = "created_at"
MIN_SECONDS = 3600
MAX_SECONDS = 2_592_000

SCHEMA = {
    "type": "object",
    "required": ["anchor", "seconds"],
    "additionalProperties": False,
    "properties": {
        "anchor": {"const": ANCHOR},
        "seconds": {"type": "integer", "minimum": MIN_SECONDS, "maximum": MAX_SECONDS},
    },
}


def from_form(fields: Mapping[str, str]) -> int | None:
    """Seconds from the parts `expires_after[anchor]` and `expires_after[seconds]`; None without either. Raises SpecError."""
    given = {name: fields[part] for name in ("anchor", "seconds") if (part := f"expires_after[{name}]") in fields}
    if not given:
        return None
    text = given.get("seconds", "")
    return seconds({**given, "seconds": int(text) if text.isdecimal() and len(text) < 12 else text} if text else given)


def seconds(value: object) -> int:
    """Seconds of an `expires_after` object. Raises SpecError naming the key, its value and the limit."""
    if not isinstance(value, Mapping):
        raise SpecError(f"expires_after must be an object with anchor and seconds, not {value!r:.80}.", param="expires_after")
    for name in value:
        if name not in ("anchor", "seconds"):
            raise SpecError(f"expires_after.{name:.80}: known are anchor and seconds.", param="expires_after")
    anchor, number = value.get("anchor"), value.get("seconds")
    if anchor != ANCHOR:
        message = f"expires_after.anchor = {anchor!r:.80}: the only anchor is {ANCHOR!r}."
        raise SpecError(message, param="expires_after.anchor")
    if not isinstance(number, int) or isinstance(number, bool) or not MIN_SECONDS <= number <= MAX_SECONDS:
        message = f"expires_after.seconds = {number!r:.80}: must be a whole number from {MIN_SECONDS} to {MAX_SECONDS}."
        raise SpecError(message, param="expires_after.seconds")
    return number
