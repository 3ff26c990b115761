"""The chunks of a streamed chat completion, read from its server-sent events."""

from __future__ import annotations

import codecs
import json
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from typing import Any

END = "[DONE]"
"""What the last event says."""


async def chunks_of(parts: AsyncIterable[Any]) -> AsyncIterator[Mapping[str, Any]]:
    """Yield the objects of a stream of server-sent events, until it says that it has ended."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    left = ""
    async for part in parts:
        left += part if isinstance(part, str) else decoder.decode(part)
        *lines, left = left.split("\n")
        for line in lines:
            said = line.strip().removeprefix("data:").strip() if line.startswith("data:") else ""
            if said == END:
                return
            if said:
                yield json.loads(said)
