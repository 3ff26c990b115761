"""Stands before a helper's command and kills it as the host would: `strike.py FOLDER HOW KILLS
COMMAND …`.

The first KILLS starts end by SIGKILL: before the command begins (`start`), when half of its first
line has been said (`middle`), or when all of that has (`end`). Each start adds a byte to
FOLDER/starts; the next one is the command itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path


def main(folder: str, how: str, kills: str, *command: str) -> None:
    with Path(folder, "starts").open("ab") as file:
        file.write(b"x")
        file.flush()
        number = os.fstat(file.fileno()).st_size
    if number > int(kills):
        os.execvp(command[0], command)
    if how != "start":
        child = subprocess.Popen(command, stdout=subprocess.PIPE, close_fds=False)
        assert child.stdout is not None
        line = child.stdout.readline()
        os.write(1, line if how == "end" else line[: len(line) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
