"""JSON bodies of Tinker's wire, checked. Pure.

Clients of later versions send fields that this version does not know, mostly with a value that says
nothing: those are let through, and any other unknown field is refused by its name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ft_service.errors import SpecError
from ft_service.spec import LEAST_EPSILON, spec_error
from ft_service.wording import kind

LEAST_TTL = 3600
MOST_TTL = 315_360_000
"""Lifetime of saved weights in seconds: an hour to ten years."""
_NOTHING: tuple[object, ...] = (None, False, 0, "", [], {})

Seq = Annotated[int, Field(ge=1, le=999_999_999)]
MOST_METADATA_BYTES = 16 * 1024
"""Limit of a session's metadata as JSON."""
_Key = Annotated[str, Field(max_length=64)]
_Text = Annotated[str, Field(max_length=512)]
"""A value of metadata, as a job may have it."""
Metadata = Annotated[dict[_Key, Any], Field(max_length=14)]
"""At most two fewer than a job may have."""
Ttl = Annotated[int, Field(ge=LEAST_TTL, le=MOST_TTL)]


class Body(BaseModel):
    """Base class of bodies and their parts."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())

    @classmethod
    def parse(cls, body: object, not_here: Mapping[str, str] | None = None) -> Self:
        """Raises SpecError naming the field, its value and the limit.

        `not_here`: field → why it must say nothing.
        """
        if not isinstance(body, dict):
            raise SpecError(f"The body must be an object, not {kind(body)}.")
        for name, why in (not_here or {}).items():
            if body.get(name) not in _NOTHING:
                raise SpecError(
                    f"{name}: {why}. Leave it out.", param=name, code="unsupported_parameter"
                )
        try:
            parsed = cls.model_validate(
                {name: value for name, value in body.items() if value is not None}
            )
        except ValidationError as error:
            raise spec_error(error, cls) from None
        parsed.refuse_unknown()
        return parsed

    def refuse_unknown(self, place: str = "") -> None:
        """Raise SpecError for an unknown field that says something, here or in a part."""
        for name, value in (self.model_extra or {}).items():
            if value not in _NOTHING and name != "type":
                shown = f"{place}{name[:80]}"
                raise SpecError(
                    f"{shown}: this service does not know it. Leave it out.",
                    param=shown,
                    code="unsupported_parameter",
                )
        for name in type(self).model_fields:
            value = getattr(self, name)
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, Body):
                    part.refuse_unknown(f"{place}{name}.")


class CreateSession(Body):
    """The body of `create_session`."""

    display_name: str | None = Field(default=None, max_length=200)
    user_metadata: Metadata | None = None
    project_id: str | None = None
    tags: list[str] = []
    sdk_version: str = ""

    @field_validator("user_metadata")
    @classmethod
    def _short(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if (size := len(json.dumps(value))) > MOST_METADATA_BYTES:
            raise ValueError(
                f"at most {MOST_METADATA_BYTES:,} bytes as JSON are possible, and it has "
                f"{size:,}: shorten it"
            )
        return value


class OptimizerConfig(Body):
    """The optimizer of a model."""

    type: str = "adamw"

    @field_validator("type")
    @classmethod
    def _adamw(cls, value: str) -> str:
        if value != "adamw":
            raise ValueError("this service has AdamW only: 'adamw'")
        return value


class LoraConfig(Body):
    """The adapter of a model."""

    rank: int = Field(default=32, ge=1, le=1024)
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(Body):
    """The body of `create_model`."""

    session_id: str
    model_seq_id: int = Field(ge=0, le=999_999_999)
    base_model: str = Field(min_length=1, max_length=512)
    lora_config: LoraConfig = LoraConfig()
    optimizer_config: OptimizerConfig = OptimizerConfig()
    user_metadata: Metadata | None = None


class AdamParams(Body):
    """How one optimizer step is made (Loshchilov and Hutter, 2019)."""

    learning_rate: float = Field(default=1e-4, ge=0, le=100)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, ge=LEAST_EPSILON, le=1)
    weight_decay: float = Field(default=0.0, ge=0, le=100)
    grad_clip_norm: float = 0.0
    """0 or less: gradients are not clipped."""

    @field_validator("grad_clip_norm")
    @classmethod
    def _finite(cls, value: float) -> float:
        if not math.isfinite(value):
            raise ValueError("a finite number is expected")
        return value


class OfCommand(Body):
    """A body of a command."""

    model_id: str
    seq_id: Seq


class OptimStep(OfCommand):
    """The body of `optim_step`."""

    adam_params: AdamParams = AdamParams()


class Save(OfCommand):
    """A body of a command that saves weights."""

    path: str | None = None
    """The name; None: the request's number."""
    ttl_seconds: Ttl | None = None
    user_metadata: Annotated[dict[_Key, _Text], Field(max_length=16)] | None = None


class SaveWeights(Save):
    """The body of `save_weights`."""

    overwrite: bool = False


class SaveForSampler(Save):
    """The body of `save_weights_for_sampler`."""

    sampling_session_seq_id: int | None = Field(default=None, ge=0, le=999_999_999)
    """The sampler that is made of the weights if they have no name."""
    kind: str = "snapshot"


class SaveExternal(OfCommand):
    """The body of `save_weights_external`."""

    path: str | None = None
    ttl_seconds: int | None = None
    age_encryption_recipients: list[str] | None = None


class LoadWeights(Body):
    """The body of `load_weights`: into a model, or as one that begins with them."""

    path: str
    optimizer: bool = False
    model_id: str | None = None
    seq_id: Seq | None = None
    session_id: str | None = None
    model_seq_id: int | None = Field(default=None, ge=0, le=999_999_999)
    base_model: str | None = None
    user_metadata: Metadata | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class CreateSampler(Body):
    """The body of `create_sampling_session`."""

    session_id: str
    sampling_session_seq_id: int = Field(ge=0, le=999_999_999)
    base_model: str | None = Field(default=None, max_length=512)
    model_path: str | None = None


class OfSession(Body):
    """A body that names a session."""

    session_id: str


class OfModel(Body):
    """A body that names a model."""

    model_id: str


class OfSampler(Body):
    """A body that names a sampler."""

    sampling_session_id: str


class RetrieveFuture(Body):
    """The body of `retrieve_future`."""

    request_id: str
    allow_metadata_only: bool = False


class WeightsInfo(Body):
    """The body of `weights_info`."""

    tinker_path: str


class FinishReason(Body):
    """How a session ended."""

    type: str = "success"


class FinishSession(Body):
    """The body of `sessions/ID/finish`."""

    reason: FinishReason = FinishReason()
    detail: str | None = None


class WeightsTtl(Body):
    """The body of a checkpoint's `ttl`."""

    ttl_seconds: Ttl | None = None
    """None: they stay."""
