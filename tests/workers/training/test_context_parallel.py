"""Rows that several ranks share against the same rows on one rank each: losses, gradients,
preferences, and a job that goes on with whole rows.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ft_service.errors import SpecError
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Outcome, OutcomeKind
from ft_service.rundir.evaluations import evaluated_steps, read_evaluation
from ft_service.spec import DpoOptions, JobSpec, KtoOptions
from tests.support.ranks import run_on_ranks
from tests.support.training.attempts import adapter, losses, run_attempt
from tests.support.training.late_copies import on_small_scale
from tests.support.training.models import (
    FAMILIES,
    OF_EXPERTS,
    save_chat_base,
    save_chats,
    save_tiny,
    spec_for,
)
from tests.support.training.parity import CPU, constructed, relative_error
from tests.support.training.shared_rows import of_lengths, step
from workers.data.micro_batches import MicroBatchLimits
from workers.ranks.context_group import ContextGroup
from workers.ranks.runtime import COMPUTE_DTYPE
from workers.training.kto import Labelled
from workers.training.objective import (
    Objective,
    Preference,
    RankShare,
    Supervised,
)
from workers.training.shared_rows_trial import refuse_if_unlike

EXACT = {"default": "bf16", "compute": "fp32"}
BOUND = 1e-6
"""Relative: of each loss, and of all gradients of a model together."""
IN_BF16 = 2e-2
"""The same in bf16, where parts of a row are rounded otherwise than the whole."""
ROW = 60
"""Tokens of a row."""


SAMPLES = of_lengths(21, 1, 13, 2, 17, 30, 5)
"""Rows of them are cut within samples and between, and padded to a multiple of the ranks."""
ANSWERS = of_lengths(9, 12, 20, 6, 15, 11)
REFERENCE = -4.0 * torch.arange(6, dtype=torch.float64)

METHODS: dict[str, Callable[[], Objective]] = {
    "supervised": partial(Supervised, SAMPLES),
    "dpo": lambda: Preference(
        ANSWERS, REFERENCE, DpoOptions(beta=0.1, loss_type="sigmoid", rpo_alpha=0.5)
    ),
    "kto": lambda: Labelled.without_values(
        ANSWERS,
        KtoOptions(beta=0.1, loss_type="kto", desirable_weight=1.0, undesirable_weight=1.3),
        seed=3,
        max_length=64,
    ).with_reference([REFERENCE, REFERENCE - 20]),
}


def errors(
    rank: int,
    world: int,
    specs: Mapping[str, JobSpec],
    ranks: int,
    methods: Mapping[str, tuple[str, ...]],
) -> dict[str, float]:
    """Of every base, its methods, packed and padded: the largest error of sums, of training and
    validation, and gradient with `ranks` ranks a row.
    """
    context = ContextGroup.made(ranks)
    found = {}
    for name, spec in specs.items():
        model = constructed(spec, world).peft_model
        refuse_if_unlike(model, context, None, CPU, COMPUTE_DTYPE[spec.precision.compute])
        random = spec.lora.lora_dropout > 0
        for method in methods.get(name, ("supervised",)):
            for packed in (True, False):
                limits = MicroBatchLimits(ROW // ranks, None, packed)
                alone, shared = (
                    step(
                        model,
                        METHODS[method](),
                        RankShare(rank, world, CPU, limits, own),
                        random=random,
                    )
                    for own in (None, context)
                )
                gradients = (
                    torch.cat([grads[key].flatten() for key in alone[2]])
                    for grads in (shared[2], alone[2])
                )
                found[f"{name} {method} {'packed' if packed else 'padded'}"] = max(
                    relative_error(shared[0], alone[0]),
                    relative_error(shared[1], alone[1]),
                    relative_error(*gradients),
                )
    return found


def specs_of(
    folder: Path, families: Mapping[str, dict[str, Any]], ranks: int
) -> dict[str, JobSpec]:
    """Jobs on tiny bases of some families, by name. Values: `config`, and options of a request."""
    found = {}
    for family, given in families.items():
        options = {"precision": EXACT, **given}
        base = save_tiny(family, folder / family, **options.pop("config", {}))
        lora = {"r": 3, "target_modules": OF_EXPERTS.get(family, "all-linear")}
        lora |= options.pop("lora", {})
        found[family] = spec_for(base, ranks=ranks, lora=lora, **options)
    return found


def beyond(found: Mapping[str, float]) -> dict[str, float]:
    return {case: error for case, error in found.items() if not error <= BOUND}


NOISY = {"lora": {"lora_dropout": 0.2}, "training": {"neftune_noise_alpha": 5.0}}
SCANS = {"nemotron_h", "granitemoehybrid", "falcon_h1", "bamba", "jamba"}
"""Families whose layers scan a state space."""
BY_LENGTH = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
ALL_METHODS = {"llama": tuple(METHODS)}


def test_two_ranks_a_sample_train_as_one_does(tmp_path: Path) -> None:
    """Windows, sinks, experts, scaled positions, dropout, noise, and preferences."""
    specs = specs_of(tmp_path, {"gpt_oss": NOISY}, 2)
    found = run_on_ranks(errors, 2, specs, 2, {"gpt_oss": ("supervised", "dpo")})[0]
    assert len(found) == 4
    assert beyond(found) == {}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_family_of_attention_does_in_every_format(tmp_path: Path) -> None:
    formats = ("bf16", "fp8", "nf4")
    families: dict[str, dict[str, Any]] = {
        family: {"precision": {"default": formats[number % 3], "compute": "fp32"}}
        for number, family in enumerate(sorted(FAMILIES.keys() - SCANS))
    }
    families["qwen2"]["config"] = {"rope_parameters": BY_LENGTH, "max_position_embeddings": 16}
    families["llama"] |= NOISY
    specs = specs_of(tmp_path, families, 2)
    assert beyond(run_on_ranks(errors, 2, specs, 2, ALL_METHODS)[0]) == {}


@pytest.mark.slow
@pytest.mark.parametrize(("world", "ranks", "heads"), [(4, 4, 4), (3, 3, 6), (4, 2, 4)])
def test_ranks_share_groups_of_heads_that_they_outnumber(
    world: int, ranks: int, heads: int, tmp_path: Path
) -> None:
    """Two groups of keys and values; with four ranks two that share rows and two others."""
    config = {"num_attention_heads": heads}
    families = {"llama": {"config": config}, "gemma2": {"config": config}}
    specs = specs_of(tmp_path, families, world)
    assert beyond(run_on_ranks(errors, world, specs, ranks, ALL_METHODS)[0]) == {}


def errors_by_tiles(
    rank: int, world: int, specs: Mapping[str, JobSpec], ranks: int
) -> dict[str, float]:
    """Errors where feed-forwards go by tiles of 8 rows, and layers' inputs lie in host memory."""
    # `offload` is refused where there is no GPU: given to the model, past the spec's checks.
    update = {"activation_checkpointing": "offload"}
    offloading = {
        name: spec.model_copy(update={"distributed": spec.distributed.model_copy(update=update)})
        for name, spec in specs.items()
    }
    with on_small_scale(8) as copies:
        found = errors(rank, world, offloading, ranks, ALL_METHODS)
    assert copies.asked > 0
    return found


