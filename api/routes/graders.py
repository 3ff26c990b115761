"""`/v1/fine_tuning/alpha/graders`: graders tried on an answer, by the functions that grade in
training.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

from api.http.auth import Caller
from api.http.dependencies import (
    ExactJsonBody,
    JsonBody,
    Services,
    Svc,
    body_schema,
    parse_body,
    with_whole_numbers,
)
from api.http.routing import keyed_router
from api.http.threads import takes_turns
from ft_service.control.webhook_delivery import secrets_of
from ft_service.graders.grades import Grade, Sample
from ft_service.graders.grading import (
    GraderBody,
    GraderContext,
    check_outside,
    grade,
    require_usable,
)
from ft_service.spec import Strict
from ft_service.spec.graders import Grader

router = keyed_router("/v1/fine_tuning/alpha/graders", "fine-tuning")

SECONDS = 120.0
"""Time for a grader to grade one answer here, or for its source to load."""


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
    """OpenAI's error flags, those of endpoints, and what happened."""

    formula_parse_error: bool = False
    sample_parse_error: bool = False
    """The answer lacks what a template names."""
    invalid_variable_error: bool = False
    """The item lacks what a template names."""
    truncated_observation_error: bool = False
    """Does not occur here: an answer is given whole."""
    unresponsive_reward_error: bool = False
    """There was no reward within two minutes, or texts need more than 20 seconds of a processor."""
    other_error: bool = False
    """Texts are too long, need too much memory, or the reward is beyond 10^12."""
    python_grader_server_error: bool = False
    """The process in which the grader ran has ended, or took too long."""
    python_grader_server_error_type: str | None = None
    """time, killed, exited or garbage."""
    python_grader_runtime_error: bool = False
    python_grader_runtime_error_details: str | None = None
    """End of the traceback."""
    model_grader_server_error: bool = False
    model_grader_server_error_details: str | None = None
    model_grader_refusal_error: bool = False
    model_grader_parse_error: bool = False
    """The model's answer is no score of the range, or none of the labels."""
    endpoint_grader_server_error: bool = False
    """The user's server was not reached, or answered with an error."""
    endpoint_grader_parse_error: bool = False
    """Its answer is no reward."""
    details: dict[str, str] = {}
    """Name of each flag that is true → what happened."""


class GraderMetadataView(BaseModel):
    name: str
    type: str
    errors: ErrorsView
    execution_time: float
    """Seconds."""
    scores: dict[str, float]
    """Name → score of each grader in a multi grader; of another grader, its own."""
    token_usage: int | None = None
    """All tokens of models that graded; null: none did, or their servers do not say."""
    sampled_model_name: str | None = None


class GraderRunView(BaseModel):
    reward: float
    """0 where `metadata.errors` has one."""
    metadata: GraderMetadataView
    sub_rewards: dict[str, float]
    model_grader_token_usage_per_model: dict[str, dict[str, int]] = {}


@router.post("/validate", openapi_extra=body_schema(GraderBody))
@takes_turns("grading")
def validate(body: JsonBody, caller: Caller, services: Svc) -> GraderValidationView:
    """Return the grader, if it can be used: options, templates, formula, models and addresses are
    checked, and the source of a python grader is loaded. Servers are not asked.
    """
    grader = parse_body(body, GraderBody).grader
    require_usable(grader, services.grader_limits)
    check_outside(grader, grader_context(services, caller.project_id))
    return GraderValidationView(grader=body["grader"])


@router.post("/run", openapi_extra=body_schema(GraderRun))
@takes_turns("grading")
def run(body: ExactJsonBody, caller: Caller, services: Svc) -> GraderRunView:
    """Return a grader's reward for an answer.

    A project tries one grader at a time; further requests wait for their turn.
    """
    if isinstance(
        body, dict
    ):  # the item stays as in a data file, where 1.0 fills a template as 1.0
        body = {
            name: value if name == "item" else with_whole_numbers(value)
            for name, value in body.items()
        }
    given = parse_body(body, GraderRun)
    require_usable(given.grader, services.grader_limits)
    graded = grade(
        given.grader,
        Sample(given.model_sample),
        given.item,
        grader_context(services, caller.project_id),
    )
    return _view(given.grader, graded)


def grader_context(services: Services, project_id: str) -> GraderContext:
    """Return the context of graders that a request tries."""

    def secrets(endpoint_id: str) -> list[str]:
        return secrets_of(services.store.webhooks.get_webhook(project_id, endpoint_id))

    return GraderContext(
        project=project_id, limits=services.grader_limits, secrets=secrets, seconds=SECONDS
    )


def _view(grader: Grader, graded: Grade) -> GraderRunView:
    details = {str(kind): detail for kind, detail in graded.errors.items()}
    errors = ErrorsView(
        **dict.fromkeys(details, True),  # pyright: ignore[reportArgumentType]
        python_grader_server_error_type=details.get("python_grader_server_error", "").partition(
            ":"
        )[0]
        or None,
        python_grader_runtime_error_details=details.get("python_grader_runtime_error"),
        model_grader_server_error_details=details.get("model_grader_server_error"),
        details=details,
    )
    totals = [
        tokens["total_tokens"] for tokens in graded.usage.values() if "total_tokens" in tokens
    ]
    metadata = GraderMetadataView(
        name=grader.name,
        type=grader.type,
        errors=errors,
        execution_time=graded.seconds,
        scores=dict(graded.scores),
        token_usage=sum(totals) if totals else None,
        sampled_model_name=graded.sampled_model,
    )
    usage = {model: dict(tokens) for model, tokens in graded.usage.items()}
    return GraderRunView(
        reward=graded.reward,
        metadata=metadata,
        sub_rewards=dict(graded.sub_rewards),
        model_grader_token_usage_per_model=usage,
    )
