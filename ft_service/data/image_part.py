"""Pictures of a line, in OpenAI's parts of type image_url and in the other forms that people have.
Pure.

    {"type": "image_url", "image_url": {"url": "data:image/png;base64,…", "detail": "low"}}
    {"type": "image_url", "image_url": {"url": "https://example.com/gauge.png"}}
    {"type": "image", "image": "https://example.com/gauge.png"}     transformers'; url and path too
    {"type": "image"}, or <image> in a text                         the next one of the line's column

What a picture is, its first bytes say, and not what the URL claims. It is fetched and decoded
later, where the base's image processor is (ft_service/data/tokens/).
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from ft_service.data.image_limits import most_bytes, most_images
from ft_service.data.line_errors import ImageError, LineError, refuse_keys, required, text_of
from ft_service.data.sample_kinds import DETAILS, IMAGE, Detail, Picture
from ft_service.wording import counted, kind, shown_value

TYPE = "image_url"
_PLACED = "image"
TYPES = (TYPE, _PLACED)
"""Types of parts that are pictures."""
COLUMNS = ("image", "images")
"""Keys beside messages whose pictures stand, in their order, at the places in them."""
TAG = "<image>"
"""The place of a picture in a text, in files of LLaVA and LLaMA-Factory."""
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
_OTHER_URL = re.compile(r"[a-z][a-z0-9+.-]+:", re.IGNORECASE)
_LONGEST_PATH = 4096
"""Characters of a path, at most: a longer text is no path."""
_TAG = re.compile(rf"(?<![`\"']){TAG}")
_SHOWN = 12
_SHOWN_URL = 40


@dataclass
class LineImages:
    """The pictures of a line, in the order of its messages."""

    column: str = ""
    """The key that holds those of which the messages have only the places; empty: there is none."""
    values: Sequence[tuple[str, Any]] = ()
    """Those of the column with their places in the line: URLs, paths, bytes, or objects with bytes
    or path."""
    pictures: list[Picture] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    """Dotted place of each of `pictures` in the line."""
    _taken: int = 0
    """Places for pictures of the column, so far."""
    _sign: str = ""
    """The place of the first text that holds IMAGE."""

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Self:
        """Those of a line of which the messages were not read yet. Raises LineError."""
        given = [name for name in COLUMNS if line.get(name)]
        if len(given) > 1:
            raise LineError(given[0], f"and {given[1]} are both given: keep one")
        if not given:
            return cls()
        column = given[0]
        value = line[column]
        if not isinstance(value, list):
            return cls(column, [(column, value)])
        return cls(column, [(f"{column}.{at}", inner) for at, inner in enumerate(value)])

    @property
    def placed(self) -> list[tuple[Picture, str]]:
        """The pictures with their places."""
        return list(zip(self.pictures, self.places, strict=True))

    def text(self, text: str, place: str, *, of_user: bool) -> str:
        """A message's text, with IMAGE at the places of pictures of the column. Raises LineError
        for a place in another message than a user's.
        """
        if of_user and IMAGE in text:
            self._sign = self._sign or place
        if not self.column or TAG not in text:
            return text
        pieces = split_at_tags(text)
        if not of_user and len(pieces) > 1:
            raise LineError(
                place, f"holds {TAG}, and {USERS_ONLY}. Remove it, or leave the line out"
            )
        for _ in pieces[1:]:
            self._take()
        return IMAGE.join(pieces)

    def part(self, part: dict[str, Any], place: str) -> str:
        """IMAGE for a user's part of one of TYPES. Raises LineError."""
        if part["type"] == TYPE:
            self._add(*_parse_image_url(part, place))
        elif part.keys() <= {"type", "index"}:
            self._require_column(part, place)
            self._take()
        else:
            self._add(*_parse_image(part, place))
        return IMAGE

    def complete(
        self, messages: list[tuple[dict[str, Any], int]], *, lead: bool = True
    ) -> list[tuple[dict[str, Any], int]]:
        """The line's messages with their weights, whose texts and parts were all read.

        `lead`: where they have no place for any picture, the column's stand before the text of the
        first user's message, as in TRL's trainers. Raises LineError.
        """
        first = next((at for at, (own, _) in enumerate(messages) if own["role"] == "user"), None)
        if lead and first is not None and not self.pictures and not self._taken:
            for _ in self.values:
                self._take()
            message, weight = messages[first]
            led = message | {"content": IMAGE * len(self.values) + message["content"]}
            messages = [*messages[:first], (led, weight), *messages[first + 1 :]]
        if self._taken != len(self.values):
            raise LineError(
                self.column,
                f"holds {counted(len(self.values), 'picture')}, and the user's messages have "
                f"{counted(self._taken, 'place')} for them, which are {TAG} or a part of type "
                f"{_PLACED}: give as many places as pictures",
            )
        if len(self.pictures) > (most := most_images()):
            raise LineError(
                self.places[most],
                f"is one of {len(self.pictures)} images, and a line may have {most}: make "
                "several lines of it, or leave some out",
            )
        if self.pictures and self._sign:
            raise LineError(
                self._sign,
                f"holds the character U+{ord(IMAGE):04X}, which Unicode gives to no text, beside "
                "images: remove it",
            )
        return messages

    def _require_column(self, part: dict[str, Any], place: str) -> None:
        if not self.column:
            raise LineError(
                place,
                "is the place of a picture of the line's image or images, and the line has none: "
                f"give them, or the part's own as {_PLACED} or url",
            )
        if part.get("index", self._taken) != self._taken:
            raise LineError(
                f"{place}.index",
                f"is {shown_value(part['index'])}, and this part is the place of number "
                f"{self._taken} of {self.column}: put the pictures into the order of their places",
            )

    def _take(self) -> None:
        number = self._taken
        self._taken += 1
        if number < len(self.values):
            place, value = self.values[number]
            self._add(place, _picture(value, place))

    def _add(self, place: str, picture: Picture) -> None:
        self.places.append(place)
        self.pictures.append(picture)


