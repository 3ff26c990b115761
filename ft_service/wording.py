"""Words of texts that users read."""

from __future__ import annotations


def counted(number: float, word: str, one: str = "", several: str = "") -> str:
    """`1 line`, `1,200 lines`, `0.5 days`; with verbs `1 line is`, `1,200 lines are`."""
    amount = f"{number:,g}" if isinstance(number, float) else f"{number:,}"
    text = f"{amount} {word}" if number == 1 else f"{amount} {word}s"
    verb = one if number == 1 else several
    return f"{text} {verb}" if verb else text
