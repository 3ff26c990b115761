"""Films and sound in records, and pictures that a record does not show, which are refused: words
alone would teach guessing.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ft_service.data.image_part import COLUMNS as PICTURES
from ft_service.data.image_part import TAG, split_at_tags
from ft_service.data.line_errors import LineError

COLUMNS = (*PICTURES, "video", "videos", "audio", "audios")
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
_TOKEN = re.compile(r"(?<![`\"'])<\|image(?:_pad)?\|>")
"""The place of a picture in a text that a template has written, unless it is quoted."""
_AT_AN_EDGE = re.compile(
    r"\A\s*<(video|audio)>(?!.*</\1>)|(?<![`\"'])<(?:video|audio)>\s*\Z", re.DOTALL
)
"""The same of a film or sound. Between words, such a tag is HTML's."""
_DEPTH = 6
"""Levels of the deepest text, which is `input.messages.0.content.0.text`."""
_WAY_OUT = "leave the line out, or remove this from it if its text is to be learned alone"


def refuse_media(
    record: Mapping[str, Any], *, columns: Collection[str] = COLUMNS, placed: bool = False
) -> None:
    """Raise LineError for a record with a picture, a film or sound: in one of `columns`, or as a
    placeholder in a question. `placed`: pictures have TAG as their places.
    """
    for name in columns:
        if record.get(name):
            why = (
                "a record of this format shows none (messages do)"
                if name in PICTURES
                else "only text and pictures can be trained on"
            )
            raise LineError(name, f"holds {_word(name)}, and {why}: {_WAY_OUT}")
    for place, text in _asked(record, ""):
        if "<" in text and (tag := _tag(text, placed=placed)):
            word = _word(tag.strip("<|>").split("_")[0])
            raise LineError(
                place, f"holds {tag}, the place of {word}, and there is none for it: {_WAY_OUT}"
            )


def _tag(text: str, *, placed: bool) -> str:
    """The first place of a picture, a film or sound in a text; empty: there is none."""
    if found := _TOKEN.search(text) or _AT_AN_EDGE.search(text):
        return found[0].strip()
    return TAG if not placed and len(split_at_tags(text)) > 1 else ""


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
