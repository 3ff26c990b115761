"""Whether a model forgets: numbers of the ranks next to those of plain PEFT with its adapter on and
off.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from ft_service.data.general_text import passages, prompts
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Outcome, OutcomeKind, Start
from ft_service.rundir.evaluations import MOST_NATS, Forgetting, read_forgetting
from ft_service.rundir.events import read_segments
from tests.support.ranks import run_on_ranks
from tests.support.training.attempts import attempt_on_rank, run_spec
from tests.support.training.kept_tokens import give_tokens
from tests.support.training.models import save_chat_base, save_chats, spec_for
from workers.data.micro_batches import MicroBatchLimits
from workers.training import forgetting
from workers.training.evaluation_prompts import Question


def with_time(rank: int, world: int, root: str, share: float) -> Outcome:
    forgetting.SHARE = share
    return attempt_on_rank(rank, world, root, 1)


def job(folder: Path, world: int, share: float, **options: Any) -> RunDir:
    base = save_chat_base(folder / "base")
    training = {"max_steps": 3, "batch_size": 8, "learning_rate": 2e-2}
    given = {
        "training": training,
        "lora": {"r": 4},
        "precision": {"compute": "fp32", "compare_served": "off"},
        **options,
    }
    run = RunDir(folder / "run")
    run.write(
        "spec.json", spec_for(base, save_chats(folder / "train.jsonl", 8), ranks=world, **given)
    )
    start = Start(
        job_id=run_spec(run).job_id, attempt=1, world_size=world, generation=1, checkpoint=None
    )
    run.write("attempts/1/start.json", start)
    give_tokens(run, run_spec(run))
    outcomes = run_on_ranks(with_time, world, str(run.root), share)
    assert all(outcome == Outcome(kind=OutcomeKind.SUCCEEDED) for outcome in outcomes)
    return run


def by_peft(folder: Path) -> tuple[float, float, float]:
    """(the base's perplexity, the tuned model's, divergence) by transformers and PEFT alone, in
    fp32.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "base")
    base: Any = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.bfloat16).float()
    model: Any = PeftModel.from_pretrained(base, folder / "run/adapter").eval()

    @torch.inference_mode()
    def logs(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with model.disable_adapter():
            plain = model(ids).logits[0]
        return plain.log_softmax(-1), model(ids).logits[0].log_softmax(-1)

    losses = torch.zeros(2)
    tokens = 0
    for text in passages():
        ids = tokenizer(text, return_tensors="pt")["input_ids"][
            :, : min(forgetting.PASSAGE_TOKENS, 64)
        ]
        losses += torch.stack(
            [F.nll_loss(own[:-1], ids[0, 1:], reduction="sum") for own in logs(ids)]
        )
        tokens += ids.shape[1] - 1
    divergence = 0.0
    answered = 0
    for prompt in prompts(chat=True):
        turns = [turn.model_dump() for turn in prompt.messages or []]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        begin = ids.shape[1]
        for _ in range(forgetting.ANSWER_TOKENS):
            following = logs(ids)[0][-1:].argmax(-1, keepdim=True)
            if following.item() == tokenizer.eos_token_id:
                break
            ids = torch.cat([ids, following], dim=1)
        plain, tuned = (own[begin - 1 : -1] for own in logs(ids))
        divergence += float((plain.exp() * (plain - tuned)).sum())
        answered += ids.shape[1] - begin
    before, after = (losses / tokens).exp().tolist()
    return before, after, divergence / answered


ON_TWO_RANKS = [
    pytest.param(2, lora, together, marks=pytest.mark.slow)
    for lora, together in (
        ({"use_dora": True}, 1),
        ({"modules_to_save": ["embed_tokens", "lm_head"]}, 1),
        ({}, 2),
    )
]
"""LoRA's options, and ranks that share a sample."""


@pytest.mark.parametrize(("world", "lora", "together"), [(1, {}, 1), *ON_TWO_RANKS])
def test_numbers_are_those_of_plain_peft(
    world: int, lora: dict[str, Any], together: int, tmp_path: Path
) -> None:
    training = {
        "max_steps": 3,
        "batch_size": 8,
        "learning_rate": 2e-2,
        "max_length": 64,
        "packing": not lora,
    }
    run = job(
        tmp_path,
        world,
        1e6,
        training=training,
        lora={"r": 4, **lora},
        distributed={"context_parallel": together},
    )
    found = read_forgetting(run)
    assert found is not None
    base, tuned, divergence = by_peft(tmp_path)
    assert found.base_perplexity == pytest.approx(base, rel=1e-4)
    assert found.perplexity == pytest.approx(tuned, rel=1e-4)
    assert found.divergence == pytest.approx(divergence, rel=1e-3)
    assert abs(tuned - base) > 0.01 * base
    assert divergence > 1e-3
    assert found.left_out is None
    card = run.path("adapter/README.md").read_text()
    assert all(f"| {name} | {value} |" in card for name, value in found.figures)
    told = [event.message for segment in read_segments(run, 1) for event in segment.events]
    assert sum(text.startswith("Compared with the base alone: ") for text in told) == 2


def test_what_takes_too_long_is_left_out_and_said_so(tmp_path: Path) -> None:
    run = job(tmp_path, 1, 1e-9)
    found = read_forgetting(run)
    assert found is not None
    assert (found.perplexity, found.divergence, found.figures) == (None, None, [])
    assert "of the job's time" in (found.left_out or "")
    told = [event.message for segment in read_segments(run, 1) for event in segment.events]
    assert f"Whether the model forgets: {found.left_out}" in told


def test_a_figure_beyond_its_threshold_is_a_warning() -> None:
    mild = Forgetting(
        step=1,
        tokens=9,
        base_perplexity=10,
        perplexity=10.9,
        answer_tokens=9,
        divergence=0.49,
        agreement=0.9,
    )
    assert mild.warnings == []
    first, second = mild.model_copy(update={"perplexity": 11.1, "divergence": 0.6}).warnings
    assert "11% higher than the base's, more than 10%" in first
    assert "0.60 nats per token, more than 0.5" in second
    assert Forgetting(step=1, left_out="no time").warnings == []


def test_perplexity_is_a_number_whatever_the_loss() -> None:
    assert (
        forgetting._perplexity(math.nan)
        == forgetting._perplexity(1e9)
        == pytest.approx(math.exp(100))
    )


def test_a_divergence_that_is_no_number_is_not_none_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = torch.tensor([math.nan, 0.0], dtype=torch.float64)
    monkeypatch.setattr(forgetting, "evaluate", lambda *_: broken)
    runtime = SimpleNamespace(rank=0, world=1, device=torch.device("cpu"), context=None)
    context: Any = SimpleNamespace(runtime=runtime, limits=MicroBatchLimits(8), model=None)
    question = Question(np.arange(3, dtype=np.int32), "abc", None)
    measurement = forgetting._Measurement(context, 1, 1.0)
    monkeypatch.setattr(forgetting._Measurement, "_questions", lambda self: [question])
    monkeypatch.setattr(forgetting._Measurement, "_written", lambda self, questions: [[4, 5]])
    found = measurement._answers()
    assert found is not None
    assert found["divergence"] == MOST_NATS


def test_the_text_is_small_and_of_many_kinds() -> None:
    text = Path(forgetting.passages.__code__.co_filename).with_name("general_text.txt")
    assert text.stat().st_size <= 200_000
    assert "CC0-1.0" in text.read_text()
    assert len(passages()) >= 16
    assert not any("=== " in passage for passage in passages())


@pytest.mark.parametrize(
    ("rank", "steps", "seconds"),
    [
        (0, [30.0, None, 25.0], 55.0),
        (0, [30.0, None], 40.0),
        (0, [], 40.0),
        (1, [30.0, 25.0], 40.0),
    ],
)
def test_a_job_has_taken_the_time_of_its_attempt_or_of_all_its_steps(
    rank: int, steps: list[float | None], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [SimpleNamespace(step_seconds=own) for own in steps]
    monkeypatch.setattr(forgetting, "metrics_of_all_attempts", lambda run, attempt: rows)
    monkeypatch.setattr(forgetting.time, "monotonic", lambda: 100.0)
    runtime: Any = SimpleNamespace(rank=rank, run=None, start=SimpleNamespace(attempt=2))
    assert forgetting.seconds_of_job(runtime, 60.0) == seconds


@pytest.mark.parametrize(
    ("budget", "portions"),
    [(39.9, 0), (40.0, 2), (79.9, 2), (80.0, 3), (1e6, 3)],
)
def test_text_is_measured_in_portions_while_there_is_time(
    budget: float, portions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 6, 6 and 1 passages, each of 4 tokens and after its cut 3; a loss takes 10 seconds."""
    now = [0.0]
    monkeypatch.setattr(forgetting.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(forgetting, "passages", lambda: ["text"] * 13)
    monkeypatch.setattr(forgetting, "without_adapter", lambda model: contextlib.nullcontext())
    monkeypatch.setattr(
        forgetting, "load_tokenizer", lambda *_: lambda text: {"input_ids": [5] * 4}
    )
    monkeypatch.setattr(
        forgetting.TokenOptions, "of", lambda spec: SimpleNamespace(chat_template=None)
    )
    asked: list[list[int]] = []

    class Measured(forgetting._Measurement):
        def _loss(self, objective: Any, items: Any) -> float:
            now[0] += 10.0
            asked.append(items)
            return len(items) * (2.0 if len(asked) % 2 else 4.0)  # the base's, then as tuned

    spec = SimpleNamespace(training=SimpleNamespace(max_length=3), model=SimpleNamespace(path=""))
    context: Any = SimpleNamespace(runtime=SimpleNamespace(spec=spec, world=1), model=None)
    found = Measured(context, 1, budget, began=0.0)._text()
    both = [list(range(6)), list(range(6, 12)), [12]]
    assert (
        asked == [items for items in both[: max(1, portions)] for _ in (0, 1)][: 2 * portions or 1]
    )
    count = [0, 6, 12, 13][portions]
    assert found == (
        {
            "tokens": 2 * count,
            "base_perplexity": pytest.approx(math.e),
            "perplexity": pytest.approx(math.e**2),
        }
        if portions
        else None
    )


@pytest.mark.parametrize(("job_seconds", "measured"), [(2.0, True), (1.999, False)])
def test_what_is_found_is_told_and_too_little_time_is_not_begun(
    job_seconds: float, measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Forgetting(
        step=3, tokens=9, base_perplexity=10, perplexity=12, divergence=0.1, agreement=0.9
    )
    budgets: list[float] = []
    monkeypatch.setattr(
        forgetting._Measurement, "take", lambda self: budgets.append(self.budget) or found
    )
    said: list[str] = []
    warned: list[str] = []
    reporter = SimpleNamespace(message=said.append, warn=warned.append)
    context: Any = SimpleNamespace(reporter=reporter)
    told = forgetting.measure_forgetting(context, 3, job_seconds)
    assert budgets == ([pytest.approx(0.1)] if measured else [])
    assert (told is found, told.step, len(warned)) == (measured, 3, int(measured))
    assert len(said) == (len(found.figures) if measured else 1)
