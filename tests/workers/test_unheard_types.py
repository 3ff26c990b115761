"""Types that do not exist: tuned exactly, or refused with the true reason, without a line that
names them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ft_service.errors import SpecError
from tests.support.training.checks import BOUND, between_ranks, check_worker
from tests.support.training.models import spec_for
from tests.support.training.parity import CPU
from tests.support.training.unheard_types import measure_unheard, save_unheard
from workers.base.load import load
from workers.model.build import build
from workers.training.packing import settle_attention

TUNED = ("unheard_plain", "unheard_experts", "unheard_scaled")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", TUNED)
def test_a_type_that_nobody_has_heard_of_trains_as_its_class_with_plain_peft(
    kind: str, tmp_path: Path
) -> None:
    found = check_worker(save_unheard(kind, tmp_path / "base"), tmp_path)
    assert found.exact, found.faults()
    assert found.packed


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_two_ranks_train_it_as_one(tmp_path: Path) -> None:
    folders = {kind: save_unheard(kind, tmp_path / kind) for kind in TUNED}
    assert not {
        kind: error
        for kind, error in between_ranks(folders, 2, measure_unheard).items()
        if not error <= BOUND
    }


@pytest.mark.filterwarnings("ignore")
def test_one_that_reads_both_ways_is_refused_for_that(tmp_path: Path) -> None:
    folder = save_unheard("unheard_both_ways", tmp_path / "base")
    model = build(
        spec_for(folder, precision={"default": "bf16", "compute": "fp32"}, lora={"r": 2}), CPU
    ).peft_model
    load(model, folder, seed=1, compute_dtype=torch.float32, device=CPU)
    with pytest.raises(
        SpecError, match="unheard_both_ways model whose tokens see those behind them"
    ):
        settle_attention(model, CPU, torch.float32)
