"""Graders as OpenAI's API has them, and `endpoint`, which is ours.

What a grader may use on this service is checked in ft_service/graders/grading.py, which also runs
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ft_service.spec.option_types import Number, Strict

SOURCE_BYTES = 262_144
"""Longest source of a python grader, in UTF-8."""

Template = Annotated[str, Field(max_length=16_384)]
"""Text with `{{ item.key }}`, and `{{ sample.output_text }}`, `{{ sample.output_json.key }}`, `{{
sample.output_tools[0]… }}` and `{{ sample.choices[0]… }}`.
"""
GraderName = Annotated[str, Field(min_length=1, max_length=64)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StringCheck(Strict):
    """OpenAI's string_check: 1 or 0."""

    type: Literal["string_check"]
    name: GraderName
    input: Template
    reference: Template
    operation: Literal["eq", "ne", "like", "ilike"]
    """eq, ne: the input is, or is not, the reference; like: it contains the reference; ilike: in
    any case.
    """


class TextSimilarity(Strict):
    """OpenAI's text_similarity, in [0, 1]."""

    type: Literal["text_similarity"]
    name: GraderName
    input: Template
    reference: Template
    evaluation_metric: Literal[
        "fuzzy_match",
        "bleu",
        "gleu",
        "rouge_1",
        "rouge_2",
        "rouge_3",
        "rouge_4",
        "rouge_5",
        "rouge_l",
    ]

    @field_validator("evaluation_metric", mode="before")
    @classmethod
    def _not_by_models(cls, value: Any) -> Any:
        if isinstance(value, str) and value in _METRICS_REFUSED:
            raise ValueError(f"is not available: {_METRICS_REFUSED[value]}")
        return value


_METRICS_REFUSED = {
    "cosine": "it needs an embedding model, which this service does not have. Use fuzzy_match or "
    "rouge_l",
    "meteor": "it needs WordNet, which this service does not have. Use rouge_l or gleu",
}


class GraderText(Strict):
    """A part of a message."""

    type: Literal["input_text", "output_text"]
    text: Template


class GraderMessage(Strict):
    """A message to the model that grades."""

    role: Literal["user", "assistant", "system", "developer"]
    content: (
        Template
        | GraderText
        | Annotated[list[Template | GraderText], Field(min_length=1, max_length=64)]
    )
    type: Literal["message"] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _only_text(cls, value: Any) -> Any:
        for part in value if isinstance(value, list) else [value]:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind in ("input_image", "input_audio"):
                raise ValueError(
                    f"content of type {kind!r} is not available: only text is graded here. Use "
                    "input_text"
                )
        return value


GraderMessages = Annotated[list[GraderMessage], Field(min_length=1, max_length=64)]
ModelName = Annotated[str, Field(min_length=1, max_length=256)]
"""One of those that the operator allows graders to ask (FT_GRADER_MODELS)."""


class GraderSampling(Strict):
    """OpenAI's sampling parameters of a model that grades; None: the model's own."""

    max_completions_tokens: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    reasoning_effort: ReasoningEffort | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None


class ScoreModel(Strict):
    """OpenAI's score_model: a number that a model gives."""

    type: Literal["score_model"]
    name: GraderName
    model: ModelName
    input: GraderMessages
    range: Annotated[
        list[Annotated[Number, Field(allow_inf_nan=False)]], Field(min_length=2, max_length=2)
    ] = [0.0, 1.0]
    """Lowest and highest score. One outside of it is an error, and is not cut off."""
    sampling_params: GraderSampling | None = None

    @field_validator("range")
    @classmethod
    def _in_order(cls, value: list[float]) -> list[float]:
        if value[0] >= value[1]:
            raise ValueError("the first number, the lowest score, must be below the second")
        return value


class LabelModel(Strict):
    """OpenAI's label_model, within a multi grader: 1 if the label that a model gives is a passing
    one, else 0.
    """

    type: Literal["label_model"]
    name: GraderName
    model: ModelName
    input: GraderMessages
    labels: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=256)]],
        Field(min_length=1, max_length=64),
    ]
    passing_labels: Annotated[list[str], Field(min_length=1, max_length=64)]

    @field_validator("passing_labels")
    @classmethod
    def _passing_ones_are_labels(cls, value: list[str], others: ValidationInfo) -> list[str]:
        labels = others.data.get("labels", value)  # missing if they are invalid themselves
        if unknown := [label for label in value if label not in labels]:
            raise ValueError(
                f"{unknown[0][:80]!r} is not one of labels. Add it there, or leave it out"
            )
        return value


