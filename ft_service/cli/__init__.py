"""Command line `ft`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit with its code."""
    from ft_service import installation

    installation.put_first()
    from ft_service.cli.root_command import run

    sys.exit(run(sys.argv[1:]))
