"""What renders with a chat template in a process of its own, in this one: a process takes a second
to start.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from ft_service.data.tokens.chat_template import ChatTemplate


class RenderedHere:
    """In place of a TemplateProcess."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, Any]) -> None:
        self.write = ChatTemplate(sources, special_tokens).write

    def close(self) -> None:
        pass


def renders_here(*modules: str) -> ExitStack:
    """Have these modules' templates rendered in this process, until the result is closed."""
    patched = ExitStack()
    for module in modules:
        patched.enter_context(patch(f"{module}.TemplateProcess", RenderedHere))
    return patched