def split_at_tags(text: str) -> list[str]:
    """The texts between those TAGs that are places of pictures: one that is quoted, or closed as
    XML's is, is none.
    """
    closed, end, others = text.rpartition("</image>")
    first, *others = _TAG.split(others)
    return [closed + end + first, *others]


def refuse_paths(images: Sequence[Picture], places: Sequence[str]) -> None:
    """Raise LineError for a picture that is in a file of its own."""
    for picture, place in zip(images, places, strict=True):
        if picture.path is not None:
            raise LineError(
                place_of_url(place),
                f"is the path {shown_value(picture.path)}, and the service has no such "
                "file: `ft data convert FILE OUT.jsonl` writes the pictures into the lines",
            )


def place_of_url(place: str) -> str:
    """The place of a picture's URL or path. `place`: that of the picture."""
    return f"{place}.url" if place.endswith(f".{TYPE}") else place


def _parse_image(part: dict[str, Any], place: str) -> tuple[str, Picture]:
    """The picture of a part of type image, as transformers has them, and its place."""
    keys = {_PLACED, "url", "path"}
    refuse_keys(part, {"type", *keys}, {}, f"{place}.")
    own, *more = sorted(part.keys() & keys)
    if more:
        raise LineError(f"{place}.{own}", f"and {more[0]} are both given: keep one")
    return f"{place}.{own}", _picture(part[own], f"{place}.{own}")


def _picture(value: Any, place: str) -> Picture:
    """A picture as columns have it: its URL or path, bytes, or an object with bytes or path."""
    data = value
    if isinstance(value, dict):
        refuse_keys(value, {"bytes", "path"}, {}, f"{place}.")
        data = value.get("bytes")
        value = required(value, "path", f"{place}.") if data is None else None
    if isinstance(value, str):
        return _of_url(value, place, "auto")
    if not isinstance(data, bytes):
        raise LineError(
            place,
            "must be a URL, data: or https:, or in Parquet the picture's bytes, also as bytes of "
            f"an object, not {kind(data)}",
        )
    refuse_large(len(data), place)
    refuse_other_types(data, place)
    return Picture.of(data)


