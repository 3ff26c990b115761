"""Tuned models in this host's run directories, for jobs without a server that continue one."""

from __future__ import annotations

from pathlib import Path

from ft_service.errors import FtError, NotFoundError, SpecError
from ft_service.rundir.directory import RunDir
from ft_service.serving import worker_tasks
from ft_service.settings import Settings
from ft_service.spec import AdapterRef, JobSpec, TunedName
from ft_service.spec.tuned_name import CHECKPOINT

PREFIX = "ftjob-"
LAST = "last"
SEARCHED = 1000
"""Number of the newest jobs in which a name is searched."""


def find_local(name: str, settings: Settings, place: str = "model") -> tuple[JobSpec, AdapterRef]:
    """Return the job that trained a tuned model here, and the path of its adapter, which for a
    checkpoint may have to be made first. `place`: the option that names it.

    Raises SpecError that says what to do if FT_HOME has no such job, or no adapter of it.
    """
    try:
        tuned = TunedName.parse(name)
    except ValueError as error:
        raise _refusal(name, str(error), place) from None
    run = RunDir(settings.runs_dir / tuned.job_id)
    before = run.readable("spec.json", JobSpec) if tuned.id.isalnum() else None
    if before is None or before.tuned_name != str(tuned.outcome):
        raise _refusal(
            name,
            f"no job in {settings.runs_dir} has trained it. `ft submit` continues models that a "
            "server has trained",
            place,
        )
    if tuned.step is None:
        if not run.path("adapter").is_dir():
            raise _refusal(
                name,
                f"its job has left no adapter in {run.root}. Name one of its checkpoints: "
                f"…{CHECKPOINT}N",
                place,
            )
        return before, _ref(name, before, run, "adapter")
    try:
        point = worker_tasks.name_of_step(run, tuned.step)
    except NotFoundError as error:
        raise _refusal(name, error.message.rstrip("."), place) from None
    return before, _ref(name, before, run, f"adapters/{point}")


def name_of_local(word: str, settings: Settings) -> str | None:
    """Return the tuned model of a local job by its id or the beginning of it, its suffix (the
    newest job), or `last`; None: there is no such job with an adapter. Raises SpecError if several
    match.
    """
    trained = [
        spec
        for run in _newest_runs(settings)
        if (spec := run.read("spec.json", JobSpec)) is not None
    ]
    if word == LAST and trained:
        return trained[0].tuned_name
    by_suffix = next(
        (spec.tuned_name for spec in trained if TunedName.parse(spec.tuned_name).suffix == word),
        None,
    )
    if by_suffix is not None:
        return by_suffix
    matching = [spec for spec in trained if word and spec.job_id.startswith((word, PREFIX + word))]
    if len(matching) > 1:
        raise SpecError(
            f"model = {word[:120]!r} matches {len(matching)} jobs: give more of the id.",
            param="model",
        )
    return matching[0].tuned_name if matching else None


def _newest_runs(settings: Settings) -> list[RunDir]:
    """Return the run directories with an adapter, the newest first."""
    runs = [path for path in settings.runs_dir.glob(f"{PREFIX}*") if (path / "adapter").is_dir()]
    newest = sorted(runs, key=lambda path: path.stat().st_mtime, reverse=True)
    return [RunDir(path) for path in newest[:SEARCHED]]


def _ref(name: str, before: JobSpec, run: RunDir, key: str) -> AdapterRef:
    return AdapterRef(
        name=name,
        job_id=before.job_id,
        path=str(run.path(key)),
        shared_experts=before.shared_experts,
    )


def prepare_local(parent: AdapterRef) -> None:
    """Make the adapter of a checkpoint, unless it exists. Raises SpecError if it cannot be made."""
    folder = Path(parent.path)
    if folder.is_dir():
        return
    try:
        worker_tasks.make_checkpoint_adapter(folder.parents[1], folder.name)
    except FtError as error:
        raise SpecError(
            f"model = {parent.name!r}: {error.message}", param="model", code="model_not_found"
        ) from error


def _refusal(name: str, why: str, place: str = "model") -> SpecError:
    return SpecError(f"{place} = {name[:120]!r}: {why}.", param=place, code="model_not_found")
