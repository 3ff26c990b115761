"""Jobs on bases of every family that reads pictures: on any number of ranks, resumed, and with an
adapter that plain PEFT puts on the published class.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from ft_service.rundir.checkpoints import complete_checkpoints
from ft_service.rundir.directory import RunDir
from ft_service.rundir.evaluations import PROBES, Probes
from tests.support.ranks import often_and_slow
from tests.support.training.attempts import adapter, losses, run_attempt, trained
from tests.support.training.pictured_jobs import pictured_job, published_loss, published_probe
from tests.support.training.pictures import WHOLE

NOISY = {"qwen 3.5": 2e-5}
"""Families of recurrences, which round more over longer samples."""
UNCOMPARED = ("smolvlm",)
"""Families of which `published_probe` finds more signs of pictures than pictures."""
BOUND = 1e-6


@pytest.mark.parametrize(
    "family", often_and_slow(sorted(WHOLE), sorted(WHOLE.keys() - {"gemma 3"}))
)
def test_one_rank_and_plain_peft_compute_the_same(family: str, tmp_path: Path) -> None:
    spec = pictured_job(family, tmp_path, 1)
    alone = trained(spec, tmp_path / "one", 1)
    theirs = published_loss(alone, spec)
    assert losses(alone, "valid_loss")[2] == pytest.approx(theirs, rel=NOISY.get(family, 2e-6))
    document = alone.read(PROBES, Probes)
    assert document is not None
    pictured = [own for own in document.probes if own.chat is not None]
    assert len(pictured) == (0 if spec.chat_template else 1)
    if not pictured or family in UNCOMPARED:
        return
    (probe,) = pictured
    tuned, base = published_probe(alone, spec, probe)
    assert probe.tuned == pytest.approx(tuned, abs=2e-4)
    assert probe.base == pytest.approx(base, abs=2e-4)
    assert probe.tuned != pytest.approx(probe.base, abs=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(WHOLE))
def test_ranks_compute_the_same_and_resume_with_the_same_bits(family: str, tmp_path: Path) -> None:
    spec = pictured_job(family, tmp_path, 2)
    two = trained(spec, tmp_path / "two", 2)
    for world in (1, 3):
        other = trained(spec, tmp_path / str(world), world)
        bound = NOISY.get(family, BOUND)
        for column in ("train_loss", "valid_loss"):
            assert losses(other, column) == pytest.approx(losses(two, column), rel=bound), world
    run = RunDir(shutil.copytree(two.root, tmp_path / "resumed"))
    names = sorted(complete_checkpoints(run))
    for later in names[1:]:
        shutil.rmtree(run.path(f"checkpoints/{later}"))
    shutil.rmtree(run.path("adapter"))
    assert run_attempt(run, 2, 2, names[0]).kind == "succeeded"
    for name, expected in adapter(two).items():
        assert torch.equal(adapter(run)[name], expected), name
