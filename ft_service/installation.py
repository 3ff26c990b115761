"""Places of this installation: the folder that has `api`, `workers` and the sample beside
`ft_service`.

In the repository that folder is its root. A wheel has it inside of `ft_service`, laid out like the
repository (`pyproject.toml` maps it): as top-level packages, `api` and `workers` would overwrite
those of another distribution, or be overwritten. So they can be imported only in processes that put
the folder first on their path: the command line (`put_first`), and the processes that it starts
(`python_path`). Other programs in the same environment never see them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

BUNDLED = "_bundled"
PYTHONPATH = "PYTHONPATH"


def root_of(package: Path) -> Path:
    """Return the folder with `api` and `workers` that belong to this folder of `ft_service`."""
    bundled = package / BUNDLED
    return bundled if bundled.is_dir() else package.parent


ROOT = root_of(Path(__file__).absolute().parent)
SAMPLE_MODELS = ROOT / "examples" / "models"
"""Folder of the sample base; an installation may be without it, as images of containers are."""
SAMPLE_DESCRIPTIONS = ROOT / "examples" / "descriptions"
"""Folder with the description of the sample base, NAME.json, for machines without the workers'
packages.
"""
SAMPLE_DATA = ROOT / "examples" / "data"
SAMPLE_SPEC = ROOT / "deploy" / "examples" / "quickstart.yaml"
"""SPEC of the quickstart, which names its data relative to itself."""

SKILL = ROOT / "skills" / "ft-service" / "SKILL.md"
"""What a coding agent should know before it uses this service (docs/agents.md)."""


def is_installed() -> bool:
    """Return whether this is an installed wheel; False: it runs from the repository."""
    return ROOT.name == BUNDLED


def put_first() -> None:
    """Import `api` and `workers` from this installation in this process, whatever else is called
    like that.
    """
    if sys.path[:1] != [str(ROOT)]:
        sys.path.insert(0, str(ROOT))


def python_path(inherited: Mapping[str, str]) -> str:
    """Return PYTHONPATH for a process that imports `workers`: this installation's folder before the
    folders inherited.
    """
    further = inherited.get(PYTHONPATH, "")
    if further.split(os.pathsep)[0] == str(ROOT):
        return further
    return os.pathsep.join([str(ROOT), further]) if further else str(ROOT)
