"""Helper processes that are killed by SIGKILL as the host would, at every moment of their lives."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ft_service.errors import FtError, is_lost
from ft_service.host import helper_process
from ft_service.host.helper_process import Program
from ft_service.shared_work import losses
from tests.support.attempts import wait_for

KILLS = 4
"""More than anything but a mirror tries in a row while somebody waits."""
MOMENTS = ("start", "middle", "end")
"""Before a helper's command begins; when its answer is said, but for the last character; and when
all of that is said.
"""
_STRIKE = """
moment=$0 starts=$1 kills=$2 lines=$3
shift 3
printf x >>"$starts"
[ "$(wc -c <"$starts")" -le "$kills" ] || exec "$@"
[ $moment != start ] || kill -KILL 0
"$@" | {
    while [ $((lines -= 1)) -gt 0 ] && IFS= read -r line; do printf '%s\\n' "$line"; done
    IFS= read -r line
    if [ $moment = end ]; then printf '%s\\n' "$line"; else printf %s "${line%?}"; fi
    kill -KILL 0
}
"""
"""Stands before a helper's command, and kills its session: a shell, which starts at once."""


def says(answer: str, *, again: bool = False) -> tuple[str, ...]:
    """A command that prints a line and ends, whatever it is asked; `again`: for each request."""
    say = """printf '%s\\n' "$0" """
    return ("/bin/sh", "-c", f"while read -r asked; do {say}; done" if again else say, answer)


class Killer:
    """Kills the helpers that this process starts from now on, the first KILLS of each moment."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, lines: int = 1) -> None:
        """`lines`: which line of a helper's output is its answer."""
        self.folder = folder
        self._lines = lines
        self._moment = MOMENTS[0]
        self._all: list[subprocess.Popen[bytes]] = []
        self._popen = helper_process._popen
        patch.setattr(helper_process, "_popen", self._started)
        patch.setattr(losses, "pause_seconds", lambda *_, **__: 0.0)

    def begin(self, moment: str) -> None:
        """Kill what is idle, and what is started next at this moment of its life."""
        self._moment = moment
        for popen in self._all:
            if popen.returncode is None:
                with contextlib.suppress(ProcessLookupError):  # another thread has asked just now
                    os.kill(popen.pid, signal.SIGKILL)
                wait_for(lambda: _has_ended(popen))  # noqa: B023  # waited for here

    @property
    def starts(self) -> int:
        """Helpers that were started since the moment was set."""
        path = self.folder / self._moment
        return path.stat().st_size if path.exists() else 0

    def _started(self, program: Program) -> subprocess.Popen[bytes]:
        words = (self._moment, str(self.folder / self._moment), str(KILLS), str(self._lines))
        command = ("/bin/sh", "-c", _STRIKE, *words, *program.command)
        self._all.append(self._popen(replace(program, command=command)))
        return self._all[-1]


def _has_ended(popen: subprocess.Popen[bytes]) -> bool:
    """Whether it has ended, also while nobody has asked for its exit code."""
    if popen.returncode is not None:
        return True
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    try:
        return os.waitid(os.P_PID, popen.pid, flags) is not None
    except ChildProcessError:  # another thread has asked for it
        return True


def is_done_in_the_end(killer: Killer, ask: Callable[[str], object]) -> None:
    """Ask for work at every moment, and again as long as its helper is killed. Fails the test if
    anything but the host is said to be at fault, or it may never be done.

    `ask`: does the work that a moment's name stands for.
    """
    for moment in MOMENTS:
        killer.begin(moment)
        for _ in range(KILLS + 2):  # each try may end with a kill, and the first with the idle one
            try:
                ask(moment)
                break
            except FtError as error:
                if not is_lost(error) or getattr(error, "retry_after", None) is None:
                    pytest.fail(f"killed at its {moment}, and the input is at fault: {error!r}")
        else:
            pytest.fail(f"killed at its {moment}, and never done")
        # What has said all of its answer before it died need not be asked again.
        assert killer.starts > (0 if moment == "end" else KILLS), moment
