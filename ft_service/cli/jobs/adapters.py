"""The adapter that a word on the command line means: a job's, here or on the server, or a folder."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ft_service.cli.jobs.naming import find_job
from ft_service.cli.output import connect, load_settings
from ft_service.errors import SpecError
from ft_service.rundir.verify import CONFIG


@contextmanager
def find_adapter(source: str) -> Iterator[Path]:
    """The folder of the adapter that a job, run directory or folder names. One that only a server has is fetched for now."""
    runs = load_settings().runs_dir
    if here := _adapter_in(Path(source) / "adapter", Path(source), runs / source / "adapter"):
        yield here
        return
    if Path(source).exists():
        raise SpecError(f"{source}: holds no adapter (no {CONFIG}).", param="source")
    with connect() as client:
        job_id = find_job(client, source)
        if here := _adapter_in(runs / job_id / "adapter"):
            yield here
            return
        with tempfile.TemporaryDirectory(prefix="ft-merge-") as scratch:
            yield client.download_adapter(job_id, Path(scratch) / "adapter")


def adapter_of_job(job_id: str) -> Path | None:
    """The folder of a job's adapter, where this host has it."""
    return _adapter_in(load_settings().runs_dir / job_id / "adapter")


def _adapter_in(*folders: Path) -> Path | None:
    return next((folder.absolute() for folder in folders if (folder / CONFIG).is_file()), None)
