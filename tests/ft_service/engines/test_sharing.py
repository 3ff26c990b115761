from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_service.bases.describing import files_state
from ft_service.engines.sharing import fault_groups, share_key
from ft_service.jobs.states import ALONE
from ft_service.rundir.engine import SeatSize
from ft_service.spec import AdapterRef, BaseModelRef, JobSpec, LoraOptions, PrecisionOptions
from ft_service.spec.methods import DistillationMethod, DistillationOptions
from ft_service.spec.options import DistributedOptions, Prefetch, TrainingOptions, WrapBySize
from ft_service.spec.teachers import TeacherRef
from tests.support.engines import SETTLED, sharing_spec

BASE: dict[str, Any] = SETTLED["distributed"].model_dump()


def with_distributed(**options: Any) -> JobSpec:
    return sharing_spec(distributed=DistributedOptions(**BASE | options))


def taught_by(kind: Any, *, samples: bool = False) -> JobSpec:
    """A student with a teacher beside the base, or one whose answers are sampled."""
    options = DistillationOptions(loss_type="reverse_kl", beta=0.5, with_context="", top_k=4)
    teacher = None if kind is None else TeacherRef(kind=kind, name="larger", path="/larger")
    method = DistillationMethod(teacher="larger", answers="student")
    return sharing_spec(
        loss=options.model_copy(update={"teacher": teacher}),
        reinforcement=method.sampling() if samples else None,
    )


def with_training(**options: Any) -> JobSpec:
    return sharing_spec(training=TrainingOptions(tokens_per_micro_batch=256, **options))


@pytest.mark.parametrize(
    "other",
    [
        sharing_spec("ftjob-2", seed=9),
        sharing_spec(lora=LoraOptions(r=4, target_modules=["q_proj"], lora_dropout=0.1)),
        with_training(learning_rate=1e-3, packing=False, group_by_length=True, max_length=64),
        with_training(adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6),
        with_distributed(max_nproc_per_node=2),
        sharing_spec(chosen={"distributed.replicate": "one rank"}),
    ],
)
def test_what_is_a_seats_own_is_not_in_the_key(other: JobSpec) -> None:
    assert share_key(other) == share_key(sharing_spec()) is not None


def test_who_continues_an_adapter_runs_alone_where_ranks_do_not_see_it() -> None:
    parent = AdapterRef(name="ft:tiny:local::0", job_id="ftjob-0", path="/runs/ftjob-0/adapter")
    assert (
        share_key(sharing_spec(parent=parent))
        == share_key(sharing_spec(), shares_adapters=False)
        is not None
    )
    assert share_key(sharing_spec(parent=parent), shares_adapters=False) is None


@pytest.mark.parametrize(
    "other",
    [
        sharing_spec(model=BaseModelRef(name="tiny", path="/models/other")),
        sharing_spec(precision=PrecisionOptions(default="nf4")),
        sharing_spec(precision=PrecisionOptions(compute="fp32")),
        sharing_spec(precision=PrecisionOptions(overrides={"lm_head": "bf16"})),
        with_distributed(nproc_per_node=4),
        with_distributed(activation_checkpointing="full"),
        with_distributed(reshard_after_forward=False),
        with_distributed(ignored=["norm"]),
    ],
)
def test_what_the_ranks_hold_is_in_the_key(other: JobSpec) -> None:
    assert share_key(other) is not None
    assert share_key(other) != share_key(sharing_spec())


@pytest.mark.parametrize(
    ("changes", "shares"),
    [
        ({}, True),
        ({"gain": 1.15}, True),
        ({"gain": 1.14}, False),
        ({"gain": None}, True),
        ({"room": 30}, True),
        ({"room": 29}, False),
    ],
)
def test_who_shares_gains_and_fits(changes: dict[str, Any], shares: bool) -> None:
    seat = SeatSize(
        **{"held": 10, "batch": 20, "batch_tokens": 64, "room": None, "gain": 2.0, **changes}
    )
    assert (share_key(sharing_spec(), seat) is not None) == shares


