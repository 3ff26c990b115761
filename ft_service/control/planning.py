"""What a job would take, or takes, on this service's machines: the plan of a create body, before it is sent; and of a job."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from ft_service.bases.catalogue import Catalogue
from ft_service.control.admission import door_for, read, resolve_asked
from ft_service.control.capacity import capacity_now
from ft_service.data.formats.reading import estimate_samples, open_data
from ft_service.data.formats.recognise import Container
from ft_service.errors import SpecError
from ft_service.jobs.states import Job
from ft_service.plan.job import Plan, bounded, plan_job, training_time
from ft_service.plan.lengths import BYTES_PER_TOKEN, Lengths
from ft_service.plan.machines import Machine, this_host
from ft_service.plan.text import change_text
from ft_service.settings import Settings
from ft_service.spec import JobSpec
from ft_service.spec.rates import COUNTED
from ft_service.storage.locations import Places
from ft_service.store.records import Principal
from ft_service.store.sql import Store

_UNKNOWN = "file-not-chosen-yet"
_CHUNK = 1024**2


def plan_body(
    body: object, *, principal: Principal, store: Store, settings: Settings, catalogue: Catalogue, places: Places
) -> dict[str, Any]:
    """The plan of a create body, in which `training_file` may still be missing: then nothing is said of time, and of memory
    the most that it can be.

    Raises SpecError as the creation of such a job would, but for one that does not fit.
    """
    known = isinstance(body, dict) and bool(body.get("training_file"))
    if isinstance(body, dict) and not known:
        body = body | {"training_file": _UNKNOWN}
    asked = read(body, principal=principal, store=store, settings=settings)
    door = door_for([asked], store=store, settings=settings, catalogue=catalogue)
    spec = resolve_asked(asked, door, data=known)
    size = door.files[asked.request.training_file].bytes if known else None
    path = places.file(asked.request.training_file) if known else None
    return _document(bounded(spec), door.capacity.machine or this_host(), path, size)


def plan_of_job(job: Job, store: Store, settings: Settings, places: Places) -> dict[str, Any]:
    """The plan by which a job runs. Raises SpecError if its base is gone."""
    path = places.file(job.request["training_file"])
    size = path.stat().st_size if path.is_file() else None
    return _document(job.spec, capacity_now(settings, store).machine or this_host(), path if size is not None else None, size)


def _document(spec: JobSpec, machine: Machine, path: Path | None, size: int | None) -> dict[str, Any]:
    samples = None if path is None or size is None or not path.is_file() else _samples(path, size)
    if samples is not None and spec.validation_split is not None:
        samples -= int(samples * spec.validation_split)
    lengths = None if size is None else Lengths(size // BYTES_PER_TOKEN, samples or None)
    try:
        plan = plan_job(spec, machine, lengths, to_train=False)
    except OSError as error:
        raise SpecError(f"The base {spec.model.name} cannot be read: {error}.", param="model") from None
    return _shown(plan) | {"time": training_time(plan, spec, samples) if samples else None}


def _shown(plan: Plan) -> dict[str, Any]:
    """The plan without the list of all modules, and its changes in words too."""
    document = plan.as_dict()
    del document["modules"]
    for change, shown in zip(plan.changes, document["changes"], strict=True):
        shown["text"] = change_text(change)
    return document


@lru_cache(maxsize=256)
def _samples(path: Path, size: int) -> int:
    """Of a file, which never changes: of JSON lines all lines, of others about."""
    reader = open_data(path)
    reader.look()
    if reader.shape.container is not Container.LINES or reader.shape.compression is not None:
        return estimate_samples(path, most=COUNTED)
    with path.open("rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(_CHUNK), b""))
