from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ft_service.data.statistics import Measure
from ft_service.errors import SpecError
from ft_service.host.processor import Products, processor_kind, slow_bf16_advice
from ft_service.plan.auto_options import Ranks, is_settled, keep_choices, settle
from ft_service.plan.machines import GIB, MACHINES, Machine, machine_of_gpu, measured
from ft_service.plan.sample_lengths import SampleLengths
from ft_service.spec import DataFileRef
from ft_service.wording import bytes_text
from tests.support.bases import LLAMA_8B, plan_of, save_base, settle_for, spec_on
from tests.support.plans import AUTO, CHATS, HOST, MACHINE, made_base, open_spec, sections


def test_who_knows_better_chooses_again_but_for_the_format(tmp_path: Path) -> None:
    spec = open_spec(
        tmp_path, "8b", 4, precision={"default": "auto"}, training={"max_length": 32_768}
    )
    created = settle_for(spec, replace(MACHINES["RTX-4090"], memory=10 * GIB)).spec
    assert (created.precision.default, created.distributed.replicate) == ("nf4", 1)
    read = settle_for(
        created, machine_of_gpu("NVIDIA H100 80GB HBM3", 79 * GIB), CHATS, Ranks(1, 1)
    )
    assert (read.spec.world_size, read.spec.distributed.activation_checkpointing) == (1, "none")
    assert read.spec.precision == created.precision
    assert [sentence.split(":")[0] for sentence in read.news][:2] == [
        "distributed.activation_checkpointing",
        "training.tokens_per_micro_batch",
    ]
    assert settle_for(created, MACHINES["H200"]).spec == created, (
        "nothing is open, and nothing more is known"
    )
    assert keep_choices(spec, created).precision == created.precision


def test_a_format_that_is_not_given_is_the_most_exact_that_fits(tmp_path: Path) -> None:
    spec = open_spec(tmp_path, "8b", 1, training={"max_length": 4096})
    small = replace(MACHINES["RTX-4090"], memory=12 * GIB)
    chosen = {
        name: settle_for(spec, machine).spec
        for name, machine in (("H200", MACHINES["H200"]), ("small", small))
    }
    assert {name: of.precision.default for name, of in chosen.items()} == {
        "H200": "bf16",
        "small": "nf4",
    }
    assert chosen["H200"].chosen["precision.default"].startswith("exact, peak")
    assert chosen["small"].chosen["precision.default"].startswith("the most exact format that fits")
    unknown = settle_for(spec, Machine("somewhere", None)).spec
    assert (unknown.precision.default, "precision.default" in unknown.chosen) == ("bf16", False)
    given = open_spec(tmp_path, "8b", 1, precision={"default": "bf16"})
    assert settle_for(given, small).spec.precision.default == "bf16"
    for before in chosen.values():
        again = settle_for(keep_choices(spec, before), MACHINES["H200"]).spec
        assert again.precision.default == before.precision.default, "results depend on it"
    earlier = given.model_copy(update={"chosen": {}})  # made where bf16 was the default
    kept = settle_for(keep_choices(spec, earlier), small).spec
    assert kept.precision.default == "bf16"


@pytest.mark.parametrize(
    ("machine", "fused", "lengths", "compiled", "why"),
    [
        ("H100", "off", CHATS, True, "training takes about 59 min"),
        (
            "H100",
            "off",
            SampleLengths(200_000, 400, 2048),
            False,
            "too short to win back the minute",
        ),
        ("H100", "off", None, False, "how long training takes is not known"),
        ("H100", "off", SampleLengths.of_size(10**9), True, "and some 15% less"),
        ("H100", "auto", CHATS, False, "precision.fused_kernels do what compiling would gain"),
        ("cpu", "off", CHATS, False, "only GPUs gain from it"),
    ],
)
def test_layers_are_compiled_where_that_pays(
    machine: str,
    fused: str,
    lengths: SampleLengths | None,
    compiled: bool,
    why: str,
    tmp_path: Path,
) -> None:
    spec = settle_for(
        open_spec(tmp_path, "8b", precision={"default": "nf4", "fused_kernels": fused}),
        MACHINE[machine],
        lengths,
    ).spec
    assert spec.distributed.compile is compiled
    assert why in spec.chosen["distributed.compile"]


