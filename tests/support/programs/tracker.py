"""A tracker's process as ft_service/control/tracking/__main__.py is one, whose runs are files:
`tracker.py FOLDER`.

A run is FOLDER/<id>.json: its steps, ends, and descriptions. Files make it misbehave: `away` holds
what is answered, `lost` that nothing arrives, `hang` that nothing is answered, `die` that it ends
with its secret on stderr.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

folder = Path(sys.argv[1])
path = folder / "none"
secret = ""
run = dict[str, Any]()
for line in sys.stdin:
    request: dict[str, Any] = json.loads(line)
    if (folder / "hang").exists():
        time.sleep(600)
    reply: dict[str, Any] = {}
    waits = request["do"] != "log"
    if request["do"] == "open":
        path = folder / f"{request['run']['id']}.json"
        secret = request["account"]["api_key"]
        fresh: dict[str, Any] = {"steps": [], "ends": [], "described": [], "confirmed": []}
        run = json.loads(path.read_text()) if path.exists() else fresh
        reply = {
            "url": f"https://user:password@there/{request['run']['id']}",
            "next_step": run["steps"][-1] + 1 if run["steps"] else 0,
        }
    if (folder / "die").exists():
        sys.exit(f"could not use {secret}")
    run = run if request["do"] == "open" else json.loads(path.read_text())
    if waits and (folder / "away").exists():
        reply = {"failed": (folder / "away").read_text()}
    elif request["do"] == "open":
        run["described"].append(request["run"])
    elif request["do"] == "log" and not (folder / "lost").exists():
        run["steps"] += [step for step, _ in request["points"]]
    elif request["do"] == "confirm":
        run["confirmed"].append(request["step"])
        if request["step"] not in run["steps"]:
            reply = {"failed": f"step {request['step']} has not arrived"}
    elif request["do"] in ("rest", "finish"):
        run["ends"].append(request.get("exit_code", "rest"))
    if "failed" not in reply or request["do"] == "confirm":
        path.write_text(json.dumps(run))
    print(json.dumps(reply), flush=True)