@pytest.mark.slow
def test_shared_samples_go_by_tiles_and_are_offloaded_too(tmp_path: Path) -> None:
    specs = specs_of(tmp_path, {"llama": NOISY, "qwen3_moe": NOISY}, 2)
    assert beyond(run_on_ranks(errors_by_tiles, 2, specs, 2)[0]) == {}


@pytest.mark.slow
def test_samples_are_shared_in_bf16_too(tmp_path: Path) -> None:
    """To its rounding."""
    families: dict[str, dict[str, Any]] = {
        "llama": {"precision": {"default": "nf4", "compute": "bf16"}},
        "gpt_oss": {"precision": {"default": "bf16", "compute": "bf16"}},
    }
    found = run_on_ranks(errors, 2, specs_of(tmp_path, families, 2), 2, {}, timeout=1700)[0]
    assert len(found) == 4
    assert {case: error for case, error in found.items() if not 0 < error <= IN_BF16} == {}


def refusals(rank: int, world: int, specs: Mapping[str, JobSpec]) -> dict[str, str | None]:
    """The parameter that each refusal names."""
    context = ContextGroup.made(world)
    found: dict[str, str | None] = {}
    for name, spec in specs.items():
        model = constructed(spec, world).peft_model
        try:
            refuse_if_unlike(model, context, None, CPU, torch.float32)
        except SpecError as error:
            found[name] = error.param
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_shared_is_refused_before_training(tmp_path: Path) -> None:
    families: dict[str, dict[str, Any]] = {family: {} for family in SCANS}
    found = run_on_ranks(refusals, 2, specs_of(tmp_path, families, 2))[0]
    assert found == dict.fromkeys(families, "distributed.context_parallel")


