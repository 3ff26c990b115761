"""Removal of old data from the disk: first a plan, then each item of it, checked once more right
before it is removed.

A plan never holds data of an unfinished job, of a job whose adapter an unfinished job continues
from, or a file that an unfinished job refers to. Ages count from a job's end, a file's upload, and
the last use of a cache entry.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Literal, TypeVar

from ft_service.bases.cache_folder import Cache
from ft_service.bases.describing import DESCRIPTIONS
from ft_service.control.cleanup.stored_tree import StoredTree, size_of
from ft_service.errors import NotFoundError
from ft_service.host.loops import log_errors
from ft_service.jobs.states import TERMINAL, Job
from ft_service.rundir.checkpoints import CHECKPOINT_NAME, step_of
from ft_service.settings import Settings
from ft_service.spec import TunedName
from ft_service.store.records import File
from ft_service.store.sql import Store
from ft_service.wording import counted

log = logging.getLogger(__name__)

Item = TypeVar("Item")

DAY_SECONDS = 86_400.0
PAGE = 100
"""Most jobs or files that are held at once, whatever the number of run directories."""
LEFTOVER_SECONDS = DAY_SECONDS
"""Age from which a file without an owner may go: a newer one may still be arriving."""

Kind = Literal["run", "checkpoints", "adapter", "file", "cache", "leftover"]


@dataclass(frozen=True, kw_only=True)
class RetentionLimits:
    """Age limits in days; None: no limit."""

    runs: float | None = None
    """Age of whole run directories; the tuned model is deleted with its directory."""
    checkpoints: float | None = None
    """Age of checkpoints of ended jobs; the outcome, and adapters already made from checkpoints,
    stay.
    """
    files: float | None = None
    cache: float | None = None
    leftovers: bool = False
    """Whether to remove files at least a day old that belong to no job and no file record."""

    @classmethod
    def from_settings(cls, settings: Settings) -> RetentionLimits:
        return cls(
            runs=settings.keep_runs_days,
            checkpoints=settings.keep_checkpoints_days,
            files=settings.keep_files_days,
            cache=settings.keep_cache_days,
        )


@dataclass(frozen=True, kw_only=True)
class Removal:
    """An item of a plan."""

    kind: Kind
    path: Path
    bytes: int
    why: str
    job: Job | None = None
    """The job that it belongs to, if any."""
    file: File | None = None
    hides: Sequence[str] = ()
    """Tuned models that are deleted with it."""
    last_use: int | None = None
    """Last use of a cache entry, ns since the epoch."""
    tree: StoredTree | None = field(default=None, repr=False, compare=False)
    """Where the path is; None: a cache of this host."""

    @property
    def stored_in(self) -> StoredTree:
        assert self.tree is not None
        return self.tree


@dataclass(frozen=True)
class _Needed:
    """The jobs and adapter paths that unfinished jobs continue from."""

    jobs: frozenset[str]
    paths: frozenset[str]

    @classmethod
    def now(cls, store: Store, tree: StoredTree) -> _Needed:
        parents = store.jobs.adapters_to_continue()
        paths = frozenset(str(tree.root(Path(path))) for _, path in parents)
        return cls(frozenset(job_id for job_id, _ in parents), paths)


def plan_pruning(
    settings: Settings,
    store: Store,
    limits: RetentionLimits,
    *,
    cache: Path | None = None,
    tokens: Path | None = None,
) -> Iterator[Removal]:
    """All removals that are possible now, found as they are asked for: records are read in pages,
    and only those of jobs and files that something is to be removed of. `cache`, `tokens`: folders
    of quantised bases and of data files' tokens; None: the folder is left out.

    Raises SpecError if FT_STORAGE is not a usable URL, UnavailableError if it does not answer.
    """
    tree = StoredTree.of(settings)
    yield from _of_jobs(settings, store, limits, tree)
    yield from _of_files(settings, store, limits, tree)
    if limits.leftovers:
        yield from _leftovers(settings, store, tree)
    yield from _of_caches(cache, tokens, limits)


def remove(removal: Removal, store: Store) -> bool:
    """Remove an item. False, with nothing removed, if it came into use since the plan.

    Raises OSError, UnavailableError, and NotFoundError if its job is gone.
    """
    if removal.file is not None:
        try:
            unused = store.files.delete_file(removal.file.project_id, removal.file.id)
        except NotFoundError:  # already deleted
            return False
        if not unused:
            return False
        removal.stored_in.remove_file(removal.file)
        store.files.mark_freed([removal.file.id])
        return True
    if removal.kind == "cache" and removal.path.parent.name == DESCRIPTIONS:
        unused = removal.path.is_file() and removal.path.stat().st_mtime_ns == removal.last_use
        if unused:
            removal.path.unlink(missing_ok=True)
        return unused
    if removal.kind == "cache":
        return Cache(removal.path.parent).remove(removal.path.name, removal.last_use)
    tree = removal.stored_in
    if removal.job is not None:
        if _is_in_use(removal, removal.job, tree, store):
            return False
        for model in removal.hides:
            store.models.delete_model(removal.job.project_id, model)
        # No new job can begin to need it now. One that did in the last moment keeps the data, but
        # the models stay deleted.
        if removal.hides and _is_in_use(removal, removal.job, tree, store):
            return False
    tree.remove(removal.path)
    return True


def _of_jobs(
    settings: Settings, store: Store, limits: RetentionLimits, tree: StoredTree
) -> Iterator[Removal]:
    """What goes of run directories by age, and what goes since a model was deleted."""
    needed = _Needed.now(store, tree)
    for job, folder, days in _old_jobs(settings, store, limits, tree):
        yield from _unneeded(folder, _by_age(job, folder, limits, days, tree), needed)
    for job, folder, names in _jobs_of_deleted_models(settings, store, tree):
        removals = _of_models(job, folder, names, limits, store.now(), tree)
        yield from _unneeded(folder, removals, needed)


def _unneeded(folder: Path, removals: Iterator[Removal], needed: _Needed) -> list[Removal]:
    """Those that can be measured, and that no unfinished job needs."""
    found: list[Removal] = []
    with log_errors(f"measuring {folder}"):
        found = list(removals)
    return [removal for removal in found if not _is_needed(removal, needed)]


def _old_jobs(
    settings: Settings, store: Store, limits: RetentionLimits, tree: StoredTree
) -> Iterator[tuple[Job, Path, float]]:
    """Jobs that are older than an age limit and have a run directory, with that directory and
    their age in days. Other records are not read.
    """
    ages = [days for days in (limits.runs, limits.checkpoints) if days is not None]
    for names in pages(tree.names(settings.runs_dir), PAGE) if ages else ():
        now = store.now()
        for job in store.jobs.jobs_by_id(store.jobs.ended_before(names, min(ages) * DAY_SECONDS)):
            if (folder := tree.root(settings.runs_dir / job.id)) is not None and _is_over(job):
                yield job, folder, (now - (job.finished_at or now)) / DAY_SECONDS


def _jobs_of_deleted_models(
    settings: Settings, store: Store, tree: StoredTree
) -> Iterator[tuple[Job, Path, list[TunedName]]]:
    """Jobs, with their run directories and those of their deleted models that still have files.

    Other records are not read.
    """
    last = ""
    while models := store.models.deleted_after(last, PAGE):
        last = models[-1]
        by_job: dict[str, list[TunedName]] = {}
        for model in models:
            with contextlib.suppress(ValueError), log_errors(f"looking for the files of {model}"):
                name = TunedName.parse(model)
                if (folder := tree.root(settings.runs_dir / name.job_id)) and any(
                    _files_of(name, folder, tree)
                ):
                    by_job.setdefault(name.job_id, []).append(name)
        for job in filter(_is_over, store.jobs.jobs_by_id(list(by_job))):
            folder = tree.root(settings.runs_dir / job.id)
            if folder is not None:
                yield (
                    job,
                    folder,
                    [name for name in by_job[job.id] if name.outcome == job.tuned_name],
                )


def _by_age(
    job: Job, folder: Path, limits: RetentionLimits, days: float, tree: StoredTree
) -> Iterator[Removal]:
    why = f"the job {_ended(job)} {counted(round(days), 'day')} ago"
    if limits.runs is not None and days >= limits.runs:
        steps = _steps(folder, tree)
        hidden = [str(job.tuned_name), *(str(job.tuned_name.at(step)) for step in steps)]
        yield replace(_removal("run", folder, why, job, tree), hides=hidden)
    elif limits.checkpoints is not None and days >= limits.checkpoints:
        for path in sorted(_points(folder / "checkpoints", tree)):
            yield _removal("checkpoints", path, why, job, tree)


def _of_models(
    job: Job,
    folder: Path,
    names: Sequence[TunedName],
    limits: RetentionLimits,
    now: float,
    tree: StoredTree,
) -> Iterator[Removal]:
    """What goes with deleted models, unless it goes by age."""
    days = (now - (job.finished_at or now)) / DAY_SECONDS
    if limits.runs is not None and days >= limits.runs:
        return
    for path in (path for name in names for path in _files_of(name, folder, tree)):
        is_shards = path.parent.name == "checkpoints"
        if not (is_shards and limits.checkpoints is not None and days >= limits.checkpoints):
            yield _removal(
                "checkpoints" if is_shards else "adapter", path, "the model was deleted", job, tree
            )


def _files_of(name: TunedName, folder: Path, tree: StoredTree) -> Iterator[Path]:
    """The folders of a tuned model in its run directory."""
    if name.step is None:
        yield from (path for path in tree.folders(folder) if path.name in ("adapter", "exports"))
        return
    for kind in ("checkpoints", "adapters"):
        points = _points(folder / kind, tree)
        yield from (path for path in points if step_of(path.name) == name.step)


def _steps(folder: Path, tree: StoredTree) -> list[int]:
    """Steps of the checkpoints that exist, as shards or as adapters."""
    return sorted(
        {
            step_of(path.name)
            for kind in ("checkpoints", "adapters")
            for path in _points(folder / kind, tree)
        }
    )


def _points(folder: Path, tree: StoredTree) -> Iterator[Path]:
    """The checkpoints in a folder, as shards or as adapters."""
    return (path for path in tree.folders(folder) if CHECKPOINT_NAME.fullmatch(path.name))


def _of_files(
    settings: Settings, store: Store, limits: RetentionLimits, tree: StoredTree
) -> Iterator[Removal]:
    if limits.files is None:
        return
    last: str | None = None
    while files := store.files.old_files(limits.files * DAY_SECONDS, after=last, limit=PAGE):
        last = files[-1].id
        for file in files:
            path = settings.files_dir / file.id
            why = f"{file.filename} is older than {counted(limits.files, 'day')}"
            yield Removal(kind="file", path=path, bytes=file.bytes, why=why, file=file, tree=tree)


def _leftovers(settings: Settings, store: Store, tree: StoredTree) -> Iterator[Removal]:
    before = time.time() - LEFTOVER_SECONDS
    kinds = (
        (settings.runs_dir, "job", store.jobs.known_jobs),
        (settings.files_dir, "file record", store.files.kept_files),
    )
    for folder, owner, known in kinds:
        for names in pages(tree.names(folder), PAGE):
            for path in (folder / name for name in sorted(set(names) - known(names))):
                root = tree.root(path)
                # What it leads to is gone already.
                root = path if root is not None and not tree.exists(root) else root
                if root is not None and tree.changed_at(root) <= before:
                    yield Removal(
                        kind="leftover",
                        path=root,
                        bytes=tree.size(root),
                        why=f"no {owner} belongs to it",
                        tree=tree,
                    )


def pages(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """The items in lists of at most `size`."""
    left = iter(items)
    while found := list(islice(left, size)):
        yield found


def _of_caches(cache: Path | None, tokens: Path | None, limits: RetentionLimits) -> list[Removal]:
    days = limits.cache
    if days is None:
        return []
    entries = {} if cache is None else Cache(cache).entries() | _descriptions(cache / DESCRIPTIONS)
    return [
        *_not_used(entries, days),
        *_not_used({} if tokens is None else Cache(tokens).entries(), days),
    ]


def _descriptions(folder: Path) -> dict[Path, int]:
    """File → last use (ns since the epoch) of the descriptions of bases."""
    return {path: path.stat().st_mtime_ns for path in folder.glob("[!.]*") if path.is_file()}


def _not_used(entries: Mapping[Path, int], days: float) -> list[Removal]:
    """Removals of entries of a cache, in order of names. `entries`: path → last use."""
    now = time.time()
    ages = [
        (entry, last_use, (now - last_use / 1e9) / DAY_SECONDS)
        for entry, last_use in entries.items()
    ]
    return [
        Removal(
            kind="cache",
            path=entry,
            bytes=size_of(entry),
            why=f"not used for {counted(round(unused), 'day')}",
            last_use=last_use,
        )
        for entry, last_use, unused in sorted(ages)
        if unused >= days
    ]


def _is_in_use(removal: Removal, job: Job, tree: StoredTree, store: Store) -> bool:
    return not _is_over(store.jobs.get_job(job.project_id, job.id)) or _is_needed(
        removal, _Needed.now(store, tree)
    )


def _is_needed(removal: Removal, needed: _Needed) -> bool:
    job = removal.job
    if job is None or job.id not in needed.jobs:
        return False
    if removal.kind == "checkpoints":  # an adapter will be made from it
        return str(removal.path.parents[1] / "adapters" / removal.path.name) in needed.paths
    return removal.kind == "run" or str(removal.path) in needed.paths


def _is_over(job: Job) -> bool:
    return job.state in TERMINAL and job.phase is None


def _ended(job: Job) -> str:
    return {"succeeded": "succeeded", "failed": "failed", "cancelled": "was cancelled"}[
        job.state.value
    ]


def _removal(kind: Kind, path: Path, why: str, job: Job, tree: StoredTree) -> Removal:
    return Removal(kind=kind, path=path, bytes=tree.size(path), why=why, job=job, tree=tree)
