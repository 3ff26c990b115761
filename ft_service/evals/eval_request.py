"""Bodies of `/v1/evals` as OpenAI's API has them: what this service lacks is refused by name.
Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationError, field_validator

from ft_service.errors import SpecError
from ft_service.evals.item_schema import check_schema, fault_of
from ft_service.graders.grades import NO_JSON, parsed
from ft_service.graders.grading import require_usable
from ft_service.graders.limits import GraderLimits
from ft_service.graders.templates import TemplateError, check_template
from ft_service.graders.texts import texts_of
from ft_service.spec.graders import (
    EndpointGrader,
    GraderMessage,
    LabelModel,
    PythonGrader,
    ScoreModel,
    StringCheck,
    TextSimilarity,
    by_type,
)
from ft_service.spec.option_types import Number, Strict
from ft_service.spec.request import Metadata
from ft_service.spec.validation_errors import spec_error

MOST_ITEMS = 1000
"""Limit of a run's items."""
MOST_LINE = 65_536
"""Bytes of an item with its sample."""
MOST_FILE = 32 * 1024**2
"""Bytes of a file of items."""
MOST_LINES = 10 * MOST_ITEMS
"""Lines of such a file, empty ones too."""
MOST_VALUES = 4096
"""Brackets and commas of a line: the interpreter does nothing else while it parses them."""
MOST_TOKENS = 4096
"""Limit of an answer's tokens."""
Threshold = Annotated[Number, Field(ge=-1e12, le=1e12)]
"""An answer passes with a score of at least this."""
Name = Annotated[str, Field(min_length=1, max_length=256)]


class TextCriterion(TextSimilarity):
    """text_similarity in an eval."""

    pass_threshold: Threshold


class ScoreCriterion(ScoreModel):
    """score_model in an eval."""

    pass_threshold: Threshold


class PythonCriterion(PythonGrader):
    """A python grader in an eval."""

    pass_threshold: Threshold


class EndpointCriterion(EndpointGrader):
    """Not in OpenAI's API. A server of the user's own in an eval."""

    pass_threshold: Threshold


Criterion = Annotated[
    Annotated[StringCheck, Tag("string_check")]
    | Annotated[TextCriterion, Tag("text_similarity")]
    | Annotated[ScoreCriterion, Tag("score_model")]
    | Annotated[LabelModel, Tag("label_model")]
    | Annotated[PythonCriterion, Tag("python")]
    | Annotated[EndpointCriterion, Tag("endpoint")],
    by_type("string_check", "text_similarity", "score_model", "label_model", "python", "endpoint"),
]


def _refuse(types: Mapping[str, str]) -> BeforeValidator:
    """Return what refuses objects of these types: type → why, and what to do instead."""

    def look(value: Any) -> Any:
        given = value.get("type") if isinstance(value, Mapping) else None
        if isinstance(given, str) and given in types:
            raise ValueError(f"type {given!r} is not available: {types[given]}")
        return value

    return BeforeValidator(look)


_NOT_KEPT = "no answers are read from what this service has kept. Use file_id or file_content"


