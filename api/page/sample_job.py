"""The job of the quickstart, which the page offers where there is no job yet."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ft_service.installation import SAMPLE_SPEC

_FILES = ("training_file", "validation_file")


@cache
def sample_base() -> str | None:
    """Return the base of the sample job. None: this installation came without the sample."""
    return _spec()["model"] if SAMPLE_SPEC.is_file() else None


def sample_options() -> dict[str, Any]:
    """Return the job's create body without its files, and without its ranks, which go by the
    machine.
    """
    left_out = (*_FILES, "distributed")
    return {name: value for name, value in _spec().items() if name not in left_out}


def sample_files() -> dict[str, Path]:
    """Return the paths of the job's data files by the names of their options."""
    spec = _spec()
    return {name: (SAMPLE_SPEC.parent / spec[name]).resolve() for name in _FILES if name in spec}


def _spec() -> dict[str, Any]:
    return yaml.safe_load(SAMPLE_SPEC.read_text(encoding="utf-8"))
