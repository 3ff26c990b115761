"""Measures of what the tuned model has lost of its base: perplexity on general text, and divergence
on the base's own answers.

Measured once, after the last step, with the sharded model as it stands and then with its adapter
switched off. Samples are shared out over the ranks as those of a validation. All of it may take a
share of the job's time; what does not fit is left out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ft_service.data.general_text import passages, prompts
from ft_service.data.token_options import TokenOptions
from ft_service.data.tokens.sample import Tokens
from ft_service.data.tokens.token_set import TokenSet
from ft_service.data.tokens.tokenize import load_tokenizer
from ft_service.errors import DataError
from ft_service.rundir.evaluations import Forgetting, finite_nats
from workers.base.rank_objects import from_all, from_first
from workers.data.batches import Batch
from workers.data.micro_batches import MicroBatchLimits
from workers.output.report import metrics_of_all_attempts
from workers.output.served_probes import without_adapter
from workers.ranks.runtime import Runtime
from workers.training.context import TrainingContext
from workers.training.evaluation_answers import GreedyDecoding, greedy
from workers.training.evaluation_prompts import Question, ends_of, questions_of_prompts
from workers.training.objective import RankShare, Supervised
from workers.training.step import evaluate, target_logits

SHARE = 0.05
"""Share of the job's time that measuring may take."""
LEAST_SECONDS = 0.1
"""Less time is not worth a beginning."""
PASSAGE_TOKENS = 512
"""Most tokens of a passage."""
PASSAGES_AT_ONCE = 6
"""Passages between two looks at the clock: one of each of the first kinds.

As many as ranks, where these are more.
"""
ANSWER_TOKENS = 32
"""Most tokens of an answer: all unfinished answers take a forward for each."""
TOKENS_AT_ONCE = 8
"""Tokens of answers between two looks at the clock."""
ANSWERS_AT_ONCE = 2
"""Answers of a micro-batch: the distributions over all words by both models are in memory at
once.
"""


def seconds_of_job(runtime: Runtime, began: float) -> float:
    """Time that the job has taken, in seconds: of this attempt, or of the steps of all attempts if
    these took longer. `began`: when this attempt did, on this rank's clock.
    """
    rows = metrics_of_all_attempts(runtime.run, runtime.start.attempt) if runtime.rank == 0 else []
    return max(time.monotonic() - began, sum(row.step_seconds or 0.0 for row in rows))


def measure_forgetting(context: TrainingContext, step: int, job_seconds: float) -> Forgetting:
    """Measure and report, with a warning for what is beyond a threshold.

    Called by all ranks together, who all get the same.

    `job_seconds`: the job's time; rank 0's counts.
    """
    budget = SHARE * from_first(job_seconds)
    found = (
        _Measurement(context, step, budget).take()
        if budget >= LEAST_SECONDS
        else _left_out(step, budget)
    )
    for name, value in found.figures:
        context.reporter.message(f"Compared with the base alone: {name} {value}.")
    for text in found.warnings:
        context.reporter.warn(text)
    if found.left_out:
        context.reporter.message(f"Whether the model forgets: {found.left_out}")
    return found


def _left_out(step: int, budget: float, what: str = "not measured") -> Forgetting:
    return Forgetting(
        step=step,
        left_out=f"{what}, since it would take more than {SHARE:.0%} of the job's time "
        f"({budget:.1f} s).",
    )


