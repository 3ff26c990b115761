from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ft_service.bases.description import Description, Weight
from ft_service.errors import SpecError
from ft_service.money import Rate
from ft_service.plan.job import (
    Module,
    Plan,
    plan_job,
    reference_steps,
    training_cost,
    training_time,
)
from ft_service.plan.machines import GIB, Machine
from ft_service.plan.memory import planned_micro_batches, rank_bytes
from ft_service.plan.plan_text import cost_text
from ft_service.plan.sample_lengths import SampleLengths
from ft_service.plan.seat import lanes_of, seat_size, sharing_gain
from ft_service.plan.speed import flops_per_token, speed_on, wire_bytes
from ft_service.plan.teacher import described_job
from ft_service.spec import DistillationOptions, JobSpec
from ft_service.spec.options import LoraOptions
from ft_service.spec.teachers import TeacherRef
from ft_service.wording import bytes_text
from tests.support.bases import LLAMA_8B, describe, plan_of, save_base, save_fp8_index, spec_on
from tests.support.plans import H100, made_base, made_job, plan_8b, sections
from tests.support.rollouts import GRADER


def test_what_the_base_is_published_in_is_proposed_first(tmp_path: Path) -> None:
    plan = plan_of(spec_on(save_fp8_index(tmp_path, LLAMA_8B)), Machine("small", 10 * GIB))
    of_formats = [
        change.options["precision.default"]
        for change in plan.changes
        if "precision.default" in change.options
    ]
    assert of_formats[:2] == ["as_published", "nf4"]


def test_what_it_costs_to_store_a_published_base_otherwise_is_said(tmp_path: Path) -> None:
    folder = save_fp8_index(tmp_path, LLAMA_8B)
    said = {}
    for default in ("bf16", "nf4", "fp8", "as_published"):
        plan = plan_of(spec_on(folder, precision={"default": default}), H100)
        said[default] = [
            warning
            for warning in plan.warnings
            if warning.startswith("The base is published in fp8_blocks")
        ]
    assert said["fp8"] == said["as_published"] == []
    assert re.search(
        r"Storing 224 of its weights in bf16 takes 13\.00 GiB a rank instead of 6\.70 GiB\. "
        r"precision",
        said["bf16"][0],
    )
    assert re.search(
        r"in nf4 takes .* a rank instead of 6\.70 GiB, and rounds their values a second time\.",
        said["nf4"][0],
    )


def test_changes_are_proposed_in_order_and_marked_when_enough(tmp_path: Path) -> None:
    small = Machine("small", 10 * GIB)
    plan = plan_8b(tmp_path, machine=small, precision={"default": "bf16"})
    assert plan.fits is False
    assert [next(iter(change.options)) for change in plan.changes][:5] == [
        "distributed.activation_checkpointing",
        "training.max_length",
        "precision.default",
        "distributed.nproc_per_node",
        "distributed.activation_checkpointing",
    ]
    combined = plan.changes[-1]
    assert len(combined.options) == 5
    assert combined.fits
    assert combined.total < min(change.total for change in plan.changes[:-1])


def test_copies_are_proposed_where_the_base_fits_whole(tmp_path: Path) -> None:
    options = {
        "precision": {"default": "nf4"},
        "training": {"max_length": 1024, "per_device_train_batch_size": 1},
    }
    assert plan_8b(tmp_path, 4, **options).hints == (
        "The base fits whole on every rank: distributed.replicate: -1 needs no gathers and is the "
        "fastest.",
    )
    assert plan_8b(tmp_path, 1, **options).hints == ()
    job = made_job(made_base(), 2)
    assert len(plan_job(job.base, job.spec, H100).hints) == 1
    chosen = job.spec.model_copy(update={"chosen": {"distributed.replicate": "why"}})
    assert plan_job(job.base, chosen, H100).hints == ()
    assert plan_8b(tmp_path, 4, Machine("small", 13 * GIB), **options).hints == ()


