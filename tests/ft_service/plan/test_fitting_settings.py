from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ft_service.plan.auto_options import settle_on
from ft_service.plan.fitting_settings import best_setting, is_open, ranks_per_sample
from ft_service.plan.machines import GIB, MACHINES, Machine, machine_of_gpu
from ft_service.spec import JobSpec
from tests.support.bases import (
    LLAMA_8B,
    describe,
    plan_of,
    save_base,
    save_fp8_index,
    settle_for,
    spec_on,
)
from tests.support.plans import AUTO, CHATS, MACHINE, open_spec


def choices(spec: JobSpec) -> tuple[Any, ...]:
    options = spec.distributed
    return (
        spec.precision.default,
        options.replicate,
        options.activation_checkpointing,
        spec.training.tokens_per_micro_batch,
        options.compile,
    )


ON_SHARDING: dict[str, Any] = {
    "reshard_after_forward": False,
    "keep_unsharded": True,
    "prefetch": {"forward": 2},
    "wrap": "none",
    "offload": True,
    "ignored": [r".*norm\.weight"],
}


@pytest.mark.parametrize(
    ("base", "machine", "ranks", "wanted", "chosen"),
    [
        ("8b", "H200", 1, "bf16", ("bf16", 1, "none", 8192, False)),
        ("8b", "H100", 1, "auto", ("bf16", 1, "none", 8192, False)),
        ("8b", "H100", 4, "nf4", ("nf4", -1, "none", 8192, False)),
        ("8b", "A100-40GB", 1, "nf4", ("nf4", 1, "none", 4096, False)),
        ("8b", "RTX-4090", 1, "bf16", ("bf16", 1, "full", 8192, False)),
        ("8b", "RTX-4090", 4, "bf16", ("bf16", 1, "none", 3072, False)),
        ("8b", "cpu", 1, "auto", ("fp8", 1, "full", 2048, False)),
        ("70b", "H200", 1, "auto", ("fp8", 1, "none", 2048, False)),
        ("70b", "H100", 2, "auto", ("fp8", 1, "full", 8192, False)),
        ("70b", "H100", 8, "auto", ("bf16", 1, "none", 2048, False)),
        ("0.5b", "RTX-4090", 8, "bf16", ("bf16", -1, "none", 8192, False)),
        ("tiny", "cpu", 2, "bf16", ("bf16", -1, "none", 2048, False)),
    ],
)
def test_what_is_chosen(
    base: str, machine: str, ranks: int, wanted: str, chosen: tuple[Any, ...], tmp_path: Path
) -> None:
    settled = settle_for(
        open_spec(tmp_path, base, ranks, precision={"default": wanted}), MACHINE[machine], CHATS
    )
    assert choices(settled.spec) == chosen
    assert len(settled.news) == 4 + (wanted == "auto")
    plan = plan_of(settled.spec, MACHINE[machine], CHATS)
    assert plan.fits
    assert settle_for(settled.spec, MACHINE[machine], CHATS).spec == settled.spec, (
        "the same again: ranks and attempts agree"
    )


@pytest.mark.parametrize("wanted", ["bf16", "auto"])
def test_more_memory_is_never_slower_nor_less_exact(wanted: str, tmp_path: Path) -> None:
    spec = open_spec(tmp_path, "8b", 4, precision={"default": wanted})
    base = describe(spec.model.path)
    sizes = [
        replace(MACHINES["H100"], memory=gib * GIB)
        for gib in (3, 5, 6, 8, 11, 15, 20, 24, 32, 48, 64, 80, 141, 288)
    ]
    taken = [best_setting(base, spec, machine, CHATS) for machine in sizes]
    exact = ["nf4", "fp8", "bf16"]
    for (less, _), (more, _) in pairwise(taken):
        before = exact.index(less.spec.precision.format)
        after = exact.index(more.spec.precision.format)
        assert before <= after
        assert before < after or more.pace <= less.pace * 1.02
    fits = [fitting for _, fitting in taken]
    assert fits == sorted(fits)
    assert {fits[0], fits[-1]} == {False, True}