@dataclass(frozen=True)
class _Measurement:
    """One measurement, which ends when the budget (seconds) is spent."""

    context: TrainingContext
    step: int
    budget: float
    began: float = field(default_factory=time.monotonic)

    def take(self) -> Forgetting:
        """The measurement. Called by all ranks together."""
        model = self.context.model
        was_training = model.training
        model.eval()
        try:
            with torch.compiler.set_stance("force_eager"):  # for a few sequences
                text = self._text()
                answers = self._answers() if text else None
        finally:
            model.train(was_training)
        if not text:
            return _left_out(self.step, self.budget)
        left_out = (
            _left_out(self.step, self.budget, "divergence not measured").left_out
            if answers is None
            else None
        )
        found = Forgetting(
            step=self.step, **text, **(answers or {}), seconds=self._seconds, left_out=left_out
        )
        return from_first(found)  # of the same time

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self.began

    def _beyond(self, share: float) -> bool:
        """Whether this share of the budget is spent: the same on all ranks, which ask together."""
        return from_first(self._seconds > share * self.budget)

    def _share(self, limits: MicroBatchLimits | None = None) -> RankShare:
        return RankShare.of(self.context.runtime, limits or self.context.limits)

    @cached_property
    def _tokenizer(self) -> Any:
        spec = self.context.runtime.spec
        return load_tokenizer(spec.model.path, TokenOptions.of(spec).chat_template)

    def _text(self) -> dict[str, Any] | None:
        """Perplexity of the general text, by the base and as tuned; None: there is no time.

        Takes about half of the budget.
        """
        spec = self.context.runtime.spec
        world = self.context.runtime.world
        own = [
            np.asarray(self._tokenizer(text)["input_ids"], dtype=np.int32) for text in passages()
        ]
        longest = min(PASSAGE_TOKENS, spec.training.max_length)
        objective = Supervised(
            TokenSet.of(Tokens(ids, np.ones(len(ids), dtype=bool)) for ids in own).cut(longest)
        )
        base = 0.0
        tuned = 0.0
        tokens = 0
        at_once = max(PASSAGES_AT_ONCE, world)
        for first in range(0, len(objective), at_once):
            items = list(range(len(objective)))[first : first + at_once]
            with without_adapter(self.context.model):
                base_loss = self._loss(objective, items)
            if not tokens and self._beyond(0.25):  # as tuned takes as long again
                return None
            base = base + base_loss
            tuned = tuned + self._loss(objective, items)
            tokens = tokens + objective.divisor(items)
            if self._beyond(0.5):
                break
        return {
            "tokens": tokens,
            "base_perplexity": _perplexity(base / tokens),
            "perplexity": _perplexity(tuned / tokens),
        }

    def _loss(self, objective: Supervised, items: Sequence[int]) -> float:
        batches = self._share().batches(objective, items)
        sums = evaluate(
            self.context.model, batches, self.context.runtime.world, objective.loss_of(items)
        )
        return objective.read(sums.tolist(), items).loss

    def _answers(self) -> dict[str, Any] | None:
        """Divergence and agreement on the base's own answers; None: there is no time."""
        runtime = self.context.runtime
        limits = self.context.limits
        questions = self._questions()
        by_rank = from_all(self._written(questions))
        texts = [by_rank[i % runtime.world][i // runtime.world] for i in range(len(questions))]
        answered = [
            _answered(question.ids, answer)
            for question, answer in zip(questions, texts, strict=True)
            if answer
        ]
        if not answered:
            return None
        objective = Supervised(TokenSet.of(answered))
        items = range(len(objective))
        few = replace(limits, samples=ANSWERS_AT_ONCE)
        sums = evaluate(
            self.context.model,
            self._share(few).batches(objective, items),
            runtime.world,
            _divergence,
        )
        divergence, same = sums.tolist()
        tokens = objective.divisor(items)
        nats = max(0.0, finite_nats(divergence / tokens))
        return {"answer_tokens": tokens, "divergence": nats, "agreement": same / tokens}

    def _written(self, questions: Sequence[Question]) -> list[list[int]]:
        """The base's answers to this rank's questions, as far as there is time."""
        runtime = self.context.runtime
        own = [question.ids for question in questions[runtime.rank :: runtime.world]]
        decoding = GreedyDecoding.of(
            self.context, TOKENS_AT_ONCE, ends_of(questions, self._tokenizer)
        )
        written: list[list[int]] = [[] for _ in own]
        for before in range(0, ANSWER_TOKENS, TOKENS_AT_ONCE):
            if self._beyond(0.8):
                break
            unfinished = [i for i, answer in enumerate(written) if len(answer) == before]
            begun = [
                np.concatenate([own[i], np.asarray(written[i], dtype=np.int32)]) for i in unfinished
            ]
            with without_adapter(self.context.model):
                more = greedy(runtime, self.context.model, begun, decoding)
            assert more is not None, "nothing stops it"
            for i, tokens in zip(unfinished, more, strict=True):
                written[i] += tokens
        return written

    def _questions(self) -> list[Question]:
        """The general prompts in the base's chat template; as plain text if there is none, or it
        refuses them.
        """
        options = TokenOptions.of(self.context.runtime.spec)
        if self._tokenizer.chat_template:
            try:
                return questions_of_prompts(prompts(chat=True), self._tokenizer, options)
            except DataError:
                pass  # such as a template that wants a system message
        return questions_of_prompts(prompts(chat=False), self._tokenizer, options)


def _divergence(model: nn.Module, batch: Batch, scale: float) -> tuple[Tensor, Tensor]:
    """KL(base || tuned) (`LossOf`): its sum over the targets, and that and the targets that are
    likeliest as tuned, fp64.
    """
    switches: tuple[AbstractContextManager[None], ...] = (without_adapter(model), nullcontext())
    logs: list[Tensor] = []
    for switch in switches:
        with switch:
            logs.append(F.log_softmax(target_logits(model, batch), dim=-1))
    base, tuned = logs
    total = F.kl_div(tuned, base, reduction="sum", log_target=True)
    same = (tuned.argmax(dim=-1) == batch.targets).sum().double()
    return total * scale, torch.stack([total.double(), same])


def _answered(prompt: np.ndarray, answer: Sequence[int]) -> Tokens:
    ids = np.concatenate([prompt, np.asarray(answer, dtype=np.int32)])
    return Tokens(ids, np.arange(len(ids)) >= len(prompt))


def _perplexity(loss: float) -> float:
    """exp(loss), as a number that JSON can hold."""
    return math.exp(finite_nats(loss))
