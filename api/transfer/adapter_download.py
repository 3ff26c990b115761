"""An adapter as a download."""

from __future__ import annotations

from pathlib import Path

from fastapi.responses import StreamingResponse

from api.transfer import tar_stream
from ft_service.control.tuned_models import Tuned, refuse_pruned
from ft_service.errors import NotFoundError
from ft_service.rundir.intact import refuse_damaged
from ft_service.storage.locations import Places
from ft_service.supervisor import worker_tasks


def adapter_folder(model: Tuned, places: Places) -> Path:
    """The folder with a model's adapter, which is what was written. That of a checkpoint is made at its first use.

    Raises NotFoundError if it is gone or damaged. Reads all of it once for each state that its files are in.
    """
    refuse_pruned(model, places)
    if model.checkpoint is not None:
        whole = places.whole_run(model.job.id, model.checkpoint.name)
        folder = worker_tasks.make_checkpoint_adapter(whole, model.checkpoint.name)
    else:
        folder = places.run(model.job.id).plain(model.adapter_key)
    if not isinstance(folder, Path) or not folder.is_dir():
        raise _gone(model)
    refuse_damaged(folder, model.name)
    return folder


def _gone(model: Tuned) -> NotFoundError:
    return NotFoundError(f"The adapter of {model.name} is gone from the service's disk.", param="job_id", code="no_adapter")


def archived(model: Tuned, places: Places) -> StreamingResponse:
    """A tar of the model's adapter, in a folder `adapter/`. That of a checkpoint is made at its first download.

    Raises NotFoundError if it is gone from the disk.
    """
    folder = adapter_folder(model, places)
    if not any(folder.iterdir()):
        raise _gone(model)
    name = model.job.id if model.checkpoint is None else f"{model.job.id}-step-{model.checkpoint.step}"
    return as_tar(folder, f"{name}-adapter", "adapter")


def as_tar(folder: Path, name: str, inside: str) -> StreamingResponse:
    """A folder as a tar named `name`, its files in a folder `inside`."""
    files = tar_stream.members(folder, inside)
    headers = {
        "content-length": str(tar_stream.length(files)),
        "content-disposition": f'attachment; filename="{name}.tar"',
    }
    return StreamingResponse(tar_stream.stream(files), media_type="application/x-tar", headers=headers)
