"""Training steps with every kernel for GPUs in place, by Triton's interpreter: each storage format
and kind of norm.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.training.models import save_tiny
from tests.support.triton_programs import run_with_triton
from workers.quant.weights import QUANTIZED

STEP = """
import sys
from pathlib import Path
from tests.support.interpreted_kernels import compare
base, stored, norms, gates, rotations = sys.argv[1:]
for packed in (True, False):
    called = compare(Path(base), packed=packed, precision={"default": stored})
    assert called["normed"] == int(norms) and called["normed_grad"] > 0, called
    assert called["gated"] == called["gated_grad"] == int(gates), called
    assert called["rotated"] == 2 * int(rotations), called
    assert called["kept_mask"] > 0
    assert (called["dequantised"] > 0) == (stored == "nf4"), called
"""


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["bf16", *QUANTIZED])
def test_every_storage_format_trains_as_it_does_without_kernels(
    stored: str, tmp_path: Path
) -> None:
    base = save_tiny("llama", tmp_path / "base", hidden_size=64, intermediate_size=96)
    run_with_triton(STEP, tmp_path, str(base), stored, "5", "2", "2", TRITON_INTERPRET="1")


@pytest.mark.slow
@pytest.mark.parametrize(("family", "norms", "gates"), [("gemma3_text", 13, 0), ("qwen3", 9, 2)])
def test_every_form_of_norm_does(family: str, norms: int, gates: int, tmp_path: Path) -> None:
    base = save_tiny(family, tmp_path / "base")
    run_with_triton(
        STEP, tmp_path, str(base), "bf16", str(norms), str(gates), "2", TRITON_INTERPRET="1"
    )


EXPERTS = """
import sys
from pathlib import Path
from tests.support.interpreted_kernels import compare
called = compare(Path(sys.argv[1]), packed=True, close=3e-2, precision={"default": "bf16"})
assert called["gated_halves"] == called["gated_halves_grad"] == 2, called
assert called["summed"] == 2 + 2 and called["sums_grad"] == 2, called
"""


@pytest.mark.slow
def test_experts_train_as_they_do_without_kernels(tmp_path: Path) -> None:
    """Sums that lie between two numbers of bf16 are rounded up on a processor and to the even one
    by kernels, so that a token may meet another expert in the next layer.
    """
    base = save_tiny("qwen3_moe", tmp_path / "base")
    run_with_triton(EXPERTS, tmp_path, str(base), TRITON_INTERPRET="1")
