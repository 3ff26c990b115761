"""Run directories of jobs with a seat in an engine of a cluster, in a folder for each project.

    runs/<job>                        a link to the directory below, by the service; without a seat
    the run directory itself project-runs/<project>/<job>      the run directory

The pods of an engine mount the folder of its project, and no other run directories: their mounts
are fixed before later jobs join. They can replace what is in that folder, but not the links in
`runs/`, which no pod mounts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from urllib.parse import quote

from ft_service.errors import FtError

RUNS = "runs"
PROJECT_RUNS = "project-runs"


def project_folder(home: Path, project_id: str) -> Path:
    """Return the folder of a project's run directories."""
    return home / PROJECT_RUNS / quote(project_id, safe="")


def run_root(home: Path, job_id: str) -> Path:
    """Return the path of a job's run directory, which may not exist.

    Raises FtError if a link has taken its place in the folder of its project: a worker must have
    put it there.
    """
    target = _target(home, job_id)
    if target.parents[1] == home / PROJECT_RUNS and target.is_symlink():
        raise FtError(
            f"The run directory of {job_id} was replaced by a link, which is not followed: "
            f"{target}."
        )
    return target


def move_run(home: Path, project_id: str, job_id: str) -> Path:
    """Move a job's run directory, which may not exist, to the folder of its project, and return its
    path there. Repeat it after an interruption. Only for a job without running processes.
    """
    link = home / RUNS / job_id
    target = project_folder(home, project_id) / job_id
    if not link.is_symlink():
        target.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            link.rename(target)
        target.mkdir(exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(target, link.parent))
    return run_root(home, job_id)


def remove_run(home: Path, job_id: str) -> None:
    """Remove a job's run directory, if it exists, and the link to it.

    Of what has taken its place only the link goes. Raises OSError.
    """
    target = _target(home, job_id)
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)
    (home / RUNS / job_id).unlink(missing_ok=True)


def _target(home: Path, job_id: str) -> Path:
    """The path that a link in `runs` leads to, if it is the service's; else its own."""
    link = home / RUNS / job_id
    try:
        target = Path(os.path.normpath(link.parent / link.readlink()))
    except OSError:  # there is nothing, or no link
        return link
    # Else a link of the operator's.
    return target if target.parents[1:2] == (home / PROJECT_RUNS,) else link
