"""The process that renders conversations with one chat template, under limits
(ft_service/data/template_process.py).

`python -m ft_service.data.tokens.template_worker` serves as limited_worker.py says.
"""

from __future__ import annotations

import sys

from ft_service.host.quick_imports import begin_imports, end_imports

if __name__ == "__main__":  # transformers imports torch wherever it finds it, which takes seconds
    begin_imports()
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]

from datetime import date
from functools import partial
from typing import Any

from ft_service.data.template_process import MOST_CHARACTERS
from ft_service.data.tokens.chat_template import ChatTemplate
from ft_service.data.tokens.limited_worker import Work, serve


def _begin(given: dict[str, Any]) -> Work:
    return partial(_rendered, ChatTemplate(given["sources"], given["special_tokens"]))


def _rendered(template: ChatTemplate, request: dict[str, Any]) -> dict[str, Any]:
    """Raises LineError."""
    text = template.write(
        request["messages"],
        request["tools"],
        date.fromisoformat(request["day"]),
        prompt=request["prompt"],
        images=request["images"],
    )
    if len(text) > MOST_CHARACTERS:
        return {"limit": f"wrote more than {MOST_CHARACTERS:,} characters"}
    return {"text": text}


if __name__ == "__main__":
    end_imports()
    serve(_begin)
