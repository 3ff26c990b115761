"""Graders of requests: parsed, checked against what the operator allows, and run on answers.

    grader = parse_grader(body, limits)
    grade(grader, Sample("4"), {"answer": 4}, context).reward

Whatever a grader does (fails, hangs, lies), its answer is a Grade with a finite reward, and errors
by kind. These functions block; they start an event loop of their own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from ft_service.errors import FtError, SpecError, UnavailableError
from ft_service.graders import python_fence
from ft_service.graders.asking import ask_endpoint, ask_model, signed_posts
from ft_service.graders.grades import Case, Grade, GradingError, Sample, Score
from ft_service.graders.limits import GraderLimits
from ft_service.graders.text_processes import TEXT_PROCESSES, TaskResult, TextProcesses, Work
from ft_service.graders.text_tasks import NO_CASE, WRITE, Task, fill
from ft_service.graders.texts import check_grader, combined, compare_task, formula_task, texts_of
from ft_service.host.hardware import core_count
from ft_service.host.webhook_receiver import parse_receiver
from ft_service.shared_work.places import Kind, Places
from ft_service.spec.graders import (
    EndpointGrader,
    Grader,
    LabelModel,
    PythonGrader,
    ScoreModel,
    Single,
    StringCheck,
    TextSimilarity,
    singles_of,
)
from ft_service.spec.option_types import Strict
from ft_service.spec.validation_errors import spec_error

ASKED_AT_ONCE = 16
"""Requests of one call to servers that grade, at once."""
FENCES_AT_ONCE = 2
"""Processes of one call for python graders, at once."""
FENCE_TURN_SECONDS = 5.0
"""Time for which a python grader keeps its place while others wait for one."""

_fences = max(4, core_count())
FENCES = Places(Kind(name="python graders", places=_fences, of_project=_fences // 2))
"""Processes of python graders: each has one processor, and at most 2 GB of memory."""
MODELS = Places(Kind(name="models that grade", places=64, of_project=32))
"""Requests to models of the operator's list."""
ENDPOINTS = Places(Kind(name="endpoints that grade", places=256, of_project=64))
"""Requests to users' servers, which may take minutes."""


class GraderBody(Strict):
    """A grader to check."""

    grader: Grader


def _no_secrets(endpoint_id: str) -> Sequence[str]:
    raise SpecError(f"webhook_endpoint_id = {endpoint_id!r}: no webhook endpoints are known here.")


@dataclass(frozen=True, kw_only=True)
class GraderContext:
    """What graders of a project work with."""

    project: str
    """Whose turn it is in what all projects share."""
    limits: GraderLimits = field(default_factory=GraderLimits)
    secrets: Callable[[str], Sequence[str]] = _no_secrets
    """Valid secrets of one of the project's webhook endpoints by its id.

    Raises FtError if there is none.
    """
    seconds: float | None = None
    """Time for servers and python with all cases of a call together; answers without a grade by
    then have an unresponsive_reward_error. None: each try of a grader has its own limit, and there
    is no other.
    """
    texts: TextProcesses = TEXT_PROCESSES
    """Where texts are compared and filled in."""


def parse_grader(body: Any, limits: GraderLimits) -> Grader:
    """Return a grader. Raises SpecError, naming the field from `grader` on, for unknown or wrong
    options, and as require_usable.
    """
    try:
        grader = GraderBody.model_validate({"grader": body}).grader
    except ValidationError as error:
        raise spec_error(error, GraderBody) from None
    require_usable(grader, limits)
    return grader


def require_usable(grader: Grader, limits: GraderLimits) -> None:
    """Raise SpecError for a grader that cannot grade: its template or formula is wrong for every
    answer, or its model, its address, or python is not allowed here.
    """
    try:
        check_grader(grader)
    except ValueError as error:
        raise SpecError(f"grader.{error}.", param="grader") from None
    for place, own in _places(grader):
        _check_allowed(place, own, limits)


def check_outside(grader: Grader, context: GraderContext) -> None:
    """Check what needs more than the grader itself: secrets of endpoints are there, and sources of
    python graders load. Raises FtError naming the field.
    """
    for place, own in _places(grader):
        if isinstance(own, EndpointGrader):
            try:
                context.secrets(own.webhook_endpoint_id)
            except FtError as error:
                raise type(error)(
                    f"{place}.{error.message}", param=f"{place}.webhook_endpoint_id"
                ) from None
        if isinstance(own, PythonGrader):
            try:
                seconds = context.seconds or python_fence.SECONDS
                private = context.limits.private
                with (
                    FENCES.hold(context.project),
                    python_fence.FencedGrader(
                        own.source, private=private, seconds=seconds
                    ) as fenced,
                ):
                    fenced.start()
            except GradingError as error:
                message = f"{place}.source: cannot be loaded: {error.detail.strip()}"
                raise SpecError(message, param=f"{place}.source") from None


