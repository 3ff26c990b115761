"""The operator's limits of pictures, which every process that reads some has from its environment.
Settings checks them when the service starts.
"""

from __future__ import annotations

import os

BYTES = "FT_IMAGE_BYTES"
IMAGES = "FT_LINE_IMAGES"
NAMES = (BYTES, IMAGES)
USUAL_BYTES = 10 * 1024**2
"""Bytes of a picture, at most: 10 MB at OpenAI."""
USUAL_IMAGES = 10
"""Pictures of a line, at most, as at OpenAI."""
MOST_BYTES = 64 * 1024**2
MOST_IMAGES = 64
"""Most that an operator may set: a line's pictures are in memory together. At Azure, 64 pictures
are the limit.
"""


def most_bytes() -> int:
    """Bytes that a picture may have."""
    return _limit(BYTES, USUAL_BYTES, MOST_BYTES)


def most_images() -> int:
    """Pictures that a line, a chat or a sequence may have."""
    return _limit(IMAGES, USUAL_IMAGES, MOST_IMAGES)


def _limit(name: str, usual: int, most: int) -> int:
    given = os.environ.get(name, "")
    return min(int(given), most) if given.isdecimal() and int(given) else usual
