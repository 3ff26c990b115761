"""Answers that the ranks write while a job runs: those of transformers' own greedy generation, on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Outcome, OutcomeKind
from ft_service.rundir.events import read_segments
from tests.support.training.attempts import run_attempt
from tests.support.training.models import save_chat_base, save_chats, save_tiny_llama, spec_for
from workers.training.answers import EVALUATION, Evaluation, greedy, last_stretch

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("targets", "stretch"),
    [([0, 0, 1, 1], (2, 4)), ([0, 1, 1, 0, 0, 1, 0], (5, 6)), ([1, 1, 1], (1, 3)), ([0, 1], (1, 2))],
)
def test_the_expected_answer_is_the_last_learned_stretch(targets: list[int], stretch: tuple[int, int]) -> None:
    assert last_stretch(np.array(targets, dtype=bool)) == stretch


def test_tokens_are_those_of_greedy_generation(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_tiny_llama(tmp_path), dtype=torch.float32)
    generator = np.random.default_rng(0)
    prompts = [generator.integers(5, 250, length).astype(np.int32) for length in (3, 11, 7)]
    whole = [_generated(model, prompt, 12) for prompt in prompts]
    runtime = cast("Any", SimpleNamespace(rank=0, world=1, device=CPU))
    assert greedy(runtime, model, prompts, 12, (), packed=False) == whole
    end = whole[1][4]
    shorter = [own[: own.index(end)] if end in own else own for own in whole]
    assert len(shorter[1]) <= 4
    assert greedy(runtime, model, prompts, 12, {end}, packed=False) == shorter


def _generated(model: Any, prompt: np.ndarray, most: int) -> list[int]:
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    options = {"do_sample": False, "max_new_tokens": most, "min_new_tokens": most, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_job_shows_answers_before_and_after(world: int, tmp_path: Path) -> None:
    base = save_chat_base(tmp_path / "base")
    spec = spec_for(
        base,
        save_chats(tmp_path / "train.jsonl", 8),
        valid=save_chats(tmp_path / "valid.jsonl", 3),
        ranks=world,
        precision={"compute": "fp32"},
        training={"max_steps": 30, "batch_size": 8, "learning_rate": 2e-2},
        lora={"r": 8},
        evaluation={"prompts": 3, "max_new_tokens": 16, "metrics": ["exact_match", "rouge_l"]},
    )
    run = RunDir(tmp_path / "run")
    run.write("spec.json", spec)
    assert run_attempt(run, 1, world) == Outcome(kind=OutcomeKind.SUCCEEDED)
    found = run.read(EVALUATION, Evaluation)
    assert found is not None
    assert found.step == 30
    assert [own.expected for own in found.answers] == ["it is 0", "it is 7!", "it is 14!!"]
    assert found.after is not None
    assert found.after.keys() == found.before.keys() == {"exact_match", "rouge_l"}
    assert any(own.before != own.after for own in found.answers)
    tokenizer = AutoTokenizer.from_pretrained(base)
    stock = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tuned = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), run.path("adapter"))
    for own, ask in zip(found.answers, ("say 0", "say 1", "say 2"), strict=True):
        assert ask in own.prompt
        text = f"<|im_start|>user\n{ask}<|im_end|>\n<|im_start|>assistant\n"
        prompt = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
        for model, answer in ((stock, own.before), (tuned, own.after)):
            tokens = _generated(model, prompt, 16)
            tokens = tokens[: tokens.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in tokens else tokens
            assert tokenizer.decode(tokens, skip_special_tokens=True).strip() == answer
    told = [event.message for _, events in read_segments(run, 1) for event in events]
    assert any(message.startswith("Evaluation after step 30, 3 prompts: exact_match") for message in told)
    assert sum("\nBefore: " in message for message in told) == 3
