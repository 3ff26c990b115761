"""The filter of lists by metadata: `metadata[key]=value`, any number of times."""

from __future__ import annotations

import re
from typing import Literal

from fastapi import Request

from ft_service.errors import SpecError

_PAIR = re.compile(r"metadata\[(.+)\]", re.DOTALL)


def metadata_filter(request: Request) -> dict[str, str] | Literal["none"] | None:
    """Return the pairs of `metadata[k]=v`, "none" for `metadata=null`, or for `metadata=`, as
    OpenAI's client for JavaScript writes null. Raises SpecError for other forms, which would
    otherwise list everything.
    """
    given = [
        (name, value)
        for name, value in request.query_params.multi_items()
        if name.startswith("metadata")
    ]
    if given in ([("metadata", "null")], [("metadata", "")]):
        return "none"
    pairs: dict[str, str] = {}
    for name, value in given:
        match = _PAIR.fullmatch(name)
        if match is None:
            raise SpecError(
                f"{name[:80]} = {value[:80]!r}: filter by metadata[key]=value, or by "
                "metadata=null alone.",
                param="metadata",
            )
        if pairs.setdefault(match[1], value) != value:
            raise SpecError(
                f"{name[:80]} is given twice with different values, and what is listed can have "
                "only one.",
                param=name[:80],
            )
    return pairs or None
