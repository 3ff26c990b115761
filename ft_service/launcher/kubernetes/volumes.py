"""Files of the service that a worker pod sees: those of its job only.

Pure, except `visible_reads` and `visible_to_engine`.

The operator mounts the whole volume of FT_HOME. A pod gets sub-paths of it: the job's run directory
to write, and the files that the job names to read, but no keys, uploads or files of other jobs. The
kubelet follows links in a sub-path inside its volume, so `visible_reads` refuses links in what a
worker may have written.

A pod of an engine sees the engine's directory, the run directories of its project's jobs with a
seat in some engine (rundir/project_runs.py), and in place of FT_HOME/files and FT_HOME/tokens a
folder that the service fills as jobs join. With FT_STORAGE it fetches what it needs, as others do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ft_service.data.token_folder import IN_HOME, entries_of
from ft_service.launcher.kubernetes.profile import PodProfile
from ft_service.launcher.protocol import LaunchError
from ft_service.rundir.directory import RunDir
from ft_service.rundir.engine import ENGINE, ENGINES, data_folder
from ft_service.rundir.engine_spec import EngineSpec
from ft_service.rundir.project_runs import PROJECT_RUNS, RUNS, project_folder, run_root
from ft_service.spec import JobSpec

Mount = dict[str, Any]

FILES = "files"
PRIVATE = (
    *(
        "cache",
        "credentials",
        ENGINES,
        FILES,
        "ft.db",
        "logins",
        PROJECT_RUNS,
        RUNS,
        "server.json",
        "tokens",
        "uploads",
        "wandb",
    ),
)
"""Names in FT_HOME that belong to the service: the operator's mounts never show them, or files in
them, to a pod.
"""
IMAGE_USER = 10001
"""User to whom FT_HOME belongs in our images, and who alone may enter it there."""
_PER_POD = ("emptyDir", "ephemeral")
"""Kinds of volumes that each pod has for itself, without files of others."""
_PLACE = ("mountPath", "subPath", "subPathExpr", "readOnly", "recursiveReadOnly")
"""Fields of a mount that differ between its parts."""


@dataclass(frozen=True)
class Home:
    """Paths of the service's files, for the service and its pods alike."""

    path: Path
    """FT_HOME."""
    models: tuple[Path, ...] = ()
    """FT_MODELS."""
    shared: bool = True
    """Whether pods share FT_HOME.

    False: with FT_STORAGE, each pod has its own and downloads its job's files.
    """

    def run(self, job_id: str) -> Path:
        return self.path / RUNS / job_id


@dataclass(frozen=True)
class VisibleFiles:
    """Files and folders of the service that an attempt's pods see, besides its run directory."""

    reads: tuple[Path, ...] = ()
    writes: tuple[Path, ...] = ()
    instead: Mapping[Path, Path] = field(default_factory=dict[Path, Path])
    """Path in the pod → the folder that is read there."""


def reads_of(spec: JobSpec, home: Home, profile: PodProfile) -> list[Path]:
    """Return the files and folders that the job's pods must see: its bases, its data, and the
    adapters that it continues or learns from.

    Raises LaunchError for data or an adapter that no volume contains; a base may be in the image.
    """
    bases = [path for name in spec.bases_read for path in base_reads(Path(name), home, profile)]
    bases = list(dict.fromkeys(bases))
    if not home.shared:
        return bases
    named = [Path(data.path) for data in spec.data_files]
    named += [Path(adapter.path) for adapter in spec.adapters_read]
    for path in named:
        if _mount_of(path, profile) is None:
            raise LaunchError(
                f"The job reads {path}, which is on no volume of the worker pods: mount it at "
                "this path in the pod profile "
                "(volume_mounts), or create the job again from files that the service has now."
            )
    return [*bases, *named]


def base_reads(folder: Path, home: Home, profile: PodProfile) -> list[Path]:
    """Return the folder that pods must see for a base; empty: the base is in the image."""
    base = _models_folder(folder, home)
    return [base] if _mount_of(base, profile) is not None else []


def visible_reads(spec: JobSpec, home: Home, profile: PodProfile) -> tuple[Path, ...]:
    """Return the existing files and folders for the pods' mounts (`AttemptShape.reads`), as
    `reads_of` and cached tokens.

    Missing ones are left out: the worker reports them, and a kubelet would create a folder of root
    in their place. For the same reason a cache in FT_HOME is created here. Raises LaunchError as
    `reads_of`, and for an adapter that is a link.
    """
    reads = reads_of(spec, home, profile)
    for path in reads:
        _refuse_link(path, home)
    cache = cache_below(profile, home)
    if cache is not None and home.shared:
        cache.mkdir(parents=True, exist_ok=True)
    return tuple(path for path in [*reads, *_tokens(spec, home)] if path.exists())


