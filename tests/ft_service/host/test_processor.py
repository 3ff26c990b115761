"""The kind of a processor, by which another host's measurements are told apart, and what counts as
slow.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ft_service.host.processor import Products, processor_kind

X86 = (
    "processor\t: {}\nmodel name\t: One\ncpu MHz\t\t: {}\nflags\t\t: fpu avx2 "
    "avx512bw{}\nbugs\t\t: some\n"
)
ARM = (
    "processor\t: 0\nBogoMIPS\t: {}\nFeatures\t: fp asimd{}\nCPU implementer\t: 0x41\nCPU "
    "part\t: {}\n"
)


def kind_of(folder: Path, text: str, **environment: str) -> str:
    (folder / "cpuinfo").write_text(text)
    return processor_kind(folder / "cpuinfo", environment)


def test_a_kind_is_named_by_what_a_processor_can_do_and_may_use(tmp_path: Path) -> None:
    x86 = kind_of(tmp_path, X86.format(0, "2500.1", "") + "\n" + X86.format(1, "2500.1", ""))
    assert kind_of(tmp_path, X86.format(0, "3100.7", "")) == x86, (
        "neither its clock now nor its cores"
    )
    assert kind_of(tmp_path, X86.format(0, "2500.1", ""), LANG="C", OMP_NUM_THREADS="4") == x86
    arm = kind_of(tmp_path, ARM.format("50", "", "0xd0c"))
    others = {
        x86,
        arm,
        kind_of(tmp_path, X86.format(0, "2500.1", " avx512_bf16")),
        kind_of(tmp_path, X86.format(0, "2500.1", ""), ONEDNN_MAX_CPU_ISA="AVX2"),
        kind_of(tmp_path, X86.format(0, "2500.1", ""), ATEN_CPU_CAPABILITY="default"),
        kind_of(tmp_path, ARM.format("50", " bf16", "0xd0c")),
        kind_of(tmp_path, ARM.format("50", "", "0xd40")),
        processor_kind(tmp_path / "absent", {}),
    }
    assert len(others) == 8
    assert kind_of(tmp_path, ARM.format("62", "", "0xd0c")) == arm


@pytest.mark.parametrize(
    ("bf16_flops", "by_onednn", "slow", "by_fp32"),
    [
        (2e10, True, True, True),
        (3e9, False, True, False),
        (9e10, True, False, False),
        (4e11, True, False, False),
    ],
)
def test_bf16_is_slow_if_it_is_clearly_slower_than_fp32(
    bf16_flops: float, by_onednn: bool, slow: bool, by_fp32: bool
) -> None:
    products = Products("", 1e11, bf16_flops, by_onednn)
    assert (products.slow_in_bf16, products.by_fp32) == (slow, by_fp32)
    assert products.ratio == pytest.approx(1e11 / bf16_flops)
