"""Embedding and output head trained whole, next to PEFT's own on the whole dequantised weights."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ft_service.errors import SpecError
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Outcome, OutcomeKind
from ft_service.rundir.verify import verify
from ft_service.spec import AdapterRef, JobSpec, PrecisionOptions
from tests.support.ranks import Cases, often_and_slow, run_on_ranks
from tests.support.training.adapters import difference, logits, merged_by_peft, save_adapter
from tests.support.training.attempts import losses, run_attempt, run_spec
from tests.support.training.models import (
    reference,
    reference_name,
    save_chat_base,
    save_pairs,
    save_tiny_llama,
    spec_for,
)
from tests.support.training.parity import (
    CPU,
    MIXED,
    Step,
    assert_parity,
    constructed,
    full,
    reference_steps,
    relative_error,
    samples,
    train_steps,
)
from workers.attempt.prepared_model import construct
from workers.base.load import adapters
from workers.data.batches import collate
from workers.job.parent_adapter import adopt
from workers.model.build import build
from workers.output.served_probes import without_adapter
from workers.ranks.sharding import Gradients, make_mesh
from workers.tasks.fidelity import with_adapter
from workers.tasks.merge import merge
from workers.training.step import target_log_probabilities

BOTH = ["embed_tokens", "lm_head"]
OUTER = ["model.embed_tokens.weight", "lm_head.weight"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


def whole(
    base: Path, world: int, names: list[str], compute: str = "fp32", **options: Any
) -> JobSpec:
    lora = {"r": 5, "modules_to_save": names}
    return spec_for(
        base, ranks=world, lora=lora, precision={**MIXED, "compute": compute}, **options
    )


CASES: dict[str, tuple[int, list[str]]] = {
    "both on one": (1, BOTH),
    "both on three": (3, BOTH),
    "the embedding on two": (2, ["embed_tokens"]),
    "the head on two": (2, ["lm_head"]),
}
TIED = "tied on {}"
IN_BF16 = "in bf16 on two"
SLOW = ("both on one", TIED.format(1), "the head on two")
"""On one rank nothing is sharded, and the head is trained on three too."""


@pytest.fixture(scope="module")
def trained(base: Path, tied: Path) -> Cases[list[Step]]:
    # Several micro-batches, the gradients of which add up.
    several: dict[str, Any] = {"training": {"per_device_train_batch_size": 2}}
    specs = {case: whole(base, world, names, **several) for case, (world, names) in CASES.items()}
    specs |= {TIED.format(world): whole(tied, world, ["lm_head"]) for world in (1, 2)}
    specs[IN_BF16] = whole(base, 2, BOTH, "bf16")
    return Cases(train_steps, specs, SLOW)


@pytest.mark.parametrize("case", often_and_slow(CASES, CASES.keys() & SLOW))
def test_loss_and_every_gradient_are_those_of_peft(
    case: str, base: Path, trained: Cases[list[Step]]
) -> None:
    names = CASES[case][1]
    truth = reference_steps(base, whole(base, 1, names))
    assert sum("lora" not in name for name in truth[0].grads) == len(names)
    for ours in trained.of(case)[1]:
        assert_parity(ours, truth)


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_tied_they_are_one_weight_with_both_gradients(
    world: int, tied: Path, trained: Cases[list[Step]]
) -> None:
    truth = reference_steps(tied, whole(tied, 1, ["lm_head"]))
    assert [name for name in truth[0].grads if "lora" not in name] == [
        "base_model.model.model.embed_tokens.weight"
    ]
    for ours in trained.of(TIED.format(world))[1]:
        assert_parity(ours, truth)


def log_probability_gradients(rank: int, world: int, spec: JobSpec) -> dict[str, torch.Tensor]:
    """Of log-probabilities each with a factor of its own, as those of pairs have."""
    built = constructed(spec, world)
    batch = collate(samples(), CPU)
    gradients = Gradients(built.peft_model, world)
    gradients.begin(last=True)
    logs, _ = target_log_probabilities(built.peft_model, batch)
    gradients.backward((logs * factors(logs)).sum())
    gradients.reduce()
    return {name: full(parameter.grad) for name, parameter in adapters(built.peft_model)}


def factors(logs: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1, 2, len(logs))


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_gradients_of_log_probabilities_are_those_of_peft(world: int, base: Path) -> None:
    model = reference(base, whole(base, 1, BOTH))
    batch = collate(samples(), CPU)
    logs = model(input_ids=batch.ids).logits.flatten(0, 1)[batch.places].log_softmax(-1)
    logs = logs.gather(1, batch.targets[:, None])[:, 0]
    (logs * factors(logs)).sum().backward()
    truth = {
        reference_name(name): p.grad for name, p in model.named_parameters() if p.requires_grad
    }
    for ours in run_on_ranks(log_probability_gradients, world, whole(base, world, BOTH)):
        assert ours.keys() == truth.keys()
        for name, gradient in ours.items():
            wanted = truth[name]
            assert wanted is not None
            assert relative_error(gradient, wanted) < 1e-5, name


def beginning(rank: int, world: int, spec: JobSpec) -> tuple[bool, bool]:
    """Whether what is trained whole begins as the base's, in fp32, and is that again when it was
    left out of a comparison.
    """
    model = construct(spec, make_mesh("cpu", world, 1), CPU, warn=print).peft_model
    trained = {name: p for name, p in adapters(model) if "lora" not in name}
    first = {name: full(p.detach()) for name, p in trained.items()}
    assert all(p.dtype == torch.float32 for p in trained.values())
    with torch.no_grad():
        for parameter in trained.values():
            parameter.add_(1.0)
    moved = {name: full(p.detach()) for name, p in trained.items()}
    with without_adapter(model):
        original = all(torch.equal(full(p.detach()), first[name]) for name, p in trained.items())
    again = all(torch.equal(full(p.detach()), moved[name]) for name, p in trained.items())
    held = load_file(Path(spec.model.path) / "model.safetensors")
    as_base = all(
        torch.equal(first[f"base_model.model.{name}"], held[name].float())
        for name in held
        if "layers" not in name and name != "model.norm.weight"
    )
    return as_base and original, again


@pytest.mark.parametrize(
    ("world", "compute"), [pytest.param(1, "bf16", marks=pytest.mark.slow), (3, "fp32")]
)
def test_they_begin_as_the_bases_and_can_be_it_again(world: int, compute: str, base: Path) -> None:
    assert (
        run_on_ranks(beginning, world, whole(base, world, BOTH, compute)) == [(True, True)] * world
    )


def test_in_bf16_it_is_as_near_as_bf16_is(base: Path, trained: Cases[list[Step]]) -> None:
    truth = reference_steps(base, whole(base, 1, BOTH))
    for ours in trained.of(IN_BF16)[1]:
        for step, expected in zip(ours, truth, strict=True):
            assert step.loss == pytest.approx(expected.loss, rel=1e-3)
        for name, gradient in ours[0].grads.items():
            assert gradient.dtype == torch.float32
            assert relative_error(gradient, truth[0].grads[name]) < 0.03, name


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["norm"], "'norm' is neither the base's embedding .model.embed_tokens. nor"),
        (["tokens"], "neither"),
    ],
)
def test_other_modules_are_refused_by_name(names: list[str], says: str, base: Path) -> None:
    with pytest.raises(SpecError, match=says) as caught:
        build(whole(base, 1, names), CPU)
    assert caught.value.param == "lora.modules_to_save"


@pytest.fixture(scope="module")
def preferred(tied: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A finished job on pairs, on two ranks, of a base whose head is its embedding."""
    folder = tmp_path_factory.mktemp("job")
    base = save_chat_base(folder / "base", tie_word_embeddings=True)
    run = RunDir(folder / "run")
    spec = spec_for(
        base,
        save_pairs(folder / "train.jsonl", 8),
        valid=save_pairs(folder / "valid.jsonl", 3),
        ranks=2,
        method={"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.5, "batch_size": 4}}},
        precision={"default": "nf4", "compute": "fp32", "compare_served": "off"},
        training={"max_steps": 4, "learning_rate": 5e-3},
        checkpoint={"save_steps": 2, "save_total_limit": 10},
        lora={"r": 4, "modules_to_save": ["embed_tokens"]},
    )
    run.write("spec.json", spec)
    assert run_attempt(run, 1, 2) == Outcome(kind=OutcomeKind.SUCCEEDED)
    return run


def test_pairs_are_compared_with_the_base_as_it_was(preferred: RunDir) -> None:
    with preferred.path("metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert float(rows[0]["rewards/margins"]) == pytest.approx(0, abs=1e-6)
    assert float(rows[-1]["rewards/margins"]) > 0.1
    assert verify(preferred.root).faults == []


def test_resume_is_bitwise_the_uninterrupted_job(preferred: RunDir, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    shutil.copytree(preferred.path("attempts"), run.path("attempts"))
    shutil.copytree(preferred.path("checkpoints/step-2-a1"), run.path("checkpoints/step-2-a1"))
    run.write("spec.json", run_spec(preferred))
    assert run_attempt(run, 2, 2, "step-2-a1").kind == "succeeded"
    assert losses(run) == losses(preferred)
    before = load_file(preferred.path("adapter/adapter_model.safetensors"))
    after = load_file(run.path("adapter/adapter_model.safetensors"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_peft_finds_it_as_its_own_and_merging_gives_its_logits(
    preferred: RunDir, tmp_path: Path
) -> None:
    spec = run_spec(preferred)
    folder = preferred.path("adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["modules_to_save"], config["ensure_weight_tying"]) == (
        ["embed_tokens", "lm_head"],
        True,
    )
    held = load_file(folder / "adapter_model.safetensors")
    stock = save_adapter(
        Path(spec.model.path),
        tmp_path / "stock",
        modules_to_save=["embed_tokens"],
        ensure_weight_tying=True,
    )
    theirs = load_file(stock / "adapter_model.safetensors")
    assert {name: tensor.shape for name, tensor in held.items() if "lora" not in name} == {
        name: tensor.shape for name, tensor in theirs.items() if "lora" not in name
    }
    by_peft = merged_by_peft(Path(spec.model.path), folder)
    assert by_peft.lm_head.weight is by_peft.model.embed_tokens.weight
    assert torch.equal(by_peft.lm_head.weight, held["base_model.model.lm_head.weight"])
    plain = spec.model_copy(update={"precision": PrecisionOptions(compute="fp32")})
    ours = with_adapter(plain, folder, CPU)
    exact = logits(by_peft)
    assert difference(logits(ours), exact) < 1e-5
    merge(Path(spec.model.path), folder, tmp_path / "merged", to="bf16")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert difference(logits(merged), logits(by_peft.to(torch.bfloat16).float())) < 1e-5
    parent = AdapterRef(name="ft:tiny:local::test", job_id=spec.job_id, path=str(folder))
    with torch.no_grad():
        for parameter in dict(adapters(ours)).values():
            parameter.zero_()
    adopt(dict(adapters(ours)), parent)
    assert difference(logits(ours), exact) < 1e-5


def test_a_base_that_holds_its_tied_weights_twice_is_merged_with_both_replaced(
    tmp_path: Path,
) -> None:
    base = save_tiny_llama(tmp_path / "base", tie_word_embeddings=True)
    held = load_file(base / "model.safetensors")
    assert "lm_head.weight" not in held
    held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()
    save_file(held, base / "model.safetensors", metadata={"format": "pt"})
    adapter = save_adapter(
        base, tmp_path / "adapter", modules_to_save=["embed_tokens"], ensure_weight_tying=True
    )
    merge(base, adapter, tmp_path / "merged", to="bf16")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    by_peft = merged_by_peft(base, adapter).to(torch.bfloat16).float()
    assert not torch.equal(by_peft.lm_head.weight, held["lm_head.weight"].float())
    assert difference(logits(merged), logits(by_peft)) < 1e-5


def test_a_tied_head_with_values_of_its_own_is_not_merged(
    preferred: RunDir, tmp_path: Path
) -> None:
    base = Path(run_spec(preferred).model.path)
    with pytest.warns(UserWarning, match="tie_word_embeddings"):
        parted = save_adapter(base, tmp_path / "stock", modules_to_save=BOTH)
    with pytest.raises(SpecError, match=r"embed_tokens\.weight differ, and the base ties them"):
        merge(base, parted, tmp_path / "merged", to="bf16")
