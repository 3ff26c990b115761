"""OpenAI's `integrations` of a job: services and files that receive its metrics."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator
from pydantic_core import PydanticKnownError

from ft_service.spec.option_types import Strict

Name = Annotated[str, Field(min_length=1, max_length=128)]
PlaceName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^/\\#?%:]+$")]
"""Name that W&B accepts for a project and an entity."""
Tag = Annotated[str, Field(min_length=1, max_length=64)]


class Wandb(Strict):
    """A run of Weights & Biases, in W&B's terms."""

    project: PlaceName
    """Project; created if it does not exist."""
    name: Name | None = None
    """Display name of the run; None: the job's id."""
    entity: PlaceName | None = None
    """Team or user; None: the default one of the server's API key."""
    tags: Annotated[list[Tag], Field(max_length=20, default_factory=list)]
    """Tags in addition to those of every run: ft-service/finetune, ft-service/<base>,
    ft-service/<job id>.
    """


class Mlflow(Strict):
    """A run of MLflow, on the server's FT_MLFLOW_TRACKING_URI."""

    experiment: Name
    """Experiment; created if it does not exist."""
    name: Name | None = None
    """Display name of the run; None: the job's id."""
    tags: Annotated[list[Tag], Field(max_length=20, default_factory=list)]
    """Names of tags, without values, in addition to those of every run."""


def _not_reserved(name: str) -> str:
    endings = ("_system", "_configs", "_traces")
    if name.startswith("registry-") or name.endswith(endings):
        raise ValueError(
            f"trackio reserves names that begin with registry- or end with {', '.join(endings)}"
        )
    return name


class Trackio(Strict):
    """A run of trackio, in the server's FT_TRACKIO_URL."""

    project: Annotated[
        str,
        Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_-]+$"),
        AfterValidator(_not_reserved),
    ]
    """Project; created if it does not exist."""
    name: Name | None = None
    """Display name of the run; None: the job's id. trackio has no tags."""


def _is_none(value: object) -> bool:
    return value is None


class Integration(Strict):
    """One integration; `type` says which settings it has."""

    type: Literal["wandb", "mlflow", "trackio", "tensorboard"]
    """wandb, mlflow, trackio: a run there, sent by the server. tensorboard: files for TensorBoard,
    which the job writes; no settings.
    """
    wandb: Annotated[Wandb | None, Field(exclude_if=_is_none)] = None
    mlflow: Annotated[Mlflow | None, Field(exclude_if=_is_none)] = None
    trackio: Annotated[Trackio | None, Field(exclude_if=_is_none)] = None

    @field_validator("wandb", "mlflow", "trackio", mode="before")
    @classmethod
    def _settings_of_its_type(cls, value: object, info: ValidationInfo) -> object:
        kind = info.data.get("type")
        if kind == info.field_name and value is None:
            raise PydanticKnownError("missing")
        if kind is not None and kind != info.field_name and value is not None:
            raise ValueError(f"belongs to type: {info.field_name}; leave it out, or give that type")
        return value

    @property
    def sent(self) -> Wandb | Mlflow | Trackio | None:
        """Settings of the run to which the server sends metrics; None: it does not send them."""
        return self.wandb or self.mlflow or self.trackio


Integrations = Annotated[list[Integration], Field(max_length=5)]
