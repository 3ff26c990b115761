"""Rendering with a chat template in a separate process, with limits on time and memory
(ft_service/data/tokens/template_worker.py).

Templates come from bases and jobs, and conversations from any user. Compared with rendering in this
process, a short conversation takes 0.1 ms longer and one of 10 KiB 1.5 ms; starting the process
takes about a second.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

from ft_service.data.limited_process import LimitedProcess, RenderLimits, Wording
from ft_service.host.helper_process import Program

RENDERING = Program(
    command=(sys.executable, "-P", "-m", "ft_service.data.tokens.template_worker"),
    expendable=True,
    limits_itself=True,
    variables={"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
)
MOST_CHARACTERS = 32 * 1024**2
"""Length of a conversation's text, at most."""
_WORDS = Wording("rendering", "the chat template", "this conversation")


class TemplateProcess(LimitedProcess):
    """A process that renders with one chat template."""

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, Any],
        limits: RenderLimits | None = None,
    ) -> None:
        """`sources`, `special_tokens`: those of a ChatTemplate."""
        begin = {"sources": dict(sources), "special_tokens": dict(special_tokens)}
        super().__init__(lambda: RENDERING, begin, limits or RenderLimits(), _WORDS)

    def write(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        day: date,
        *,
        prompt: bool = False,
        images: bool = False,
    ) -> str:
        """The text of ChatTemplate.write.

        Raises LineError if the template refuses the conversation or exceeds a limit, HelperFailed
        if the host lets no process render it.
        """
        request = {
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "day": str(day),
            "prompt": prompt,
            "images": images,
        }
        return self.ask(request)["text"]
