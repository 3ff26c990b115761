"""Plays the preview's process without torch: `scripted_preview.py`, as `workers.serving`.

A base whose folder is called `bad` cannot be loaded. Each token of a probe is thought to have -1
nat. The last message says what to do: `hang` begins an answer and leaves it at that, `die` ends the
process, `say …` is answered with the rest of it, word by word, `loads` with how many bases were
loaded, and anything else with the base's folder, its formats and the adapter. A prompt of tokens is
answered with its first token, but for POISON, which ends the process as an error that nobody
catches.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

POISON = 666


def main() -> None:
    def say(kind: str, **message: Any) -> None:
        print(json.dumps({"kind": kind, **message}), flush=True)

    refusal = {
        "message": "no such base",
        "code": "model_not_served",
        "param": "model",
        "wrong": True,
    }
    base: dict[str, Any] = {}
    bad = False
    for line in sys.stdin:
        message = json.loads(line)
        if message["op"] == "base":
            base = message
            bad = Path(message["path"]).name == "bad"
            say("failed" if bad else "ready", load=base["load"], **(refusal if bad else {}))
        if message.get("probes"):
            thought = [[-1.0] * (len(tokens) - 1) for tokens in message["probes"]]
            say("probed", adapter=message["adapter"], logprobs=thought)
        if message.get("apart"):
            say("at", id=message["id"])
        if message["op"] == "sample":
            if message["prompt"][0] == POISON:
                os._exit(1)
            say("tokens", id=message["id"], index=0, tokens=message["prompt"][:1], logprobs=[0.0])
            say("end", id=message["id"], index=0, reason="stop")
            say("done", id=message["id"], completion_tokens=1)
            say("at", id=None)
        if message["op"] != "complete":
            continue
        if bad:
            say("error", id=message["id"], **refusal)
            continue
        wanted = message["messages"][-1]["content"]
        say("begun", id=message["id"], prompt_tokens=3)
        if wanted == "die":
            os.abort()
        if wanted == "hang":
            continue
        told = [
            f"{Path(base['path']).name} {base['precision'].get('default')} {message['adapter']}"
        ]
        if wanted == "loads":
            told = [str(base["load"])]
        if wanted.startswith("say "):
            told = wanted.removeprefix("say ").split(" ")
        for number, word in enumerate(told):
            say("text", id=message["id"], index=0, text=f" {word}" if number else word)
        say("end", id=message["id"], index=0, reason="stop", calls=[])
        say("done", id=message["id"], completion_tokens=len(told))


if __name__ == "__main__":
    main()
