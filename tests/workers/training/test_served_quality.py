"""What the adapter is worth where it is served: numbers of the ranks next to those of plain
PEFT.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from ft_service.data.tokens.sample import Tokens
from ft_service.data.tokens.token_set import TokenSet
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Outcome, OutcomeKind
from ft_service.rundir.evaluations import (
    ADAPTER_ON_BF16,
    AS_TRAINED,
    MERGED,
    SERVED,
    ServedQuality,
    read_served,
)
from ft_service.rundir.events import read_segments
from tests.support.training.attempts import losses, run_attempt
from tests.support.training.models import save_chat_base, save_chats, spec_for
from workers.data.micro_batches import MicroBatchLimits
from workers.training import served_quality
from workers.training.objective import Supervised
from workers.training.served_quality import (
    BOUND,
    MOST_SECONDS,
    Comparison,
    TimeBudget,
    lacking_memory,
    messages,
)


def served_job(folder: Path, world: int, **options: Any) -> RunDir:
    base = save_chat_base(folder / "base")
    files = {
        name: save_chats(folder / f"{name}.jsonl", count)
        for name, count in (("train", 8), ("valid", 5))
    }
    given = {
        "training": {"max_steps": 3, "batch_size": 8, "learning_rate": 2e-2},
        "lora": {"r": 4},
        **options,
    }
    spec = spec_for(base, files["train"], valid=files["valid"], ranks=world, **given)
    run = RunDir(folder / "run")
    run.write("spec.json", spec)
    assert run_attempt(run, 1, world) == Outcome(kind=OutcomeKind.SUCCEEDED)
    return run


def loss_by_peft(folder: Path, *, merged: bool) -> float:
    """Of the job's adapter on the published base, by transformers and PEFT alone, in fp32."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.bfloat16).float()
    model = PeftModel.from_pretrained(model, folder / "run/adapter")
    if merged:
        model = model.merge_and_unload()
        for (
            parameter
        ) in model.parameters():  # and not the buffers of rotary positions, which no file holds
            parameter.data = parameter.data.bfloat16().float()
    total = 0.0
    targets = 0
    for line in (folder / "valid.jsonl").read_text().splitlines():
        prompt, answer = (message["content"] for message in json.loads(line)["messages"])
        before = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        begin = len(tokenizer(before, add_special_tokens=False)["input_ids"])
        ids = torch.tensor(
            tokenizer(f"{before}{answer}<|im_end|>", add_special_tokens=False)["input_ids"]
        )[None]
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, begin - 1 : -1]
        total += float(F.cross_entropy(logits, ids[0, begin:], reduction="sum"))
        targets += ids.shape[1] - begin
    return total / targets


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_losses_where_it_is_served_are_those_of_plain_peft(world: int, tmp_path: Path) -> None:
    evaluation = {"prompts": 2, "max_new_tokens": 4}
    run = served_job(
        tmp_path, world, precision={"default": "nf4", "compute": "fp32"}, evaluation=evaluation
    )
    found = run.read(SERVED, ServedQuality)
    assert found is not None
    assert (found.step, found.samples) == (3, 5)
    assert found.loss[AS_TRAINED] == pytest.approx(losses(run, "valid_loss")[3], abs=1e-6)
    assert found.loss[ADAPTER_ON_BF16] == pytest.approx(
        loss_by_peft(tmp_path, merged=False), abs=1e-5
    )
    assert found.loss[MERGED] == pytest.approx(loss_by_peft(tmp_path, merged=True), abs=1e-5)
    assert len({round(loss, 5) for loss in found.loss.values()}) == 3, (
        "the three are of different weights"
    )
    assert {way: len(said) for way, said in found.answers.items()} == {
        ADAPTER_ON_BF16: 2,
        MERGED: 2,
    }
    told = [event.message for segment in read_segments(run, 1) for event in segment.events]
    assert (
        sum(
            text.startswith("Validation loss by where it is served, over 5 samples")
            for text in told
        )
        == 1
    )


