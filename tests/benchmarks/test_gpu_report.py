"""The report of one GPU, proven on a processor: the harness keeps what it gets, and the sections
run in their smallest form.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import _registry, current_flash_attention_impl
from torch.nn.modules.module import register_module_forward_hook

from benchmarks.bases import Llama
from benchmarks.gpu_report import __main__ as harness
from benchmarks.gpu_report import operators, sections, two_ranks, whole
from benchmarks.gpu_report.arithmetic import Work
from benchmarks.gpu_report.gpu_tests import RowPlugin
from benchmarks.gpu_report.jobs import alone
from benchmarks.gpu_report.packages import COMPARED, NAMES, TESTING, pinned, trim
from benchmarks.gpu_report.peft_speed import Stock, rows_of, steps
from benchmarks.gpu_report.profile import covered
from benchmarks.gpu_report.rows import Row, Rows, SkippedError, append, markdown, read
from benchmarks.gpu_report.sections import PARTS, SECTIONS, Context, Section
from benchmarks.gpu_report.speed_job import (
    TINY,
    TINY_SHAPES,
    Shape,
    base_of,
    job,
    log_normal,
    long_chats,
    shapes_of,
)
from ft_service.data.tokens.tokenize import load_dataset, load_tokenizer
from tests.support.fused_attention import fused_attention
from tests.support.ranks import run_on_ranks
from tests.support.training.models import save_chat_base, save_chats
from workers.attempt.prepared_model import construct
from workers.layers import packed_attention
from workers.quant.rowwise import RowQuantized
from workers.ranks.sharding import make_mesh

ROOT = Path(__file__).parents[2]


def test_the_command_runs_a_section_and_writes_its_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = harness.main(["--device", "cpu", "--tiny", "--only", "ceilings", "--out", str(tmp_path)])
    rows = read(tmp_path / "gpu_report.jsonl")
    assert code == 0, rows
    assert {row.section for row in rows} == {"ceilings"}
    assert next(row for row in rows if row.case == "bf16 matrix product").numbers["tflops"] > 0
    assert (tmp_path / "gpu_report.md").read_text() in capsys.readouterr().out


def test_calls_of_less_than_ten_minutes_are_the_report(tmp_path: Path) -> None:
    assert {name for part in PARTS.values() for name in part} == SECTIONS.keys()
    assert max(sum(SECTIONS[name].seconds for name in part) for part in PARTS.values()) < 600
    results = tmp_path / "rows"
    rows = [
        Row("ceilings", "one", "ok"),
        Row("kernels", "two", "ok"),
        Row("ceilings", "three", "ok"),
    ]
    for row in rows:
        append(results, row)
    harness.keep(results, {"ceilings", "service"})
    assert read(results) == [rows[1]]


def test_a_base_that_memory_has_no_room_for_goes_to_the_disk() -> None:
    assert harness.scratch_in(2**60) is None


def test_lengths_are_spread_and_fill_a_micro_batch() -> None:
    lengths = log_normal(8192)
    assert sum(lengths) == 8192
    assert len(lengths) > 4
    assert max(lengths) > 3 * sorted(lengths)[len(lengths) // 2 - 1]
    shape = Shape(lengths, 2)
    assert shape.length > 8192 / len(lengths), "long samples have more of attention's work"
    forwards = rows_of(shape)
    assert sorted(length for forward in forwards for length in forward) == sorted(lengths)
    assert all(len(forward) * max(forward) <= shape.tokens for forward in forwards)


def test_chats_have_the_lengths_that_are_asked_for(tmp_path: Path) -> None:
    base = save_chat_base(tmp_path / "base")
    lengths = (100, 37, 300)
    samples = load_dataset(
        load_tokenizer(str(base)), long_chats(tmp_path / "chats.jsonl", lengths), max(lengths)
    )
    assert [len(sample.ids) for sample in samples] == list(lengths)


@pytest.mark.slow
def test_the_command_runs_every_section(tmp_path: Path) -> None:
    code = harness.main(["--device", "cpu", "--tiny", "--out", str(tmp_path)])
    rows = read(tmp_path / "gpu_report.jsonl")
    assert code == 0, [row for row in rows if row.status == "failed"]
    assert {row.section for row in rows} == SECTIONS.keys()


@pytest.mark.slow
def test_sections_measure_on_a_processor(tmp_path: Path) -> None:
    names = ["kernels", "speed nf4", "synchronisations"]
    run_on_ranks(sections_on_rank, 1, names, str(tmp_path))
    rows = read(tmp_path / "rows")
    assert list(dict.fromkeys(row.section for row in rows)) == names
    assert not [row for row in rows if row.status == "failed"], rows
    speed = next(row for row in rows if row.section == "speed nf4")
    assert speed.numbers["tokens_per_s"] > 0
    whole = next(
        row for row in rows if row.section == "synchronisations" and "a_step" in row.numbers
    )
    parts = [
        row.numbers["a_step"]
        for row in rows
        if row.section == "synchronisations" and row is not whole
    ]
    assert whole.numbers["a_step"] == pytest.approx(sum(parts))


def test_ranks_are_forked_from_a_server_that_has_not_begun_cuda() -> None:
    """It would begin it by asking whether there is a GPU, unless the server's own environment says
    to ask the driver.
    """
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    assert run_on_ranks(variable_on_rank, 1, name) == ["1"]
    assert harness.environment({}, "cuda")[name] == "1"


def variable_on_rank(rank: int, world: int, name: str) -> str | None:
    return os.environ.get(name)


@pytest.mark.slow
def test_torchao_is_imported_for_the_comparison_alone() -> None:
    program = """
