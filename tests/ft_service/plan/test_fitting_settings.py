from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ft_service.plan.auto_options import settle_on
from ft_service.plan.fitting_settings import (
    Setting,
    assumed,
    best_setting,
    host_fits,
    is_open,
    ranks_per_sample,
    with_options,
)
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
from tests.support.plans import AUTO, CHATS, MACHINE, made_base, made_job, open_spec


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


H, Q, KV, INNER, V, L, S = 64, 128, 64, 512, 1000, 3, 50
"""Of `made_base`, and tokens of a sample."""
MATRICES = L * (2 * Q * H + 2 * KV * H + 3 * INNER * H)
A = L * 4 * (2 * (Q + H) + 2 * (KV + H) + 3 * (INNER + H))
FLOPS = 4 * (MATRICES + V * H) + 6 * A + 6 * L * S * Q
AGAIN = 2 * MATRICES + 2 * A + 2 * L * S * Q
GATHER = 2 * (2 * V * H + H + 2 * (MATRICES + A))
"""Bytes of the gathers of a micro-batch, layers twice, if adapters have r = 4."""
GPU = Machine("gpu", 100 * GIB, flops=1e12, memory_bandwidth=1e9, link_bandwidth=1e10)


def only_setting(machine: Machine, ranks: int, **options: Any) -> tuple[Setting, bool]:
    """That of a job whose options are given: a step of three samples of each two ranks, in two
    micro-batches of 100 tokens of a rank.
    """
    given: dict[str, Any] = {
        "lora": {"r": 4},
        "precision": {"compute": "bf16", "default": "bf16"},
        "training": {"batch_size": 3 * ranks, "max_length": S, "tokens_per_micro_batch": 100},
    }
    job = made_job(made_base(), ranks, **{**given, **options})
    return best_setting(job.base, job.spec, machine, None)


