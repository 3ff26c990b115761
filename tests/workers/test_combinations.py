"""Jobs that combine options: what is taken is trained, to the same numbers however its work is
shared out.

Every two values of different options meet in one of the jobs. Each is trained as it stands, with
its samples laid out otherwise, on another number of ranks, and interrupted and resumed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from ft_service.bases.adapter_names import MAGNITUDE
from ft_service.data.examiner import Examiner
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Result
from ft_service.rundir.evaluations import (
    PROBES,
    Probes,
    evaluated_steps,
    read_evaluation,
    read_served,
)
from ft_service.rundir.verify import verify
from ft_service.spec import JobSpec
from tests.support.training.attempts import adapter, losses
from tests.support.training.combinations import FACTORS, NEVER, body_of, merged
from tests.support.training.pairwise import Choice, pairwise
from tests.support.training.whole_jobs import Job, Run, Workshop, table, train

VALUES = {factor: tuple(values) for factor, values in FACTORS.items()}
CHOICES = pairwise(VALUES, NEVER, seed=1)


def test_the_choices_hold_every_pair_that_goes_together() -> None:
    found = {
        frozenset(pair) for choice in CHOICES for pair in itertools.combinations(choice.items(), 2)
    }
    values = [[(factor, value) for value in own] for factor, own in VALUES.items()]
    every = {
        frozenset(pair)
        for a, b in itertools.combinations(values, 2)
        for pair in itertools.product(a, b)
    }
    assert found == every - NEVER
    assert len(CHOICES) <= 70
    assert pairwise(VALUES, NEVER, seed=1) == CHOICES


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    folder = tmp_path_factory.mktemp("workshop")
    with Examiner(tokens=folder / "tokens") as examiner:
        yield Workshop(folder, examiner)


@pytest.mark.slow
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: "+".join(choice.values()))
def test_what_is_taken_is_trained_to_the_same_numbers_in_every_way(
    choice: Choice, workshop: Workshop, tmp_path: Path
) -> None:
    job = workshop.admitted(body_of(choice), choice["base"], choice["data"])
    world = 1 if choice["ranks"] == "1" else 2
    tokens = workshop.tokens if choice["tokens"] == "by the check" else None
    with_adapters = choice["kept"] == "every step"
    whole, laid, cut, others = (
        RunDir(tmp_path / name)
        for name in ("whole", "laid out otherwise", "cut off", "other ranks")
    )
    for run in (whole, cut, others):
        run.write("spec.json", job.spec)
    laid.write("spec.json", laid_out_otherwise(choice, job.spec))
    pause = job.statistics.steps // 2 or None
    train(
        [Run(whole, tokens=tokens, with_adapters=with_adapters), Run(laid), Run(cut, pause)], world
    )
    train([Run(others, tokens=tokens)], 3 - world)

    check_outcome(job, whole)
    assert_same(table(cut), table(whole), 0)
    assert all(torch.equal(matrix, adapter(whole)[name]) for name, matrix in adapter(cut).items())
    exact = job.spec.precision.compute == "fp32"
    bound = 1e-5 if exact else 0.1
    # Rounding in bf16 may decide when a job has learned enough.
    as_long = exact or job.spec.training.early_stopping_patience is None
    assert_same(table(laid), table(whole), bound, as_long=as_long)
    assert_same(table(others), table(whole), bound, as_long=as_long)


DECIDE: dict[str, list[Any]] = {
    "seed": [8],
    "validation_split": [0.25],
    "precision.default": ["fp8", "nf4", "nf4_fp32", "fp8_blocks", "nvfp4", "mxfp4"],
    "precision.compute": ["bf16"],
    "precision.served_as": ["int4_g32", "int4_g64", "fp8"],
    "training.max_steps": [4],
    "training.batch_size": [3],
    "training.max_length": [40],
    "training.train_on": ["last_assistant", "everything"],
    "training.learning_rate": [1e-3, "auto"],
    "training.lr_scheduler_type": ["cosine", "constant", "warmup_stable_decay"],
    "training.min_lr_ratio": [0.5],
    "training.warmup_ratio": [0.5],
    "training.warmup_steps": [2],
    "training.weight_decay": [0.5],
    "training.adam_beta1": [0.5],
    "training.adam_beta2": [0.95],
    "training.adam_epsilon": [1e-2],
    "training.loraplus_lr_ratio": [16],
    "training.neftune_noise_alpha": [5],
    "training.max_grad_norm": [0.01],
    "lora.r": [2],
    "lora.lora_alpha": [8],
    "lora.lora_dropout": [0.1],
    "lora.use_rslora": [True],
    "lora.use_dora": [True],
    "lora.target_modules": [["q_proj"], r".*\.(q|k)_proj"],
    "lora.rank_pattern": [{"q_proj": 2}],
    "lora.alpha_pattern": [{"q_proj": 2}],
}
"""Options by which the same chats give other losses."""
CHANGE_NOTHING: dict[str, list[Any]] = {
    "suffix": ["mine"],
    "precision.default": ["bf16", "as_published", "auto"],
    "precision.compare_served": ["off"],
    "training.packing": [False],
    "training.per_device_train_batch_size": [1],
    "training.tokens_per_micro_batch": [64],
    "training.n_epochs": [7],
    "distributed.activation_checkpointing": ["full", "selective"],
    "checkpoint.save_steps": [1],
    "checkpoint.async_save": [False],
    "evaluation": [{"prompts": 2, "max_new_tokens": 3}],
}
"""Options by which they do not, beyond rounding; n_epochs since max_steps is given."""


@pytest.mark.slow
def test_an_option_changes_the_losses_if_it_is_meant_to_and_else_not(
    workshop: Workshop, tmp_path: Path
) -> None:
    start = {
        "model": "llama",
        "training_file": "training",
        "seed": 7,
        "lora": {"r": 4},
        "precision": {"compute": "fp32"},
    }
    start["training"] = {"max_steps": 5, "batch_size": 4, "learning_rate": 5e-3}
    bodies = {"": start}
    for options in (DECIDE, CHANGE_NOTHING):
        for name, values in options.items():
            for value in values:
                section, _, key = name.partition(".")
                bodies[f"{name} {value}"] = merged(start, {section: {key: value} if key else value})
    runs = {name: RunDir(tmp_path / str(number)) for number, name in enumerate(bodies)}
    for name, run in runs.items():
        run.write("spec.json", workshop.admitted(bodies[name], "llama", "chats").spec)
    train([Run(run, tokens=workshop.tokens) for run in runs.values()], 1)
    truth = list(losses(runs[""]).values())
    unchanged = {
        name
        for name, run in runs.items()
        if list(losses(run).values()) == pytest.approx(truth, rel=1e-6)
    }
    assert unchanged - {""} == {
        f"{name} {value}" for name, values in CHANGE_NOTHING.items() for value in values
    }


def laid_out_otherwise(choice: Choice, spec: JobSpec) -> JobSpec:
    """The same job with other micro-batches, and what else decides no number."""
    training: dict[str, Any] = {"tokens_per_micro_batch": 100, "per_device_train_batch_size": None}
    # A packed step counts these, a padded one samples.
    in_rows = "texts" in choice["data"] or choice["learned"] == "everything"
    if choice["rows"] != "by length" and not in_rows:
        training["packing"] = choice["rows"] == "padded"
    recomputed = "full" if spec.distributed.activation_checkpointing == "none" else "none"
    return spec.model_copy(
        update={
            "training": spec.training.model_copy(update=training),
            "distributed": spec.distributed.model_copy(
                update={"activation_checkpointing": recomputed}
            ),
            "checkpoint": spec.checkpoint.model_copy(
                update={"async_save": not spec.checkpoint.async_save}
            ),
        }
    )


def check_outcome(job: Job, run: RunDir) -> None:
    """Everything that a finished job promises is there, and fits together."""
    spec = job.spec
    rows = table(run)
    result = run.read("result.json", Result)
    probes = run.read(PROBES, Probes)
    assert verify(run.root).faults == []
    assert all(math.isfinite(float(row["train_loss"])) for row in rows)
    assert result is not None
    assert result.steps == len(rows)
    assert spec.training.early_stopping_patience is not None or result.steps == job.statistics.steps
    assert probes is not None
    of_step = rows[probes.step - 1]
    assert result.train_loss == float(of_step["train_loss"])
    assert (result.valid_loss is not None) == spec.validates
    assert (read_served(run) is not None) == spec.validates
    if spec.training.load_best_model_at_end:
        assert result.valid_loss == min(
            float(row["valid_loss"]) for row in rows if row["valid_loss"]
        )
    if spec.evaluation is not None:
        steps = evaluated_steps(run)
        assert {0, probes.step} <= steps.keys()
        asked: list[Any] = [read_evaluation(run, key) for key in steps.values()]
        assert all(own.metrics.keys() == asked[0].metrics.keys() for own in asked)
    in_peft = loaded_by_peft(run, spec)
    if (
        set(spec.precision.overrides.values()) | {spec.precision.default} == {"bf16"}
        and spec.precision.compute == "fp32"
    ):
        for probe in probes.probes:
            assert log_probabilities(in_peft, probe.tokens) == pytest.approx(probe.tuned, abs=1e-3)
            with in_peft.disable_adapter():
                assert log_probabilities(in_peft, probe.tokens) == pytest.approx(
                    probe.base, abs=1e-3
                )


def loaded_by_peft(run: RunDir, spec: JobSpec) -> PeftModel:
    """The published class with the exported adapter, of which every matrix is in place."""
    base = AutoModelForCausalLM.from_pretrained(spec.model.path, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, run.path("adapter")).eval()
    names = (
        (name.replace(".default.", "."), own)
        for name, own in model.named_parameters()
        if "lora_" in name
    )
    # As PEFT writes them: DoRA's vector was a parameter before it became a layer.
    there = {name.replace(f".{MAGNITUDE}.weight", f".{MAGNITUDE}"): own for name, own in names}
    exported = adapter(run)
    assert there.keys() == exported.keys()
    assert all(torch.equal(own, exported[name]) for name, own in there.items())
    return model


@torch.no_grad()
def log_probabilities(model: PeftModel, tokens: list[int]) -> list[float]:
    ids = torch.tensor(tokens)
    logs = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(dim=-1)
    return logs.gather(1, ids[1:, None])[:, 0].tolist()


def assert_same(
    ours: list[dict[str, str]], theirs: list[dict[str, str]], bound: float, *, as_long: bool = True
) -> None:
    """`bound`: of every number, relative; 0: to the last bit.

    Not `as_long`: the steps that both have are compared.
    """
    assert ours
    assert theirs
    for our, their in zip(ours, theirs, strict=as_long):
        assert our.keys() == their.keys()
        for name, value in their.items():
            assert bool(our[name]) == bool(value), name
            if value and not (
                bound and name.endswith("accuracies")
            ):  # of margins that are 0, rounding decides
                assert float(our[name]) == pytest.approx(float(value), rel=bound, abs=bound), (
                    name,
                    our["step"],
                )