import sys
sys.modules["torchao"] = None
from benchmarks.gpu_report.operators import torchao_rounding
assert "torchao.prototype" not in sys.modules
assert torchao_rounding().__name__ == "triton_fp8_rowwise_2d_scale_and_cast"
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_attention_is_measured_as_another_package_computes_it_and_in_any_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[tuple[str | None, bool]] = []

    def measured(*_: Any) -> dict[str, Any]:
        with packed_attention.deterministic_mode():
            found.append(
                (current_flash_attention_impl(), torch.are_deterministic_algorithms_enabled())
            )
        return {}

    class Registered:
        def remove(self) -> None:
            found.append((None, False))

    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "a stand-in", Registered)
    monkeypatch.setattr(operators, "_packed_attention", measured)
    gpu = torch.device("cuda", 7)
    operators._attention(gpu, (64,), 4, 2, implementation="a stand-in", repeatable=True)
    operators._attention(gpu, (64,), 4, 2, implementation=None, repeatable=False)
    assert found == [("a stand-in", True), (None, False), (None, False)]
    with pytest.raises(SkippedError, match="flash_attn"):
        operators._attention(gpu, (64,), 4, 2, implementation="FA4", repeatable=False)


def test_gradients_that_have_other_bits_the_next_time_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operators, "seconds", lambda act: act() is None or 1.0)
    with fused_attention():
        same = operators._packed_attention(torch.device("cpu"), (16, 32, 16), 4, 2)
        assert same["gradients_have_the_same_bits_again"]
        stock = torch.autograd.grad
        monkeypatch.setattr(
            torch.autograd, "grad", lambda *given: [own + torch.rand(()) for own in stock(*given)]
        )
        assert not operators._packed_attention(torch.device("cpu"), (64,), 4, 2)[
            "gradients_have_the_same_bits_again"
        ]


def test_the_stock_parts_compute_in_bf16(tmp_path: Path) -> None:
    """Their adapters too, which PEFT keeps in fp32: without autocast their products are in fp32,
    several times as slow.
    """
    assert run_on_ranks(adapters_results_on_rank, 1, str(tmp_path)) == [{torch.bfloat16}]


def adapters_results_on_rank(rank: int, world: int, folder: str) -> set[torch.dtype]:
    context = Context(
        "cpu", True, Rows(Path(folder, "rows"), "peft"), Path(folder), Path(folder, "rows")
    )
    stock = Stock("cpu", base_of(context), TINY.vocabulary, "all-linear", quantised=False)
    step_of = steps(stock)
    found = set[torch.dtype]()

    def watch(module: nn.Module, _: Any, result: Any) -> None:
        if isinstance(module, nn.Linear) and module.weight.requires_grad:
            found.add(result.dtype)

    with register_module_forward_hook(watch):
        step_of(shapes_of(context)[0])()
    return found


def sections_on_rank(rank: int, world: int, names: list[str], folder: str) -> None:
    results = Path(folder, "rows")
    for name in names:
        sections.run(name, Context("cpu", True, Rows(results, name), Path(folder), results))


