"""OpenAI's `integrations` of a job: where else its metrics go."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator
from pydantic_core import PydanticKnownError

from ft_service.spec.values import Strict

Name = Annotated[str, Field(min_length=1, max_length=128)]
PlaceName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^/\\#?%:]+$")]
"""What W&B takes for a project and an entity."""
Tag = Annotated[str, Field(min_length=1, max_length=64)]


class Wandb(Strict):
    """A run of Weights & Biases, by names as W&B uses them."""

    project: PlaceName
    """Made there if there is none of this name."""
    name: Name | None = None
    """Of the run, for display; None: the job's id."""
    entity: PlaceName | None = None
    """Team or user; None: the default one of the server's API key."""
    tags: Annotated[list[Tag], Field(max_length=20, default_factory=list)]
    """Beside those that every run gets: ft-service/finetune, ft-service/<base>, ft-service/<job id>."""


class Mlflow(Strict):
    """A run of MLflow, on the server's FT_MLFLOW_TRACKING_URI."""

    experiment: Name
    """Made there if there is none of this name."""
    name: Name | None = None
    """Of the run, for display; None: the job's id."""
    tags: Annotated[list[Tag], Field(max_length=20, default_factory=list)]
    """Names of tags, without values, beside those that every run gets."""


def _no_file_of_another(name: str) -> str:
    taken = ("_system", "_configs", "_traces")
    if name.startswith("registry-") or name.endswith(taken):
        raise ValueError(f"trackio keeps files of its own under names with registry- before or {', '.join(taken)} behind them")
    return name


class Trackio(Strict):
    """A run of trackio, in the server's FT_TRACKIO_URL."""

    project: Annotated[
        str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_-]+$"), AfterValidator(_no_file_of_another)
    ]
    """Made there if there is none of this name."""
    name: Name | None = None
    """Of the run, for display; None: the job's id. trackio has no tags."""


def _is_none(value: object) -> bool:
    return value is None


class Integration(Strict):
    """One of them, by its type."""

    type: Literal["wandb", "mlflow", "trackio", "tensorboard"]
    """wandb, mlflow, trackio: a run there, sent by the server. tensorboard: files for TensorBoard, which the job writes; no
    settings."""
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
        """What the server sends its metrics by; None: it sends nothing."""
        return self.wandb or self.mlflow or self.trackio


Integrations = Annotated[list[Integration], Field(max_length=5)]
