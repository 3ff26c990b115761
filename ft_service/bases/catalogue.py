"""The base models of this host: folders in Hugging Face layout below the operator's model folders.

A model is a folder with `config.json`, safetensors weights and a tokenizer; its name is its path
below the model folder, and in Hugging Face's cache (`models--ORG--NAME`) ORG/NAME. Pickled weights
are never read: unpickling runs code.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ft_service.bases.base_files import (
    TOKENIZER_FILE,
    cached_name,
    is_base_file,
    shown,
    tokenizer_fault,
)
from ft_service.bases.describing import Descriptions
from ft_service.bases.origin import cached_snapshots, is_published
from ft_service.errors import SpecError
from ft_service.settings import Settings
from ft_service.spec import BaseModelRef
from ft_service.wording import did_you_mean

MAX_DEPTH = 4
"""Levels below a model folder that are searched for models."""
_LISTED = 20
"""Names that a refusal lists."""
_LISTED_FILES = 5
_NONE = (
    "There are no base models yet: put one into a folder that FT_MODELS names (without it: "
    "FT_HOME/models)."
)
_TOKENIZER_FILES = (
    TOKENIZER_FILE,
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "spiece.model",
)
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_NO_SAFETENSORS = "the folder holds no weights in safetensors, only "
_NEVER_READ = ", which is pickled and never read"


@dataclass(frozen=True)
class Base:
    """A base model."""

    name: str
    path: Path
    created_at: float
    """Modification time of its config.json, seconds since the epoch."""

    def ref(self) -> BaseModelRef:
        return BaseModelRef(name=self.name, path=str(self.path))


class Catalogue:
    """The base models below the operator's folders.

    Every call searches again, so that new models are found.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        aliases: Mapping[str, str] | None = None,
        descriptions: Descriptions | None = None,
    ) -> None:
        """`descriptions`: descriptions of the bases; None: without any."""
        self.descriptions = descriptions or Descriptions(None, None)
        self._folders = [folder.absolute() for folder in folders]
        self._aliases = dict(aliases or {})
        self._staged: Mapping[str, Path] = {}

    @classmethod
    def from_settings(
        cls, settings: Settings, descriptions: Descriptions | None = None
    ) -> Catalogue:
        """The catalogue of FT_MODELS.

        Raises SpecError if FT_MODEL_ALIASES is not a YAML mapping of names to names.
        """
        aliases = read_aliases(settings.model_aliases) if settings.model_aliases else None
        return cls(settings.model_folders(), aliases, descriptions)

    def with_staged(self, staged: Mapping[str, Path]) -> Catalogue:
        """The same catalogue, for plans: `find` knows bases of which all but the weights is here
        too, by the folders that hold it.
        """
        other = copy(self)
        other._staged = staged
        return other

    def list_models(self) -> list[Base]:
        """Every base that may be read, sorted by name, also those with pickled weights, which
        cannot be used. If two model folders hold the same name, the first one counts.
        """
        usable: dict[str, Base] = {}
        for folder in self._folders:
            for name, path in _model_folders(folder, MAX_DEPTH):
                if name not in usable and (
                    (fault := _faults(folder, path)) is None or fault.endswith(_NEVER_READ)
                ):
                    with suppress(FileNotFoundError):  # it has been removed
                        usable[name] = _base(name, path)
        return [usable[name] for name in sorted(usable)]

    def list_aliases(self) -> list[tuple[str, Base]]:
        """Every alias of a usable base, sorted by name."""
        return self._aliases_of(self.list_models())

    def _aliases_of(self, models: Sequence[Base]) -> list[tuple[str, Base]]:
        bases = {model.name: model for model in models}
        return [
            (alias, bases[name]) for alias, name in sorted(self._aliases.items()) if name in bases
        ]

    def find(self, name: str, *, to_train: bool = True, param: str = "model") -> Base:
        """A base by its name or an alias.

        `to_train` False: its config.json suffices. `param`: the option that names it. Raises
        SpecError with its fault or the known names.
        """
        target = self._aliases.get(name, name)
        named = f"{param} = {shown(name)}" + (
            f" (an alias of {shown(target)})" if target != name else ""
        )
        found = self._search(target, to_train)
        if found is None or isinstance(found, str):
            raise self._not_found(
                f"{named}: {found or 'there is no such base model'}.",
                target if found is None else None,
                param,
            )
        return found

    @classmethod
    def find_folder(cls, folder: Path, *, to_train: bool = True) -> Base:
        """The base in a folder that is named by its path, not as one of FT_MODELS.

        Raises SpecError with its fault.
        """
        found = cls([folder.parent])._search(folder.name, to_train)
        if found is None or isinstance(found, str):
            # its user's own path, whole
            message = f"model = {str(folder)!r}: {found or 'there is no such folder'}."
            raise SpecError(message, param="model", code="model_not_found")
        return found

    def _search(self, name: str, to_train: bool) -> Base | str | None:
        """The base of a name, or why it is refused; None: there is none."""
        if not is_model_name(name):
            return "a model's name is a path below the model folder, without '..'"
        for folder in self._folders:
            path = _folder_of(folder, name)
            if path is None:
                continue
            fault = _faults(folder, path)
            if fault and (to_train or not _has_config(path)):
                return fault
            with suppress(FileNotFoundError):  # it has been removed
                return _base(name, path)
        if name in self._staged:
            with suppress(FileNotFoundError):  # it is in its place by now, or was removed
                return _base(name, self._staged[name])
        return None

    def _may_be_tuned(self, base: Base) -> bool:
        """False for a base that was refused, which error messages do not offer."""
        document = self.descriptions.known(base.path)
        return pickled_weights(base.path) is None and (document is None or document.refused is None)

    def _not_found(
        self, message: str, wanted: str | None = None, param: str = "model"
    ) -> SpecError:
        """`wanted`: a name that no base has, for which a similar one is proposed, or the way to
        fetch it.
        """
        models = self.list_models()
        tunable = [model for model in models if self._may_be_tuned(model)]
        there = "The bases that are here cannot be tuned." if models else _NONE
        if tunable:
            there = f"There are: {_listed([model.name for model in tunable])}."
        if aliases := [alias for alias, _ in self._aliases_of(tunable)]:
            there = f"{there} Aliases: {_listed(aliases)}."
        if wanted is not None:
            similar = did_you_mean(wanted, [*(model.name for model in tunable), *aliases])
            fetch = (
                f" To fetch it, on the server's host: ft pull {wanted}."
                if is_published(wanted)
                else ""
            )
            message = f"{message}{similar or fetch}"
        return SpecError(f"{message} {there}", param=param, code="model_not_found")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{', '.join(names[:_LISTED])}{more}"