class CustomData(Strict):
    """Items of the user's own."""

    type: Literal["custom"]
    item_schema: dict[str, Any]
    """JSON schema of an item, in type, properties, required, additionalProperties, items, enum."""
    include_sample_schema: bool = False
    """Whether criteria may name `sample`, the model's answer."""

    @field_validator("item_schema")
    @classmethod
    def _checked(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            check_schema(value, "item_schema")
        except SpecError as error:
            raise ValueError(error.message.removesuffix(".")) from None
        return value


_KEPT = "it reads answers that were kept. Use custom, with items of a file"


class EvalRequest(Strict):
    """A new eval."""

    data_source_config: Annotated[CustomData, _refuse({"logs": _KEPT, "stored_completions": _KEPT})]
    testing_criteria: Annotated[list[Criterion], Field(min_length=1, max_length=16)]
    """Graders, each with a name of its own. All must pass for an item to pass."""
    name: Name | None = None
    metadata: Metadata | None = None


class EvalUpdate(Strict):
    """Changes to an eval; None: no change."""

    name: Name | None = None
    metadata: Metadata | None = None


class GivenSample(Strict):
    """An answer that a line of a jsonl run brings along."""

    output_text: Annotated[str, Field(max_length=MOST_LINE)]
    output_tools: list[dict[str, Any]] = Field(default_factory=list)


class ItemLine(Strict):
    """A line of a file of items."""

    item: dict[str, Any]
    sample: GivenSample | None = None


class FileContent(Strict):
    """Items in the body."""

    type: Literal["file_content"]
    content: Annotated[list[ItemLine], Field(min_length=1, max_length=MOST_ITEMS)]


class FileId(Strict):
    """Items in a file: JSON lines of `{"item": {…}}`."""

    type: Literal["file_id"]
    id: Annotated[str, Field(min_length=1, max_length=64)]


Source = Annotated[
    FileContent | FileId,
    Discriminator("type"),
    _refuse({"stored_completions": _NOT_KEPT, "responses": _NOT_KEPT}),
]


class MessageTemplate(Strict):
    """Messages with `{{ item.key }}`."""

    type: Literal["template"]
    template: Annotated[list[GraderMessage], Field(min_length=1, max_length=64)]


class ItemReference(Strict):
    """Messages that an item holds, in the form of chat completions."""

    type: Literal["item_reference"]
    item_reference: Annotated[str, Field(pattern=r"^item(\.\w+)+$", max_length=512)]


class EvalSampling(Strict):
    """How answers are drawn; None: as a chat completion without it."""

    max_completion_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] = 1024
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    """Functions, as in a chat completion."""
    response_format: dict[str, Any] | None = None
    """As in a chat completion: an inference server's."""
    reasoning_effort: str | None = None
    """As in a chat completion: an inference server's."""

    @field_validator("tools")
    @classmethod
    def _of_chats(cls, value: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        if any(not isinstance(tool.get("function"), Mapping) for tool in value or ()):
            raise ValueError('a tool must be {"type": "function", "function": {…}}')
        return value


class ModelData(Strict):
    """Answers of a model. `responses` asks as `completions` does."""

    type: Literal["completions", "responses"]
    source: Source
    model: Annotated[str, Field(min_length=1, max_length=512)]
    """A base, an alias or a tuned model."""
    input_messages: Annotated[MessageTemplate | ItemReference, Discriminator("type")]
    sampling_params: EvalSampling = EvalSampling()


class JsonlData(Strict):
    """Items, with answers where criteria need them: no model is asked."""

    type: Literal["jsonl"]
    source: Source


class RunRequest(Strict):
    """A new run of an eval."""

    data_source: Annotated[ModelData | JsonlData, Discriminator("type")]
    name: Name | None = None
    metadata: Metadata | None = None


_NAMES_SAMPLE = re.compile(r"\{\{\s*sample\b")


def needs_sample(criterion: Criterion) -> bool:
    """Return whether a criterion looks at the answer."""
    return isinstance(criterion, PythonGrader | EndpointGrader) or bool(
        _NAMES_SAMPLE.search(criterion.model_dump_json())
    )


def check_eval(request: EvalRequest, limits: GraderLimits) -> None:
    """Raise SpecError for criteria that cannot be used here, or that name what no item has."""
    names = [criterion.name for criterion in request.testing_criteria]
    for number, criterion in enumerate(request.testing_criteria):
        place = f"testing_criteria.{number}"
        if names.index(criterion.name) != number:
            raise SpecError(
                f"{place}.name = {criterion.name!r}: another criterion has it. Choose another.",
                param=f"{place}.name",
            )
        try:
            require_usable(criterion, limits)  # pyright: ignore[reportArgumentType]
        except SpecError as error:
            said = place + error.message.removeprefix("grader")
            param = place + (error.param or "").removeprefix("grader")
            raise SpecError(said, param=param, code=error.code) from None
        if needs_sample(criterion) and not request.data_source_config.include_sample_schema:
            raise SpecError(
                f"{place}: looks at the answer (sample), which items are without. Set "
                "data_source_config.include_sample_schema to true.",
                param="data_source_config.include_sample_schema",
            )


def check_run(request: RunRequest, schema: Mapping[str, Any]) -> None:
    """Raise SpecError for messages that name nothing, or items in the body that the eval's schema
    does not allow.
    """
    data = request.data_source
    if isinstance(data, ModelData) and isinstance(data.input_messages, MessageTemplate):
        for number, message in enumerate(data.input_messages.template):
            place = f"data_source.input_messages.template.{number}.content"
            for text in texts_of(message):
                try:
                    check_template(text)
                except TemplateError as error:
                    raise SpecError(f"{place}: {error}.", param=place) from None
                if _NAMES_SAMPLE.search(text):
                    raise SpecError(
                        f"{place}: the answer (sample) is not there yet. Name item.KEY.",
                        param=place,
                    )
    if isinstance(data.source, FileContent):
        for number, line in enumerate(data.source.content):
            place = f"data_source.source.content.{number}"
            if fault := fault_of(line.item, schema, "item"):
                raise SpecError(f"{place}.{fault}.", param=place, code="invalid_item")


def read_lines(lines: Iterable[bytes], schema: Mapping[str, Any]) -> Iterator[ItemLine]:
    """Yield the items of a file's lines. Raises SpecError naming the line."""
    count = 0
    for number, line in enumerate(lines, 1):
        if number > MOST_LINES:
            raise _wrong_line(number, f"a file has at most {MOST_LINES:,}. Leave out empty ones")
        if not line.strip():
            continue
        count += 1
        if count > MOST_ITEMS:
            raise _wrong_line(number, f"a run has at most {MOST_ITEMS:,} items. Split the file")
        if len(line) > MOST_LINE:
            raise _wrong_line(number, f"has {len(line):,} bytes, at most {MOST_LINE:,}: shorten it")
        if sum(map(line.count, (b"[", b"{", b","))) > MOST_VALUES:
            raise _wrong_line(number, f"has more than {MOST_VALUES:,} values: shorten it")
        yield _read_line(number, parsed(line), schema)
    if not count:
        raise SpecError("The file has no items.", code="invalid_item")


def _read_line(number: int, given: Any, schema: Mapping[str, Any]) -> ItemLine:
    if given is NO_JSON:
        raise _wrong_line(number, 'is not JSON: {"item": {…}}')
    try:
        line = ItemLine.model_validate(given)
    except ValidationError as error:
        why = spec_error(error, ItemLine).message.removesuffix(".")
        raise _wrong_line(number, why) from None
    if fault := fault_of(line.item, schema, "item"):
        raise _wrong_line(number, fault)
    return line


def _wrong_line(number: int, why: str) -> SpecError:
    return SpecError(f"Line {number}: {why}.", code="invalid_item")
