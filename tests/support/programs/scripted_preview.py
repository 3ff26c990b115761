"""Plays the preview's process without torch: `scripted_preview.py DESCRIPTOR PARENT`, as `workers.serving`.

A base whose folder is called `bad` cannot be loaded. The last message says what to do: `hang` begins an answer and leaves it at
that, `die` ends the process, `say …` is answered with the rest of it, word by word, and anything else with the base's
folder, its formats and the adapter.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))

    def say(kind: str, **message: Any) -> None:
        connection.sendall(json.dumps({"kind": kind, **message}).encode() + b"\n")

    lines = connection.makefile("rb")
    base = json.loads(lines.readline())
    if Path(base["path"]).name == "bad":
        say("failed", message="no such base", code="model_not_served", param="model", wrong=True)
        return
    say("ready")
    for line in lines:
        message = json.loads(line)
        if message["op"] != "complete":
            continue
        wanted = message["messages"][-1]["content"]
        say("begun", id=message["id"], prompt_tokens=3)
        if wanted == "die":
            os.abort()
        if wanted == "hang":
            continue
        told = [f"{Path(base['path']).name} {base['precision'].get('default')} {message['adapter']}"]
        if wanted.startswith("say "):
            told = wanted.removeprefix("say ").split(" ")
        for number, word in enumerate(told):
            say("text", id=message["id"], index=0, text=f" {word}" if number else word)
        say("end", id=message["id"], index=0, reason="stop", calls=[])
        say("done", id=message["id"], completion_tokens=len(told))


if __name__ == "__main__":
    main()
