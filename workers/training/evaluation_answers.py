"""Answers to a few prompts before the first step, while training and after the last step.

The ranks write them themselves, with the sharded model as it stands, so that no second copy of it
is needed. Each rank has its share of the prompts. Tokens are the likeliest ones, and nothing is
cached: each token is a forward of all unfinished answers, or several where these have more tokens
than a micro-batch.

Before the first step the model is the base, or the tuned model that the job continues from: no
adapter is switched off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ft_service.bases.module_rules import learned_positions
from ft_service.data.answer_format import Answer
from ft_service.data.answer_metrics import score
from ft_service.data.tokens.sample import ImageUse, Tokens
from ft_service.rundir.evaluations import (
    EvaluatedPrompt,
    Evaluation,
    evaluated_steps,
    evaluation_key,
    prompt_turns,
    read_evaluation,
)
from ft_service.spec import EvaluationOptions
from ft_service.wording import counted
from workers.base.rank_objects import by_first, from_all, from_first
from workers.data.batches import make_batch
from workers.data.micro_batches import MicroBatchLimits, share_out
from workers.output.publishing import write_document
from workers.ranks.runtime import Runtime
from workers.ranks.sharding import reshard
from workers.training.context import TrainingContext
from workers.training.evaluation_prompts import Asked, Question
from workers.training.guards import positions_of
from workers.training.packing import TOKENS
from workers.training.step import last_logits

SHOWN = 300
"""Most characters of an answer in an event; the evaluation has all of it."""
TOLD = 8
"""Prompts that events show."""
LOOK_TOKENS = 8
"""Tokens between two checks for a stop."""
REPORT_SECONDS = 30.0


class Evaluator:
    """A job's prompts, answered by the model as it is.

    Every method is called by all ranks together.
    """

    def __init__(
        self, context: TrainingContext, asked: Asked, tokenizer: Any, options: EvaluationOptions
    ) -> None:
        self._context = context
        self._runtime = context.runtime
        self._tokenizer = tokenizer
        self._options = options
        self._asked = asked
        self._questions = asked.questions
        self._begun: Evaluation | None = None
        self._reported_at = 0.0

    @property
    def on_validation(self) -> bool:
        """Whether every validation asks too."""
        return self._options.on_validation

    def begin(self) -> bool:
        """Ask the model that training starts from, unless an earlier attempt did.

        False: it was stopped meanwhile.
        """
        self._begun = by_first(lambda: self._known(0))
        if self._begun is None:
            self._tell_of_room()
            answers = self.ask(0)
            if answers is None:
                return False
            scores = self.scores(answers)
            rows = [
                EvaluatedPrompt(
                    **self._told(question),
                    base=answer.whole,
                    tuned=None,
                    scores=own,
                    base_scores=own,
                )
                for question, answer, own in zip(self._questions, answers, scores, strict=True)
            ]
            means = mean_scores(scores)
            self._begun = self._write(
                Evaluation(
                    step=0, time=time.time(), metrics=means, base_metrics=means, samples=rows
                )
            )
        return True

    def at(self, step: int, *, last: bool) -> dict[str, float] | None:
        """Ask the model at a step, once; the metrics.

        None: it was stopped meanwhile. `last`: tell of every prompt.
        """
        known = by_first(lambda: self._known(step))
        if known is not None:
            return known.metrics
        assert self._begun is not None, "begin comes first"
        answers = self.ask(step)
        if answers is None:
            return None
        scores = self.scores(answers)
        begun = self._begun
        rows = [
            before.model_copy(update={"tuned": answer.whole, "scores": own})
            for before, answer, own in zip(begun.samples, answers, scores, strict=True)
        ]
        evaluation = Evaluation(
            step=step,
            time=time.time(),
            metrics=mean_scores(scores),
            base_metrics=begun.base_metrics,
            samples=rows,
        )
        for sentence in messages(evaluation, everything=last):
            self._context.reporter.message(sentence)
        return self._write(evaluation).metrics

    def ask(
        self, step: int, model: nn.Module | None = None, seconds: float | None = None
    ) -> list[Answer] | None:
        """An answer to every prompt by the model as it stands, or by another one.

        None: it was stopped meanwhile, or took more than so many seconds.
        """
        runtime = self._runtime
        model = model or self._context.model
        own = self._questions[runtime.rank :: runtime.world]
        self._reported_at = time.monotonic()
        training = model.training
        model.eval()
        with torch.compiler.set_stance("force_eager"):  # every token is of another length
            decoding = GreedyDecoding.of(
                self._context, self._options.max_new_tokens, self._asked.ends
            )
            written = greedy(
                runtime,
                model,
                [question.ids for question in own],
                decoding,
                self._goes_on(step, seconds),
                images=[question.images for question in own],
            )
        model.train(training)
        if written is None:
            return None
        pairs = zip(own, written, strict=True)
        by_rank = from_all(
            [
                question.read(tokens, self._tokenizer, self._asked.answers)
                for question, tokens in pairs
            ]
        )
        return [by_rank[i % runtime.world][i // runtime.world] for i in range(len(self._questions))]

    def _tell_of_room(self) -> None:
        """Report prompts behind which the base's context has no room."""
        room = room_of(self._context)
        full = [
            number
            for number, own in enumerate(self._questions, 1)
            if room is not None and len(own.ids) >= room
        ]
        if full:
            more = f" (and {len(full) - 1} more)" if len(full) > 1 else ""
            self._context.reporter.warn(
                f"evaluation.prompts: prompt {full[0]}{more} leaves no room for an answer in the "
                f"base's context of {room:,} "
                "tokens, and gets none."
            )

    def _goes_on(self, step: int, seconds: float | None) -> Callable[[int], bool]:
        """Return a function of a token's number that says whether to continue.

        It reports progress: silence means a stall.
        """
        began = time.monotonic()

        def goes_on(token: int) -> bool:
            if time.monotonic() - self._reported_at >= REPORT_SECONDS:
                self._reported_at = time.monotonic()
                most = self._options.max_new_tokens
                self._context.reporter.message(
                    f"Evaluation at step {step}: the answers have {token} of at most {most} tokens."
                )
            if token % LOOK_TOKENS:
                return True
            if seconds is not None and from_first(time.monotonic() - began > seconds):
                return False
            return not self._context.stop.agreed()

        return goes_on

    def scores(self, answers: Sequence[Answer]) -> list[dict[str, float]]:
        """Scores of the answers to all prompts."""
        pairs = zip(answers, self._questions, strict=True)
        return [
            score(answer, own.reference, self._options.metrics, own.item) for answer, own in pairs
        ]

    def _known(self, step: int) -> Evaluation | None:
        """This attempt's evaluation of a step; of step 0 any attempt's, if the questions are the
        same.
        """
        run = self._runtime.run
        if step:
            return read_evaluation(run, evaluation_key(step, self._runtime.start.attempt))
        key = evaluated_steps(run).get(0)
        evaluation = read_evaluation(run, key) if key else None
        prompts = [(question.prompt, question.reference) for question in self._questions]
        return (
            evaluation
            if evaluation and [(own.prompt, own.reference) for own in evaluation.samples] == prompts
            else None
        )

    def _write(self, found: Evaluation) -> Evaluation:
        key = evaluation_key(found.step, self._runtime.start.attempt)
        by_first(lambda: write_document(self._runtime.run, key, found, self._runtime.fence))
        return found

    @staticmethod
    def _told(question: Question) -> dict[str, Any]:
        return {
            "prompt": question.prompt,
            "messages": question.messages,
            "reference": question.reference,
        }


