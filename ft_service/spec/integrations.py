"""OpenAI's `integrations` of a job: where else its metrics go."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator
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


class Integration(Strict):
    type: Literal["wandb", "tensorboard"]
    """wandb: a run there, sent by the server. tensorboard: files that the job writes for TensorBoard, with no settings."""
    wandb: Annotated[Wandb | None, Field(validate_default=True)] = None

    @field_validator("wandb", mode="before")
    @classmethod
    def _settings_of_its_type(cls, value: object, info: ValidationInfo) -> object:
        kind = info.data.get("type")
        if kind == "wandb" and value is None:
            raise PydanticKnownError("missing")
        if kind == "tensorboard" and value is not None:
            raise ValueError("belongs to type: wandb; type: tensorboard has no settings")
        return value


Integrations = Annotated[list[Integration], Field(max_length=5)]
