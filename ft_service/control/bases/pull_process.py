"""The process that talks to the hub for a server: `python -m
ft_service.control.bases.pull_process`.

It reads one request, a line of JSON, and prints one answer. A process of its own, since the hub's
library and what the hub sends are none of the server's: it can be killed at any moment, and the
next one goes on with what has arrived.

    {"do": "look", "models", "repository", "revision"}       {"commit", "licence", "bytes", "staged"}
    {"do": "fetch", …, "commit", "name"}                     {}
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from ft_service.bases import hub
from ft_service.errors import FtError
from ft_service.host.helper_process import REFUSED


def look(request: dict[str, Any]) -> dict[str, Any]:
    """Look a base up, and fetch all of it but the weights."""
    found = hub.look_up(request["repository"], request["revision"])
    staged = hub.fetch_small_files(found, Path(request["models"]))
    return {
        "commit": found.commit,
        "licence": found.licence,
        "bytes": found.bytes([*found.small_files(), *found.weights()]),
        "staged": staged.name,
    }


def fetch(request: dict[str, Any]) -> dict[str, Any]:
    """Fetch the rest of a base that was looked up, and put it in its place."""
    found = hub.look_up(request["repository"], request["commit"])
    hub.pull(
        replace(found, revision=request["revision"]),
        Path(request["models"]),
        request["name"],
        judge=lambda _: None,
        tell=lambda _: None,
        shows_bars=False,
    )
    return {}


def main() -> int:
    request = json.loads(sys.stdin.readline())
    try:
        answer = {"look": look, "fetch": fetch}[request["do"]](request)
    except FtError as error:
        answer = {"error": hub.without_token(error.message), "code": error.code}
        print(json.dumps(answer), flush=True)
        return REFUSED
    print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