def mean_scores(scores: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric over the prompts that have it."""
    names = dict.fromkeys(name for own in scores for name in own)
    return {name: mean(own[name] for own in scores if name in own) for name in names}


def messages(found: Evaluation, *, everything: bool) -> list[str]:
    """Sentences for events: the scores, then with `everything` the first prompts with their
    answers.
    """
    scores = ", ".join(
        f"{name} {value:.2f} (before: {found.base_metrics.get(name, 0):.2f})"
        for name, value in found.metrics.items()
    )
    lines = [
        f"Evaluation after step {found.step}, {counted(len(found.samples), 'prompt')}: "
        f"{scores or 'no metric applies'}."
    ]
    for own in found.samples[: TOLD if everything else 0]:
        said = "\n".join(
            f"{role}: {text}" if role else text
            for role, text in prompt_turns(own.prompt, own.messages)
        )
        question, expected, before, after = (
            _short(text or "") for text in (said, own.reference, own.base, own.tuned)
        )
        lines.append(f"Asked: {question}\nExpected: {expected}\nBefore: {before}\nAfter: {after}")
    return lines


def room_of(context: TrainingContext) -> int | None:
    """Tokens that a prompt and its answer may have together: as many as the base has positions, or
    as a sample of the job, if the base has learned no vector for each position: behind them it
    would fail. None: the base does not say.
    """
    positions, embeddings = positions_of(context.model)
    if positions is None or learned_positions(positions, embeddings):
        return positions
    return max(positions, context.runtime.spec.training.max_length)


@dataclass(frozen=True)
class GreedyDecoding:
    """How answers are written: always the likeliest token."""

    max_new_tokens: int
    ends: Collection[int]
    """Tokens that end an answer, and are not part of it."""
    limits: MicroBatchLimits
    """What a forward of unfinished answers may hold."""
    room: int | None = None
    """Tokens of a prompt and its answer together at most; None: any number."""

    @classmethod
    def of(
        cls, context: TrainingContext, max_new_tokens: int, ends: Collection[int]
    ) -> GreedyDecoding:
        """That of a job, whose micro-batches set the limits: but a forward without a backward keeps
        nothing, so that it has at least the usual number of tokens, and however many samples.
        """
        limits = replace(context.limits, tokens=max(context.limits.tokens, TOKENS), samples=None)
        return cls(max_new_tokens, ends, limits, room_of(context))


@torch.no_grad()
def greedy(
    runtime: Runtime,
    model: nn.Module,
    prompts: Sequence[np.ndarray],
    decoding: GreedyDecoding,
    goes_on: Callable[[int], bool] = lambda token: True,
    *,
    images: Sequence[tuple[ImageUse, ...]] = (),
) -> list[list[int]] | None:
    """Return the likeliest tokens after each of this rank's prompts.

    Called by all ranks together, which take part as long as any rank has an unfinished answer.

    `goes_on` is called before every token, with its number from 1; once it returns False, the
    result is None. `images`: those of each prompt; empty: there are none.
    """
    written: list[list[int]] = [[] for _ in prompts]
    rows = [prompt.astype(np.int32) for prompt in prompts]
    shown = images or [()] * len(rows)
    open_ones = [i for i, row in enumerate(rows) if _has_room(row, decoding)]
    for token_number in range(1, decoding.max_new_tokens + 1):
        if not goes_on(token_number):
            reshard(model)
            return None
        forwards = _forwards({i: len(rows[i]) for i in open_ones}, decoding.limits)
        most = _most(len(forwards), runtime)
        if not most:
            break
        for members in [
            *forwards,
            *[[]] * (most - len(forwards)),
        ]:  # an empty one meets those of the other ranks
            for i, token in zip(
                members,
                _next_tokens(
                    runtime, model, [_asked(rows[i], shown[i]) for i in members], decoding
                ),
                strict=True,
            ):
                if token in decoding.ends:
                    open_ones.remove(i)
                else:
                    written[i].append(token)
                    rows[i] = np.append(rows[i], np.int32(token))
        open_ones = [i for i in open_ones if _has_room(rows[i], decoding)]
    reshard(model)
    return written


def _has_room(row: np.ndarray, decoding: GreedyDecoding) -> bool:
    return decoding.room is None or len(row) < decoding.room


def _forwards(lengths: Mapping[int, int], limits: MicroBatchLimits) -> list[list[int]]:
    """Numbers of the rows of each forward. `lengths`: tokens of each row, by its number."""
    numbers = list(lengths)
    shared = share_out(list(lengths.values()), 1, limits) if numbers else []
    return [[numbers[place] for place in places] for (places,) in shared]


def _next_tokens(
    runtime: Runtime, model: nn.Module, rows: Sequence[Tokens], decoding: GreedyDecoding
) -> list[int]:
    """The likeliest token after each of some rows, by one forward."""
    batch = make_batch(rows, runtime.device, packed=decoding.limits.packed)
    return last_logits(model, batch, [len(row.ids) for row in rows]).argmax(dim=-1).tolist()


def _asked(ids: np.ndarray, images: tuple[ImageUse, ...]) -> Tokens:
    return Tokens(ids, np.zeros(len(ids), dtype=bool), images=images)


def _most(here: int, runtime: Runtime) -> int:
    """The largest of the ranks' numbers."""
    if runtime.world == 1:
        return here
    count = torch.tensor(here, device=runtime.device)
    dist.all_reduce(count, op=dist.ReduceOp.MAX)
    return int(count)


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
