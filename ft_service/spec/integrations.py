"""OpenAI's `integrations` of a job: where else its metrics are sent. OpenAI has W&B alone."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

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


def _is_none(value: object) -> bool:
    return value is None


class Integration(Strict):
    """One of them, by its type."""

    type: Literal["wandb", "mlflow"]
    wandb: Annotated[Wandb | None, Field(exclude_if=_is_none)] = None
    mlflow: Annotated[Mlflow | None, Field(exclude_if=_is_none)] = None

    @field_validator("wandb", "mlflow")
    @classmethod
    def _of_its_type(cls, value: object, info: ValidationInfo) -> object:
        kind = info.data.get("type")
        if kind is not None and (value is not None) != (info.field_name == kind):
            raise ValueError(
                f"is required with type {kind!r}" if value is None else f"has no place with type {kind!r}: leave it out"
            )
        return value

    @property
    def own(self) -> Wandb | Mlflow:
        """The section of its type."""
        section = self.wandb or self.mlflow
        assert section is not None, "validated"
        return section


Integrations = Annotated[list[Integration], Field(max_length=5)]
