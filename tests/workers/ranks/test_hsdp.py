"""Copies of the sharded model: replicate × shard."""

from __future__ import annotations

from pathlib import Path

import pytest

from ft_service.spec import JobSpec
from tests.support.ranks import Cases, often_and_slow
from tests.support.training.models import save_tiny_llama, spec_for
from tests.support.training.parity import MIXED, Step, assert_parity, reference_steps, train_steps

UNEVEN: dict[str, object] = {"vocab_size": 259, "intermediate_size": 203}


CASES: dict[str, tuple[int, int, dict[str, object]]] = {
    "2x2": (4, 2, {}),
    "2x1": (2, 2, {}),
    "all by one": (3, -1, UNEVEN),
    "2x1 tied": (2, 2, {"tie_word_embeddings": True}),
}
"""Beside those of tests/workers/test_parity_matrix.py, which have rows that do not divide."""
SLOW = ("2x1",)
"""The same with tied embeddings has more."""


def job(base: Path, case: str) -> JobSpec:
    world, replicate, changes = CASES[case]
    return spec_for(
        save_tiny_llama(base, **changes),
        ranks=world,
        precision={**MIXED, "compute": "fp32"},
        training={"per_device_train_batch_size": 2},
        distributed={"replicate": replicate},
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Cases[list[Step]]:
    specs = {case: job(tmp_path_factory.mktemp("base"), case) for case in CASES}
    return Cases(train_steps, specs, SLOW)


@pytest.mark.parametrize("case", often_and_slow(CASES, SLOW))
def test_loss_and_gradients_equal_the_unsharded_reference(
    case: str, trained: Cases[list[Step]]
) -> None:
    spec, of_ranks = trained.of(case)
    truth = reference_steps(Path(spec.model.path), spec)
    for steps in of_ranks:
        assert_parity(steps, truth)
        kinds = [kind for kind, *_ in steps[0].collectives]
        if spec.world_size == 4:
            assert kinds.count("reduce") == 2, "one reduce-scatter per layer inside a copy"
            assert kinds.count("allreduce") == 2 + 1, (
                "one all-reduce per layer between the copies, and the sums of the step"
            )
        else:
            assert kinds == ["allreduce"] * 2, (
                "all gradients in one all-reduce, nothing gathered; and the sums of the step"
            )
