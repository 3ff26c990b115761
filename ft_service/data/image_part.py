"""Pictures in messages, as OpenAI's parts of type image_url have them. Pure.

    {"type": "image_url", "image_url": {"url": "data:image/png;base64,…", "detail": "low"}}
    {"type": "image_url", "image_url": {"url": "https://example.com/gauge.png"}}

What a picture is, its first bytes say, and not what the URL claims. It is fetched and decoded
later, where the base's image processor is (ft_service/data/tokens/).
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from typing import Any

from ft_service.data.line_errors import LineError, refuse_keys, required, text_of
from ft_service.data.sample_kinds import DETAILS, IMAGE, Picture
from ft_service.wording import kind, shown_value

TYPE = "image_url"
MOST_IMAGES = 10
"""Pictures of a line, at most, as at OpenAI."""
MOST_BYTES = 10 * 1024**2
"""Bytes of a picture, at most: 10 MB at OpenAI."""
SUPERVISED_ONLY = "images are learned from in supervised chats and prompts of pairs alone so far"
USERS_ONLY = "only messages of the role user take images"
_TYPES = (
    (re.compile(rb"\x89PNG\r\n\x1a\n"), "image/png"),
    (re.compile(rb"\xff\xd8\xff"), "image/jpeg"),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), "image/webp"),
    (re.compile(rb"GIF8[79]a"), "image/gif"),
)
_DATA = re.compile(r"data:[^,;]*(?:;[^,;]*)*;base64,", re.IGNORECASE)
_WEB = re.compile(r"https?://", re.IGNORECASE)
_SHOWN = 12

Found = list[tuple[str, Picture]]
"""Pictures of a line, each with its place."""


def parse_image(part: dict[str, Any], place: str) -> tuple[str, Picture]:
    """The picture of a part of type image_url, and its place. Raises LineError."""
    refuse_keys(part, {"type", TYPE}, {}, f"{place}.")
    given = required(part, TYPE, f"{place}.")
    place = f"{place}.{TYPE}"
    if not isinstance(given, dict):
        raise LineError(place, f"must be an object with url, not {kind(given)}")
    refuse_keys(given, {"url", "detail"}, {}, f"{place}.")
    detail = "auto" if given.get("detail") is None else given["detail"]
    if detail not in DETAILS:
        raise LineError(
            f"{place}.detail", f"must be one of {', '.join(DETAILS)}, not {shown_value(detail)}"
        )
    url = text_of(required(given, "url", f"{place}."), f"{place}.url")
    if _WEB.match(url):
        return place, Picture.on_web(url, detail)
    data = _data(url, f"{place}.url")
    refuse_other_types(data, f"{place}.url")
    return place, Picture.of(data, detail)


def refuse_other_types(data: bytes, place: str) -> None:
    """Raise LineError for bytes that are no picture of a type that is taken."""
    if type_of(data) is None:
        begin = f"begins with {data[:_SHOWN]!r}" if data else "is empty"
        raise LineError(
            place,
            f"is no PNG, JPEG, WEBP or GIF: what it holds {begin}. Save the picture in one of "
            "these formats, or leave the line out",
        )


def _data(url: str, place: str) -> bytes:
    begin = _DATA.match(url)
    if begin is None:
        way_out = "write the picture into the line, as data:image/png;base64,…"
        raise LineError(
            place,
            f"is {shown_value(url[:40])}, and neither an https: nor a data: URL in base64: "
            f"{way_out}",
        )
    length = (len(url) - begin.end()) * 3 // 4 - url[-2:].count("=")
    if length > MOST_BYTES:
        raise LineError(
            place,
            f"is a picture of {length:,} bytes, and one may have {MOST_BYTES:,}: make it smaller, "
            "or leave the line out",
        )
    try:
        return base64.b64decode(url[begin.end() :].encode(), validate=True)
    except (binascii.Error, ValueError) as error:
        raise LineError(
            place, f"is not base64 after {begin[0][:40]}: {error}. Write the file's bytes in it"
        ) from None


def require_few(images: Found) -> None:
    """Raise LineError for too many pictures of a line."""
    if len(images) > MOST_IMAGES:
        raise LineError(
            images[MOST_IMAGES][0],
            f"is one of {len(images)} images, and a line may have {MOST_IMAGES}: make several "
            "lines of it, or leave some out",
        )


def refuse_sign(text: str, place: str) -> None:
    """Raise LineError for a text that holds the character which stands for pictures."""
    if IMAGE in text:
        raise LineError(
            place,
            f"holds the character U+{ord(IMAGE):04X}, which Unicode gives to no text, beside "
            "images: remove it",
        )


def type_of(data: bytes) -> str | None:
    """The media type of an encoded picture, by its first bytes. None: it is none that is taken."""
    return next((name for begin, name in _TYPES if begin.match(data)), None)


def content_of(content: str, images: Sequence[Picture]) -> list[dict[str, Any]]:
    """A user's content with these pictures as OpenAI's parts."""
    parts: list[dict[str, Any]] = []
    for number, text in enumerate(content.split(IMAGE)):
        if number:
            parts.append({"type": TYPE, TYPE: _url_of(images[number - 1])})
        if text:
            parts.append({"type": "text", "text": text})
    return parts


def _url_of(picture: Picture) -> dict[str, str]:
    if picture.url is not None:
        url = {"url": picture.url}
        return url if picture.detail == "auto" else url | {"detail": picture.detail}
    encoded = base64.b64encode(picture.data).decode()
    url = {"url": f"data:{type_of(picture.data)};base64,{encoded}"}
    return url if picture.detail == "auto" else url | {"detail": picture.detail}