def visible_to_engine(run: RunDir, home: Home, profile: PodProfile) -> VisibleFiles | None:
    """Return what the pods of an engine see, after creating what is missing of it; None: the
    directory is not that of an engine. Its engine.json counts only until it was started: then its
    ranks may write there.
    """
    held = run.readable(ENGINE, EngineSpec) if run.root.parent == home.path / ENGINES else None
    if held is None:
        return None
    reads = [
        path for path in base_reads(Path(held.spec.model.path), home, profile) if path.exists()
    ]
    if not home.shared:
        return VisibleFiles(tuple(reads))
    shown = data_folder(run.root)
    instead = {home.path / name: shown / name for name in (FILES, IN_HOME)}
    runs = project_folder(home.path, held.project_id)
    cache = cache_below(profile, home)
    for folder in (*instead.values(), runs, *([cache] if cache is not None else [])):
        folder.mkdir(parents=True, exist_ok=True)
    return VisibleFiles(tuple(reads), (runs,), instead)


def _tokens(spec: JobSpec, home: Home) -> list[Path]:
    """Return the cached tokens of the job's data files.

    A pod without them tokenises the files itself.
    """
    if not home.shared:
        return []
    files = {data.sha256 for data in spec.data_files}
    return [entry for sha256 in sorted(files) for entry in entries_of(home.path / IN_HOME, sha256)]


def _refuse_link(path: Path, home: Home) -> None:
    """Refuse a link in a run directory, which workers write: the kubelet would show the pod its
    target. The service's own link to the run directory is none of them.
    """
    runs = home.path / RUNS
    projects = home.path / PROJECT_RUNS
    if path.is_relative_to(runs):
        job_id, *below = path.relative_to(runs).parts
        path = run_root(home.path, job_id).joinpath(*below)
    folder = projects if path.is_relative_to(projects) else runs
    if path.is_relative_to(folder) and path.resolve() != folder.resolve() / path.relative_to(
        folder
    ):
        raise LaunchError(
            f"The adapter that the job continues is a symbolic link, which is not followed: {path}."
        )


def pod_mounts(
    profile: PodProfile, home: Home, run: Path | None, seen: VisibleFiles
) -> list[Mount]:
    """Return the operator's `volume_mounts`; those that show the service's files are replaced by
    the parts that the job needs. `run`: run directory; None: the pod belongs to no job, and writes
    nothing.
    """
    narrowed = [mount for mount in profile.volume_mounts if _shows_private(mount, profile, home)]
    kept = [
        _guarded(mount, profile, home) for mount in profile.volume_mounts if mount not in narrowed
    ]
    cache = cache_below(profile, home)
    written: list[Path] = []
    if run is not None:
        written = [
            *([run] if home.shared else []),
            *seen.writes,
            *([cache] if cache is not None else []),
        ]
    of_mount = {
        path: _mount_of(seen.instead.get(path, path), profile)
        for path in (*written, *seen.reads, *seen.instead)
    }

    def is_part_of_another(path: Path) -> bool:
        return any(
            path != other and path.is_relative_to(other) and of_mount[other] == of_mount[path]
            for other in of_mount
        )

    parts = [
        _part(mount, path, seen.instead.get(path, path), read_only=path not in written)
        for path, mount in of_mount.items()
        if mount is not None and mount in narrowed and not is_part_of_another(path)
    ]
    return [*kept, *parts]


def needs_own_home(profile: PodProfile, home: Home) -> bool:
    """Return whether pods need a volume for FT_HOME that the operator's mounts do not provide: for
    their own files, or because sub-paths are mounted in the image's FT_HOME, which other users than
    the image's may not enter.
    """
    mount = _mount_of(home.path, profile)
    needed = not home.shared or profile.run_as_user != IMAGE_USER
    return needed and (mount is None or not _is_per_pod(_volume(mount, profile)))