def test_every_choice_says_why_with_numbers(tmp_path: Path) -> None:
    settled = settle_for(
        open_spec(tmp_path, "8b", precision={"default": "auto"}), MACHINES["RTX-4090"], CHATS
    )
    room = "peak 19.09 GiB of 22.18 GiB per rank"
    assert settled.news == (
        f"precision.default: bf16 (exact, {room}).",
        "distributed.replicate: 1 (one rank).",
        "distributed.activation_checkpointing: full (without it 8,192 tokens need 50.92 GiB, more "
        "than the 22.18 GiB that there"
        " are).",
        f"training.tokens_per_micro_batch: 8192 ({room}; enough to keep it busy).",
        "distributed.compile: false (precision.fused_kernels do what compiling would gain).",
    )


def test_nothing_is_chosen_for_a_machine_that_is_not_known_and_a_format_is_refused(
    tmp_path: Path,
) -> None:
    unknown = Machine("some GPU", None)
    spec = open_spec(tmp_path, "tiny", 2)
    assert settle_for(spec, unknown, CHATS).spec == spec
    assert plan_of(spec, unknown).layout.shard == 2
    with pytest.raises(SpecError, match="memory of some GPU is not known here") as refused:
        settle_for(open_spec(tmp_path, "tiny", precision={"default": "auto"}), unknown)
    assert refused.value.param == "precision.default"


def test_samples_are_no_longer_than_the_base_was_made_for(tmp_path: Path) -> None:
    unsaid = spec_on(save_base(tmp_path / "tiny"), distributed=AUTO)
    settled = settle_for(unsaid, HOST)
    assert settled.spec.training.max_length == 128
    assert (
        settled.news[0]
        == "training.max_length: 128 (limited by the base's context of 128; the default is 2,048)."
    )
    assert (
        settle_for(settled.spec, MACHINES["H100"], CHATS, Ranks(2, 1)).spec.training.max_length
        == 128
    )
    assert settle_for(unsaid, machine_of_gpu("unknown", 0)).spec.training.max_length == 128
    said = open_spec(tmp_path, "tiny", training={"max_length": 4096})
    assert settle_for(said, HOST).spec.training.max_length == 4096
    data = {"training_data": DataFileRef(name="a.jsonl", path="a.jsonl", sha256="a")}
    specs = (settled.spec, settle_for(said, HOST).spec)
    assert [Measure.of(spec.model_copy(update=data)).at_context for spec in specs] == [
        True,
        False,
    ], "for advice on what is cut"
    assert (
        settle_for(spec_on(save_base(tmp_path / "8b", LLAMA_8B)), HOST).spec.training.max_length
        == 2048
    )
    begun = unsaid.model_copy(
        update={"training": unsaid.training.model_copy(update={"max_length": 2048})}
    )
    assert settle_for(keep_choices(unsaid, begun), HOST).spec.training.max_length == 2048, (
        "its samples are those it began with"
    )


def test_a_processor_that_is_slow_in_bf16_computes_in_fp32_unless_told_otherwise(
    tmp_path: Path,
) -> None:
    products = Products(processor_kind(), fp32_flops=9.4e10, bf16_flops=2e10, by_onednn=True)
    slow = measured(HOST, products)
    unsaid = open_spec(tmp_path, "tiny")
    settled = settle_for(unsaid, slow)
    assert settled.spec.precision.compute == "fp32"
    why = "a product in bf16 takes this processor 4.7 times as long as one in fp32"
    assert f"precision.compute: fp32 ({why})." in settled.news
    nothing_open = spec_on(Path(unsaid.model.path), training={"max_length": 64})
    assert settle_for(nothing_open, slow).spec.precision.compute == "fp32"
    assert settle_for(nothing_open, HOST).spec.precision.compute == "bf16"
    assert (
        settle_for(settled.spec, MACHINES["H100"], CHATS, Ranks(2, 1)).spec.precision.compute
        == "fp32"
    ), "results depend on it"
    assert keep_choices(unsaid, settled.spec).precision.compute == "fp32"
    begun = settle_for(unsaid, HOST).spec
    kept = settle_for(keep_choices(unsaid, begun), slow).spec
    assert kept.precision.compute == "bf16", "a job that began in bf16 continues in it"
    said = spec_on(Path(unsaid.model.path), precision={"compute": "bf16"})
    assert settle_for(said, slow).spec.precision.compute == "bf16"
    assert slow_bf16_advice(products) in plan_of(said, slow).hints
    assert slow_bf16_advice(products) not in plan_of(unsaid, slow).hints
    fast = measured(HOST, replace(products, bf16_flops=8e10))
    assert settle_for(nothing_open, fast).spec.precision.compute == "bf16", "fp32 takes more memory"
    assert slow_bf16_advice(products) not in plan_of(said, fast).hints


