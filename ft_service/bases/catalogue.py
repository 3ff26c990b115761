"""The base models of this host: folders in Hugging Face layout below the operator's model folders.

A model is a folder with `config.json`, safetensors weights and a tokenizer; its name is its path below the model folder. In
Hugging Face's cache (`models--ORG--NAME`) it is ORG/NAME.
Weights in pickle form are never read: unpickling runs code.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ft_service.bases.base_files import cached_name, is_base_file
from ft_service.bases.origin import cached_snapshots
from ft_service.errors import SpecError
from ft_service.settings import Settings
from ft_service.spec import BaseModelRef

MAX_DEPTH = 4
"""Folders below a model folder that are looked through for models."""
_LISTED = 20
"""Names that a refusal lists."""
_SHOWN = 5
"""Files of a folder that a refusal lists."""
_NONE = "There are no base models yet: put one into a folder that FT_MODELS names (without it: FT_HOME/models)."
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_NO_SAFETENSORS = "the folder holds no weights in safetensors, only "
_NEVER_READ = ", which is pickled and never read"


@dataclass(frozen=True)
class Base:
    """A base that jobs can train on."""

    name: str
    path: Path
    created_at: float
    """When its config.json was last written, seconds since the epoch."""

    def ref(self) -> BaseModelRef:
        return BaseModelRef(name=self.name, path=str(self.path))


class Catalogue:
    """The base models below the operator's folders. It looks anew on every call, so that a model copied there is found."""

    def __init__(
        self,
        folders: Sequence[Path],
        aliases: Mapping[str, str] | None = None,
        is_tunable: Callable[[Base], bool] = lambda base: True,
    ) -> None:
        """`is_tunable`: whether a refusal names a base among those to choose from."""
        self._is_tunable = is_tunable
        self._folders = [folder.absolute() for folder in folders]
        self._aliases = dict(aliases or {})

    @classmethod
    def from_settings(cls, settings: Settings, is_tunable: Callable[[Base], bool] = lambda base: True) -> Catalogue:
        """Raises SpecError if FT_MODEL_ALIASES is not a YAML mapping of names to names."""
        aliases = read_aliases(settings.model_aliases) if settings.model_aliases else None
        return cls(settings.model_folders(), aliases, is_tunable)

    def list_models(self) -> list[Base]:
        """Every base that may be read, by name, those among them whose weights are pickled and cannot be used. If two model
        folders hold the same name, the first one's."""
        usable: dict[str, Base] = {}
        for folder in self._folders:
            for name, path in _model_folders(folder, MAX_DEPTH):
                if name not in usable and ((fault := _faults(folder, path)) is None or fault.endswith(_NEVER_READ)):
                    usable[name] = _base(name, path)
        return [usable[name] for name in sorted(usable)]

    def list_aliases(self) -> list[tuple[str, Base]]:
        """Every alias of a usable base, by name."""
        bases = {model.name: model for model in self.list_models()}
        return [(alias, bases[name]) for alias, name in sorted(self._aliases.items()) if name in bases]

    def find(self, name: str, *, to_train: bool = True) -> Base:
        """A base by its name or an alias. `to_train` False: its config.json is enough. Raises SpecError that names its fault,
        or lists the known names.
        """
        target = self._aliases.get(name, name)
        shown = f"model = {_shown(name)}" + (f" (an alias of {_shown(target)})" if target != name else "")
        if not is_model_name(target):
            raise self._not_found(f"{shown}: a model's name is a path below the model folder, without '..'.")
        for folder in self._folders:
            path = _folder_of(folder, target)
            if path is None:
                continue
            fault = _faults(folder, path)
            if fault and (to_train or not _has_config(path)):
                raise self._not_found(f"{shown}: {fault}.")
            return _base(target, path)
        raise self._not_found(f"{shown}: there is no such base model.")

    def _not_found(self, message: str) -> SpecError:
        names = [model.name for model in self.list_models() if self._is_tunable(model)]
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        none = _NONE if not self.list_models() else "None of those that are here can be tuned."
        there = f"There are: {', '.join(names[:_LISTED])}{more}." if names else none
        return SpecError(f"{message} {there}", param="model", code="model_not_found")


