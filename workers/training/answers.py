"""What was learned, in words: answers to a few held-out prompts before the first step and behind the last one, side by side.

The ranks write them themselves, with the sharded model as it stands, so that no second copy of it is needed. Each rank has its
share of the prompts. Tokens are the likeliest ones, and nothing is cached: each token is a forward of all unfinished answers.

Before the first step the model is the base, or the tuned model that the job goes on from: no adapter is switched off.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch import nn

from ft_service.data.answer_metrics import scores
from ft_service.data.tokens.sample import Tokens
from ft_service.data.tokens.token_set import TokenSet
from ft_service.spec import EvaluationOptions
from workers.base.agreement import from_all
from workers.data.batches import make_batch
from workers.ranks.runtime import Runtime
from workers.ranks.sharding import reshard
from workers.training.step import last_logits

EVALUATION = "evaluation.json"
SHOWN = 300
"""Characters of an answer in an event; all of it is in evaluation.json."""


class Answered(BaseModel):
    """One prompt with its answers."""

    prompt: str
    expected: str
    before: str
    after: str | None = None
    """None: training is not over."""


class Evaluation(BaseModel):
    """`evaluation.json`: the answers, and their mean scores."""

    answers: list[Answered]
    before: dict[str, float]
    after: dict[str, float] | None = None
    step: int | None = None
    """The last one, whose answers `after` is."""

    def messages(self) -> list[str]:
        """Sentences for events, once training is over: the scores, then every prompt."""
        assert self.after is not None, "training is over"
        told = ", ".join(f"{name} {self.after[name]:.2f} (before: {self.before[name]:.2f})" for name in self.after)
        lines = [f"Evaluation after step {self.step}, {len(self.answers)} prompts: {told}."]
        for own in self.answers:
            asked, expected, before, after = (_short(text) for text in (own.prompt, own.expected, own.before, own.after or ""))
            lines.append(f"Asked: {asked}\nExpected: {expected}\nBefore: {before}\nAfter: {after}")
        return lines


class Asker:
    """The prompts of a job, and what ends an answer."""

    def __init__(self, samples: TokenSet, tokenizer: Any, options: EvaluationOptions, *, pairs: bool, packed: bool) -> None:
        """`samples`: the first ones are asked, each up to its last learned stretch, which is the expected answer. `pairs`: of
        each pair the preferred one. `packed`: how samples are put together."""
        self._tokenizer, self._options, self._packed = tokenizer, options, packed
        chosen = [samples[i] for i in range(0, len(samples), 2 if pairs else 1)[: options.prompts]]
        places = [last_stretch(sample.targets) for sample in chosen]
        self._prompts = [sample.ids[:begin] for sample, (begin, _) in zip(chosen, places, strict=True)]
        learned = [sample.ids[begin:end] for sample, (begin, end) in zip(chosen, places, strict=True)]
        special = set(tokenizer.all_special_ids)
        self._ends = {int(token) for answer in learned for token in answer if int(token) in special} | {tokenizer.eos_token_id}
        self.expected = [self._text(answer) for answer in learned]

    def ask(self, runtime: Runtime, model: nn.Module) -> list[str]:
        """An answer to every prompt by the model as it stands. Called by all ranks together."""
        own = self._prompts[runtime.rank :: runtime.world]
        training = model.training
        model.eval()
        written = greedy(runtime, model, own, self._options.max_new_tokens, self._ends, packed=self._packed)
        model.train(training)
        by_rank = from_all([self._text(tokens) for tokens in written])
        return [by_rank[i % runtime.world][i // runtime.world] for i in range(len(self._prompts))]

    def before(self, answers: Sequence[str]) -> Evaluation:
        """The first half of an evaluation."""
        shown = [self._tokenizer.decode(prompt, skip_special_tokens=True).strip() for prompt in self._prompts]
        rows = zip(shown, self.expected, answers, strict=True)
        found = [Answered(prompt=prompt, expected=expected, before=answer) for prompt, expected, answer in rows]
        return Evaluation(answers=found, before=scores(answers, self.expected, self._options.metrics))

    def after(self, begun: Evaluation, answers: Sequence[str], step: int) -> Evaluation:
        """All of it."""
        both = [own.model_copy(update={"after": answer}) for own, answer in zip(begun.answers, answers, strict=True)]
        after = scores(answers, self.expected, self._options.metrics)
        return begun.model_copy(update={"answers": both, "after": after, "step": step})

    def _text(self, tokens: Any) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True).strip()


def last_stretch(targets: np.ndarray) -> tuple[int, int]:
    """The last run of targets: [begin, end). There is a target behind the first token."""
    places = np.flatnonzero(targets)
    end = int(places[-1]) + 1
    gaps = np.flatnonzero(np.diff(places) > 1)
    begin = int(places[gaps[-1] + 1] if len(gaps) else places[0])
    return max(begin, 1), end


@torch.no_grad()
def greedy(
    runtime: Runtime, model: nn.Module, prompts: Sequence[np.ndarray], most: int, ends: Collection[int], *, packed: bool
) -> list[list[int]]:
    """The likeliest tokens behind each of this rank's prompts, without the one that ends them; at most `most`. Called by all
    ranks together, which take part as long as any has something to write.
    """
    written: list[list[int]] = [[] for _ in prompts]
    open_ones = list(range(len(prompts)))
    for _ in range(most):
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
