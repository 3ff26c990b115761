"""Describe a base as its config.json asks for with `test`, in place of workers.describe: `python
…/describe_oddly.py FOLDER`.

Every run adds the folder's name and its process id to the file that config.json names as `log`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path


def main(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    if "log" in config:
        with Path(config["log"]).open("a") as file:
            file.write(f"{folder.name} {os.getpid()}\n")
    match config.get("test"):
        case "hang":
            time.sleep(3600)
        case "spin":
            while True:
                pass
        case "killed":  # as long as there is no file `go`
            if not Path(config["go"]).exists():
                os.kill(os.getpid(), signal.SIGKILL)
        case "eat":
            eaten = bytearray()
            while True:
                eaten += b"x" * 2**24
        case "crash":
            sys.stderr.write("the folder made it stumble\n")
            sys.stderr.flush()
            os.abort()
        case "garbage":
            print("all is well")
            return
        case "other":
            print(json.dumps({"key": "x"}))
            return
        case "slow":
            while not Path(config["go"]).exists():
                time.sleep(0.05)
    # Only what describes needs them, and of whom it is started by there is no folder of tests.
    sys.path.insert(0, str(Path(__file__).parents[3]))
    from ft_service.bases.description import write_described
    from tests.support.describing import small_document

    sys.stdout.buffer.write(write_described(small_document(folder)) + b"\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