@pytest.mark.parametrize(
    ("rows", "longest", "refused"),
    [(64, 65, True), (66, 65, True), (64, 64, False), (2, 65, False)],
)
def test_samples_longer_than_the_learned_positions_are_refused(
    rows: int, longest: int, refused: bool, tmp_path: Path
) -> None:
    """By what is learned of positions, and not of other things, and only once a sample needs more
    of them.
    """
    spec = spec_on(
        save_base(tmp_path / "base", max_position_embeddings=64), training={"max_length": 128}
    )
    base = describe(spec.model.path)
    positions = Weight(
        "model.embed_positions", "weight", (rows, base.dimensions.hidden), "embedding", None
    )
    base = replace(base, weights=(*base.weights, positions))
    assert plan_job(base, spec, H100) is not None
    if not refused:
        assert plan_job(base, spec, H100, SampleLengths(1000, 20, longest)) is not None
        return
    with pytest.raises(
        SpecError,
        match=r"longest sample has 65 tokens, .* learned 64 positions \(model\.embed_positions",
    ):
        plan_job(base, spec, H100, SampleLengths(1000, 20, longest))


def test_a_teacher_beside_the_base_takes_memory_and_time(tmp_path: Path) -> None:
    folder = save_base(tmp_path / "8b", LLAMA_8B)
    own = spec_on(folder, 2, method={"type": "distillation", "distillation": {"with_context": "x"}})
    loss = own.loss
    assert isinstance(loss, DistillationOptions)

    def taught_by(ref: TeacherRef) -> JobSpec:
        return own.model_copy(update={"loss": loss.model_copy(update={"teacher": ref})})

    alone = plan_of(own, H100)
    adapter = TeacherRef(kind="adapter", name="t", path="/t", job_id="j", lora=LoraOptions(r=8))
    tuned = plan_of(taught_by(adapter), H100)
    r8 = plan_of(own.model_copy(update={"lora": LoraOptions(r=8)}), H100).adapter_parameters
    assert (alone.rank.teacher, tuned.rank.teacher) == (0, 2 * r8)
    assert tuned.rank.stored - alone.rank.stored == tuned.rank.teacher

    smaller = {**LLAMA_8B, "num_hidden_layers": 4}
    other = save_base(tmp_path / "small", smaller)
    ref = TeacherRef(kind="base", name="small", path=str(other))
    for path, ids in ((folder, {"a": 0}), (other, {"a": 1})):
        (path / "tokenizer.json").unlink(missing_ok=True)
        (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": ids}}))
    with pytest.raises(SpecError, match="another vocabulary") as refused:
        described_job(taught_by(ref), lambda path: describe(str(path)))
    assert refused.value.param == "method.distillation.teacher"
    (other / "tokenizer.json").write_text('{"added_tokens": [],  "model": {"vocab": {"a": 0}}}')
    base = described_job(taught_by(ref), lambda path: describe(str(path)))
    plan = plan_job(base, taught_by(ref), H100)
    smaller_alone = plan_of(spec_on(other, 2), H100)
    assert plan.rank.teacher == sum(smaller_alone.rank.base.values())
    forwards = [p.flops_per_token for p in (alone, plan)]
    assert forwards[1] < forwards[0], "its forward has fewer layers than the base's"


@pytest.mark.parametrize(("r", "warned"), [(256, False), (257, True)])
def test_a_rank_above_the_smaller_side_of_a_matrix_is_warned_of(
    r: int, warned: bool, tmp_path: Path
) -> None:
    """Of 256 rows, of keys and values."""
    base = save_base(tmp_path, {**LLAMA_8B, "num_key_value_heads": 2})
    warnings = plan_of(spec_on(base, lora={"r": r}), H100).warnings
    assert any(warning.startswith(f"lora.r = {r} ") for warning in warnings) is warned


def test_a_plan_as_a_document_has_the_sums_of_both_costs(tmp_path: Path) -> None:
    spec = spec_on(save_base(tmp_path, LLAMA_8B), 2)
    known = plan_of(spec, H100, SampleLengths(100_000, 1000, 500))
    assert known.likely is not None
    document = known.as_dict()
    for cost, shown in ((known, document), (known.likely, document["likely"])):
        assert shown["rank"]["total"] == cost.rank.total
        assert shown["rank"]["stored"] == cost.rank.stored
        assert shown["rank"]["resident"] == cost.rank.resident
        assert shown["wire"]["total"] == cost.wire.total > 0
    unknown = plan_of(spec, H100).as_dict()
    assert unknown["likely"] is None
    assert unknown["rank"]["total"] == plan_of(spec, H100).rank.total


GPU = Machine("gpu", 100 * GIB, flops=1e12, memory_bandwidth=1e9, link_bandwidth=1e10)
TINY_CARD = replace(GPU, name="tiny", memory=1000)
MADE: dict[str, Any] = {"lora": {"r": 4}, "training": {"max_length": 200, "batch_size": 4}}


def made_plan(
    machine: Machine = GPU,
    ranks: int = 1,
    lengths: SampleLengths | None = None,
    base: Description | None = None,
    most_per_host: int = 64,
    **options: Any,
) -> Plan:
    precision = {"compute": "bf16", "default": "bf16", **options.pop("precision", {})}
    options = {**MADE, **options, "precision": precision}
    spec = spec_on(Path("/made"), ranks, **options)
    return plan_job(base or made_base(), spec, machine, lengths, most_per_host)


def test_a_plan_is_made_of_the_costs_of_its_longest_and_its_usual_samples() -> None:
    """Of a bias with its weight, and of a seat whose gain goes by the usual cost."""
    made = made_base()
    bias = Weight("model.layers.0.self_attn.q_proj", "bias", (128,), "bias", 0)
    base = replace(made, weights=(bias, *made.weights))
    machine = replace(GPU, host_memory=1000, rank_memory=10)
    options: dict[str, Any] = {
        "precision": {"compute": "bf16", "default": "nf4"},
        "distributed": {"nnodes": 2, "activation_checkpointing": "full"},
    }
    lengths = SampleLengths(1000, 20, 90)
    plan = made_plan(machine, 2, lengths, base, **options)
    job = made_job(base, 2, **MADE, **options)
    for cost, length in ((plan, 90), (plan.likely, 50)):
        assert cost is not None
        batches = planned_micro_batches(job.spec, job.layout, length)
        assert cost.batches == batches
        assert cost.rank == rank_bytes(job, batches, machine)
        assert cost.wire == wire_bytes(job, batches.rounds)
        flops = flops_per_token(job.base, job.adapters, length, checkpointed=True)
        assert cost.flops_per_token == flops
        assert cost.speed == speed_on(machine, job, batches, flops, cost.wire, 0)
    assert (plan.machine, plan.memory) == ("gpu", int(100 * GIB * 0.94))
    assert (plan.ranks_per_host, plan.host_memory) == (2, int((500 + 10) * 0.8))
    linears = 2 * 128 * 64 + 2 * 64 * 64 + 3 * 512 * 64
    assert plan.frozen_parameters == 3 * linears + 2 * 1000 * 64 + 64 + 128
    assert plan.adapter_parameters == 3 * 4 * (2 * (128 + 64) + 2 * (64 + 64) + 3 * (512 + 64))
    assert plan.fits is True
    own = {module.name: module for module in plan.modules}
    weight = 128 * (64 // 2 + 64 // 64 + 4)
    assert own[bias.module] == Module(
        bias.module, "linear", (128, 64), "nf4", weight + 2 * 128, (weight + 2 * 128) // 4
    )
    assert own["lm_head"].bytes == 2 * 1000 * 64
    assert plan.likely is not None
    assert plan.likely.speed is not None
    seat = seat_size(job, machine, plan.rank, plan.batches.tokens)
    tokens = 3 * 1000
    seconds = tokens / plan.likely.speed.tokens_per_second
    lanes = lanes_of([seat] * 2, plan.likely.batches.tokens, job.spec)
    assert plan.seat == replace(seat, gain=sharing_gain(plan.likely.speed, seconds, lanes))
    unread = made_plan(machine, 2, base=base, **options)
    assert unread.batches.length == 200
    assert unread.speed is not None
    assert unread.seat.gain == sharing_gain(
        unread.speed, None, lanes_of([unread.seat] * 2, 200, job.spec)
    )


@pytest.mark.parametrize(
    ("more", "fits", "stored"), [(0, True, True), (1, False, True), (10**9, False, False)]
)
def test_a_job_fits_to_the_last_byte(more: int, fits: bool, stored: bool) -> None:
    given = {**MADE["training"], "tokens_per_micro_batch": 200}
    rank = made_plan(training=given).rank
    total = max(rank.total - more, 100)
    memory = next(m for m in range(int(total / 0.94), total * 2) if int(m * 0.94) >= total)
    plan = made_plan(replace(GPU, memory=memory), training=given)
    assert (plan.memory, plan.fits, plan.stored_fits) == (total, fits, stored)
    resident = replace(plan, memory=rank.resident)
    assert (resident.stored_fits, replace(resident, memory=rank.resident - 1).stored_fits) == (
        True,
        False,
    )
    assert replace(resident, memory=None).stored_fits is None


UNPAIRED = "apo_zero_unpaired"
OPEN = {"activation_checkpointing": "auto"}
MODE = "activation_checkpointing=auto"


@pytest.mark.parametrize(
    ("options", "ranks", "most_per_host", "changes"),
    [
        (sections(default="nf4"), 1, 1, [MODE]),
        (sections(default="nf4"), 1, 2, [MODE, "nproc_per_node=2"]),
        (sections(default="nf4", **OPEN), 1, 1, []),
        (sections(default="nf4", activation_checkpointing="offload"), 1, 1, []),
        (sections(default="nf4", max_length=256, tokens_per_micro_batch=256), 1, 1, [MODE]),
        (
            *(sections(default="nf4", max_length=257, tokens_per_micro_batch=257), 1, 1),
            [MODE, "tokens_per_micro_batch=auto", "max_length=128"],
        ),
        (
            *(sections(default="nf4", replicate=2, **OPEN), 4, 1),
            ["context_parallel=auto", "replicate=auto"],
        ),
        (
            sections(default="nf4", keep_unsharded=True, context_parallel="auto", nnodes=2, **OPEN),
            *(4, 8, ["keep_unsharded=False", "nproc_per_node=8"]),
        ),
        (sections(default="nf4", max_nproc_per_node=3, **OPEN), 2, 4, ["context_parallel=auto"]),
        (sections(default="fp8", **OPEN), 1, 1, ["default=nf4 overrides={}"]),
        (
            *(sections(default="nf4", overrides={r".*\.0\..*q_proj": "bf16"}, **OPEN), 1, 1),
            ["default=nf4 overrides={}"],
        ),
        (sections(reshard_after_forward=2, context_parallel="auto", **OPEN), 4, 1, []),
    ],
)
def test_what_is_proposed_of_a_job_that_does_not_fit(
    options: dict[str, Any], ranks: int, most_per_host: int, changes: list[str]
) -> None:
    """Each alone, and all together where no single one is enough."""
    plan = made_plan(TINY_CARD, ranks, most_per_host=most_per_host, **options)
    found = [
        " ".join(f"{name.split('.')[1]}={value}" for name, value in change.options.items())
        for change in plan.changes
    ]
    together = " ".join(changes)
    assert found == changes + ([together] if " " in together else [])
    assert not any(change.fits for change in plan.changes)


def test_of_changes_that_are_enough_alone_none_are_put_together() -> None:
    """Chosen options follow a change of the others."""
    options: dict[str, Any] = {"training": {"max_length": 4000, "batch_size": 4}}
    least = min(c.total for c in made_plan(TINY_CARD, most_per_host=1, **options).changes[:-1])
    enough = replace(GPU, memory=int(least / 0.94) + 2)
    plan = made_plan(enough, most_per_host=1, **options)
    assert plan.fits is False
    assert any(change.fits for change in plan.changes)
    assert all(len(change.options) < 3 for change in plan.changes)


@pytest.mark.parametrize(
    ("training", "examples", "steps", "whole"),
    [
        ({"batch_size": 4, "n_epochs": 3}, 10, 9, 3 * 10 / 4),
        ({"batch_size": 4, "n_epochs": 1}, 1, 1, 1 / 4),
        ({"batch_size": 4, "max_steps": 5}, 10, 5, (10 + 8) / 4),
    ],
)
@pytest.mark.parametrize(
    ("method", "mode", "share"),
    [
        ({"type": "supervised"}, "none", 0),
        ({"type": "dpo"}, "full", 1 / 3),
        ({"type": "kto"}, "none", 2 / 3),
        ({"type": "kto"}, "full", 2 / 4),
    ],
)
def test_the_time_of_a_training_is_that_of_its_steps_and_of_the_reference_before(
    training: dict[str, Any],
    examples: int,
    steps: int,
    whole: float,
    method: dict[str, Any],
    mode: str,
    share: float,
) -> None:
    options: dict[str, Any] = {
        "training": {"max_length": 200, **training},
        "method": method,
        "distributed": {"activation_checkpointing": mode},
    }
    plan = made_plan(GPU, lengths=SampleLengths(1000, 20, 90), **options)
    spec = spec_on(Path("/made"), 1, **options)
    assert plan.speed is not None
    assert plan.likely is not None
    assert plan.likely.speed is not None
    before = share * min(steps * 4, examples) / 4
    time = training_time(plan, spec, examples)
    assert time == {
        "examples": examples,
        "steps": steps,
        "seconds_at_most": pytest.approx((whole + before) * plan.speed.step_seconds, rel=1e-9),
        "seconds_likely": pytest.approx(
            (whole + before) * plan.likely.speed.step_seconds, rel=1e-9
        ),
    }
    assert reference_steps(spec, 3) == pytest.approx(3 * share, rel=1e-9)
    unknown = training_time(replace(plan, speed=None, likely=None), spec, examples)
    assert (unknown["seconds_at_most"], unknown["seconds_likely"]) == (None, None)


def test_what_a_plan_costs() -> None:
    time = {"seconds_at_most": 7200.0, "seconds_likely": 3600.0}
    cost = training_cost(time, 4, Rate(3_000_000, "EUR"))
    assert cost == {"currency": "EUR", "slot_hour": 3.0, "at_most": 24.0, "likely": 12.0}
    assert cost_text(cost) == "That costs about 12.00 EUR (at worst 24.00 EUR)."
    unknown = training_cost(
        {"seconds_at_most": None, "seconds_likely": None}, 4, Rate(3_000_000, "EUR")
    )
    assert unknown == {"currency": "EUR", "slot_hour": 3.0, "at_most": None, "likely": None}
    assert training_cost(None, 4, Rate(3_000_000, "EUR")) == unknown
    assert training_cost(time, 4, None) is None
    for nothing in (None, unknown):
        assert cost_text(nothing) is None


@pytest.mark.parametrize(("more", "told"), [(0, False), (1, True)])
def test_a_host_that_cannot_pin_what_would_fit_the_gpu_is_named(more: int, told: bool) -> None:
    """Of two inputs in blocks of 64 MiB."""
    base = made_base(inner=8)
    host = int((2 * 2**26 - more) / 0.8) + (1 - more)
    given: dict[str, Any] = {
        "training": {"max_length": 4000, "batch_size": 1},
        "base": base,
        "most_per_host": 1,
    }
    away = made_plan(GPU, distributed={"activation_checkpointing": "offload"}, **given)
    machine = replace(GPU, host_memory=host, memory=int(away.rank.total / 0.94) + 2)
    plan = made_plan(machine, **given)
    assert plan.fits is False
    sentences = [warning for warning in plan.warnings if "offload takes" in warning]
    assert bool(sentences) is told
    if told:
        assert f"pins {bytes_text(2 * 2**26)} of the host" in sentences[0]
        assert f"takes {bytes_text(away.rank.total)} of the GPU" in sentences[0]
        small = made_plan(replace(machine, memory=away.rank.total // 2), **given)
        assert not any("offload takes" in warning for warning in small.warnings)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"method": {"type": "dpo"}, "distributed": {"activation_checkpointing": "full"}},
            "log-probabilities of each pair that they read are computed once: a whole training's "
            "time has it, 0.33 times as long as a first pass over these pairs; that of a step",
        ),
        (
            {"method": {"type": "kto"}},
            "each answer that they read are computed once: a whole training's time has it, 0.67",
        ),
        ({"method": {"type": "kto"}}, " A mismatched answer for each one is a forward more"),
        (
            {"method": {"type": "kto", "kto": {"hyperparameters": {"loss_type": UNPAIRED}}}},
            "0.5 times as long as a first pass over these answers; that of a step does not.",
        ),
        (
            {"method": {"type": "distillation", "distillation": {"with_context": "x"}}},
            "Each step has a forward of the teacher, without gradients",
        ),
        (
            {
                "method": {
                    "type": "reinforcement",
                    "reinforcement": {
                        "grader": GRADER,
                        "hyperparameters": {"num_generations": 5, "max_completion_length": 7},
                    },
                }
            },
            "a step's 20 answers of at most 7 tokens, 140 together, estimated to take one gpu at "
            "least 0.007 s; and so does grading.",
        ),
    ],
)
def test_what_comes_on_top_of_steps_is_said(options: dict[str, Any], said: str) -> None:
    hints = made_plan(**options).hints
    assert [said in hint for hint in hints].count(True) == 1, hints
    assert ("mismatched" in " ".join(hints)) is (options["method"] == {"type": "kto"})
    assert made_plan().hints == ()
    assert made_plan(replace(GPU, memory=None), **options).hints == ()