@pytest.mark.parametrize(
    ("machine", "ranks", "options", "seconds"),
    [
        (GPU, 1, {}, 2 * L * 0.006),
        (GPU, 1, {"distributed": {"activation_checkpointing": "full"}}, 2 * L * 1.35 * 0.006),
        (replace(GPU, flops=1e9), 1, {}, 150 * FLOPS / 1e9 / 0.48),
        (
            replace(GPU, flops=1e9),
            1,
            {"distributed": {"activation_checkpointing": "selective"}},
            150 * 1.08 * FLOPS / 1e9 / 0.48,
        ),
        (
            replace(GPU, flops=1e9),
            1,
            {"distributed": {"activation_checkpointing": "full"}},
            150 * (FLOPS + AGAIN) / 1e9 / 0.48,
        ),
        (
            replace(GPU, flops=1e9),
            1,
            {"method": {"type": "kto"}},
            150 * (FLOPS + 2 * (MATRICES + V * H + A + L * S * Q)) / 1e9 / 0.48,
        ),
        (
            replace(GPU, memory_bandwidth=1e6),
            1,
            {"precision": {"compute": "bf16", "default": "fp8"}},
            150 * FLOPS / 1e12 / 0.48
            + 2 * 2 * (3 * MATRICES + 4 * L * (Q + 2 * KV + H + 2 * INNER + H)) / 1e6,
        ),
        (
            replace(GPU, memory_bandwidth=1e6, shared_memory=True),
            2,
            {},
            150 * FLOPS / 1e12 / 0.48 * 1.03 + 2 * 2 * (GATHER // 2) / 1e6 + 2 * L * 0.002,
        ),
        (replace(GPU, link_bandwidth=1e6), 2, {}, (2 * GATHER // 2 + 4 * A // 2) / (0.8 * 1e6)),
        (
            replace(GPU, link_bandwidth=1e6, shared_memory=True),
            2,
            {"distributed": {"replicate": -1}},
            4 * A / (0.8 * 1e6),
        ),
    ],
)
def test_the_pace_of_a_setting_is_that_of_the_slowest_part_of_its_step(
    machine: Machine, ranks: int, options: dict[str, Any], seconds: float
) -> None:
    setting, fits = only_setting(machine, ranks, **options)
    assert fits
    assert setting.pace == pytest.approx(seconds / 150, rel=1e-9)


def test_a_copy_over_several_hosts_is_gathered_by_their_network() -> None:
    """Of eight ranks on two hosts, or of the four of a host: almost all are embedding and head."""
    fast = replace(GPU, link_bandwidth=1e12, flops=1e30, memory_bandwidth=1e30)
    training = {"batch_size": 8, "max_length": S}
    job = made_job(made_base(vocabulary=10**8), 4, training=training)
    seconds = []
    for copies in (1, 2):
        options = {"distributed.nnodes": 2, "distributed.replicate": copies}
        setting, _ = best_setting(job.base, with_options(job.spec, options), fast, None)
        seconds.append(setting.pace * S)
    outer = 2 * 2 * 10**8 * H
    assert seconds == pytest.approx(
        [7 / 8 * outer / (0.8 * 25e9), 3 / 4 * outer / (0.8 * 1e12)], rel=1e-3
    )


def test_ranks_that_share_samples_wait_for_what_they_exchange() -> None:
    slow = replace(GPU, link_bandwidth=1e6, memory_bandwidth=1e15)
    training = {"batch_size": 3, "max_length": S, "tokens_per_micro_batch": 100}
    shared = {"context_parallel": 2}
    setting, _ = only_setting(slow, 2, training=training, distributed=shared)
    wired = GATHER // 2 + 4 * A // 2
    exchanged = 2 * L * (2 * (2 * Q + 2 * KV) * 75 // 2)
    assert setting.batches.step_tokens == 75
    assert setting.pace == pytest.approx((wired + exchanged) / (0.8 * 1e6) / 75, rel=1e-9)


@pytest.mark.parametrize("unknown", ["flops", "memory_bandwidth", "link_bandwidth"])
def test_without_a_figure_of_the_machine_all_are_usual_ones(unknown: str) -> None:
    slow = Machine("slow", 100 * GIB, flops=1e3, memory_bandwidth=1e3, link_bandwidth=1e3)
    usual = replace(slow, flops=150e12, memory_bandwidth=1e12, link_bandwidth=32e9)
    found, expected, other = (
        only_setting(machine, 2)[0].pace
        for machine in (replace(slow, **{unknown: None}), usual, slow)
    )
    assert found == expected < other


@pytest.mark.parametrize("more", [0, 1])
def test_a_setting_fits_to_the_last_byte(more: int) -> None:
    """Of 0.94 of the memory, and of what a rank may pin of its host's."""
    setting, _ = only_setting(GPU, 1)
    total = setting.rank.total - more
    memory = next(m for m in range(int(total / 0.94), total * 2) if int(m * 0.94) >= total)
    exact = int(memory * 0.94) - total
    machine = replace(GPU, memory=memory)
    smaller, fits = only_setting(machine, 1)
    assert exact == 0
    assert (smaller.rank.total, fits) == (setting.rank.total, more == 0)
    host = replace(setting.rank, host=800 + more)
    assert host_fits(host, setting.spec, replace(GPU, host_memory=1000)) is (more == 0)
    assert host_fits(host, setting.spec, GPU)


def test_of_what_does_not_fit_the_smallest_that_its_host_can_pin_is_taken() -> None:
    options: dict[str, Any] = {"distributed": {"activation_checkpointing": "auto"}}
    tiny = replace(GPU, memory=1000)
    taken = [
        only_setting(replace(tiny, host_memory=host), 1, **options)[0] for host in (2**40, 1000)
    ]
    modes = [one.spec.distributed.activation_checkpointing for one in taken]
    assert modes == ["offload", "full"]
    assert taken[0].rank.total < taken[1].rank.total


@pytest.mark.parametrize(
    ("gpu", "tokens", "step_tokens", "idle"),
    [
        (True, 8192, 10**6, False),
        (True, 8191, 10**6, True),
        (True, 100, 100, False),
        (True, 100, 101, True),
        (False, 2048, 10**6, False),
        (False, 2047, 10**6, True),
    ],
)
def test_settings_of_one_pace_rank_by_gathers_then_work_then_memory(
    gpu: bool, tokens: int, step_tokens: int, idle: bool
) -> None:
    setting, _ = only_setting(GPU, 2)
    batches = replace(setting.batches, tokens=tokens, step_tokens=step_tokens)
    alike = replace(setting, batches=batches, pace=1.02**2.5)
    assert alike.order(gpu) == (2, 2, idle, setting.rank.total)
    assert replace(alike, pace=1.02**3.5).order(gpu)[0] == 3


@pytest.mark.parametrize(
    ("options", "open_options"),
    [
        ({"replicate": "auto", "activation_checkpointing": "auto"}, (2, 1, "none", False)),
        ({"context_parallel": "auto", "compile": "auto"}, (1, 1, "none", False)),
        (
            {"replicate": -1, "activation_checkpointing": "full", "compile": True},
            (-1, 1, "full", True),
        ),
    ],
)
def test_what_is_assumed_of_a_machine_that_is_not_known(
    options: dict[str, Any], open_options: tuple[Any, ...]
) -> None:
    job = spec_on(Path("/made"), 4, distributed={"nnodes": 2, **options})
    found = assumed(job).distributed
    assert (
        found.replicate,
        found.context_parallel,
        found.activation_checkpointing,
        found.compile,
    ) == open_options
