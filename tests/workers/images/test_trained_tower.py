"""Adapters on towers and connectors: next to plain PEFT on the published class, on any number of
ranks, resumed, and refused where they cannot be trained.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from ft_service.rundir.checkpoints import complete_checkpoints
from ft_service.rundir.directory import RunDir, sha256_of
from ft_service.spec import DataFileRef
from tests.support.ranks import often_and_slow
from tests.support.training.attempts import adapter, losses, run_attempt, trained
from tests.support.training.checks import BOUND
from tests.support.training.pictured_jobs import pictured_job, published_loss
from tests.support.training.pictured_steps import off, our_model, our_step, our_tower
from tests.support.training.pictures import published_step, save_pictured

EVERYWHERE = r".*\.(q_proj|v_proj|out_proj|qkv|linear_1|linear_fc1|mlp1|fc1)"
"""Names of attention's and feed-forwards' layers in texts, towers and connectors."""
SLOW = ("gemma 3", "mistral small 3.1", "llava 1.5")
LATER = ("gemma3", "mistral3", "llava")


@pytest.mark.parametrize("kind", often_and_slow(["qwen3_vl", *LATER], LATER))
def test_loss_and_gradients_are_plain_pefts(kind: str, tmp_path: Path) -> None:
    """Of micro-batches with pictures, without, and with some in another place."""
    made = save_pictured(kind, tmp_path / "base")
    built = our_model(kind, made, tmp_path / "features", EVERYWHERE)
    tower = our_tower(made, built, EVERYWHERE)
    beside = [name.partition(".lora_")[0] for name in tower.parameters]
    beside = [name.removeprefix("base_model.model.") for name in dict.fromkeys(beside)]
    truth = published_step(made, built, beside=beside)
    assert len(truth[1].keys() & tower.parameters.keys()) >= 8
    for packed in (False, True):
        for groups in ([[0], [1], [2], [3]], [[2, 0, 1], [3]]):
            loss, grads = our_step(made, built, groups, packed=packed, tower=tower)
            # Of layers that the published class does not reach there are zeros.
            ours = loss, {n: g for n, g in grads.items() if n in truth[1] or g.any()}
            assert off(ours, truth) < BOUND, (packed, off(ours, truth))


@pytest.mark.parametrize("family", often_and_slow(["qwen 3 vl", *SLOW], SLOW))
def test_adapters_of_the_tower_are_plain_pefts_on_any_number_of_ranks(
    family: str, tmp_path: Path
) -> None:
    spec = pictured_job(family, tmp_path, 1, target_modules=EVERYWHERE)
    one = trained(spec, tmp_path / "one", 1)
    tower = [name for name in adapter(one) if "visual" in name or "vision" in name]
    assert tower
    learned = [name for name in tower if adapter(one)[name].any() and "lora_B" in name]
    assert len(learned) >= 4
    assert losses(one, "valid_loss")[2] == pytest.approx(published_loss(one, spec), rel=2e-6)
    assert losses(one, "valid_loss")[2] < losses(one, "valid_loss")[1]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen 3 vl", *SLOW])
def test_ranks_compute_the_same_and_resume_with_the_same_bits(family: str, tmp_path: Path) -> None:
    spec = pictured_job(family, tmp_path, 2, target_modules=EVERYWHERE)
    two = trained(spec, tmp_path / "two", 2)
    for world in (1, 3):
        other = trained(spec, tmp_path / str(world), world)
        for column in ("train_loss", "valid_loss"):
            assert losses(other, column) == pytest.approx(losses(two, column), rel=2e-6), world
        for name, expected in adapter(two).items():
            found = adapter(other)[name]
            assert (found - expected).norm() <= 1e-3 * expected.norm(), name
    run = RunDir(shutil.copytree(two.root, tmp_path / "resumed"))
    names = sorted(complete_checkpoints(run))
    for later in names[1:]:
        shutil.rmtree(run.path(f"checkpoints/{later}"))
    shutil.rmtree(run.path("adapter"))
    assert run_attempt(run, 2, 2, names[0]).kind == "succeeded"
    for name, expected in adapter(two).items():
        assert torch.equal(adapter(run)[name], expected), name


@pytest.mark.slow
def test_a_tower_without_pictures_to_look_at_is_refused(tmp_path: Path) -> None:
    spec = pictured_job("qwen 3 vl", tmp_path, 1, target_modules=["q_proj", "qkv"])
    chats = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]
    path = tmp_path / "text.jsonl"
    path.write_text(4 * (json.dumps({"messages": chats}) + "\n"))
    data = DataFileRef(name=path.name, path=str(path), sha256=sha256_of(path))
    changes = {"training_data": data, "validation_data": None}
    with pytest.raises(AssertionError, match="a layer of the base's tower, and no sample has"):
        trained(spec.model_copy(update=changes), tmp_path / "run", 1)