def read_aliases(path: Path) -> dict[str, str]:
    """Names that clients send → names of bases. Raises SpecError if the file is not such a mapping or cannot be read."""
    import yaml  # most commands need it not

    try:
        aliases = yaml.safe_load(path.read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SpecError(f"FT_MODEL_ALIASES = {path}: {error}", param="FT_MODEL_ALIASES") from None
    if not isinstance(aliases, dict) or not all(isinstance(part, str) for pair in aliases.items() for part in pair):
        message = f"FT_MODEL_ALIASES = {path}: must be a YAML mapping of names that clients send to names of base models."
        raise SpecError(message, param="FT_MODEL_ALIASES")
    return aliases


def _folder_of(folder: Path, name: str) -> Path | None:
    """The folder of a model by its name: a path, or ORG/NAME of a cache."""
    if (folder / name).is_dir():
        return folder / name
    return next((path for known, path in _model_folders(folder, MAX_DEPTH) if known == name), None)


def _model_folders(folder: Path, depth: int, prefix: str = "") -> Iterator[tuple[str, Path]]:
    """Name and folder of what has a config.json, at most `depth` levels below; such a folder is not searched further."""
    try:
        entries = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    except OSError:  # a model folder that is not there, or may not be read, holds no models
        return
    for name in entries:
        path = folder / name
        if cached_name(path) is not None:
            yield from ((known, found) for known, found in cached_snapshots(path) if _has_config(found))
        elif _has_config(path):
            yield prefix + name, path
        elif depth > 1 and not path.is_symlink():
            yield from _model_folders(path, depth - 1, f"{prefix}{name}/")


def is_model_name(name: str) -> bool:
    """Whether a name can be a path below a folder: not absolute, no '..', no hidden folder, nothing a file system refuses."""
    if not name.isprintable() or "\\" in name:
        return False
    return all(part and not part.startswith(".") and len(part.encode()) <= 255 for part in name.split("/"))


def _faults(folder: Path, path: Path) -> str | None:
    """Why a folder cannot be trained on. None: it can."""
    try:
        state, whole = path.stat(), folder.stat()
    except OSError as error:
        return f"the folder cannot be read: {error.strerror or error}"
    return _faults_of(folder, path, (state.st_dev, state.st_ino, state.st_mtime_ns), (whole.st_dev, whole.st_ino))


@lru_cache(maxsize=1024)
def _faults_of(folder: Path, path: Path, *states: tuple[int, ...]) -> str | None:
    """The faults of a base, remembered as long as both are the same folders and no file came to the base or went."""
    if not path.resolve().is_relative_to(folder.resolve()):
        return "it is a symbolic link out of the model folder; add the folder it points into to FT_MODELS"
    names = sorted(entry.name for entry in path.iterdir())
    if "config.json" not in names:
        return "the folder holds no config.json"
    if not any(name.endswith(".safetensors") for name in names):
        pickled = [name for name in names if name.endswith(_PICKLED)]
        if pickled:
            return f"{_NO_SAFETENSORS}{pickled[0]}{_NEVER_READ}"
        return f"{_NO_SAFETENSORS}{', '.join(names[:_SHOWN])}{', …' if len(names) > _SHOWN else ''}"
    if not any(name in names for name in _TOKENIZER_FILES):
        return "the folder holds no tokenizer (tokenizer.json)"
    return None


def pickled_weights(folder: Path) -> str | None:
    """A file of weights in the only form that a base's folder has them in, if that is pickled, which is never read."""
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError:
        return None
    if any(name.endswith(".safetensors") for name in names):
        return None
    return next((name for name in names if name.endswith(_PICKLED)), None)


def has_tokenizer(folder: Path) -> bool:
    return any(is_base_file(folder / name) for name in _TOKENIZER_FILES)


def _has_config(folder: Path) -> bool:
    """True for the folder of a model, also where its config.json is a link or a pipe that nobody may open: it is listed, with
    that as the reason why it cannot be used.
    """
    return os.path.lexists(folder / "config.json")


def _base(name: str, path: Path) -> Base:
    return Base(name, path, (path / "config.json").lstat().st_mtime)


def _shown(name: str) -> str:
    text = repr(name)
    return text if len(text) <= 120 else text[:117] + "..."