@pytest.mark.parametrize(
    "alone",
    [
        sharing_spec(engine="off"),
        *(taught_by(kind) for kind in ("adapter", "base", "server")),
        taught_by(None, samples=True),
        with_training(neftune_noise_alpha=5.0),
        sharing_spec(training=TrainingOptions()),
        with_training(learning_rate="auto"),
        sharing_spec(precision=PrecisionOptions(default="auto")),
        sharing_spec(lora=LoraOptions(target_parameters=["mlp.experts.down_proj"])),
        sharing_spec(lora=LoraOptions(use_dora=True)),
        sharing_spec(precision=PrecisionOptions(served_as="fp8")),
        sharing_spec(lora=LoraOptions(modules_to_save=["lm_head"])),
        with_distributed(compile=True),
        with_distributed(compile="auto"),
        with_distributed(activation_checkpointing="auto"),
        with_distributed(wrap="none"),
        with_distributed(wrap=WrapBySize(min_params=10)),
        with_distributed(keep_unsharded=True),
        with_distributed(prefetch=Prefetch()),
        with_distributed(offload=True),
        with_distributed(context_parallel=2),
        with_distributed(activation_checkpointing="tiled"),
        with_distributed(activation_checkpointing="offload"),
        with_distributed(replicate="auto"),
        with_distributed(nnodes=2),
        with_distributed(max_nnodes=2),
        with_distributed(max_nproc_per_node=4),
    ],
)
def test_who_runs_alone(alone: JobSpec) -> None:
    assert share_key(alone) is None


def test_a_student_whose_teacher_is_the_base_shares_it() -> None:
    assert share_key(taught_by(None)) == share_key(sharing_spec()) is not None


def test_one_rank_holds_one_copy_however_that_is_said() -> None:
    keys = {share_key(with_distributed(nproc_per_node=1, replicate=copies)) for copies in (1, -1)}
    assert len(keys) == 1
    assert None not in keys


@settings(deadline=None, database=None)
@given(st.data())
def test_the_guilty_job_is_alone_soon_whoever_sits_beside_it(data: st.DataObject) -> None:
    """Of a group some jobs have a seat when the guilty one ends the engine; the others may join the
    next one.
    """
    jobs = [f"ftjob-{number}" for number in range(data.draw(st.integers(1, 64)))]
    guilty = data.draw(st.sampled_from(jobs))
    groups: dict[str, str | None] = dict.fromkeys(jobs)
    deaths = 0
    while groups[guilty] != ALONE:
        group = [job for job in jobs if groups[job] == groups[guilty]]
        seated = sorted({guilty, *data.draw(st.sets(st.sampled_from(group)))})
        deaths += 1
        lost = fault_groups(f"engine-{deaths}", seated)
        assert set(lost) == set(seated)
        assert all(
            list(lost.values()).count(name) <= math.ceil(len(seated) / 2)
            for name in lost.values()
            if name != ALONE
        )
        groups |= lost
    assert deaths <= max(1, math.ceil(math.log2(len(jobs))))


def test_eight_jobs_lose_three_engines_to_one_of_them() -> None:
    jobs = [f"ftjob-{number}" for number in range(8)]
    for guilty in jobs:
        group = jobs
        deaths = 0
        while len(group) > 1:
            deaths += 1
            groups = fault_groups(f"engine-{deaths}", group)
            group = [
                job for job in group if job == guilty or (groups[job] == groups[guilty] != ALONE)
            ]
        assert deaths == 3


def test_a_job_on_a_replaced_base_shares_with_those_on_it_alone(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")
    keys = [share_key(sharing_spec(), files=files_state(tmp_path)) for _ in range(2)]
    weights.write_bytes(b"two, and longer")
    assert keys[0] == keys[1] != share_key(sharing_spec(), files=files_state(tmp_path))