@pytest.mark.parametrize(
    ("options", "ranks", "warned"),
    [
        (sections(batch_size=3, max_length=100), 4, "so that 1 of them have nothing"),
        (sections(batch_size=4, max_length=100), 4, None),
        (
            *(sections(batch_size=1, max_length=100, context_parallel=2), 4),
            "so that 2 of them have nothing to do",
        ),
        (sections(batch_size=4, max_length=101), 1, "max_length = 101: the base was"),
        (sections(r=65), 1, "lora.r = 65 is more than the matrix of model.layers.0.self_attn"),
        (sections(r=64), 1, None),
        (
            *(sections(served_as="int8"), 1),
            "the 21 linear weights are rounded with their adapters once in the forward and once in "
            "the backward of every micro-batch, each by one",
        ),
        (
            *(sections(served_as="mxfp4", activation_checkpointing="full"), 1),
            "of every micro-batch, once more to compute the layer again, each by one product",
        ),
        (sections(served_as="nvfp4"), 1, "A model in NVFP4 whose inputs stay in bf16"),
    ],
)
def test_what_a_job_is_warned_of(options: dict[str, Any], ranks: int, warned: str | None) -> None:
    base = made_base(dimensions={"max_positions": 100})
    options = {"training": {"max_length": 100, "batch_size": 4}, **options}
    warnings = made_plan(GPU, ranks, base=base, **options).warnings
    assert [warned in own for own in warnings].count(True) == 1 if warned else warnings == (), (
        warnings
    )
    assert "in most shapes" not in " ".join(warnings) or "fp4" in str(options)


def test_weights_that_no_format_keeps_are_said_to_be_stored_in_bf16() -> None:
    names = ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj")
    base = made_base(unkept=dict.fromkeys(names, "AWQ"))
    (said,) = made_plan(base=base).warnings
    assert "holds 2 of its weights in AWQ" in said
    assert f"stored in bf16, {bytes_text(2 * 2 * 512 * 64)} a rank" in said
    assert made_plan(base=base, precision={"default": "nf4"}).warnings == ()
