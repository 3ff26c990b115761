"""The version of this build, by which a support case can name what runs.

A release is its number. A build between two releases is that of the next one, in development, with
the commit if that can be known: `0.3.0.dev0+g1a2b3c4d5e`. `pyproject.toml` calls
`version_of` for the wheel's.
"""

from __future__ import annotations

import os
import re
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path

from ft_service import NEXT, __version__
from ft_service.host.environment import child_environment

COMMIT = "SOURCE_COMMIT"
"""Variable with the commit, for builds without the repository, as those of images."""


@cache
def this_version() -> str:
    """Return the version of what runs: of the checkout, or of the installed wheel."""
    root = Path(__file__).absolute().parents[1]
    if (root / "pyproject.toml").is_file():
        return version_of(root)
    try:
        return installed_version("ft-service")
    except PackageNotFoundError:
        return base_version()


def version_of(root: Path) -> str:
    """Return the version of the sources in a folder, which is what a build of them gets."""
    commit = _commit(root) if NEXT else None
    return f"{base_version()}+g{commit[:10]}" if commit else base_version()


def base_version() -> str:
    """Return the version without a commit: what a build says that knows none."""
    return f"{NEXT}.dev0" if NEXT else __version__


def _commit(root: Path) -> str | None:
    """Return the commit of a checkout, or the variable's; None: neither can be known."""
    commit = os.environ.get(COMMIT, "")
    if not commit and (root / ".git").exists():  # not that of a repository around an unpacked file
        command = ["git", "-C", str(root), "rev-parse", "HEAD"]
        try:
            asked = subprocess.run(
                command,
                env=child_environment(os.environ),
                capture_output=True,
                text=True,
                timeout=10,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        commit = asked.stdout.strip()
    return commit if re.fullmatch("[0-9a-f]{7,64}", commit) else None
