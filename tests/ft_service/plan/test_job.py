from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ft_service.bases.description import Weight
from ft_service.errors import SpecError
from ft_service.plan.job import Plan, plan_job, training_time
from ft_service.plan.machines import GIB, Machine
from ft_service.plan.sample_lengths import SampleLengths
from ft_service.plan.teacher import described_job
from ft_service.spec import DistillationOptions, JobSpec
from ft_service.spec.options import LoraOptions
from ft_service.spec.teachers import TeacherRef
from tests.support.bases import LLAMA_8B, describe, plan_of, save_base, save_fp8_index, spec_on
from tests.support.plans import H100, plan_8b


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
    assert plan_8b(tmp_path, 4, Machine("small", 13 * GIB), **options).hints == ()


def test_warnings_name_what_to_change(tmp_path: Path) -> None:
    folder = save_base(tmp_path / "base")
    plan = plan_of(
        spec_on(folder, 4, lora={"r": 64}, training={"batch_size": 3, "max_length": 512}), H100
    )
    fields = [warning.split(" ")[0] for warning in plan.warnings]
    assert fields == ["lora.r", "training.max_length", "training.batch_size"]
    assert plan_of(spec_on(folder, lora={"r": 16}), H100).warnings == ()


def test_a_step_takes_as_long_as_the_samples_that_there_are(tmp_path: Path) -> None:
    spec = spec_on(save_base(tmp_path / "8b", LLAMA_8B), training={"batch_size": 40, "n_epochs": 2})
    plan = plan_of(spec, H100)
    assert plan.speed is not None
    time = training_time(plan, spec, 10)
    assert (time["steps"], time["seconds_at_most"]) == (2, plan.speed.step_seconds * 2 * 10 / 40)


def test_no_change_is_proposed_that_would_be_refused(tmp_path: Path) -> None:
    base = save_base(tmp_path / "8b", LLAMA_8B)
    small = Machine("small", 4 * GIB)

    def proposed(most_per_host: int = 64, world: int = 2, **distributed: object) -> set[str]:
        spec = spec_on(base, world, distributed={"replicate": 1, **distributed})
        plan = plan_job(describe(spec.model.path), spec, small, most_per_host=most_per_host)
        return {option for change in plan.changes for option in change.options}

    ranks = "distributed.nproc_per_node"
    formats = "precision.default"
    assert {ranks, formats} <= proposed()
    assert {ranks, formats} & proposed(3) == {formats}
    assert ranks not in proposed(max_nproc_per_node=3)
    assert {ranks, formats} & proposed(world=1, reshard_after_forward=2) == set()


def test_what_comes_before_the_steps_of_preferences_is_said(tmp_path: Path) -> None:
    folder = save_base(tmp_path / "8b", LLAMA_8B)
    hints = plan_of(spec_on(folder, method={"type": "dpo"}), H100).hints
    assert [hint for hint in hints if "reference's log-probabilities" in hint]
    assert not [hint for hint in plan_of(spec_on(folder), H100).hints if "reference" in hint]


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


def test_forwards_without_gradients_are_counted(tmp_path: Path) -> None:
    """A teacher's, KTO's mismatched answers in each step, and a reference's before them."""
    folder = save_base(tmp_path / "8b", LLAMA_8B)

    def planned(**method: Any) -> tuple[Plan, float]:
        options: dict[str, Any] = {"distributed": {"activation_checkpointing": "none"}}
        spec = spec_on(folder, 1, **options, **({"method": method} if method else {}))
        plan = plan_of(spec, H100)
        assert plan.speed is not None
        seconds = training_time(plan, spec, spec.training.batch)["seconds_at_most"]
        return plan, seconds / plan.speed.step_seconds / spec.training.epochs

    supervised, _ = planned()
    taught, of_taught = planned(type="distillation", distillation={"with_context": "Be brief."})
    assert taught.flops_per_token / supervised.flops_per_token == pytest.approx(1.5, rel=0.01)
    by_words: dict[str, Any] = {"with_context": "Be brief.", "top_k": 20}
    few, _ = planned(type="distillation", distillation=by_words)
    kept = (few.batches.tokens - 1) * (20 * 12 + 3 * 4)
    assert few.rank.logits - supervised.rank.logits == pytest.approx(kept, rel=0.01)
    hidden = taught.batches.tokens * 4096 * 2
    assert taught.rank.logits - supervised.rank.logits == pytest.approx(hidden, rel=0.01)
    assert of_taught == 1
    _, of_dpo = planned(type="dpo")
    assert of_dpo == 1 + 1 / 2
    kto, of_kto = planned(type="kto")
    assert kto.flops_per_token == taught.flops_per_token
    assert of_kto == pytest.approx(1 + 2 / 3)
    unpaired = {"hyperparameters": {"loss_type": "apo_zero_unpaired"}}
    alone, of_alone = planned(type="kto", kto=unpaired)
    assert (alone.flops_per_token, of_alone) == (supervised.flops_per_token, 1.5)


@pytest.mark.parametrize(("r", "warned"), [(256, False), (257, True)])
def test_a_rank_above_the_smaller_side_of_a_matrix_is_warned_of(
    r: int, warned: bool, tmp_path: Path
) -> None:
    """Of 256 rows, of keys and values."""
    base = save_base(tmp_path, {**LLAMA_8B, "num_key_value_heads": 2})
    warnings = plan_of(spec_on(base, lora={"r": r}), H100).warnings
    assert any(warning.startswith(f"lora.r = {r} ") for warning in warnings) is warned


def test_weights_that_stay_whole_are_proposed_to_be_sharded(tmp_path: Path) -> None:
    small = Machine("small", 10 * GIB)
    options: list[Any] = [
        plan_8b(
            tmp_path,
            2,
            small,
            precision={"default": "bf16"},
            distributed={"keep_unsharded": kept, "replicate": 1},
        ).changes
        for kept in (True, False)
    ]
    kept, sharded = ([change.options for change in changes] for changes in options)
    assert {"distributed.keep_unsharded": False} in kept
    assert not any("distributed.keep_unsharded" in change for change in sharded)


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
