from __future__ import annotations

from pathlib import Path

from ft_service.plan.machines import machine_of_model
from ft_service.plan.plan_text import summary
from tests.support.plans import plan_8b


def test_a_gpu_that_is_not_in_the_table_is_not_judged(tmp_path: Path) -> None:
    plan = plan_8b(tmp_path, machine=machine_of_model("NVIDIA Something New"))
    assert (plan.fits, plan.speed, plan.changes) == (None, None, ())
    assert summary(plan).endswith("memory of NVIDIA Something New not known.")
