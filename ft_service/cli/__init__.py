"""The command line `ft`."""

from __future__ import annotations

import sys


def main() -> None:
    """The entry point: parse, run, leave with the exit code."""
    from ft_service.cli.app import run

    sys.exit(run(sys.argv[1:]))
