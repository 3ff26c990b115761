"""What "auto" stands for: a table of machines, bases and options, and what holds whatever they are."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ft_service.bases.contents import read_contents
from ft_service.bases.described import described
from ft_service.errors import SpecError
from ft_service.plan.base import base_shape
from ft_service.plan.choose import best_setting, is_open
from ft_service.plan.job import plan_job
from ft_service.plan.lengths import Lengths
from ft_service.plan.machines import CPU, GIB, MACHINES, Machine, machine_of_gpu
from ft_service.plan.settle import keep_choices, settle, settle_on
from ft_service.spec import JobSpec
from tests.support.bases import LLAMA_8B, TINY, save_base, save_fp8_index, spec_on

AUTO: dict[str, Any] = {"replicate": "auto", "activation_checkpointing": "auto", "compile": "auto"}
CHATS = Lengths(20_000_000, 40_000, 2048)
"""Of 500 tokens on average."""
LLAMA_70B = {**LLAMA_8B, "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64}
SMALL = {
    **LLAMA_8B,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
BASES = {"70b": LLAMA_70B, "8b": LLAMA_8B, "0.5b": SMALL, "tiny": TINY}
HOST = Machine(CPU, 16 * GIB, 50e9, 10e9, 1e9, shared_memory=True)
MACHINE = {**MACHINES, "cpu": HOST}


def open_spec(folder: Path, base: str, ranks: int = 1, **options: Any) -> JobSpec:
    distributed = {**AUTO, **options.pop("distributed", {})}
    training = {"batch_size": 16 * ranks, "max_length": 2048, **options.pop("training", {})}
    return spec_on(save_base(folder / base, BASES[base]), ranks, distributed=distributed, training=training, **options)


def choices(spec: JobSpec) -> tuple[Any, ...]:
    options = spec.distributed
    return (
        spec.precision.default,
        options.replicate,
        options.activation_checkpointing,
        spec.training.tokens_per_micro_batch,
        options.compile,
    )


@pytest.mark.parametrize(
    ("base", "machine", "ranks", "wanted", "chosen"),
    [
        ("8b", "H200", 1, "bf16", ("bf16", 1, "none", 8192, True)),
        ("8b", "H100", 1, "auto", ("bf16", 1, "none", 8192, True)),
        ("8b", "H100", 4, "nf4", ("nf4", -1, "none", 8192, True)),
        ("8b", "A100-40GB", 1, "nf4", ("nf4", 1, "none", 4096, True)),
        ("8b", "RTX-4090", 1, "bf16", ("bf16", 1, "full", 8192, True)),
        ("8b", "RTX-4090", 4, "bf16", ("bf16", 1, "none", 2048, True)),
        ("8b", "cpu", 1, "auto", ("fp8", 1, "full", 2048, False)),
        ("70b", "H200", 1, "auto", ("fp8", 1, "selective", 2048, True)),
        ("70b", "H100", 2, "auto", ("fp8", 1, "full", 8192, True)),
        ("70b", "H100", 8, "auto", ("bf16", 1, "selective", 3072, True)),
        ("0.5b", "RTX-4090", 8, "bf16", ("bf16", -1, "none", 8192, False)),
        ("tiny", "cpu", 2, "bf16", ("bf16", -1, "none", 2048, False)),
    ],
)
def test_what_is_chosen(base: str, machine: str, ranks: int, wanted: str, chosen: tuple[Any, ...], tmp_path: Path) -> None:
    settled = settle(open_spec(tmp_path, base, ranks, precision={"default": wanted}), MACHINE[machine], CHATS)
    assert choices(settled.spec) == chosen
    assert len(settled.news) == 4 + (wanted == "auto")
    plan = plan_job(settled.spec, MACHINE[machine], CHATS)
    assert plan.fits
    assert settle(settled.spec, MACHINE[machine], CHATS).spec == settled.spec, "the same again: ranks and attempts agree"


@pytest.mark.parametrize("wanted", ["bf16", "auto"])
def test_more_memory_is_never_slower_nor_less_exact(wanted: str, tmp_path: Path) -> None:
    spec = open_spec(tmp_path, "8b", 4, precision={"default": wanted})
    base = base_shape(read_contents(Path(spec.model.path)))
    sizes = [replace(MACHINES["H100"], memory=gib * GIB) for gib in (3, 5, 6, 8, 11, 15, 20, 24, 32, 48, 64, 80, 141, 288)]
    taken = [best_setting(base, spec, machine, CHATS) for machine in sizes]
    exact = ["nf4", "fp8", "bf16"]
    for (less, _), (more, _) in pairwise(taken):
        before, after = exact.index(less.spec.precision.format), exact.index(more.spec.precision.format)
        assert before <= after
        assert before < after or more.pace <= less.pace * 1.02
    fits = [fitting for _, fitting in taken]
    assert fits == sorted(fits)
    assert {fits[0], fits[-1]} == {False, True}


def test_each_option_stays_as_it_is_set(tmp_path: Path) -> None:
    given = {"replicate": 2, "activation_checkpointing": "full", "compile": True}
    spec = open_spec(tmp_path, "8b", 4, distributed=given, training={"tokens_per_micro_batch": 3000})
    assert choices(spec) == choices(settle(spec, MACHINES["H200"], CHATS).spec)
    assert settle(spec, MACHINES["H200"], CHATS).news == ()
    one = settle(open_spec(tmp_path, "8b", 4, distributed={"activation_checkpointing": "full"}), MACHINES["H200"], CHATS)
    assert one.spec.distributed.activation_checkpointing == "full"
    assert one.spec.chosen.keys() == {"distributed.replicate", "training.tokens_per_micro_batch", "distributed.compile"}


ON_SHARDING: dict[str, Any] = {
    "reshard_after_forward": False,
    "keep_unsharded": True,
    "prefetch": {"forward": 2},
    "wrap": "none",
    "offload": True,
    "ignored": [r".*norm\.weight"],
}


@pytest.mark.parametrize("option", ON_SHARDING)
def test_who_says_how_to_shard_is_sharded(option: str, tmp_path: Path) -> None:
    asks = {option: ON_SHARDING[option]}
    assert settle(open_spec(tmp_path, "8b", 2, distributed=asks), MACHINES["H200"]).spec.distributed.replicate == 1


def test_copies_are_one_a_host_or_one_over_all_where_a_host_is_too_small(tmp_path: Path) -> None:
    spec = open_spec(tmp_path, "70b", 4, distributed={"nnodes": 2})
    assert settle(spec, MACHINES["H200"]).spec.distributed.replicate == 2
    assert settle(spec, MACHINES["A100-40GB"]).spec.distributed.replicate == 1


def test_a_micro_batch_is_never_below_the_longest_sample(tmp_path: Path) -> None:
    spec = open_spec(tmp_path, "8b", training={"max_length": 32_768})
    unread, short = (settle(spec, MACHINES["H100"], lengths).spec for lengths in (None, CHATS))
    assert (unread.training.tokens_per_micro_batch, unread.distributed.activation_checkpointing) == (32_768, "full")
    assert (short.training.tokens_per_micro_batch, short.distributed.activation_checkpointing) == (8192, "none")


def test_who_knows_better_chooses_again_but_for_the_format(tmp_path: Path) -> None:
    spec = open_spec(tmp_path, "8b", 4, precision={"default": "auto"}, training={"max_length": 32_768})
    created = settle(spec, replace(MACHINES["RTX-4090"], memory=12 * GIB)).spec
    assert (created.precision.default, created.distributed.replicate) == ("nf4", 1)
    read = settle(created, machine_of_gpu("NVIDIA H100 80GB HBM3", 79 * GIB), CHATS, world=1)
    assert (read.spec.world_size, read.spec.distributed.activation_checkpointing) == (1, "none")
    assert read.spec.precision == created.precision
    assert [sentence.split(":")[0] for sentence in read.news][:2] == [
        "distributed.activation_checkpointing",
        "training.tokens_per_micro_batch",
    ]
    assert settle(created, MACHINES["H200"]).spec == created, "nothing is open, and nothing more is known"
    assert keep_choices(spec, created).precision == created.precision


@pytest.mark.parametrize(
    ("machine", "lengths", "compiled", "why"),
    [
        ("H100", CHATS, True, "training takes about 1 h "),
        ("H100", Lengths(200_000, 400, 2048), False, "too short to win back the minute"),
        ("H100", None, False, "how long training takes is not known"),
        ("H100", Lengths.of_size(10**9), True, "and some 15% less"),
        ("cpu", CHATS, False, "only GPUs gain from it"),
    ],
)
def test_layers_are_compiled_where_that_pays(
    machine: str, lengths: Lengths | None, compiled: bool, why: str, tmp_path: Path
) -> None:
    spec = settle(open_spec(tmp_path, "8b", precision={"default": "nf4"}), MACHINE[machine], lengths).spec
    assert spec.distributed.compile is compiled
    assert why in spec.chosen["distributed.compile"]


@pytest.mark.parametrize(
    ("machine", "chosen", "reason"),
    [
        (MACHINES["H100"], "bf16", "exact, "),
        (Machine("small", 14 * GIB, 50e12, 1e12, 1e10), "fp8", "exact, as the base is published, "),
        (Machine("tiny", 9 * GIB, 50e12, 1e12, 1e10), "nf4", "the most exact format that fits, "),
    ],
)
def test_a_base_in_fp8_by_blocks_is_stored_so_where_bf16_does_not_fit(
    machine: Machine, chosen: str, reason: str, tmp_path: Path
) -> None:
    base = base_shape(described(save_fp8_index(tmp_path, LLAMA_8B)))
    spec = spec_on(tmp_path, distributed=AUTO, precision={"default": "auto"}, training={"max_length": 512})
    settled = settle_on(base, spec, machine, None)
    assert settled.precision.default == chosen
    assert settled.chosen["precision.default"].startswith(reason)


def test_every_choice_says_why_with_numbers(tmp_path: Path) -> None:
    settled = settle(open_spec(tmp_path, "8b", precision={"default": "auto"}), MACHINES["RTX-4090"], CHATS)
    room = "peak 19.50 GiB of 22.18 GiB per rank"
    assert settled.news == (
        f"precision.default: bf16 (exact, {room}).",
        "distributed.replicate: 1 (one rank).",
        "distributed.activation_checkpointing: full (without it 8,192 tokens need 61.92 GiB, more than the 22.18 GiB that there"
        " are).",
        f"training.tokens_per_micro_batch: 8192 ({room}; enough to keep it busy).",
        "distributed.compile: true (training takes about 10 h 4 min, and some 15% less with layers compiled in about a"
        " minute).",
    )


def test_nothing_is_chosen_for_a_machine_that_is_not_known_and_a_format_is_refused(tmp_path: Path) -> None:
    unknown = Machine("some GPU", None)
    spec = open_spec(tmp_path, "tiny", 2)
    assert settle(spec, unknown, CHATS).spec == spec
    assert plan_job(spec, unknown).layout.shard == 2
    with pytest.raises(SpecError, match="memory of some GPU is not known here") as refused:
        settle(open_spec(tmp_path, "tiny", precision={"default": "auto"}), unknown)
    assert refused.value.param == "precision.default"


def test_a_gpu_without_figures_is_chosen_for_by_its_memory(tmp_path: Path) -> None:
    settled = settle(open_spec(tmp_path, "8b", precision={"default": "nf4"}), machine_of_gpu("Something New", 20 * GIB), CHATS)
    assert not any(is_open(settled.spec, option) for option in settled.spec.chosen)
    assert plan_job(settled.spec, machine_of_gpu("Something New", 20 * GIB), CHATS).fits


def test_samples_are_no_longer_than_the_base_was_made_for(tmp_path: Path) -> None:
    unsaid = spec_on(save_base(tmp_path / "tiny"), distributed=AUTO)
    settled = settle(unsaid, HOST)
    assert settled.spec.training.max_length == 128
    assert settled.news[0] == "training.max_length: 128 (limited by the base's context of 128; the default is 2,048)."
    assert settle(settled.spec, MACHINES["H100"], CHATS, world=2).spec.training.max_length == 128
    assert settle(unsaid, machine_of_gpu("unknown", 0)).spec.training.max_length == 128
    said = open_spec(tmp_path, "tiny", training={"max_length": 4096})
    assert settle(said, HOST).spec.training.max_length == 4096
    assert settle(spec_on(save_base(tmp_path / "8b", LLAMA_8B)), HOST).spec.training.max_length == 2048
    begun = unsaid.model_copy(update={"training": unsaid.training.model_copy(update={"max_length": 2048})})
    assert settle(keep_choices(unsaid, begun), HOST).spec.training.max_length == 2048, "its samples are those it began with"