def _parse_image_url(part: dict[str, Any], place: str) -> tuple[str, Picture]:
    """The picture of a part of type image_url, and its place."""
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
    url = required(given, "url", f"{place}.")
    return place, _of_url(url, f"{place}.url", detail)


def _of_url(url: Any, place: str, detail: Detail) -> Picture:
    if _WEB.match(text_of(url, place)):
        return Picture.on_web(url, detail)
    if (begin := _DATA.match(url)) is None:
        if 0 < len(url) <= _LONGEST_PATH and not _OTHER_URL.match(url):
            return Picture.in_file(url, detail)
        raise ImageError(
            place,
            f"is {shown_value(url[:_SHOWN_URL])}, and neither an https: nor a data: URL in base64: "
            "write the picture into the line, as data:image/png;base64,…",
        )
    refuse_large((len(url) - begin.end()) * 3 // 4 - url[-2:].count("="), place)
    try:
        data = base64.b64decode(url[begin.end() :].encode(), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(
            place,
            f"is not base64 after {begin[0][:_SHOWN_URL]}: {error}. Write the file's bytes in it",
        ) from None
    refuse_other_types(data, place)
    return Picture.of(data, detail)


def refuse_large(length: int, place: str) -> None:
    """Raise ImageError for a picture of more bytes than one may have."""
    if length > (most := most_bytes()):
        raise ImageError(
            place,
            f"is a picture of {length:,} bytes, and one may have {most:,}: make it smaller, "
            "or leave the line out",
        )


def refuse_other_types(data: bytes, place: str) -> None:
    """Raise ImageError for bytes that are no picture of a type that is taken."""
    if type_of(data) is None:
        begin = f"begins with {data[:_SHOWN]!r}" if data else "is empty"
        raise ImageError(
            place,
            f"is no PNG, JPEG, WEBP or GIF: what it holds {begin}. Save the picture in one of "
            "these formats, or leave the line out",
        )


def type_of(data: bytes) -> str | None:
    """The media type of an encoded picture, by its first bytes. None: it is none that is taken."""
    return next((name for begin, name in _TYPES if begin.match(data)), None)


def content_of(content: str, images: Sequence[Picture]) -> list[dict[str, Any]]:
    """A user's content with these pictures as OpenAI's parts."""
    parts: list[dict[str, Any]] = []
    for number, text in enumerate(content.split(IMAGE)):
        if number:
            parts.append({"type": TYPE, TYPE: url_of(images[number - 1])})
        if text:
            parts.append({"type": "text", "text": text})
    return parts


def url_of(picture: Picture) -> dict[str, str]:
    """A picture with bytes or of the web, as the value of OpenAI's image_url."""
    if picture.url is not None:
        url = {"url": picture.url}
        return url if picture.detail == "auto" else url | {"detail": picture.detail}
    encoded = base64.b64encode(picture.data).decode()
    url = {"url": f"data:{type_of(picture.data)};base64,{encoded}"}
    return url if picture.detail == "auto" else url | {"detail": picture.detail}


def as_json(picture: Picture) -> dict[str, Any]:
    """A picture of the web or with bytes."""
    if picture.url is not None:
        return {"url": picture.url, "detail": picture.detail}
    return {"data": base64.b64encode(picture.data).decode(), "detail": picture.detail}


def of_json(given: Mapping[str, Any]) -> Picture:
    """The picture that `as_json` wrote."""
    if "url" in given:
        return Picture.on_web(given["url"], given["detail"])
    return Picture.of(base64.b64decode(given["data"]), given["detail"])
