"""What one rank has room for, and how many ranks a longer sample takes: as plans of such jobs say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ft_service.plan.machines import MACHINES
from ft_service.plan.one_rank import PARTS, one_rank_tokens, ranks_for
from ft_service.spec import JobSpec
from tests.support.bases import LLAMA_8B, describe, plan_of, save_base, spec_on

LENGTH = 250_000
MACHINE = replace(MACHINES["RTX-4090"], host_memory=64 * 2**30)


def spec(folder: Path, ranks: int = 1, **training: Any) -> JobSpec:
    auto = dict.fromkeys(("replicate", "activation_checkpointing", "context_parallel"), "auto")
    return spec_on(
        save_base(folder / "8b", LLAMA_8B),
        ranks,
        precision={"default": "nf4"},
        distributed=auto,
        training={"max_length": LENGTH, "batch_size": 1, **training},
    )


def test_the_longest_sample_fits_one_rank_and_the_next_does_not(tmp_path: Path) -> None:
    given = spec(tmp_path)
    base = describe(given.model.path)
    most = one_rank_tokens(base, given, MACHINE)
    assert most is not None
    step = LENGTH // PARTS
    assert most % step == 0
    fits, beyond = (
        plan_of(spec(tmp_path, max_length=length), MACHINE).fits for length in (most, most + step)
    )
    assert (fits, beyond) == (True, False)
    ranks = ranks_for(base, given, MACHINE, most + step)
    assert ranks == 2
    assert plan_of(spec(tmp_path, ranks, max_length=most + step), MACHINE).batches.ranks == 2


def test_where_all_have_room_or_nothing_is_known_there_is_no_such_length(tmp_path: Path) -> None:
    short = spec(tmp_path, max_length=2000)
    base = describe(short.model.path)
    assert one_rank_tokens(base, short, MACHINE) is None
    assert one_rank_tokens(base, spec(tmp_path), replace(MACHINE, memory=None)) is None
    assert one_rank_tokens(base, short, replace(MACHINE, memory=2**30)) == 0, "nor has the base"
    assert ranks_for(base, short, replace(MACHINE, memory=2**28), 100) is None


def test_ranks_that_cannot_share_a_sample_are_no_way_out(tmp_path: Path) -> None:
    given = spec(tmp_path)
    base = describe(given.model.path)
    apart = replace(base, whole_because="layers of mamba mix tokens by more than attention")
    assert ranks_for(apart, given, MACHINE, LENGTH) is None
