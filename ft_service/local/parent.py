"""Tuned models in this host's run directories, for jobs without a server that go on from one."""

from __future__ import annotations

from pathlib import Path

from ft_service.errors import FtError, NotFoundError, SpecError
from ft_service.rundir.directory import RunDir
from ft_service.settings import Settings
from ft_service.spec import AdapterRef, JobSpec, TunedName
from ft_service.spec.tuned_name import CHECKPOINT
from ft_service.supervisor import worker_tasks

PREFIX = "ftjob-"
LAST = "last"
SEARCHED = 1000
"""Newest jobs among which a word is looked up."""


def find_local(name: str, settings: Settings) -> tuple[JobSpec, AdapterRef]:
    """The job that trained a tuned model here, and where its adapter lies, or will lie once it was made from its checkpoint.

    Raises SpecError that says what to do instead if FT_HOME has no such job, or no adapter of it.
    """
    try:
        wanted = TunedName.parse(name)
    except ValueError as error:
        raise _refusal(name, str(error)) from None
    run = RunDir(settings.runs_dir / wanted.job_id)
    before = run.readable("spec.json", JobSpec) if wanted.id.isalnum() else None
    if before is None or before.tuned_name != str(wanted.outcome):
        raise _refusal(
            name, f"no job in {settings.runs_dir} has trained it. `ft submit` goes on from what a server has trained"
        )
    if wanted.step is None:
        if not run.path("adapter").is_dir():
            raise _refusal(name, f"its job has left no adapter in {run.root}. Name one of its checkpoints: …{CHECKPOINT}N")
        return before, _ref(name, before, run, "adapter")
    try:
        point = worker_tasks.name_of_step(run, wanted.step)
    except NotFoundError as error:
        raise _refusal(name, error.message.rstrip(".")) from None
    return before, _ref(name, before, run, f"adapters/{point}")


def name_of_local(word: str, settings: Settings) -> str | None:
    """The tuned model of the job here that a word means: its id or the beginning of it, its suffix (the newest with that), or
    `last`. None: it means none that has left an adapter. Raises SpecError if it means several."""
    trained = [before for run in _newest_runs(settings) if (before := run.read("spec.json", JobSpec)) is not None]
    if word == LAST and trained:
        return trained[0].tuned_name
    by_suffix = next((one.tuned_name for one in trained if TunedName.parse(one.tuned_name).suffix == word), None)
    if by_suffix is not None:
        return by_suffix
    begun = [one for one in trained if word and one.job_id.startswith((word, PREFIX + word))]
    if len(begun) > 1:
        raise SpecError(f"model = {word[:120]!r} means {len(begun)} jobs: give more of the id.", param="model")
    return begun[0].tuned_name if begun else None


def _newest_runs(settings: Settings) -> list[RunDir]:
    """Runs that have left an adapter, the newest first."""
    found = [path for path in settings.runs_dir.glob(f"{PREFIX}*") if (path / "adapter").is_dir()]
    newest = sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)
    return [RunDir(path) for path in newest[:SEARCHED]]


def _ref(name: str, before: JobSpec, run: RunDir, key: str) -> AdapterRef:
    return AdapterRef(name=name, job_id=before.job_id, path=str(run.path(key)), shared_experts=before.shared_experts)


def prepare_local(parent: AdapterRef) -> None:
    """Make the adapter of a checkpoint, unless it is there. Raises SpecError if it cannot be made."""
    folder = Path(parent.path)
    if folder.is_dir():
        return
    try:
        worker_tasks.make_checkpoint_adapter(folder.parents[1], folder.name)
    except FtError as error:
        raise SpecError(f"model = {parent.name!r}: {error.message}", param="model", code="model_not_found") from error


def _refusal(name: str, why: str) -> SpecError:
    return SpecError(f"model = {name[:120]!r}: {why}.", param="model", code="model_not_found")