def grade(grader: Grader, sample: Sample, item: Mapping[str, Any], context: GraderContext) -> Grade:
    """Grade an answer. `item`: the other keys of its prompt's line."""
    return grade_all(grader, [Case(sample, item)], context)[0]


def grade_all(grader: Grader, cases: Sequence[Case], context: GraderContext) -> list[Grade]:
    """Grade answers, several at once where a server or a process grades: one Grade for each case,
    in their order. Raises UnavailableError if the host cannot grade now: nothing is wrong with the
    answers then.
    """
    names = singles_of(grader)
    outside = {
        name: own
        for name, own in names.items()
        if not isinstance(own, (StringCheck, TextSimilarity))
    }
    found = asyncio.run(_outside(outside, cases, context)) if outside else [{} for _ in cases]
    tasks = {
        name: compare_task(own)
        for name, own in names.items()
        if isinstance(own, (StringCheck, TextSimilarity))
    }
    wanted = [(number, name) for number in range(len(cases)) for name in tasks]
    compared = _carried_out([(tasks[name], cases[number]) for number, name in wanted], context)
    for (number, name), score in zip(wanted, compared, strict=True):
        found[number][name] = score
    formulas = {
        number: task
        for number, own in enumerate(found)
        if (task := formula_task(grader, own)) is not None
    }
    values = dict(
        zip(
            formulas,
            _carried_out([(task, NO_CASE) for task in formulas.values()], context),
            strict=True,
        )
    )
    return [
        combined(grader, {name: own[name] for name in names}, values.get(number))
        for number, own in enumerate(found)
    ]


def _carried_out(work: Sequence[Work], context: GraderContext) -> list[Score]:
    results = context.texts.carry_out(context.project, work)
    return [
        replace(Score.failed(own.error) if own.error else Score(own.value), seconds=own.seconds)
        for own in results
    ]


async def _outside(
    graders: Mapping[str, Single], cases: Sequence[Case], context: GraderContext
) -> list[dict[str, Score]]:
    """The scores of each case by graders that servers, or processes of their own, carry out."""
    run = _Run(context, cases)
    columns = await asyncio.gather(*(run.scores(own) for own in graders.values()))
    return [dict(zip(graders, scores, strict=True)) for scores in zip(*columns, strict=True)]


