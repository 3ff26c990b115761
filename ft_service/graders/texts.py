"""Graders that compare texts, formulas of graders, and what is wrong with a grader for every
answer. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ft_service.graders.formula import FormulaError, calculated
from ft_service.graders.grades import MOST_REWARD, Case, ErrorKind, Grade, GradingError, Score
from ft_service.graders.templates import TemplateError, check_template
from ft_service.graders.text_tasks import Task, calculate, carried_out, compare
from ft_service.spec.graders import (
    Grader,
    GraderMessage,
    LabelModel,
    Multi,
    ScoreModel,
    Single,
    StringCheck,
    TextSimilarity,
    singles_of,
)


def check_grader(grader: Grader) -> None:
    """Raise ValueError for a template or a formula that is wrong for every answer."""
    for own in singles_of(grader).values():
        for place, template in _templates(own):
            try:
                check_template(template)
            except TemplateError as error:
                raise ValueError(f"{own.name}.{place}: {error}") from None
    if isinstance(grader, Multi):
        try:
            calculated(grader.calculate_output, dict.fromkeys(grader.graders, 1.0))
        except FormulaError as error:
            raise ValueError(f"calculate_output: {error}") from None
        except (ArithmeticError, ValueError):
            pass  # with these numbers; others may be valid


def compare_task(grader: StringCheck | TextSimilarity) -> Task:
    """The task of a grader that compares texts."""
    by = grader.evaluation_metric if isinstance(grader, TextSimilarity) else grader.operation
    return compare(grader.input, grader.reference, by)


def grade_text(grader: StringCheck | TextSimilarity | Multi, case: Case) -> Grade:
    """Grade with a grader that consists of comparisons of texts, in this process: for ranks."""
    scores: dict[str, Score] = {}
    for name, own in singles_of(grader).items():
        assert isinstance(own, (StringCheck, TextSimilarity)), "others are refused in evaluations"
        scores[name] = _score(compare_task(own), case)
    task = formula_task(grader, scores)
    return combined(grader, scores, _score(task, case) if task else None)


def _score(task: Task, case: Case) -> Score:
    try:
        return Score(carried_out(task, case))
    except GradingError as error:
        return Score.failed(error)


def formula_task(grader: Grader, scores: Mapping[str, Score]) -> Task | None:
    """The task of a multi grader's formula; None: there is none, or a score has an error."""
    if not isinstance(grader, Multi) or any(score.error for score in scores.values()):
        return None
    return calculate(grader.calculate_output, {name: score.value for name, score in scores.items()})


def combined(grader: Grader, scores: Mapping[str, Score], formula: Score | None) -> Grade:
    """The grade of a case by the scores of all single graders, and by its formula's.

    With an error of one of them the reward is 0.
    """
    errors: dict[ErrorKind, str] = {
        score.error: score.detail
        for score in reversed(list(scores.values()))
        if score.error is not None
    }
    values = {name: score.value for name, score in scores.items() if score.error is None}
    reward = 0.0
    if formula is not None and formula.error:
        errors[formula.error] = formula.detail
    elif not errors:
        reward = formula.value if formula is not None else next(iter(values.values()))
    if abs(reward) > MOST_REWARD:
        errors["other_error"] = (
            f"the reward {reward:g} is not in the range from {-MOST_REWARD:g} to {MOST_REWARD:g}"
        )
        reward = 0.0
    usage: dict[str, dict[str, int]] = {}
    for name, own in singles_of(grader).items():
        if scores[name].usage and (model := getattr(own, "model", None)):
            total = usage.setdefault(model, {})
            for kind, tokens in scores[name].usage.items():
                total[kind] = total.get(kind, 0) + tokens
    return Grade(
        reward=reward,
        errors=errors,
        scores=values,
        sub_rewards=values if isinstance(grader, Multi) else {},
        seconds=sum(score.seconds for score in scores.values()),
        sampled_model=next(
            (score.model for score in reversed(list(scores.values())) if score.model), None
        ),
        usage=usage,
    )


def texts_of(message: GraderMessage) -> list[str]:
    """The templates of a message's parts."""
    parts = message.content if isinstance(message.content, list) else [message.content]
    return [part if isinstance(part, str) else part.text for part in parts]


def _templates(grader: Single) -> Iterator[tuple[str, str]]:
    """Place and text of each template."""
    if isinstance(grader, (StringCheck, TextSimilarity)):
        yield from (("input", grader.input), ("reference", grader.reference))
    elif isinstance(grader, (ScoreModel, LabelModel)):
        for number, message in enumerate(grader.input):
            yield from ((f"input.{number}.content", text) for text in texts_of(message))
