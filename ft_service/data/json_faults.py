"""Reasons for refusing text that is not JSON, with what to write instead. Pure."""

from __future__ import annotations

import json
import re

from ft_service.wording import shown_value

_WORDS = {"None": "null", "undefined": "null", "True": "true", "False": "false", "NaN": "null"}
_WORD = re.compile("|".join(_WORDS))
_CLOSING = re.compile(r"\s*[}\]]")
_QUOTES = "“”„«»\u2018\u2019"
_OPEN = ("{", "[", ",")


def json_fault(text: str, error: json.JSONDecodeError) -> str:
    """The reason for refusing a text, with the character at fault. `error`: of reading it as JSON.

    It depends on the text alone where it can, since Python's versions name faults differently.
    """
    place = f"at character {error.pos + 1}"
    found = text[error.pos : error.pos + 1]
    before = text[: error.pos].rstrip()
    if text.startswith('"{""'):
        return (
            'is not JSON: it is quoted like a cell of CSV, with "" for each ": export JSON '
            "lines, or CSV with a header"
        )
    if text.lstrip().startswith(("//", "#", "/*")):
        return "is not JSON: it is a comment, which JSON lines do not have: leave it out"
    if word := _WORD.match(text, error.pos):
        return f"is not JSON: {word[0]} {place}, which is {_WORDS[word[0]]} in JSON"
    if found == "'":
        return (
            f"is not JSON: a single quote {place}, where JSON has double quotes (Python's "
            "json.dumps writes them)"
        )
    if found and found in _QUOTES:
        return f"is not JSON: {found} {place}, where JSON has straight double quotes"
    if error.msg.startswith("Extra data"):
        if not text[error.pos :].strip(", \t"):
            return (
                f"is not JSON: a comma {place}, after the object: leave it out, since nothing "
                "stands between lines"
            )
        return f"is not JSON: something follows the object {place}: write one object to a line"
    if (found == "," and _CLOSING.match(text, error.pos + 1)) or (
        found in ("}", "]") and before.endswith(",")
    ):
        return f"is not JSON: a comma before the bracket {place}: leave it out"
    if error.msg.startswith("Unterminated string"):
        return f"is not JSON: the string that begins {place} does not end: is it cut off?"
    if error.msg.startswith("Invalid control character"):
        return (
            f"is not JSON: {shown_value(found)} within a string {place}: write it as "
            f"{json.dumps(found)[1:-1]}"
        )
    if error.msg.startswith("Invalid \\escape"):
        return f"is not JSON: a single backslash {place}: write it as \\\\"
    if error.pos >= len(text.rstrip()):
        return f"is not JSON: it ends early, {place}: is it cut off?"
    return f"is not JSON: {error.msg.removesuffix(' at')} {place}"


def goes_on(text: str, error: json.JSONDecodeError) -> bool:
    """Return whether an object begins in a line and goes on in the next one.

    `error`: of reading the line as JSON.
    """
    line = text.rstrip()
    return error.pos >= len(line) and line.endswith(_OPEN)
