"""What is asked of a model before and after training, so that its owner sees what it has learned."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ft_service.spec.values import Strict

AnswerMetric = Literal["exact_match", "contains", "json_valid", "rouge_l"]


class EvaluationOptions(Strict):
    """Greedy answers to held-out prompts before the first step and behind the last, scored and side by side. Where another
    step's adapter is published (training.load_best_model_at_end), that one is asked too."""

    prompts: Annotated[int, Field(ge=1, le=256)] = 8
    """The first so many samples of the validation file (without one: of the training file), each up to its last answer."""
    max_new_tokens: Annotated[int, Field(ge=1, le=2048)] = 64
    """Of an answer; each is a forward of the whole model, since training keeps nothing of earlier ones."""
    on_validation: bool = False
    """Also at every validation. Ignored without a validation file."""
    metrics: Annotated[list[AnswerMetric], Field(min_length=1, default_factory=lambda: ["exact_match", "rouge_l"])]
    """Means over the answers, in [0, 1]: exact_match, contains (the expected answer, in any case), json_valid, rouge_l."""