class PythonGrader(Strict):
    """OpenAI's python: `def grade(sample, item)` returns the reward.

    It runs without network and files, on one processor, with 2 GB of memory, for at most two
    minutes.
    """

    type: Literal["python"]
    name: GraderName
    source: Annotated[str, Field(min_length=1, max_length=SOURCE_BYTES)]
    image_tag: None = None
    """Must be left out: graders run with the service's own Python."""

    @field_validator("source")
    @classmethod
    def _fits(cls, value: str) -> str:
        if (size := len(value.encode(errors="replace"))) > SOURCE_BYTES:
            raise ValueError(f"source has {size:,} bytes, at most {SOURCE_BYTES:,}: shorten it")
        return value

    @field_validator("image_tag", mode="before")
    @classmethod
    def _no_images(cls, value: Any) -> Any:
        if value is not None:
            raise ValueError(
                "image_tag is not available: graders run with the service's own Python. Leave it "
                "out"
            )
        return value


class EndpointGrader(Strict):
    """Not in OpenAI's API. A server of the user's own: it gets `{"sample", "item"}` by POST and
    answers `{"reward": number}`. The request is signed as webhooks are; https, and public addresses
    only, unless the operator allows others.
    """

    type: Literal["endpoint"]
    name: GraderName
    url: Annotated[str, Field(min_length=1, max_length=2048)]
    webhook_endpoint_id: Annotated[str, Field(min_length=1, max_length=64)]
    """The webhook endpoint of this project whose secret signs the requests."""
    timeout_seconds: Annotated[Number, Field(ge=1, le=120)] = 30.0
    """Time for one try. A try without an answer, or with status 429 or 5xx, is made again twice."""
    batch_size: Annotated[int, Field(ge=1, le=256)] = 1
    """Samples in one request. More than 1: the server gets `{"batch": [{"sample", "item"}, …]}` and
    answers `{"rewards": [number, …]}`, with null for a sample that it cannot grade."""


def _kind(value: Any) -> Any:
    return value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)


def by_type(*types: str) -> Discriminator:
    """Return what chooses among tagged graders by their `type`."""
    message = (
        f"must have a type that is known: a grader has a type: {', '.join(types[:-1])} or "
        f"{types[-1]}"
    )
    return Discriminator(_kind, custom_error_type="grader_type", custom_error_message=message)


TextGrader = (
    Annotated[StringCheck, Tag("string_check")] | Annotated[TextSimilarity, Tag("text_similarity")]
)
_OutsideGrader = (
    Annotated[ScoreModel, Tag("score_model")]
    | Annotated[PythonGrader, Tag("python")]
    | Annotated[EndpointGrader, Tag("endpoint")]
)
Single = StringCheck | TextSimilarity | ScoreModel | LabelModel | PythonGrader | EndpointGrader
SingleByType = Annotated[
    TextGrader | _OutsideGrader | Annotated[LabelModel, Tag("label_model")],
    by_type("string_check", "text_similarity", "score_model", "label_model", "python", "endpoint"),
]


class Multi(Strict):
    """OpenAI's multi: a formula of other graders' scores."""

    type: Literal["multi"]
    name: GraderName
    graders: Annotated[dict[GraderName, SingleByType], Field(min_length=1, max_length=16)]
    """Name in the formula → grader. A single grader may be given itself, under its own name."""
    calculate_output: Annotated[str, Field(min_length=1, max_length=1024)]
    """A formula: + - * / ^, min, max, abs, floor, ceil, exp, sqrt and log of numbers and graders'
    names.
    """

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        alone = value.get("graders") if isinstance(value, Mapping) else None
        if (
            isinstance(alone, Mapping)
            and isinstance(alone.get("type"), str)
            and isinstance(alone.get("name"), str)
        ):
            return {**value, "graders": {alone["name"]: alone}}
        return value


def _labels_only_in_multi(value: Any) -> Any:
    if _kind(value) == "label_model":
        raise ValueError(
            "a grader of type 'label_model' is only available within a multi grader: give {type: "
            "multi, graders: {NAME: it}, "
            "calculate_output: NAME}"
        )
    return value


Grader = Annotated[
    TextGrader | _OutsideGrader | Annotated[Multi, Tag("multi")],
    by_type("string_check", "text_similarity", "score_model", "python", "endpoint", "multi"),
    BeforeValidator(_labels_only_in_multi),
]


def singles_of(grader: Grader) -> dict[str, Single]:
    """Name → grader of each single one: those of a multi grader, or the grader itself."""
    return dict(grader.graders) if isinstance(grader, Multi) else {grader.name: grader}
