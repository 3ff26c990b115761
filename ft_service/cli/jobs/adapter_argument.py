"""Adapter of a command-line argument: a job's, on this host or on the server, or a folder's."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ft_service.cli.jobs.job_argument import find_job
from ft_service.cli.output import connect, load_settings
from ft_service.errors import SpecError
from ft_service.rundir.verify import CONFIG


@contextmanager
def find_adapter(source: str) -> Iterator[Path]:
    """Yield the folder of the adapter of a job, run directory or folder.

    One that only a server has is downloaded temporarily.
    """
    runs = load_settings().runs_dir
    if here := _adapter_in(Path(source) / "adapter", Path(source), runs / source / "adapter"):
        yield here
        return
    if Path(source).exists():
        raise SpecError(f"{source}: contains no adapter (no {CONFIG}).", param="source")
    with connect() as client:
        job_id = find_job(client, source)
        if here := _adapter_in(runs / job_id / "adapter"):
            yield here
            return
        with tempfile.TemporaryDirectory(prefix="ft-merge-") as scratch:
            yield client.download_adapter(job_id, Path(scratch) / "adapter")


def adapter_of_job(job_id: str) -> Path | None:
    """Return the folder of a job's adapter on this host; None: it has none."""
    return _adapter_in(load_settings().runs_dir / job_id / "adapter")


def _adapter_in(*folders: Path) -> Path | None:
    return next((folder.absolute() for folder in folders if (folder / CONFIG).is_file()), None)