@pytest.mark.parametrize(
    ("lora", "share"),
    [
        pytest.param({"use_dora": True}, 1 / 3, marks=pytest.mark.slow),
        ({"modules_to_save": ["lm_head"]}, 1 / 29),
    ],
    ids=["magnitudes", "head"],
)
def test_what_is_trained_beside_a_and_b_is_that_of_plain_peft_and_merges_as_there(
    lora: dict[str, Any], share: float, tmp_path: Path
) -> None:
    run = served_job(tmp_path, 2, precision={"compute": "fp32"}, lora={"r": 4, **lora})
    found = run.read(SERVED, ServedQuality)
    assert found is not None
    assert found.loss[AS_TRAINED] == pytest.approx(loss_by_peft(tmp_path, merged=False), rel=1e-6)
    assert found.loss[MERGED] == pytest.approx(loss_by_peft(tmp_path, merged=True), rel=2e-6)
    adapter = load_file(run.path("adapter/adapter_model.safetensors"))
    beside = {
        name: tensor
        for name, tensor in adapter.items()
        if not name.endswith((".lora_A.weight", ".lora_B.weight"))
    }
    assert len(beside) == pytest.approx(len(adapter) * share)
    rounded = sum(
        float((tensor == tensor.bfloat16()).float().mean()) for tensor in beside.values()
    ) / len(beside)
    assert rounded < 0.05, "masters in fp32 are published, and not what was merged to compare"


@pytest.mark.slow
def test_a_base_in_bf16_is_merged_in_place_and_the_comparison_can_be_left_out(
    tmp_path: Path,
) -> None:
    run = served_job(tmp_path / "on", 2, precision={"compute": "fp32"})
    found = run.read(SERVED, ServedQuality)
    assert found is not None
    assert found.loss[MERGED] == pytest.approx(loss_by_peft(tmp_path / "on", merged=True), abs=1e-5)
    assert found.loss.keys() == {AS_TRAINED, MERGED}
    off = served_job(tmp_path / "off", 1, precision={"compute": "fp32", "compare_served": "off"})
    assert off.get(SERVED) is None