def answers(run: RunDir) -> list[tuple[str | None, str | None]]:
    """Of the job's evaluation: before training, and after the last step."""
    found = read_evaluation(run, evaluated_steps(run)[6])
    assert found is not None
    return [(row.base, row.tuned) for row in found.samples]


@pytest.mark.slow
def test_a_job_goes_on_with_other_numbers_of_ranks_a_sample(tmp_path: Path) -> None:
    """Two ranks a sample, then one, then four: what an uninterrupted job on one rank does but for
    rounding; and with two again, to the bit what it does with two all along.
    """
    base = save_chat_base(tmp_path / "base")
    data = save_chats(tmp_path / "train.jsonl", 8)
    valid = save_chats(tmp_path / "valid.jsonl", 3)

    def spec(ranks: int) -> JobSpec:
        return spec_for(
            base,
            data,
            ranks=ranks,
            valid=valid,
            distributed={"context_parallel": ranks},
            precision={"compute": "fp32"},
            training={"max_steps": 6, "batch_size": 3, "learning_rate": 5e-3, "eval_steps": 2},
            lora={"lora_dropout": 0.1},
            checkpoint={"save_steps": 2, "save_total_limit": 3},
            evaluation={"prompts": 3, "max_new_tokens": 6},
        )

    def ended(name: str, ranks: int, before: RunDir | None = None, step: str = "") -> RunDir:
        run = RunDir(tmp_path / name)
        run.write("spec.json", spec(ranks))
        attempt = 1
        if before is not None:
            shutil.copytree(before.path("attempts"), run.path("attempts"))
            shutil.copytree(before.path(f"checkpoints/{step}"), run.path(f"checkpoints/{step}"))
            shutil.copy(before.path("origins.json"), run.path("origins.json"))
            attempt += int(step.rpartition("-a")[2])
        done = run_attempt(run, attempt, ranks, step or None)
        assert done == Outcome(kind=OutcomeKind.SUCCEEDED)
        return run

    alone = ended("alone", 1)
    two = ended("two", 2)
    again = ended("again", 2, two, "step-4-a1")
    one = ended("one", 1, two, "step-2-a1")
    four = ended("four", 4, one, "step-4-a2")
    for name, matrix in adapter(two).items():
        assert torch.equal(adapter(again)[name], matrix), name
    for column in ("train_loss", "valid_loss"):
        assert losses(again, column) == losses(two, column)
        expected = losses(alone, column)
        for run in (two, one, four):
            assert losses(run, column) == pytest.approx(expected, rel=1e-5), column
    for name, matrix in adapter(alone).items():
        for run in (two, one, four):
            assert relative_error(adapter(run)[name], matrix) < 1e-3, name
    assert len(answers(alone)) == 3
    assert any(base != tuned for base, tuned in answers(alone))
    assert answers(two) == answers(one) == answers(four) == answers(alone)