def read_aliases(path: Path) -> dict[str, str]:
    """Read the names that clients send → names of bases.

    Raises SpecError if the file is no such mapping or unreadable.
    """
    from ft_service.spec.yaml_loader import read_yaml_setting  # most commands do not need it

    aliases = read_yaml_setting("FT_MODEL_ALIASES", path) or {}
    if not isinstance(aliases, dict) or not all(
        isinstance(part, str) for pair in aliases.items() for part in pair
    ):
        message = (
            f"FT_MODEL_ALIASES = {path}: must be a YAML mapping of names that clients send "
            "to names of base models."
        )
        raise SpecError(message, param="FT_MODEL_ALIASES")
    return aliases


def _folder_of(folder: Path, name: str) -> Path | None:
    """The folder of a model by its name: a path, or ORG/NAME in a cache."""
    if (folder / name).is_dir():
        return folder / name
    return next((path for known, path in _model_folders(folder, MAX_DEPTH) if known == name), None)


def _model_folders(folder: Path, depth: int, prefix: str = "") -> Iterator[tuple[str, Path]]:
    """(name, folder) of every folder with a config.json, at most `depth` levels below; their
    subfolders are not searched.
    """
    try:
        entries = sorted(
            entry.name
            for entry in os.scandir(folder)
            if entry.is_dir() and not entry.name.startswith(".")
        )
    except OSError:  # a model folder that does not exist or may not be read holds no models
        return
    for name in entries:
        path = folder / name
        if cached_name(path) is not None:
            yield from (
                (known, found) for known, found in cached_snapshots(path) if _has_config(found)
            )
        elif _has_config(path):
            yield prefix + name, path
        elif depth > 1 and not path.is_symlink():
            yield from _model_folders(path, depth - 1, f"{prefix}{name}/")


def is_model_name(name: str) -> bool:
    """Whether a name can be a path below a folder: relative, without '..' and hidden folders, valid
    in a file system.
    """
    if not name.isprintable() or "\\" in name:
        return False
    return all(
        part and not part.startswith(".") and len(part.encode()) <= 255 for part in name.split("/")
    )


def _faults(folder: Path, path: Path) -> str | None:
    """The reason why a folder cannot be trained on; None: it can."""
    try:
        state = path.stat()
        whole = folder.stat()
        return _faults_of(
            folder,
            path,
            (state.st_dev, state.st_ino, state.st_mtime_ns),
            (whole.st_dev, whole.st_ino),
        )
    except OSError as error:
        return f"the folder cannot be read: {error.strerror or error}"


@lru_cache(maxsize=1024)
def _faults_of(folder: Path, path: Path, *states: tuple[int, ...]) -> str | None:
    """The fault of a base, cached until a folder is replaced, or a file of the base is added or
    removed.
    """
    if not path.resolve().is_relative_to(folder.resolve()):
        return (
            "it is a symbolic link out of the model folder; add the folder it points into to "
            "FT_MODELS"
        )
    names = sorted(entry.name for entry in path.iterdir())
    if "config.json" not in names:
        return "the folder holds no config.json"
    if not any(name.endswith(".safetensors") for name in names):
        pickled = [name for name in names if name.endswith(_PICKLED)]
        if pickled:
            return f"{_NO_SAFETENSORS}{pickled[0]}{_NEVER_READ}"
        return f"{_NO_SAFETENSORS}{', '.join(names[:_LISTED_FILES])}{', …' if len(names) > _LISTED_FILES else ''}"
    if not any(name in names for name in _TOKENIZER_FILES):
        return f"the folder holds no tokenizer ({TOKENIZER_FILE})"
    return tokenizer_fault(names)


def pickled_weights(folder: Path) -> str | None:
    """Name of a pickled file of weights, if the folder has no others; None: it has."""
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
    """Whether it is the folder of a model.

    A config.json that may not be opened (a link, a pipe) counts, so that the model is listed with
    that as its fault.
    """
    return os.path.lexists(folder / "config.json")


def _base(name: str, path: Path) -> Base:
    return Base(name, path, (path / "config.json").lstat().st_mtime)
