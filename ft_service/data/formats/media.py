"""Pictures, films and sound in records, which are refused: words alone would teach guessing.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ft_service.data.line_errors import LineError

COLUMNS = ("image", "images", "video", "videos", "audio", "audios")
"""Columns that hold pictures, films or sound, or the names of their files, in files of LLaVA,
LLaMA-Factory, TRL and verl.
"""
_ANSWERS = (
    "output",
    "completion",
    "chosen",
    "rejected",
    "preferred_output",
    "non_preferred_output",
    "text",
)
"""Columns whose texts may speak of such tags: answers and documents."""
_OF_ANSWERS = ("assistant", "gpt", "chatgpt", "model", "bot")
_PLACEHOLDER = re.compile(
    r"(?<![`\"'])<(?:image|\|image\||\|image_pad\|)>(?!.*</image>)", re.DOTALL
)
"""The place of a picture in a text, unless the tag is quoted, or is closed as XML's is."""
_AT_AN_EDGE = re.compile(
    r"\A\s*<(video|audio)>(?!.*</\1>)|(?<![`\"'])<(?:video|audio)>\s*\Z", re.DOTALL
)
"""The same of a film or sound. Between words, such a tag is HTML's."""
_DEPTH = 6
"""Levels of the deepest text, which is `input.messages.0.content.0.text`."""
_WAY_OUT = (
    "only text can be trained on: leave the line out, or remove this from it if its text "
    "is to be learned alone"
)


def refuse_media(record: Mapping[str, Any], *, columns: Collection[str] = COLUMNS) -> None:
    """Raise LineError for a record with a picture, a film or sound: in one of `columns`, or as a
    placeholder in a question.
    """
    for name in columns:
        if record.get(name):
            raise LineError(name, f"holds {_word(name)}, and {_WAY_OUT}")
    for place, text in _asked(record, ""):
        if "<" in text and (found := _PLACEHOLDER.search(text) or _AT_AN_EDGE.search(text)):
            tag = found[0].strip()
            raise LineError(
                place,
                f"holds {tag}, the place of {_word(tag.strip('<|>').split('_')[0])}, and "
                f"{_WAY_OUT}",
            )


def _word(name: str) -> str:
    return {"image": "a picture", "video": "a film", "audio": "sound"}[name.removesuffix("s")]


def _asked(value: Any, place: str, depth: int = _DEPTH) -> Iterator[tuple[str, str]]:
    """The texts in a record with their places, without those of answers."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, list) and depth:
        for number, inner in enumerate(value):
            yield from _asked(inner, f"{place}.{number}", depth - 1)
    elif (
        isinstance(value, dict)
        and depth
        and value.get("role", value.get("from")) not in _OF_ANSWERS
    ):
        for key, inner in value.items():
            if place or key not in _ANSWERS:
                yield from _asked(inner, f"{place}.{key}" if place else key, depth - 1)
