"""Pictures that a file names by URL, fetched while its samples become tokens: once for each file,
and kept in its token set.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial

from ft_service.data.image_limits import most_bytes
from ft_service.data.image_part import place_of_url, refuse_other_types
from ft_service.data.line_errors import ImageError
from ft_service.data.sample_kinds import Conversation, Picture
from ft_service.host.public_fetch import FetchError, fetch_public

FETCH_SECONDS = 20.0
"""For one picture."""
MOST_FETCH_SECONDS = 3600.0
"""For all pictures of a file."""
ALLOW_PRIVATE = "FT_WEBHOOK_ALLOW_PRIVATE"
"""The operator's setting that lets users' URLs lead into private networks."""
_AT_ONCE = 8
_KEPT = 16
"""Pictures that are not fetched again for the next sample."""


class ImageFetcher:
    """Fetches the pictures of one file."""

    def __init__(self) -> None:
        self._spent = 0.0
        self._get: Callable[[str], bytes] = lru_cache(_KEPT)(
            partial(
                fetch_public,
                most_bytes=most_bytes(),
                seconds=FETCH_SECONDS,
                allow_private=os.environ.get(ALLOW_PRIVATE, "").lower() in ("1", "true"),
            )
        )

    def fetched(self, chat: Conversation) -> Conversation:
        """A conversation that holds its pictures. Raises ImageError with the place of one that
        cannot be fetched.
        """
        if not any(picture.url for picture in chat.images):
            return chat
        if self._spent > MOST_FETCH_SECONDS:
            raise ImageError(
                "messages",
                f"has images by URL, and those before it took {MOST_FETCH_SECONDS:,.0f} seconds: "
                "write them into the file, as data:image/png;base64,…",
                passing=True,
            )
        began = time.monotonic()
        with ThreadPoolExecutor(_AT_ONCE, "fetch-image") as threads:
            pictures = tuple(threads.map(self._picture, chat.images, chat.image_places))
        self._spent += time.monotonic() - began
        return replace(chat, images=pictures)

    def _picture(self, picture: Picture, place: str) -> Picture:
        if picture.url is None:
            return picture
        try:
            data = self._get(picture.url)
        except FetchError as error:
            raise ImageError(
                place_of_url(place),
                f"{error.message}. Write the picture into the line, as data:image/png;base64,…, "
                "or leave the line out",
                passing=True,
            ) from None
        refuse_other_types(data, place_of_url(place))
        return Picture.of(data, picture.detail)
