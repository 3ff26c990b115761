"""Limits that the operator sets for graders: the models that may grade, the addresses of endpoints, and python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from ft_service.errors import SpecError
from ft_service.graders import python_fence
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


@dataclass(frozen=True, kw_only=True)
class GraderLimits:
    """What graders may use."""

    models: Mapping[str, GraderModel] = field(default_factory=dict)
    """Name that graders give → model."""
    allow_private: bool = False
    """Whether endpoints may have private addresses and plain HTTP, as webhooks."""

    @classmethod
    def from_settings(cls, settings: Settings) -> GraderLimits:
        """Raises SpecError if FT_GRADER_MODELS or a key in it cannot be read."""
        models = read_models(settings.grader_models) if settings.grader_models else {}
        return cls(models=models, allow_private=settings.webhook_allow_private)

    @property
    def no_python(self) -> str | None:
        """Why python graders are refused; None: they run here. The first call starts a process."""
        return python_fence.refusal()


def read_models(path: Path) -> dict[str, GraderModel]:
    """Read FT_GRADER_MODELS. Raises SpecError if the file or a key in it is wrong or unreadable."""

    def wrong(why: object) -> SpecError:
        return SpecError(f"FT_GRADER_MODELS = {path}: {why}", param="FT_GRADER_MODELS")

    try:
        given = read_yaml_setting("FT_GRADER_MODELS", path) or {}
        if isinstance(given, dict) and any(isinstance(own, dict) and "key" in own for own in given.values()):
            raise wrong("a key is given in the file. Put it into a file of its own, and name that as key_file.")
        models = _MODELS.validate_python(given)
        return {name: _with_key(own, path.parent) for name, own in models.items()}
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join(map(str, fault["loc"]))
        raise wrong(
            f"{place}: {fault['msg']}. It is a YAML mapping of names that graders give to base_url, key_file and model."
        ) from None
    except (OSError, ValueError) as error:
        raise wrong(error) from None


def _with_key(model: GraderModel, folder: Path) -> GraderModel:
    """Raises OSError, and ValueError for a key that cannot be sent."""
    if model.key_file is None:
        return model
    path = folder / Path(model.key_file).expanduser()
    key = path.read_text(encoding="utf-8").strip()
    if not is_header_text(key):
        raise ValueError(f"{path} {NO_HEADER_TEXT}.")
    return model.model_copy(update={"key": key})