def test_a_whole_model_is_drawn_where_its_file_has_holes(tmp_path: Path) -> None:
    ((files, read, weight, norm),) = run_on_ranks(drawn_on_rank, 1, str(tmp_path))
    assert files < 2**16
    assert read == 0
    assert weight == pytest.approx(whole.DEVIATION, rel=0.1)
    assert norm == (1.0, 1.0)


def drawn_on_rank(
    rank: int, world: int, folder: str
) -> tuple[int, int, float, tuple[float, float]]:
    """Bytes that the base's weights take on disk and that were read; the deviation of a weight, and
    the least and largest of a norm's.
    """
    path = Path(folder)
    context = Context("cpu", True, Rows(path / "rows", "whole"), path, path / "rows")
    base = whole.base_of(context, "small", whole.tiny(whole.MODELS["llama-8b"]).config)
    spec = job(context, TINY_SHAPES[0], "nf4", 1, base=base)
    with alone(), whole.drawn(context.place):
        built = construct(spec, make_mesh("cpu", 1, 1), context.place, warn=lambda text: None)
    assert built.loaded is not None
    weights = dict(built.peft_model.named_parameters())
    weight = next(own.data for name, own in weights.items() if "o_proj.base_layer" in name)
    assert isinstance(weight, RowQuantized)
    norm = next(own for name, own in weights.items() if name.endswith("layernorm.weight"))
    taken = 512 * (base / "model.safetensors").stat().st_blocks
    spread = float(weight.dequantize(torch.float32).std())
    return taken, built.loaded.bytes_read, spread, (float(norm.min()), float(norm.max()))


def test_cases_of_two_ranks_are_jobs_that_a_gpu_takes(tmp_path: Path) -> None:
    data = save_chats(tmp_path / "chats.jsonl", 2)
    for options in two_ranks.CASES.values():
        assert two_ranks.job(tmp_path, data, 2, options).world_size == 2


def test_each_test_on_the_gpu_is_a_row(tmp_path: Path) -> None:
    plugin = RowPlugin(Rows(tmp_path / "rows", "tests"))
    place = ("tests/gpu/test_x.py", 7, "x")
    told: list[tuple[Any, Any, Any]] = [
        ("passed", None, "setup"),
        ("passed", None, "call"),
        ("failed", "assert 1 == 2", "call"),
        ("skipped", ("tests/gpu/test_x.py", 7, "Skipped: needs a CUDA GPU"), "setup"),
    ]
    for outcome, words, when in told:
        report = pytest.TestReport("tests/gpu/test_x.py::x", place, {}, outcome, words, when)
        plugin.pytest_runtest_logreport(report)
    assert [(row.case, row.status, row.note) for row in read(tmp_path / "rows")] == [
        ("test_x.py::x", "ok", ""),
        ("test_x.py::x", "failed", "assert 1 == 2"),
        ("test_x.py::x", "skipped", "Skipped: needs a CUDA GPU"),
    ]


def test_a_section_that_takes_too_long_is_ended_and_named(tmp_path: Path) -> None:
    results = tmp_path / "rows"
    harness.run_section(
        "slow", Section("ceilings", 1e-4), "cpu", True, results, tmp_path, time.monotonic() + 60
    )
    (row,) = read(results)
    assert row.status == "failed"
    assert "after its limit" in row.note


def test_a_section_that_ends_badly_is_a_row_with_its_last_words(tmp_path: Path) -> None:
    results = tmp_path / "rows"
    harness.run_section(
        "unheard of",
        Section("ceilings", 600),
        "cpu",
        True,
        results,
        tmp_path,
        time.monotonic() + 600,
    )
    (row,) = read(results)
    assert (row.status, row.numbers) == ("failed", {"exit_code": 1})
    assert "KeyError: 'unheard of'" in row.note


def test_no_section_is_begun_when_the_minutes_are_over(tmp_path: Path) -> None:
    harness.run_section(
        "late",
        Section("ceilings", 60),
        "cpu",
        True,
        tmp_path / "rows",
        tmp_path,
        time.monotonic() + 1,
    )
    (row,) = read(tmp_path / "rows")
    assert (row.status, row.note) == ("skipped", "the report's minutes are over")


