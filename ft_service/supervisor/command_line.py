"""Command line of the supervisor: `SupervisorOptions` writes it and `parse` reads it. Pure.

Supervisors outlive the service that started them, and pods may run another version than the
service. Options are therefore added and never renamed, and MODULE stays the module's name.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MODULE = "ft_service.supervisor"
DEFAULT_GRACE_SECONDS = 60.0


def program(python: Sequence[str] | None = None) -> list[str]:
    """Return the command of a supervisor without its arguments.

    `python`: interpreter with any prefix; None: this process's.
    """
    return [*([sys.executable] if python is None else python), "-P", "-m", MODULE]


@dataclass(frozen=True, kw_only=True)
class SupervisorOptions:
    """Options of one supervisor.

    `parse` says what each means; an option that is None, False or empty is not passed.

    Texts may hold placeholders that somebody else fills in, such as `$(NAME)` in a pod.
    """

    grace_seconds: float
    detach: bool = False
    parent: int | None = None
    node_rank: int | str | None = None
    scratch: str = ""
    rdzv_endpoint: str = ""
    address: str = ""
    conclude: bool = False
    mirror: str = ""
    worker_command: Sequence[str] = ()

    def arguments(
        self, run_dir: str | Path, attempt: int, *, lock_fd: int | None = None
    ) -> list[str]:
        """Return the arguments for one attempt on one node."""
        options: dict[str, object] = {
            "--grace": f"{self.grace_seconds:.15g}",
            "--detach": self.detach,
            "--lock-fd": lock_fd,
            "--parent": self.parent,
            "--node-rank": self.node_rank,
            "--scratch": self.scratch,
            "--rdzv-endpoint": self.rdzv_endpoint,
            "--address": self.address,
            "--conclude": self.conclude,
            "--mirror": self.mirror,
        }
        words = [str(run_dir), str(attempt)]
        for name, value in options.items():
            if value is True:
                words.append(name)
            elif value is not False and value not in (None, ""):
                words += [name, str(value)]
        return [*words, "--command", *self.worker_command] if self.worker_command else words


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed options; `words` = None: this process's arguments.

    Exits with a message if they are wrong.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}", description="Run one attempt of a job."
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    parser.add_argument("attempt", metavar="ATTEMPT", type=int)
    parser.add_argument(
        "--grace",
        type=float,
        default=float(os.environ.get("FT_STOP_GRACE_SECONDS", DEFAULT_GRACE_SECONDS)),
        help="seconds that the ranks may take to write a checkpoint and exit (default: "
        "FT_STOP_GRACE_SECONDS, or 60)",
    )
    parser.add_argument(
        "--detach", action="store_true", help="continue in the background, detached from the caller"
    )
    parser.add_argument(
        "--parent", type=int, help="process id of the caller; its death sends SIGTERM"
    )
    parser.add_argument(
        "--lock-fd", type=int, help="inherited descriptor that holds supervisor.lock"
    )
    parser.add_argument(
        "--node-rank",
        type=int,
        default=0,
        metavar="K",
        help="number of this node among those of the attempt",
    )
    parser.add_argument(
        "--rdzv-endpoint",
        default="",
        metavar="HOST:PORT",
        help="address of node 0's rendezvous store",
    )
    parser.add_argument(
        "--address", default="", help="address of this node for the others (default: its host name)"
    )
    parser.add_argument(
        "--scratch",
        type=Path,
        help="folder for locks and sockets that only this node sees (default: RUN_DIR)",
    )
    parser.add_argument(
        "--conclude",
        action="store_true",
        help="write the attempt's exit record once all nodes have left theirs",
    )
    parser.add_argument(
        "--mirror", metavar="URL", help="object storage with which RUN_DIR is kept in sync"
    )
    parser.add_argument(
        "--command",
        nargs=argparse.REMAINDER,
        help="run this, with RUN_DIR and ATTEMPT appended, instead of torchrun (last option)",
    )
    return parser.parse_args(words)