def test_answers_have_a_time_limit_and_in_an_engine_a_shorter_one_and_the_job_says_so() -> None:
    asked: list[float] = []
    told: list[str] = []
    evaluator = SimpleNamespace(ask=lambda step, model, seconds: asked.append(seconds))
    context: Any = SimpleNamespace(
        stop=SimpleNamespace(is_requested=False),
        reporter=SimpleNamespace(message=lambda text: told.append(text)),
    )
    nothing: Any = None
    for shares in (False, True):
        parts: Any = {"evaluator": evaluator, "shares_base": shares}
        of_job = Comparison(context, nothing, nothing, nothing, construct=nothing, **parts)
        of_job._ask(torch.nn.Identity(), MERGED, {}, 3, TimeBudget(7200))
    assert asked == [pytest.approx(7200, abs=60), MOST_SECONDS]
    assert "not answered merged in bf16 to the end: the comparison may take 2 h" in told[0]
    assert (
        "not answered merged in bf16 to the end: other jobs of the engine wait for it, at most 1 "
        "min" in told[1]
    )


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_kept_and_a_warning(
    loss: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON has no such number, and would hold a document that nobody can read."""
    monkeypatch.setattr(
        served_quality, "evaluate", lambda *_: torch.tensor([loss, 0.0], dtype=torch.float64)
    )
    samples = TokenSet.of([Tokens(np.arange(3, dtype=np.int32), np.ones(3, dtype=bool))])
    runtime = SimpleNamespace(rank=0, world=1, device=torch.device("cpu"))
    nothing: Any = None
    context: Any = SimpleNamespace(runtime=runtime)
    of_job = Comparison(context, nothing, nothing, Supervised(samples), nothing, construct=nothing)
    losses = {AS_TRAINED: 1.0, MERGED: of_job._loss(torch.nn.Identity(), [0], MicroBatchLimits(8))}
    run = RunDir(tmp_path)
    found = ServedQuality(step=3, samples=1, loss=losses, bound=BOUND, answers={}, metrics={})
    run.write(SERVED, found)
    assert read_served(run) == found
    assert messages(found, [])[1][0] == "warn"


def test_a_loss_beyond_the_bound_is_a_warning_with_what_to_do() -> None:
    losses = {AS_TRAINED: 1.0, ADAPTER_ON_BF16: 1.0 + BOUND / 2, MERGED: 1.0 + 2 * BOUND}
    found = ServedQuality(step=3, samples=5, loss=losses, bound=BOUND, answers={}, metrics={})
    (level, told), (warn, text) = messages(found, ["nf4"])
    assert (level, warn) == ("info", "warn")
    assert "as trained 1.0000, on the base in bf16 1.0100, merged in bf16 1.0400" in told
    assert "merged in bf16 the model is worse: its validation loss is 0.0400 higher" in text
    assert "on its base instead of merging" in text
    worse = found.model_copy(update={"loss": {AS_TRAINED: 1.0, ADAPTER_ON_BF16: 1.5}})
    assert "Serve it on the base stored as nf4" in messages(worse, ["nf4"])[1][1]
    better = found.model_copy(update={"loss": {AS_TRAINED: 1.0, ADAPTER_ON_BF16: 0.5}})
    assert len(messages(better, ["nf4"])) == 1


def test_a_second_model_is_only_read_where_memory_has_room_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a container the host's free memory says nothing: the job would be killed for it, behind
    its last step.
    """
    monkeypatch.setattr(served_quality, "available_memory", lambda: 22 * 10**6)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    frozen = torch.nn.Linear(1000, 1000, bias=False).requires_grad_(False)

    def lacking(dtype: torch.dtype) -> str | None:
        runtime: Any = SimpleNamespace(world=1, device=torch.device("cpu"), compute_dtype=dtype)
        return lacking_memory(frozen, runtime)

    assert lacking(torch.bfloat16) is None, "2 MB, and 8 MB for the largest weight"
    assert "was not measured" in (lacking(torch.float32) or ""), "one rank holds it as it computes"


@pytest.mark.parametrize(
    ("world", "dtype", "needed"),
    [
        (1, torch.float32, 4 * 140 + 8 * 100),
        (1, torch.bfloat16, 2 * 140 + 8 * 100),
        (2, torch.float32, 140 + 8 * 100),
    ],
)
def test_what_the_base_in_bf16_takes_is_its_part_and_its_largest_weight_gathered_and_used(
    world: int, dtype: torch.dtype, needed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers that are trained are there already."""
    frozen = torch.nn.ModuleList(
        torch.nn.Linear(10, rows, bias=False).requires_grad_(rows == 7) for rows in (4, 10, 7)
    )
    runtime: Any = SimpleNamespace(world=world, device=torch.device("cpu"), compute_dtype=dtype)
    for free, lacks in (([needed + 5, needed], False), ([needed + 5, needed - 1], True)):
        monkeypatch.setattr(served_quality, "from_all", lambda own, free=free: free)
        assert (lacking_memory(frozen, runtime) is not None) is lacks


def test_time_within_a_pause_is_not_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5.0]
    monkeypatch.setattr(served_quality.time, "monotonic", lambda: now[0])
    budget = served_quality.TimeBudget(60.0)
    now[0] += 7
    with budget.paused():
        now[0] += 100
    now[0] += 3
    assert (budget.seconds, budget.spent, budget.left) == (60.0, 10.0, 50.0)


@pytest.mark.parametrize(
    ("compare", "valid", "kept", "requantized", "served_as"),
    [
        ("off", 1, {}, {}, None),
        ("auto", 0, {}, {}, None),
        ("auto", 1, {"w": 1}, {}, None),
        ("auto", 1, {}, {"w": 1}, None),
        ("auto", 1, {}, {}, "nf4"),
    ],
)
def test_what_is_served_as_trained_or_has_no_other_form_is_not_compared(
    compare: str, valid: int, kept: Any, requantized: Any, served_as: str | None
) -> None:
    precision = SimpleNamespace(compare_served=compare, served_as=served_as)
    runtime = SimpleNamespace(spec=SimpleNamespace(precision=precision))
    context: Any = SimpleNamespace(runtime=runtime)
    loaded = SimpleNamespace(kept=kept, requantized=requantized)
    built: Any = SimpleNamespace(loaded=loaded, peft_model=None)
    nothing: Any = None
    items: Any = range(valid)
    assert (
        Comparison(context, built, nothing, items, nothing, construct=nothing).measured(3) is None
    )
