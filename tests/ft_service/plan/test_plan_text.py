"""Plans as text: the numbers in it, what is left out, and what of two sentences is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ft_service.plan.job import Module, OptionChange
from ft_service.plan.machines import CPU, machine_of_model
from ft_service.plan.memory import MicroBatches, RankBytes
from ft_service.plan.plan_text import (
    about,
    advice_lines,
    cost_text,
    memory_table,
    modules_table,
    summary,
    time_text,
    verdict,
    work_lines,
)
from ft_service.rundir.engine import SeatSize
from tests.support.plans import plan_8b

MIB = 2**20
RANK = RankBytes(
    base={"nf4": 3 * MIB, "bf16": MIB},
    adapters=5 * MIB,
    gradients=6 * MIB,
    optimizer=7 * MIB,
    gather=8 * MIB,
    accumulation=0,
    activations=9 * MIB,
    activations_by_mode={"none": 90 * MIB, "full": 9 * MIB, "selective": 20 * MIB, "tiled": MIB},
    workspace=10 * MIB,
    workspace_by_mode={},
    host=0,
    host_by_mode={},
    rows=11 * MIB,
    logits=12 * MIB,
    offloaded=False,
)
WIRE = SimpleNamespace(
    total=30 * MIB, exchange=4 * MIB, gathers=3, gather=20 * MIB, reduce=9 * MIB, all_reduce=MIB
)
SEAT = SeatSize(held=2 * MIB, batch=3 * MIB, batch_tokens=8, room=None, gain=None)
BATCHES = MicroBatches(rounds=2, samples=4, length=2048, tokens=8192, step_tokens=16_384)


def plan(**changes: Any) -> Any:
    values = {
        "rank": RANK,
        "wire": WIRE,
        "seat": SEAT,
        "batches": BATCHES,
        "machine": "H100",
        "layout": SimpleNamespace(world=2),
        "memory": 100 * MIB,
        "host_memory": None,
        "ranks_per_host": 1,
        "fits": True,
        "likely": None,
        "speed": None,
        "flops_per_token": 12_340_000_000,
        "changes": (),
        "hints": (),
        "warnings": (),
    }
    return SimpleNamespace(**values | changes)


def test_a_gpu_that_is_not_in_the_table_is_not_judged(tmp_path: Path) -> None:
    plan = plan_8b(tmp_path, machine=machine_of_model("NVIDIA Something New"))
    assert (plan.fits, plan.speed, plan.changes) == (None, None, ())
    assert summary(plan).endswith("memory of NVIDIA Something New not known.")


def test_a_summary_has_the_bytes_of_a_rank_and_of_the_base_in_it() -> None:
    total = RANK.total / MIB
    assert summary(plan()).startswith(f"Plan: at most {total:.2f} MiB per rank on 2 ranks")
    assert "(base 4.00 MiB), fits H100." in summary(plan())
    assert "on 1 rank (" in summary(plan(layout=SimpleNamespace(world=1)))


@pytest.mark.parametrize(
    ("fits", "machine", "begin"),
    [
        (True, "H100", "Fits H100"),
        (False, "H100", "May not fit H100"),
        (True, CPU, "Fits this host"),
        (None, "X", "Memory of X not known"),
    ],
)
def test_a_verdict_says_whether_it_fits_where(fits: bool | None, machine: str, begin: str) -> None:
    assert verdict(plan(fits=fits, machine=machine)).startswith(f"{begin}: at most ")
    assert " of 100.00 MiB usable per rank." in verdict(plan(fits=fits))
    assert " usable" not in verdict(plan(memory=None))
    likely = SimpleNamespace(rank=replace(RANK, activations=0))
    found = verdict(plan(likely=likely))
    assert f"per rank, likely {likely.rank.total / MIB:.2f} MiB." in found


def test_modules_that_differ_in_their_layer_alone_share_a_row() -> None:
    def module(name: str, rows: int = 4, weight_format: Any = "nf4") -> Module:
        return Module(name, "linear", (rows, 2), weight_format, 1024, 512)

    rows = modules_table(
        [
            module("a.0.q"),
            module("head"),
            module("a.1.q"),
            module("a.10.q"),
            module("a.2.q", 8),
            module("a.3.q", weight_format="bf16"),
            module("a.0.k"),
            module("a.1.k"),
        ]
    )
    assert rows == [
        ("a.*.q", "3", "4 x 2", "nf4", "3.00 KiB", "1.50 KiB"),
        ("head", "1", "4 x 2", "nf4", "1.00 KiB", "512 B"),
        ("a.2.q", "1", "8 x 2", "nf4", "1.00 KiB", "512 B"),
        ("a.3.q", "1", "4 x 2", "bf16", "1.00 KiB", "512 B"),
        ("a.*.k", "2", "4 x 2", "nf4", "2.00 KiB", "1.00 KiB"),
    ]


def test_the_table_of_memory_has_what_takes_room_and_what_other_modes_would() -> None:
    table = memory_table(plan())
    assert [row for row in table if not row[0].startswith("total")] == [
        ("base in nf4", "3.00 MiB"),
        ("base in bf16", "1.00 MiB"),
        ("adapters (fp32)", "5.00 MiB"),
        ("gradients", "6.00 MiB"),
        ("optimizer (AdamW)", "7.00 MiB"),
        ("gathered weights", "8.00 MiB"),
        ("micro-batches", "11.00 MiB"),
        ("activations", "9.00 MiB"),
        ("  with activation_checkpointing: none", "90.00 MiB"),
        ("  with activation_checkpointing: selective", "20.00 MiB"),
        ("logits", "12.00 MiB"),
    ]
    assert ("total", f"{RANK.total / MIB:.2f} MiB") in table
    for workspace, name in ((12, "logits"), (13, "backward's workspace")):
        names = dict(memory_table(plan(rank=replace(RANK, workspace=workspace * MIB))))
        assert names[name] == f"{workspace}.00 MiB"
        assert ("logits" in names) != ("backward's workspace" in names)
    away = dict(memory_table(plan(rank=replace(RANK, offloaded=True, teacher=MIB, tower=MIB))))
    assert {name for name in away if name.endswith("(host memory)")} == {
        "base in nf4 (host memory)",
        "base in bf16 (host memory)",
        "teacher (host memory)",
        "adapters (fp32) (host memory)",
        "gradients (host memory)",
        "optimizer (AdamW) (host memory)",
    }
    assert away["image tower (fp32)"] == "1.00 MiB"


def test_changes_come_before_hints_and_warnings() -> None:
    changes = (
        OptionChange({"a": 1, "b": "x"}, 2 * MIB, fits=True),
        OptionChange({"c": 2}, 3 * MIB, fits=False),
    )
    assert list(advice_lines(plan(changes=changes, hints=("hint",), warnings=("w",)))) == [
        "  with a: 1, b: x: 2.00 MiB per rank, fits",
        "  with c: 2: 3.00 MiB per rank, does not fit",
        "hint",
        "Warning: w",
    ]


@pytest.mark.parametrize(
    ("steps", "most", "likely", "text"),
    [
        (2, None, None, "2 steps over 9 samples."),
        (
            2,
            120.0,
            None,
            "2 steps over 9 samples take at most about 2 min, if all were training.max_length "
            "tokens long.",
        ),
        (
            1,
            120.0,
            60.0,
            "1 step over 9 samples takes about 1 min (at worst 2 min, if all were as long as the "
            "longest).",
        ),
        (1, 61.0, 60.0, "1 step over 9 samples takes about 1 min."),
    ],
)
def test_a_time_is_said_at_worst_only_where_that_is_another(
    steps: int, most: float | None, likely: float | None, text: str
) -> None:
    time = {"steps": steps, "examples": 9, "seconds_at_most": most, "seconds_likely": likely}
    assert time_text(time) == text


def test_less_than_a_second_is_not_about_one() -> None:
    assert [about(seconds) for seconds in (0.99, 1.0)] == ["less than a second", "about 1 s"]


@pytest.mark.parametrize(
    ("most", "likely", "text"),
    [
        (None, None, None),
        (2.5, None, "That costs at most 2.50 EUR."),
        (2.5, 1.0, "That costs about 1.00 EUR (at worst 2.50 EUR)."),
        (2.5, 2.5, "That costs about 2.50 EUR."),
    ],
)
def test_a_cost_is_said_where_it_is_known(
    most: float | None, likely: float | None, text: str | None
) -> None:
    assert cost_text({"at_most": most, "likely": likely, "currency": "EUR"}) == text
    assert cost_text(None) is None


def lines(**changes: Any) -> list[str]:
    return list(work_lines(plan(**changes)))


def speed(per_second: float) -> Any:
    return SimpleNamespace(tokens_per_second=per_second, copy_seconds=2.0, compute_seconds=60.0)


def test_the_work_of_a_step_is_said_by_what_there_is_of_it() -> None:
    first, wire, arithmetic, seat = lines()
    assert "2 micro-batches of 8,192 tokens" in first
    assert "2,048." in first
    assert wire == (
        "On the wire: 30.00 MiB received per rank and step (3 gathers 20.00 MiB, reductions "
        "10.00 MiB)."
    )
    assert "12.3 GFLOP" in arithmetic
    assert seat == "In an engine: 2.00 MiB per rank, and 3.00 MiB for its micro-batch."
    quiet = SimpleNamespace(**vars(WIRE) | {"total": 0})
    one = replace(BATCHES, rounds=1)
    assert len(lines(wire=quiet, batches=one)) == 3
    assert ": 1 micro-batch of" in lines(batches=one)[0]


def test_ranks_that_share_samples_say_what_they_exchange_and_have_no_seat() -> None:
    found = lines(batches=replace(BATCHES, ranks=2))
    assert found[1].startswith("2 ranks share each sample (distributed.context_parallel)")
    assert "4.00 MiB per rank and step." in found[1]
    assert not any("engine" in line for line in found)
    assert not any("context_parallel" in line for line in lines())


def test_the_speed_is_that_of_usual_samples_where_these_are_known() -> None:
    usual = replace(BATCHES, length=100, rounds=3, tokens=400, step_tokens=300)
    assert [line for line in lines(speed=speed(1234.5)) if "Estimate" in line] == [
        "Estimate on H100: 1,234 tokens/s over all ranks."
    ]
    likely = SimpleNamespace(batches=usual, speed=speed(2000))
    found = lines(speed=speed(1000), likely=likely)
    assert found[1] == "With samples of mean length, 100 tokens: 3 of 300 tokens."
    assert "2,000 tokens/s" in "".join(found)
    likely = SimpleNamespace(batches=replace(usual, step_tokens=500), speed=None)
    found = lines(speed=speed(1000), likely=likely)
    assert ": 3 of 400 tokens." in found[1]
    assert "1,000 tokens/s" in "".join(found)


@pytest.mark.parametrize(
    ("host_memory", "ranks", "speed", "text"),
    [
        (None, 1, None, "20.00 MiB of pinned host memory per rank; whether its host has it"),
        (20, 1, None, "20.00 MiB of pinned host memory per rank of 20.00 MiB that one can pin."),
        (19, 1, None, "per rank, more than the 19.00 MiB that one can pin."),
        (20, 4, None, "per rank, 80.00 MiB on a host of 4 ranks of 20.00 MiB that one can pin."),
        (20, 1, speed(1.0), "A step copies them for 2 s out and as long back, beside 1 min of"),
    ],
)
def test_memory_of_the_host_is_compared_with_what_one_can_pin(
    host_memory: int | None, ranks: int, speed: Any, text: str
) -> None:
    found = lines(
        rank=replace(RANK, host=20 * MIB),
        host_memory=None if host_memory is None else host_memory * MIB,
        ranks_per_host=ranks,
        speed=speed,
    )
    (sentence,) = (line for line in found if line.startswith("Layers' inputs"))
    assert text in sentence


def test_a_seat_says_its_room_and_what_two_gain() -> None:
    seat = replace(SEAT, room=50 * MIB, gain=1.234)
    assert lines(seat=seat)[-1] == (
        "In an engine: 2.00 MiB per rank, and 3.00 MiB for its micro-batch of 50.00 MiB beside the "
        "base; two such jobs at once are 1.2 times as fast as one by one."
    )
    assert "of 0 B beside the base" in lines(seat=replace(SEAT, room=-5))[-1]


def test_of_another_mode_s_bytes_those_that_differ_are_listed_and_empty_rows_are_left_out() -> None:
    by_mode = {"none": 9 * MIB, "full": 8 * MIB, "tiled": 8 * MIB, "offload": 0}
    rank = replace(RANK, activations_by_mode=by_mode, host=3 * MIB, heap_factor=2.0)
    table = memory_table(plan(rank=rank))
    assert [row for row in table if row[0].startswith("  with")] == [
        ("  with activation_checkpointing: full", "8.00 MiB")
    ]
    live = f"{rank.live / MIB:.2f} MiB"
    assert table[-3:] == [
        ("the allocator's gaps", live),
        ("total", f"{2 * rank.live / MIB:.2f} MiB"),
        ("layers' inputs, beside it in pinned host memory", "3.00 MiB"),
    ]
