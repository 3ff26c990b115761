"""What was learned, in words: answers to a few prompts before the first step, on the way and behind the last one.

The ranks write them themselves, with the sharded model as it stands, so that no second copy of it is needed. Each rank has its
share of the prompts. Tokens are the likeliest ones, and nothing is cached: each token is a forward of all unfinished answers.

Before the first step the model is the base, or the tuned model that the job goes on from: no adapter is switched off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from statistics import mean
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ft_service.data.answer_metrics import score
from ft_service.data.tokens.sample import Tokens
from ft_service.rundir.evaluations import Answered, Evaluation, asked, evaluated_steps, evaluation_key, read_evaluation
from ft_service.spec import EvaluationOptions
from workers.base.agreement import from_all, from_first
from workers.data.batches import make_batch
from workers.output.publishing import write_document
from workers.output.report import Reporter
from workers.ranks.runtime import Runtime
from workers.ranks.sharding import reshard
from workers.training.questions import Question, ends_of, text_of
from workers.training.step import last_logits

SHOWN = 300
"""Characters of an answer in an event; all of it is in the evaluation."""
TOLD = 8
"""Prompts that events show."""
LOOK_TOKENS = 8
"""Tokens between two looks whether to stop."""
TELL_SECONDS = 30.0


class Evaluator:
    """A job's prompts, asked of the model as it stands. Every method is called by all ranks together."""

    def __init__(
        self,
        runtime: Runtime,
        model: nn.Module,
        questions: Sequence[Question],
        tokenizer: Any,
        options: EvaluationOptions,
        reporter: Reporter,
        stops: Callable[[], bool],
        *,
        packed: bool,
        ends: Collection[int] = (),
    ) -> None:
        """`stops`: asked often, on all ranks, whether to stop. `packed`: how samples are put together. `ends`: tokens that end
        an answer, beside those of the questions."""
        self._runtime, self._model, self._tokenizer, self._options = runtime, model, tokenizer, options
        self._reporter, self._stops, self._packed = reporter, stops, packed
        self._questions = list(questions)
        self._ends = ends_of(questions, tokenizer) | set(ends)
        self._begun: Evaluation | None = None
        self._told_at = 0.0

    @property
    def on_validation(self) -> bool:
        """Whether every validation asks too."""
        return self._options.on_validation

    def begin(self) -> bool:
        """Ask the model that training starts from, unless an earlier attempt did. False: it was stopped meanwhile."""
        self._begun = from_first(self._known(0) if self._runtime.rank == 0 else None)
        if self._begun is None:
            answers = self.ask(0)
            if answers is None:
                return False
            scores = self.scores(answers)
            rows = [
                Answered(**self._told(question), base=answer, tuned=None, scores=own, base_scores=own)
                for question, answer, own in zip(self._questions, answers, scores, strict=True)
            ]
            means = mean_scores(scores)
            self._begun = self._write(Evaluation(step=0, time=time.time(), metrics=means, base_metrics=means, samples=rows))
        return True

    def at(self, step: int, *, last: bool) -> dict[str, float] | None:
        """Ask the model at a step, once; the metrics. None: it was stopped meanwhile. `last`: tell of every prompt."""
        known = from_first(self._known(step) if self._runtime.rank == 0 else None)
        if known is not None:
            return known.metrics
        assert self._begun is not None, "begin comes first"
        answers = self.ask(step)
        if answers is None:
            return None
        scores, begun = self.scores(answers), self._begun
        rows = [
            before.model_copy(update={"tuned": answer, "scores": own})
            for before, answer, own in zip(begun.samples, answers, scores, strict=True)
        ]
        found = Evaluation(
            step=step, time=time.time(), metrics=mean_scores(scores), base_metrics=begun.base_metrics, samples=rows
        )
        for sentence in messages(found, everything=last):
            self._reporter.message(sentence)
        return self._write(found).metrics

    def ask(self, step: int, model: nn.Module | None = None) -> list[str] | None:
        """An answer to every prompt by the model as it stands, or by another one. None: it was stopped meanwhile."""
        runtime, model = self._runtime, model or self._model
        own = [question.ids for question in self._questions[runtime.rank :: runtime.world]]
        self._told_at = time.monotonic()
        training = model.training
        model.eval()
        with torch.compiler.set_stance("force_eager"):  # every token is of another length
            most = self._options.max_new_tokens
            written = greedy(runtime, model, own, most, self._ends, packed=self._packed, goes_on=self._goes_on(step))
        model.train(training)
        if written is None:
            return None
        by_rank = from_all([text_of(tokens, self._tokenizer) for tokens in written])
        return [by_rank[i % runtime.world][i // runtime.world] for i in range(len(self._questions))]

    def _goes_on(self, step: int) -> Callable[[int], bool]:
        """Called with every token's number: whether to go on. Tells how far it is now and then: silence passes for a stall."""

        def goes_on(token: int) -> bool:
            if time.monotonic() - self._told_at >= TELL_SECONDS:
                self._told_at = time.monotonic()
                most = self._options.max_new_tokens
                self._reporter.message(f"Evaluation at step {step}: the answers have {token} of at most {most} tokens.")
            return token % LOOK_TOKENS != 0 or not self._stops()

        return goes_on

    def scores(self, answers: Sequence[str]) -> list[dict[str, float]]:
        """Of an answer to every prompt."""
        pairs = zip(answers, self._questions, strict=True)
        return [score(answer, own.reference, self._options.metrics, own.item) for answer, own in pairs]

    def _known(self, step: int) -> Evaluation | None:
        """This attempt's evaluation of a step; of step 0 any attempt's, if the questions are the same."""
        run = self._runtime.run
        if step:
            return read_evaluation(run, evaluation_key(step, self._runtime.start.attempt))
        key = evaluated_steps(run).get(0)
        found = read_evaluation(run, key) if key else None
        asked = [(question.prompt, question.reference) for question in self._questions]
        return found if found and [(own.prompt, own.reference) for own in found.samples] == asked else None

    def _write(self, found: Evaluation) -> Evaluation:
        if self._runtime.rank == 0:
            key = evaluation_key(found.step, self._runtime.start.attempt)
            write_document(self._runtime.run, key, found, self._runtime.fence)
        return found

    @staticmethod
    def _told(question: Question) -> dict[str, Any]:
        return {"prompt": question.prompt, "messages": question.messages, "reference": question.reference}


def mean_scores(scores: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric over the prompts that have it."""
    names = dict.fromkeys(name for own in scores for name in own)
    return {name: mean(own[name] for own in scores if name in own) for name in names}


def messages(found: Evaluation, *, everything: bool) -> list[str]:
    """Sentences for events: the scores, then with `everything` the first prompts with their answers."""
    told = ", ".join(
        f"{name} {value:.2f} (before: {found.base_metrics.get(name, 0):.2f})" for name, value in found.metrics.items()
    )
    lines = [f"Evaluation after step {found.step}, {len(found.samples)} prompts: {told or 'no metric applies'}."]
    for own in found.samples[: TOLD if everything else 0]:
        said = "\n".join(f"{role}: {text}" if role else text for role, text in asked(own.prompt, own.messages))
        question, expected, before, after = (_short(text or "") for text in (said, own.reference, own.base, own.tuned))
        lines.append(f"Asked: {question}\nExpected: {expected}\nBefore: {before}\nAfter: {after}")
    return lines


@torch.no_grad()
def greedy(
    runtime: Runtime,
    model: nn.Module,
    prompts: Sequence[np.ndarray],
    most: int,
    ends: Collection[int],
    *,
    packed: bool,
    goes_on: Callable[[int], bool] = lambda token: True,
) -> list[list[int]] | None:
    """The likeliest tokens behind each of this rank's prompts, without the one that ends them; at most `most`. Called by all
    ranks together, which take part as long as any has something to write. `goes_on`: asked before every token, with its number;
    at False the result is None.
    """
    written: list[list[int]] = [[] for _ in prompts]
    open_ones = list(range(len(prompts)))
    for token_number in range(1, most + 1):
        if not goes_on(token_number):
            reshard(model)
            return None
        if not _anywhere(bool(open_ones), runtime):
            break
        rows = [np.concatenate([prompts[i], np.array(written[i], dtype=np.int32)]) for i in open_ones]
        none = [Tokens(row.astype(np.int32), np.zeros(len(row), dtype=bool)) for row in rows]
        logits = last_logits(model, make_batch(none, runtime.device, packed=packed), [len(row) for row in rows])
        following = logits.argmax(dim=-1).tolist()
        for i, token in zip(list(open_ones), following, strict=True):
            if token in ends:
                open_ones.remove(i)
            else:
                written[i].append(token)
    reshard(model)
    return written


def _anywhere(here: bool, runtime: Runtime) -> bool:
    if runtime.world == 1:
        return here
    flag = torch.tensor([here], dtype=torch.uint8, device=runtime.device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
