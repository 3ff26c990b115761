from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ft_service.control.places.capacity import capacity_of
from ft_service.engines.sharing import options_left_open, share_key
from ft_service.errors import SpecError
from ft_service.plan.admit import admit, settle_counted
from ft_service.plan.job import plan_job
from ft_service.plan.machines import GIB, MACHINES, Machine
from ft_service.plan.plan_text import change_text, summary
from ft_service.plan.sample_lengths import SampleLengths
from ft_service.plan.speed import TrainingWork
from tests.support.bases import LLAMA_8B, describe, save_fp8_index
from tests.support.cluster_settings import cluster_settings
from tests.support.plans import made_base, made_job, open_spec, sections


def test_a_job_that_cannot_fit_is_refused_with_what_to_change(tmp_path: Path) -> None:
    spec = open_spec(tmp_path, "8b", precision={"default": "bf16"})
    with pytest.raises(
        SpecError,
        match=r"not fit small: .* with precision\.default: nf4.*: 7\.06 GiB per rank, fits",
    ) as caught:
        admit(describe(spec.model.path), spec, Machine("small", 8 * GIB))
    assert caught.value.code == "does_not_fit"


def test_a_job_with_an_auto_format_that_cannot_fit_is_refused_too(tmp_path: Path) -> None:
    spec = open_spec(tmp_path, "8b", precision={"default": "auto"})
    small = Machine("small", 4 * GIB)
    with pytest.raises(
        SpecError, match=r"not fit small: .* with distributed\.nproc_per_node: 2: "
    ) as caught:
        admit(describe(spec.model.path), spec, small)
    assert caught.value.code == "does_not_fit"
    assert plan_job(describe(spec.model.path), spec, small).fits is False


def test_what_depends_on_the_samples_is_said_once_they_are_counted(tmp_path: Path) -> None:
    spec = open_spec(tmp_path, "8b")
    base = describe(spec.model.path)
    first = admit(base, spec, MACHINES["H100"], SampleLengths.of_size(10**6))
    assert "tokens_per_micro_batch" not in first.events[0][1]
    counted = settle_counted(base, first.spec, MACHINES["H100"], SampleLengths(400_000, 1000, 500))
    assert "training.tokens_per_micro_batch" in counted.events[0][1]
    assert counted.work is not None
    assert counted.spec.chosen.keys() == first.spec.chosen.keys()


def test_a_base_whose_weights_are_absent_is_refused(tmp_path: Path) -> None:
    spec = open_spec(tmp_path, "8b")
    save_fp8_index(tmp_path / "8b", LLAMA_8B)
    (tmp_path / "8b" / "model.safetensors").unlink()
    with pytest.raises(SpecError, match=r"model-00001-of-00001\.safetensors .*: it is not there"):
        admit(describe(spec.model.path), spec, MACHINES["H200"])


@pytest.mark.parametrize(
    ("profile", "shares"),
    [
        ({}, False),
        ({"hardware": "cpu", "gpu_resource": None}, False),
        ({"hardware": "cpu", "gpu_resource": None, "limits": {"memory": "64Gi"}}, True),
        ({"hardware": "cpu", "gpu_resource": None, "limits_per_rank": {"memory": "64Gi"}}, True),
        ({"hardware": "H100"}, True),
    ],
)
def test_jobs_of_pods_may_share_an_engine_once_the_memory_of_a_rank_is_known(
    tmp_path: Path, profile: dict[str, Any], shares: bool
) -> None:
    spec = open_spec(tmp_path, "tiny", precision={"default": "bf16"})
    base = describe(spec.model.path)
    machine = capacity_of(cluster_settings(tmp_path, **profile)).machine_for(base)
    first = admit(base, spec, machine, SampleLengths.of_size(20_000))
    counted = settle_counted(base, first.spec, machine, SampleLengths(4000, 200, 40))
    assert bool(options_left_open(counted.spec)) is not shares
    assert (share_key(counted.spec, counted.seat) is not None) is shares


GPU = Machine("gpu", 100 * GIB, flops=1e12, memory_bandwidth=1e9, link_bandwidth=1e10)


def test_a_prompt_that_shows_an_image_needs_a_base_that_sees_it() -> None:
    spec = made_job(made_base()).spec
    shown = [SimpleNamespace(shows_images=shows) for shows in (False, True)]
    seen = spec.model_copy(update={"evaluation": SimpleNamespace(given=shown)})
    with pytest.raises(
        SpecError, match=r"prompt 2 shows an image.*it is a text model\. "
    ) as refused:
        admit(made_base(), seen, GPU)
    assert refused.value.param == "evaluation.prompts"
    assert admit(made_base(), spec, GPU).seat is not None


@pytest.mark.parametrize(
    ("lengths", "basis", "length", "tokens"),
    [
        (None, "This is for samples of training.max_length tokens.", 200, None),
        (SampleLengths(900), "This is for samples of training.max_length tokens.", 200, 3 * 900),
        (SampleLengths(900, 9, 150), "This is by the lengths of its samples.", 100, 3 * 900),
    ],
)
@pytest.mark.parametrize("fits", [True, False])
def test_the_first_event_is_the_plan_by_what_is_known_of_the_samples(
    lengths: SampleLengths | None, basis: str, length: int, tokens: int | None, fits: bool
) -> None:
    given = sections(max_length=200, batch_size=4, tokens_per_micro_batch=800, n_epochs=3, r=65)
    given |= sections(default="bf16")
    base = made_base()
    spec = made_job(base, **given).spec
    plan = plan_job(base, spec, GPU, lengths)
    less = replace(GPU, memory=int((plan.rank.resident + plan.rank.total) / 2 / 0.94))
    machine = GPU if fits else less
    plan = plan_job(base, spec, machine, lengths)
    admitted = admit(base, spec, machine, lengths)
    ways = "; ".join(change_text(change) for change in plan.changes if change.fits)
    assert bool(ways) is not fits
    text = " ".join(filter(None, (summary(plan), basis, ways)))
    assert admitted.events[0] == ("info" if fits else "warn", text)
    assert [level for level, _ in admitted.events[1:]] == ["warn"] * len(plan.warnings)
    cost = plan.likely or plan
    assert cost.batches.length == length
    assert cost.speed is not None
    assert admitted.work == (
        None
        if tokens is None
        else TrainingWork(tokens * cost.flops_per_token, tokens / cost.speed.tokens_per_second)
    )
    assert (admitted.seat, admitted.spec.training) == (plan.seat, spec.training)