class _Run:
    """One call: its cases, and its limits on what happens at once."""

    def __init__(self, context: GraderContext, cases: Sequence[Case]) -> None:
        self._context = context
        self._cases = cases
        self._due = (
            None if context.seconds is None else asyncio.get_running_loop().time() + context.seconds
        )
        self._asked, self._fences = (
            asyncio.Semaphore(ASKED_AT_ONCE),
            asyncio.Semaphore(FENCES_AT_ONCE),
        )

    async def scores(self, grader: Single) -> list[Score]:
        """The scores of all cases; the time is up for those that are missing."""
        late = Score(
            error="unresponsive_reward_error",
            detail=f"there was no reward within {self._context.seconds} seconds",
        )
        scores = [late] * len(self._cases)
        try:
            async with asyncio.timeout_at(self._due):
                await self._fill(grader, scores)
        except TimeoutError:
            pass
        except GradingError as error:
            scores = [Score.failed(error)] * len(self._cases)
        return scores

    async def _fill(self, grader: Single, scores: list[Score]) -> None:
        numbers = range(len(self._cases))
        match grader:
            case ScoreModel() | LabelModel():
                model = self._context.limits.models.get(grader.model)
                if model is None:  # a job that was accepted outlives what the operator allows
                    why = f"{grader.model!r} is no longer one of FT_GRADER_MODELS"
                    raise GradingError("model_grader_server_error", why)
                await asyncio.gather(
                    *(self._ask_model(grader, model, number, scores) for number in numbers)
                )
            case EndpointGrader():
                await self._ask_endpoint(grader, scores)
            case PythonGrader():
                left = list(numbers)[::-1]
                await asyncio.gather(
                    *(self._run_python(grader, left, scores) for _ in numbers[:FENCES_AT_ONCE])
                )
            case StringCheck() | TextSimilarity():
                raise AssertionError("nothing outside compares texts")

    async def _text(self, task: Task, number: int) -> Any:
        """The result of a task on a case. Raises GradingError, UnavailableError."""
        [result] = await self._texts(task, [number])
        if result.error is not None:
            raise result.error
        return result.value

    async def _texts(self, task: Task, numbers: Sequence[int]) -> list[TaskResult]:
        """Raises UnavailableError."""
        work = [(task, self._cases[number]) for number in numbers]
        return await asyncio.to_thread(self._context.texts.carry_out, self._context.project, work)

    async def _ask_model(
        self, grader: ScoreModel | LabelModel, model: Any, number: int, scores: list[Score]
    ) -> None:
        async with self._asked, MODELS.held(self._context.project):
            began = time.perf_counter()
            try:
                texts = await self._text(
                    fill([texts_of(message) for message in grader.input]), number
                )
                score = await ask_model(grader, model, texts)
            except GradingError as error:
                score = Score.failed(error)
            [scores[number]] = _timed(began, [score])

    async def _ask_endpoint(self, grader: EndpointGrader, scores: list[Score]) -> None:
        allow_private = self._context.limits.allow_private
        try:
            secrets = await asyncio.to_thread(self._context.secrets, grader.webhook_endpoint_id)
            receiver = parse_receiver(grader.url, allow_private=allow_private)
        except UnavailableError:  # the database, and not the endpoint
            raise
        except FtError as error:
            raise GradingError("endpoint_grader_server_error", error.message) from None

        async def ask(batch: Sequence[int]) -> None:
            async with self._asked, ENDPOINTS.held(self._context.project):
                began = time.perf_counter()
                written = dict(zip(batch, await self._texts(WRITE, batch), strict=True))
                scores_of = {
                    number: Score.failed(own.error)
                    for number, own in written.items()
                    if own.error is not None
                }
                bodies = {
                    number: own.value.encode()
                    for number, own in written.items()
                    if number not in scores_of
                }
                if bodies:
                    found = await ask_endpoint(grader, receiver, post, list(bodies.values()))
                    scores_of |= dict(zip(bodies, _timed(began, found), strict=True))
                for number, score in scores_of.items():
                    scores[number] = score

        numbers = range(len(self._cases))
        size = grader.batch_size
        async with signed_posts(receiver, secrets, allow_private=allow_private) as post:
            await asyncio.gather(
                *(ask(numbers[at : at + size]) for at in range(0, len(numbers), size))
            )

    async def _run_python(self, grader: PythonGrader, left: list[int], scores: list[Score]) -> None:
        """Grade cases until none is left, in one process as long as nobody waits for its place."""
        async with self._fences:
            while left:
                async with FENCES.held(self._context.project) as place:
                    began = time.monotonic()
                    with python_fence.FencedGrader(
                        grader.source, private=self._context.limits.private
                    ) as fenced:
                        while left:
                            number = left.pop()
                            scores[number] = await self._fenced_score(fenced, number)
                            place.cost = time.monotonic() - began
                            if place.cost > FENCE_TURN_SECONDS and FENCES.is_wanted():
                                break

    async def _fenced_score(self, fenced: python_fence.FencedGrader, number: int) -> Score:
        began = time.perf_counter()
        try:
            message = (await self._text(WRITE, number)).encode()
        except GradingError as error:
            return Score.failed(error)
        scored = asyncio.create_task(asyncio.to_thread(fenced.score, message))
        try:
            await asyncio.shield(scored)
        except asyncio.CancelledError:
            fenced.kill()
            # The thread still uses what is closed next.
            await asyncio.gather(scored, return_exceptions=True)
            raise
        return _timed(began, [scored.result()])[0]


def _timed(began: float, scores: list[Score]) -> list[Score]:
    """Scores with their share of the time since `began`."""
    seconds = (time.perf_counter() - began) / len(scores)
    return [replace(score, seconds=seconds) for score in scores]


def _places(grader: Grader) -> Iterator[tuple[str, Single]]:
    """Dotted place and grader of each single one."""
    inner = singles_of(grader)
    for name, own in inner.items():
        yield "grader" if own is grader else f"grader.graders.{name}", own


def _check_allowed(place: str, grader: Single, limits: GraderLimits) -> None:
    """Raise SpecError for a grader that the operator does not allow."""
    if isinstance(grader, (ScoreModel, LabelModel)) and grader.model not in limits.models:
        there = (
            f"there are {', '.join(sorted(limits.models)[:20])}"
            if limits.models
            else "and it allows none"
        )
        message = (
            f"{place}.model = {grader.model[:80]!r}: is not one that this service allows graders "
            f"to ask, {there}. The operator "
            "names them in FT_GRADER_MODELS; an endpoint grader may ask any model from your own "
            "server."
        )
        raise SpecError(message, param=f"{place}.model", code="model_not_allowed")
    if isinstance(grader, PythonGrader) and (why := limits.no_python):
        message = f"{place}: a grader of type 'python' is not available: {why}."
        raise SpecError(message, param=place, code="not_available")
    if isinstance(grader, EndpointGrader):
        try:
            parse_receiver(grader.url, allow_private=limits.allow_private)
        except SpecError as error:
            raise SpecError(
                f"{place}.{error.message}", param=f"{place}.url", code=error.code
            ) from None