def test_a_section_without_its_packages_is_left_out_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SECTIONS, "ceilings", Section("ceilings", 60, ("torch", "not_installed")))
    sections.run(
        "ceilings",
        Context("cpu", True, Rows(tmp_path / "rows", "ceilings"), tmp_path, tmp_path / "rows"),
    )
    (row,) = read(tmp_path / "rows")
    assert row.status == "skipped"
    assert row.note.startswith("not installed: not_installed; benchmarks/README.md")


def test_other_cases_go_on_when_one_fails(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows", "section")

    def fails() -> dict[str, float]:
        raise ValueError("a reason")

    def lacks() -> dict[str, float]:
        raise SkippedError("no GPU")

    rows.run("first", fails)
    rows.run("second", lacks)
    rows.run("third", lambda: {"ok": False, "apart": 0.5})
    rows.run("fourth", lambda: {"apart": 0.25})
    assert read(tmp_path / "rows") == [
        Row("section", "first", "failed", {}, "ValueError: a reason"),
        Row("section", "second", "skipped", {}, "no GPU"),
        Row("section", "third", "failed", {"apart": 0.5}),
        Row("section", "fourth", "ok", {"apart": 0.25}),
    ]


def test_the_table_stays_one_whatever_is_in_a_cell() -> None:
    table = markdown(
        [Row("a", "x | y", "failed", {"n": 0.123456}, "two\nlines"), Row("b", "z", "ok")]
    )
    assert "1 ok, 1 failed, 0 skipped" in table
    assert "| x \\| y | failed | n 0.1235 | two lines |" in table
    assert table.index("## a") < table.index("## b")


def test_work_is_that_of_the_formula() -> None:
    work = Work.of(Llama(hidden=8, intermediate=20, layers=3, heads=2, vocabulary=50), rank=2)
    linears = 3 * (4 * 64 + 3 * 160)
    adapters = 3 * 2 * (4 * 16 + 3 * 28)
    assert (work.linears, work.head, work.adapters) == (linears, 400, adapters)
    assert work.flops_per_token(10) == 4 * (linears + 400) + 6 * adapters + 6 * 3 * 8 * 10


def test_overlapping_kernels_count_once() -> None:
    assert covered([(5, 6), (0, 2), (1, 3), (1.5, 1.75)]) == 4


IMPORTS = """
import importlib, sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

waiting, there = ["torch", "transformers", "peft", "accelerate", *sys.argv[1:]], set()
while waiting:
    name = canonicalize_name(waiting.pop())
    if name not in there:
        there.add(name)
        try:
            needed = [Requirement(line) for line in requires(name) or []]
        except PackageNotFoundError:
            continue
        waiting += [own.name for own in needed if own.marker is None or own.marker.evaluate({"extra": ""})]
owners = {top: {canonicalize_name(name) for name in names} for top, names in packages_distributions().items()}

class Finder:
    def __init__(self, own):
        self._own = own

    def find_spec(self, name, path=None, target=None):
        of = owners.get(name.partition(".")[0], {"ft-service"})
        return self._own.find_spec(name, path, target) if of & there or "ft-service" in of else None

    def __getattr__(self, name):
        return getattr(self._own, name)

sys.meta_path[:] = [Finder(own) for own in sys.meta_path]
from benchmarks.gpu_report.sections import SECTIONS
for section in SECTIONS.values():
    importlib.import_module(f"benchmarks.gpu_report.{section.module}")
import workers.train
import pytest_timeout
import tests.conftest, tests.gpu.test_memory, tests.gpu.test_one_gpu
"""


@pytest.mark.slow
def test_the_sections_need_no_package_that_is_not_carried() -> None:
    """Beside what an image with PyTorch, transformers, PEFT and accelerate has."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, *NAMES, *TESTING],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_packages_for_another_machine_are_pinned_and_trimmed(tmp_path: Path) -> None:
    wanted = pinned((ROOT / "constraints.txt").read_text())
    assert [line.partition("==")[0] for line in wanted] == [*NAMES, *TESTING, *COMPARED]
    for name in ("cpu", "cuda128", "cuda130", "rocm72"):
        (tmp_path / f"libbitsandbytes_{name}.so").touch()
    with pytest.raises(SystemExit, match="no library for CUDA 999"):
        trim(tmp_path, "999")
    trim(tmp_path, "130")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "libbitsandbytes_cpu.so",
        "libbitsandbytes_cuda130.so",
    ]