def cache_below(profile: PodProfile, home: Home) -> Path | None:
    """Return the cache of quantised bases if it is inside FT_HOME, where all jobs write it; None:
    it is elsewhere.
    """
    named = [
        str(entry.get("value") or "") for entry in profile.env if entry.get("name") == "FT_CACHE"
    ]
    path = Path(named[-1]) if named and named[-1] else home.path
    return path if path != home.path and path.is_relative_to(home.path) else None


def _models_folder(base: Path, home: Home) -> Path:
    """Return the folder of models that contains a base, whose files may be links to others there;
    the base itself if that folder contains files of the service.
    """
    private = [home.path / name for name in PRIVATE]
    holding = [folder for folder in home.models if base.is_relative_to(folder)]
    harmless = [
        folder
        for folder in holding
        if not any(p.is_relative_to(folder) or folder.is_relative_to(p) for p in private)
    ]
    return max(harmless, key=lambda folder: len(folder.parts), default=base)


def _shows_private(mount: Mount, profile: PodProfile, home: Home) -> bool:
    """Return whether a mount shows files of the service, at any path in the pod."""
    source, place = _region(mount, profile)
    if source is None:
        return False
    for name in ("", *PRIVATE):
        there, private = _region_of(home.path / name, profile)
        if there != source:
            continue
        if place is None or private is None:  # only the kubelet knows the path
            return True
        if private.is_relative_to(place) or (name and place.is_relative_to(private)):
            return True
    return False


def _guarded(mount: Mount, profile: PodProfile, home: Home) -> Mount:
    """Return an operator's mount that stays; read-only if it shows a part of FT_HOME, such as base
    models.
    """
    source, place = _region(mount, profile)
    there, root = _region_of(home.path, profile)
    inside = (
        source is not None
        and source == there
        and place is not None
        and root is not None
        and place.is_relative_to(root)
    )
    return {**mount, "readOnly": True} if inside else mount


def _part(mount: Mount, path: Path, source: Path, *, read_only: bool) -> Mount:
    """Return a mount that shows `source` alone, at `path`, taken from a mount that contains it."""
    below = PurePosixPath(source).relative_to(str(mount["mountPath"])).as_posix()
    part = {key: value for key, value in mount.items() if key not in _PLACE} | {
        "mountPath": str(path)
    }
    if "subPathExpr" in mount:
        part["subPathExpr"] = f"{mount['subPathExpr']}/{below.replace('$', '$$')}"
    else:
        whole = PurePosixPath(str(mount.get("subPath") or "")) / below
        part |= {"subPath": whole.as_posix()} if whole != PurePosixPath() else {}
    return {**part, "readOnly": True} if read_only or mount.get("readOnly") else part


def _mount_of(path: Path, profile: PodProfile) -> Mount | None:
    """Return the operator's deepest mount that contains a path."""
    if ".." in path.parts:
        return None
    holding = [
        m
        for m in profile.volume_mounts
        if PurePosixPath(path).is_relative_to(str(m.get("mountPath")))
    ]
    return max(
        holding, key=lambda mount: len(PurePosixPath(str(mount["mountPath"])).parts), default=None
    )


def _region_of(path: Path, profile: PodProfile) -> tuple[str | None, PurePosixPath | None]:
    mount = _mount_of(path, profile)
    if mount is None:
        return None, None
    source, place = _region(mount, profile)
    return source, place and place / PurePosixPath(path).relative_to(str(mount["mountPath"]))


def _region(mount: Mount, profile: PodProfile) -> tuple[str | None, PurePosixPath | None]:
    """Return what a mount shows: storage, and the path on it.

    (None, None): a volume of the pod's own. (…, None): only the kubelet knows the path. Two volumes
    may be the same storage.
    """
    volume = _volume(mount, profile)
    if not volume or _is_per_pod(volume):
        return None, None
    kind = next(key for key in volume if key != "name")
    source = {
        key: value
        for key, value in (volume[kind] or {}).items()
        if key not in ("readOnly", "type", "fsType")
    }
    root = source.pop("path", "/") if kind in ("hostPath", "nfs") else "/"
    named = f"{kind} {json.dumps(source, sort_keys=True)}"
    if "subPathExpr" in mount:
        return named, None
    return named, PurePosixPath("/") / str(root) / str(mount.get("subPath") or "")


def _volume(mount: Mount, profile: PodProfile) -> dict[str, Any]:
    return next(
        (volume for volume in profile.volumes if volume.get("name") == mount.get("name")), {}
    )


def _is_per_pod(volume: dict[str, Any]) -> bool:
    return any(kind in volume for kind in _PER_POD)
