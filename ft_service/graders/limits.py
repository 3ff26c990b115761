"""Limits that the operator sets for graders: the models that may grade, the addresses of endpoints,
and python, which must see nothing of the service's own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from ft_service.errors import SpecError
from ft_service.graders import python_fence
from ft_service.installation import SAMPLE_MODELS
from ft_service.settings import NO_HEADER_TEXT, Settings, is_header_text
from ft_service.spec.option_types import Strict
from ft_service.spec.yaml_loader import read_yaml_setting


class GraderModel(Strict):
    """A model that may grade, at an OpenAI-compatible server."""

    base_url: Annotated[str, Field(pattern=r"^https?://[^\s?#]+$", max_length=2048)]
    """With /v1. The address may be private: it is the operator's."""
    key_file: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """File that contains the server's API key, relative to the YAML file; None: it needs none."""
    model: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    """Its name there; None: the name that graders give."""
    key: str | None = Field(default=None, exclude=True, repr=False)
    """The content of key_file, which is read when the service starts."""


_MODELS = TypeAdapter(dict[Annotated[str, Field(min_length=1, max_length=256)], GraderModel])


_FILE_URL = re.compile(r"(?:file://(?=/)|sqlite(?:\+\w+)?:///)(?P<path>[^?]+)")
_VARIABLES = (
    *("FT_CACHE", "FT_TOKENS"),  # below FT_HOME without them
    *(
        "AWS_SHARED_CREDENTIALS_FILE",
        "AWS_CONFIG_FILE",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "GOOGLE_APPLICATION_CREDENTIALS",
    ),
    *(
        "CLOUDSDK_CONFIG",
        "PGPASSFILE",
        "PGSERVICEFILE",
        "PGSSLKEY",
        "KUBECONFIG",
        "NETRC",
        "HF_HOME",
        "HF_TOKEN_PATH",
        "HOME",
    ),
)
"""Variables that are no settings and name files or folders with state or secrets, most of them
other programs'.
"""


@dataclass(frozen=True, kw_only=True)
class GraderLimits:
    """What graders may use."""

    models: Mapping[str, GraderModel] = field(default_factory=dict)
    """Name that graders give → model."""
    allow_private: bool = False
    """Whether endpoints may have private addresses and plain HTTP, as webhooks."""

    private: Mapping[str, Path] = field(default_factory=dict)
    """Files and folders that python graders must not see, by the setting or variable that names
    them.
    """

    @classmethod
    def from_settings(cls, settings: Settings) -> GraderLimits:
        """Raises SpecError if FT_GRADER_MODELS, a key in it or FT_DATABASE_URL_FILE cannot be
        read.
        """
        models = read_models(settings.grader_models) if settings.grader_models else {}
        private = private_paths(settings, os.environ)
        if settings.grader_models:
            keys = {name: model.key_file for name, model in models.items() if model.key_file}
            private |= {
                f"key_file of {name}": _key_path(settings.grader_models, file)
                for name, file in keys.items()
            }
        return cls(models=models, allow_private=settings.webhook_allow_private, private=private)

    @property
    def no_python(self) -> str | None:
        """Why python graders are refused; None: they run here. The first call starts a process."""
        return python_fence.refusal(self.private)


def private_paths(settings: Settings, environment: Mapping[str, str]) -> dict[str, Path]:
    """Return all that the settings and the environment name of files and folders on this host, by
    the name of the setting or variable: state, bases, keys. Raises SpecError if
    FT_DATABASE_URL_FILE cannot be read.
    """
    found = {f"FT_{name.upper()}": getattr(settings, name) for name in Settings.model_fields}
    found |= {
        name: value.split(os.pathsep) for name in _VARIABLES if (value := environment.get(name))
    }
    found["FT_DATABASE_URL"] = settings.resolved_database_url()
    found["FT_MODELS"] = [
        folder for folder in settings.model_folders() if folder != SAMPLE_MODELS
    ]  # an installed package's
    paths = {name: list(_paths(value)) for name, value in found.items()}
    paths["FT_HOME"] += [path for path in settings.home.glob("*") if path.is_symlink()]
    return {
        name if at == 0 else f"{name} ({path.name})": path
        for name, own in paths.items()
        for at, path in enumerate(own)
    }


def _paths(value: object) -> Iterator[Path]:
    """The paths in a setting's value."""
    match value:
        case Path():
            yield value.expanduser()
        case str() if url := _FILE_URL.match(value):
            yield Path(url["path"])
        case list():
            for one in value:  # pyright: ignore[reportUnknownVariableType]
                yield Path(one).expanduser()  # pyright: ignore[reportUnknownArgumentType]
        case _:
            pass


def read_models(path: Path) -> dict[str, GraderModel]:
    """Read FT_GRADER_MODELS. Raises SpecError if the file or a key in it is wrong or unreadable."""

    def wrong(why: object) -> SpecError:
        return SpecError(f"FT_GRADER_MODELS = {path}: {why}", param="FT_GRADER_MODELS")

    try:
        given = read_yaml_setting("FT_GRADER_MODELS", path) or {}
        if isinstance(given, dict) and any(
            isinstance(own, dict) and "key" in own for own in given.values()
        ):
            raise wrong(
                "a key is given in the file. Put it into a file of its own, and name that as "
                "key_file."
            )
        models = _MODELS.validate_python(given)
        return {name: _with_key(own, path) for name, own in models.items()}
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join(map(str, fault["loc"]))
        raise wrong(
            f"{place}: {fault['msg']}. It is a YAML mapping of names that graders give to "
            "base_url, key_file and model."
        ) from None
    except (OSError, ValueError) as error:
        raise wrong(error) from None


def _key_path(models: Path, key_file: str) -> Path:
    return models.parent / Path(key_file).expanduser()


def _with_key(model: GraderModel, models: Path) -> GraderModel:
    """Raises OSError, and ValueError for a key that cannot be sent."""
    if model.key_file is None:
        return model
    path = _key_path(models, model.key_file)
    key = path.read_text(encoding="utf-8").strip()
    if not is_header_text(key):
        raise ValueError(f"{path} {NO_HEADER_TEXT}.")
    return model.model_copy(update={"key": key})
