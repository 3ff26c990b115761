"""The evaluation of a job: prompts that the model answers before, during and after training, and
the scores of its answers: metrics by name, or graders as in OpenAI's API.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from ft_service.spec.graders import Multi, TextGrader
from ft_service.spec.option_types import Strict

AnswerMetric = Literal["exact_match", "contains", "json_valid", "rouge_l", "bleu"]
MOST_PROMPTS = 256
MOST_CHARACTERS = 262_144
"""Most characters of all prompts of a job, as JSON: they are part of its spec."""

_METRIC = (
    "must be a metric's name or a grader; a grader has a type: string_check, "
    "text_similarity or multi"
)


def _kind(value: Any) -> Any:
    if isinstance(value, str):
        return "metric"
    return value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)


def _only_texts(value: Any) -> Any:
    """Refuse graders that run code or ask a server: answers are scored by the ranks."""
    inner = value.get("graders") if _kind(value) == "multi" and isinstance(value, Mapping) else None
    for own in [value, inner, *(inner.values() if isinstance(inner, Mapping) else ())]:
        if _kind(own) in ("python", "score_model", "label_model", "endpoint"):
            raise ValueError(
                f"a grader of type {_kind(own)!r} is not available in an evaluation, whose "
                "answers the training processes "
                "score: they run no code of requests and ask no server. Use string_check, "
                "text_similarity, or a multi grader "
                "with a formula of those"
            )
    return value


Metric = Annotated[
    Annotated[AnswerMetric, Tag("metric")] | TextGrader | Annotated[Multi, Tag("multi")],
    Discriminator(_kind, custom_error_type="grader_type", custom_error_message=_METRIC),
    BeforeValidator(_only_texts),
]


def _of_data(url: str) -> str:
    if not url.startswith("data:"):
        raise ValueError(
            "the picture of a prompt is a data: URL, data:image/png;base64,…, as the prompts are a "
            "part of the job: write it into it; or give prompts as a number, by which samples of "
            "the data files are asked, with their images"
        )
    return url


class AskedUrl(Strict):
    url: Annotated[str, AfterValidator(_of_data)]
    detail: Literal["auto", "low", "high"] = "auto"


class AskedImage(Strict):
    type: Literal["image_url"]
    image_url: AskedUrl


class AskedText(Strict):
    type: Literal["text"]
    text: str


class AskedMessage(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Annotated[AskedText | AskedImage, Field(discriminator="type")]]
    """Text, or OpenAI's parts; the user's may be images."""

    @property
    def shows_images(self) -> bool:
        return not isinstance(self.content, str) and any(
            isinstance(part, AskedImage) for part in self.content
        )

    @model_validator(mode="after")
    def _images_of_users(self) -> AskedMessage:
        if self.shows_images and self.role != "user":
            raise ValueError("only messages of the role user take images")
        return self


class Prompt(Strict):
    """A prompt: a conversation or bare text, with the expected answer, if it is known."""

    messages: Annotated[list[AskedMessage], Field(min_length=1)] | None = None
    prompt: str | None = None
    """Bare text, without a chat template."""
    reference: str | None = None
    item: dict[str, Any] = {}
    """Other values for graders, as `{{ item.key }}`."""

    @property
    def text(self) -> str:
        """What it asks, without what the system says."""
        asked = self.messages or ()
        contents = [own.content for own in asked if own.role != "system"]
        return "\n".join(one for one in (*contents, self.prompt) if isinstance(one, str))

    @model_validator(mode="after")
    def _one_form(self) -> Prompt:
        if (self.messages is None) == (self.prompt is None):
            raise ValueError("a prompt has either messages or prompt")
        if self.messages is not None and self.messages[-1].role == "assistant":
            raise ValueError(
                "the messages of a prompt end before the assistant's answer, which goes to "
                "reference"
            )
        return self

    @property
    def shows_images(self) -> bool:
        return any(message.shows_images for message in self.messages or ())


class EvaluationOptions(Strict):
    """Greedy answers to held-out prompts before the first step and after the last, scored and
    compared. If another step's adapter is published (training.load_best_model_at_end), that one
    answers too.
    """

    prompts: (
        Annotated[int, Field(ge=1, le=MOST_PROMPTS)]
        | Annotated[str, Field(min_length=1, max_length=4096)]
        | Annotated[list[Prompt], Field(min_length=1, max_length=MOST_PROMPTS)]
    ) = 8
    """A number: that many samples from the start of the validation file (without one: of the
    training file), each up to its last answer. Or a file's id, in a SPEC file its path: JSON lines
    with `messages` (a last answer is the expected one) or `prompt`, and `reference`; other keys are
    for graders. Or a list of such objects. Messages of users may have images, as `data:` URLs in
    OpenAI's parts; all prompts together have 262,144 characters at most.
    """
    max_new_tokens: Annotated[int, Field(ge=1, le=2048)] = 64
    """Most tokens of an answer; each token takes a forward of the whole model, since training has
    no key-value cache.
    """
    on_validation: bool = False
    """Whether prompts are also answered at every validation. Ignored without a validation file."""
    metrics: Annotated[list[Metric], Field(min_length=1, max_length=32)] = Field(
        default_factory=lambda: ["exact_match", "rouge_l"]
    )
    """Means over the answers, in [0, 1]: exact_match, contains (the expected answer, in any case),
    json_valid, rouge_l, bleu; or graders in OpenAI's shape (string_check, text_similarity, and
    multi of these), by their names.
    """

    @model_validator(mode="after")
    def _names_differ(self) -> EvaluationOptions:
        names = [metric_name(metric) for metric in self.metrics]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                f"evaluation.metrics: {twice[0]!r} is there twice, and scores go by name: rename "
                "one"
            )
        return self

    @model_validator(mode="after")
    def _fits_a_spec(self) -> EvaluationOptions:
        if isinstance(self.prompts, list):
            size = len(json.dumps([own.model_dump() for own in self.prompts], ensure_ascii=False))
            if size > MOST_CHARACTERS:
                raise ValueError(
                    f"evaluation.prompts: {size:,} characters, at most {MOST_CHARACTERS:,}: give "
                    "fewer or shorter ones, or a number, by which samples of the data files are "
                    "asked, with their images"
                )
        return self

    @property
    def given(self) -> list[Prompt]:
        """The prompts; empty: they are the first samples of a data file."""
        assert not isinstance(self.prompts, str), "a file is read when the job is created"
        return self.prompts if isinstance(self.prompts, list) else []

    @property
    def count(self) -> int:
        """Largest number of prompts."""
        return self.prompts if isinstance(self.prompts, int) else len(self.given)


def metric_name(metric: Metric) -> str:
    return metric if isinstance(metric, str) else metric.name


def read_prompts(text: str, name: str) -> list[dict[str, Any]]:
    """Read the prompts of a file of JSON lines, in the form of a create body.

    `name`: name of the file, for messages.

    Raises ValueError naming the invalid line.
    """
    found: list[dict[str, Any]] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        if len(found) == MOST_PROMPTS:
            raise ValueError(f"{name} has more than {MOST_PROMPTS} prompts. Give a file of fewer")
        try:
            row = json.loads(line)
        except ValueError:
            raise ValueError(
                f"{name}, line {number}: it is no JSON. Each line is one prompt"
            ) from None
        try:
            found.append(Prompt.model_validate(_as_prompt(row)).model_dump(exclude_none=True))
        except ValidationError as error:
            # Of a content that is neither text nor parts, the deepest says which part is wrong.
            fault = max(error.errors(include_url=False), key=lambda own: len(own["loc"]))
            place = ".".join(map(str, fault["loc"]))
            said = fault["msg"].removeprefix("Value error, ")
            raise ValueError(
                f"{name}, line {number}: {place + ': ' if place else ''}{said}"
            ) from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name}, line {number}: {error}") from None
    if not found:
        raise ValueError(f"{name} holds no prompt")
    return found


def _as_prompt(row: Any) -> dict[str, Any]:
    """A line in the form of a Prompt: a last answer becomes the reference, and unknown keys become
    the item.
    """
    if not isinstance(row, Mapping):
        raise ValueError("it is no object with messages or prompt")
    known = {key: row[key] for key in ("messages", "prompt", "reference") if key in row}
    if isinstance(known.get("prompt"), Sequence) and not isinstance(known["prompt"], str):
        known["messages"] = known.pop("prompt")
    messages = known.get("messages")
    if (
        isinstance(messages, list)
        and messages
        and all(isinstance(own, Mapping) for own in messages)
    ):
        kept = [{key: own[key] for key in ("role", "content") if key in own} for own in messages]
        if kept[-1].get("role") == "assistant":
            known.setdefault("reference", kept.pop().get("content"))
        known["messages"] = kept
    for other in ("completion", "reference_answer"):
        if isinstance(row.get(other), str):
            known.setdefault("reference", row[other])
    return {**known, "item": {str(key): value for key, value in row.items() if key not in known}}
