"""What a model reads of an environment's answer."""

from __future__ import annotations


def cut_text(text: str, most: int) -> str:
    """A text with at most so many bytes, and a note if it has more; without halves of surrogate
    pairs, which no record can hold.
    """
    whole = text.encode(errors="replace")
    if len(whole) <= most:
        return whole.decode()
    shown = whole[:most].decode(errors="ignore")
    return f"{shown} [cut off: {len(whole) - most:,} bytes more]"
