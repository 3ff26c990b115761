"""Words of texts that users read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import Any

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_SHOWN = 80
"""Most characters of a value in a message."""


def counted(number: float, word: str, one: str = "", several: str = "") -> str:
    """`1 line`, `1,200 lines`, `0.5 days`; with verbs `1 line is`, `1,200 lines are`."""
    amount = f"{number:,g}" if isinstance(number, float) else f"{number:,}"
    text = f"{amount} {word}" if number == 1 else f"{amount} {word}s"
    verb = one if number == 1 else several
    return f"{text} {verb}" if verb else text


def bytes_text(count: float) -> str:
    """`5.31 GiB`, `12 B`."""
    unit = 0
    while abs(count) >= 1024 and unit < len(_UNITS) - 1:
        count = count / 1024
        unit = unit + 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 else f"{count:.2f} {_UNITS[unit]}"


def duration_text(seconds: float) -> str:
    """`2 h 5 min`, `7 min` or `30 s`; below one `less than a second`."""
    if seconds < 1:
        return "less than a second"
    if round(seconds) < 60:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def kind(value: object) -> str:
    """The kind of a value as JSON and YAML have it: `null`, `true`, `a number`, `an object`."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, (list, dict)):
        name = "a list" if isinstance(value, list) else "an object"
        return name if value else f"an empty {name.split()[1]}"
    return "a string" if isinstance(value, str) else "a number"


def shown_value(value: object) -> str:
    """A value as YAML writes it on a line, cut to 80 characters: `'text'`, `null`, `{'rows': [1,
    true]}`.
    """
    text = ""
    for part in _parts(value):  # no more of it than is shown: it may have any size and depth
        text += part
        if len(text) > _SHOWN:
            return text[: _SHOWN - 3] + "..."
    return text


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return a sentence, with a blank before it, that names the most similar choice; empty where
    none is similar.

    did_you_mean("tiny-lama", ["tiny-llama"])    " Did you mean tiny-llama?"
    """
    by_letters = {choice.lower(): choice for choice in choices}
    close = get_close_matches(name.lower(), by_letters, n=1, cutoff=0.7)
    return f" Did you mean {by_letters[close[0]]}?" if close else ""


def _parts(value: Any) -> Iterator[str]:
    if value is None or isinstance(value, bool):
        yield json.dumps(value)
    elif isinstance(value, str):
        yield repr(value[: _SHOWN + 1])
    elif isinstance(value, dict):
        yield "{"
        for number, (key, inner) in enumerate(value.items()):
            yield ", " if number else ""
            yield from _parts(key)
            yield ": "
            yield from _parts(inner)
        yield "}"
    elif isinstance(value, (list, tuple)):
        yield "["
        for number, inner in enumerate(value):
            yield ", " if number else ""
            yield from _parts(inner)
        yield "]"
    else:
        yield repr(value)