def test_the_speed_of_a_processor_is_that_of_its_products_if_they_were_measured(
    tmp_path: Path,
) -> None:
    products = Products(processor_kind(), fp32_flops=9e10, bf16_flops=3e10, by_onednn=True)
    seconds = {}
    for compute in ("fp32", "bf16"):
        spec = spec_on(save_base(tmp_path / "8b", LLAMA_8B), precision={"compute": compute})
        speed = plan_of(spec, measured(HOST, products)).speed
        assert speed is not None
        seconds[compute] = speed.compute_seconds
    assert seconds["bf16"] == pytest.approx(3 * seconds["fp32"])
    elsewhere = replace(products, kind="another")
    assert measured(HOST, elsewhere) == HOST, "measured on another host, which shares the cache"
    assert measured(MACHINES["H100"], products) == MACHINES["H100"]


GPU = Machine("gpu", 100 * GIB, flops=1e12, memory_bandwidth=1e9, link_bandwidth=1e10)
NONE_FITS = replace(GPU, memory=1000)
WEIGHTS = 2 * (2 * 1000 * 64 + 64 + 3 * (2 * 128 * 64 + 2 * 64 * 64 + 3 * 512 * 64))


@pytest.mark.parametrize(
    ("machine", "ranks", "changes", "why"),
    [
        (
            *(GPU, 2, {}),
            {
                "replicate": f"on every rank, {bytes_text(WEIGHTS)}, so that nothing is gathered",
                "context_parallel": "a sample of 200 tokens fits on one rank",
                "activation_checkpointing": ", and fit",
                "tokens_per_micro_batch": "one micro-batch holds the whole step",
            },
        ),
        (
            *(NONE_FITS, 2, {"whole_because": "it mixes"}),
            {
                "context_parallel": "sharing samples does not help",
                "replicate": f"{bytes_text(WEIGHTS // 2)} of the base each: the fastest that fits",
                "activation_checkpointing": "more than the 940 B that there are; 128.00 MiB of "
                "host memory are pinned per rank",
            },
        ),
        (NONE_FITS, 2, {}, {"context_parallel": "least memory for samples of 200 tokens"}),
        (GPU, 1, {}, {"replicate": "one rank"}),
    ],
)
def test_why_a_setting_was_taken(
    machine: Machine, ranks: int, changes: dict[str, Any], why: dict[str, str]
) -> None:
    auto = dict.fromkeys(("replicate", "context_parallel", "activation_checkpointing"), "auto")
    options = sections(max_length=200, batch_size=4, compute="bf16", default="bf16", **auto)
    chosen = settle(made_base(**changes), spec_on(Path("/made"), ranks, **options), machine)
    found = {option.split(".")[1]: reason for option, reason in chosen.spec.chosen.items()}
    for option, text in why.items():
        assert found[option].endswith(text), found


@pytest.mark.parametrize(
    ("lengths", "ranks", "again"),
    [
        (None, None, False),
        (SampleLengths(1000), None, False),
        (SampleLengths(1000, 0), None, False),
        (SampleLengths(1000, 10), None, True),
        (None, Ranks(4, 1), True),
        (None, Ranks(2, 1), False),
    ],
)
def test_what_was_chosen_is_open_again_for_other_ranks_and_counted_samples(
    lengths: SampleLengths | None, ranks: Ranks | None, again: bool
) -> None:
    spec = spec_on(Path("/made"), 2, distributed=AUTO, training={"max_length": 200})
    settled = settle(made_base(), spec, GPU).spec
    assert is_settled(settled, lengths, ranks) is not again
    assert not is_settled(spec, lengths, ranks)
