"""`/v1/fine_tuning/alpha/graders`: OpenAI's graders tried on an answer. Jobs score the answers of evaluations with them."""

from __future__ import annotations

import time
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from api.http.auth import Caller
from api.http.dependencies import JsonBody, body_schema
from api.http.routing import keyed_router
from ft_service.data.answer_metrics import Graded, grade, refuse_impossible
from ft_service.errors import SpecError
from ft_service.spec import Strict, spec_error
from ft_service.spec.evaluation import Grader

router = keyed_router("/v1/fine_tuning/alpha/graders", "fine-tuning")


class GraderValidation(Strict):
    """A grader to check."""

    grader: Grader


class GraderRun(Strict):
    """A grader and the answer that it scores."""

    grader: Grader
    model_sample: Annotated[str, Field(max_length=262_144)]
    """The answer: `{{ sample.output_text }}`, and `{{ sample.output_json.key }}` if it is JSON."""
    item: dict[str, Any] = {}
    """`{{ item.key }}`."""


class GraderValidationView(BaseModel):
    grader: dict[str, Any]
    """The grader as it was sent."""


class ErrorsView(BaseModel):
    """OpenAI's error flags; only the first three occur here."""

    formula_parse_error: bool = False
    sample_parse_error: bool = False
    invalid_variable_error: bool = False
    truncated_observation_error: bool = False
    unresponsive_reward_error: bool = False
    other_error: bool = False
    python_grader_server_error: bool = False
    python_grader_server_error_type: str | None = None
    python_grader_runtime_error: bool = False
    python_grader_runtime_error_details: str | None = None
    model_grader_server_error: bool = False
    model_grader_server_error_details: str | None = None
    model_grader_refusal_error: bool = False
    model_grader_parse_error: bool = False


class GraderMetadataView(BaseModel):
    name: str
    type: str
    errors: ErrorsView
    execution_time: float
    """Seconds."""
    scores: dict[str, float]
    """Name → score of each grader in a multi grader; of another grader, its own."""
    token_usage: int | None = None
    sampled_model_name: str | None = None


class GraderRunView(BaseModel):
    reward: float
    """0 where `metadata.errors` has one."""
    metadata: GraderMetadataView
    sub_rewards: dict[str, float]
    model_grader_token_usage_per_model: dict[str, Any] = {}


@router.post("/validate", openapi_extra=body_schema(GraderValidation))
def validate(body: JsonBody, caller: Caller) -> GraderValidationView:
    """Return the grader, if it can be used. Graders that run code or call a model are refused."""
    _read(GraderValidation, body)
    return GraderValidationView(grader=body["grader"])


@router.post("/run", openapi_extra=body_schema(GraderRun))
def run(body: JsonBody, caller: Caller) -> GraderRunView:
    """Return a grader's reward for an answer."""
    given = _read(GraderRun, body)
    began = time.perf_counter()
    graded = grade(given.grader, given.model_sample, given.item)
    return _view(given.grader, graded, time.perf_counter() - began)


def _read(model: Any, body: Any) -> Any:
    try:
        given = model.model_validate(body)
    except ValidationError as error:
        raise spec_error(error, model) from None
    try:
        refuse_impossible(given.grader)
    except ValueError as error:
        raise SpecError(f"grader.{error}.", param="grader") from None
    return given


def _view(grader: Grader, graded: Graded, seconds: float) -> GraderRunView:
    metadata = GraderMetadataView(
        name=grader.name,
        type=grader.type,
        errors=ErrorsView.model_validate(dict.fromkeys(graded.errors, True)),
        execution_time=seconds,
        scores=graded.scores,
    )
    return GraderRunView(reward=graded.reward, metadata=metadata, sub_rewards=graded.scores if grader.type == "multi" else {})