def test_each_option_stays_as_it_is_set(tmp_path: Path) -> None:
    given = {"replicate": 2, "activation_checkpointing": "full", "compile": True}
    spec = open_spec(
        tmp_path, "8b", 4, distributed=given, training={"tokens_per_micro_batch": 3000}
    )
    assert choices(spec) == choices(settle_for(spec, MACHINES["H200"], CHATS).spec)
    assert settle_for(spec, MACHINES["H200"], CHATS).news == ()
    one = settle_for(
        open_spec(tmp_path, "8b", 4, distributed={"activation_checkpointing": "full"}),
        MACHINES["H200"],
        CHATS,
    )
    assert one.spec.distributed.activation_checkpointing == "full"
    assert one.spec.chosen.keys() == {
        "precision.default",
        "distributed.replicate",
        "training.tokens_per_micro_batch",
        "distributed.compile",
    }


@pytest.mark.parametrize("option", ON_SHARDING)
def test_who_says_how_to_shard_is_sharded(option: str, tmp_path: Path) -> None:
    asks = {option: ON_SHARDING[option]}
    assert (
        settle_for(
            open_spec(tmp_path, "8b", 2, distributed=asks), MACHINES["H200"]
        ).spec.distributed.replicate
        == 1
    )


def test_copies_are_one_a_host_or_one_over_all_where_a_host_is_too_small(tmp_path: Path) -> None:
    spec = open_spec(tmp_path, "70b", 4, distributed={"nnodes": 2})
    assert settle_for(spec, MACHINES["H200"]).spec.distributed.replicate == 2
    assert settle_for(spec, MACHINES["A100-40GB"]).spec.distributed.replicate == 1


def test_a_micro_batch_is_never_below_the_longest_sample(tmp_path: Path) -> None:
    spec = open_spec(tmp_path, "8b", training={"max_length": 32_768})
    unread, short = (settle_for(spec, MACHINES["H100"], lengths).spec for lengths in (None, CHATS))
    assert (
        unread.training.tokens_per_micro_batch,
        unread.distributed.activation_checkpointing,
    ) == (32_768, "full")
    assert (short.training.tokens_per_micro_batch, short.distributed.activation_checkpointing) == (
        8192,
        "none",
    )


@pytest.mark.parametrize(
    ("machine", "chosen", "reason"),
    [
        (MACHINES["H100"], "bf16", "exact, "),
        (
            Machine("small", 14 * GIB, 50e12, 1e12, 1e10),
            "as_published",
            "exact, as the base is published, ",
        ),
        (Machine("tiny", 9 * GIB, 50e12, 1e12, 1e10), "nf4", "the most exact format that fits, "),
    ],
)
def test_a_base_in_fp8_by_blocks_is_stored_so_where_bf16_does_not_fit(
    machine: Machine, chosen: str, reason: str, tmp_path: Path
) -> None:
    base = describe(save_fp8_index(tmp_path, LLAMA_8B))
    spec = spec_on(
        tmp_path, distributed=AUTO, precision={"default": "auto"}, training={"max_length": 512}
    )
    settled = settle_on(base, spec, machine, None)
    assert settled.precision.default == chosen
    assert settled.chosen["precision.default"].startswith(reason)


def test_a_gpu_without_figures_is_chosen_for_by_its_memory(tmp_path: Path) -> None:
    settled = settle_for(
        open_spec(tmp_path, "8b", precision={"default": "nf4"}),
        machine_of_gpu("Something New", 20 * GIB),
        CHATS,
    )
    assert not any(is_open(settled.spec, option) for option in settled.spec.chosen)
    assert plan_of(settled.spec, machine_of_gpu("Something New", 20 * GIB), CHATS).fits


@pytest.mark.parametrize(
    ("ranks", "distributed", "numbers"),
    [
        (6, {}, [1, 2, 3, 6]),
        (4, {"nnodes": 2}, [1, 2, 4]),
        (8, {"context_parallel": 4}, [4]),
    ],
)
def test_as_many_ranks_may_share_a_sample_as_divide_a_host_s(
    ranks: int, distributed: dict[str, Any], numbers: list[int], tmp_path: Path
) -> None:
    options = {"context_parallel": "auto", **distributed}
    spec = spec_on(save_base(tmp_path), ranks, distributed=options)
    assert list(ranks_per_sample(describe(spec.model.path), spec, None)) == numbers
