"""Processes that work on what jobs left: adapters of checkpoints, merged models, fidelity
reports.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ft_service.errors import FtError


def print_result(task: Callable[[], dict[str, Any]]) -> int:
    """Print one line of JSON: what `task` returns, or its FtError.

    Returns the exit code, 0 or 64.
    """
    try:
        print(json.dumps(task()))
    except FtError as error:
        print(json.dumps({"error": error.message, "code": error.code, "param": error.param}))
        return 64
    return 0
