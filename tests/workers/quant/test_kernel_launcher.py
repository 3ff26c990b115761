"""Launches of Triton's kernels that are made again, beside Triton's own: without a GPU, down to its
driver.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.triton_programs import run_with_triton
from workers.quant import gpu_kernels
from workers.quant.gpu_kernels import AS_WRITTEN, KernelLauncher

SAME_LAUNCHES = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from workers.layers import fused_kernels, low_rank_kernel
from workers.quant import fp8_kernels, gpu_kernels, nf4_kernels

launched, looked = [], []

class Utils:
    def get_device_properties(self, device):
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32, "max_num_regs": 65536}

    def load_binary(self, name, kernel, shared, device):
        return None, (name, hash(kernel)), 32, 0, 1024

class Launcher:
    def __init__(self, source, metadata):
        self.constants = {place: value for (place,), value in source.constants.items()}

    def __call__(self, *given):
        # The grid, the stream, the function and its size; then what profilers want to know, and their hooks.
        tensors = [("tensor", own.data_ptr()) if isinstance(own, torch.Tensor) else (type(own), own) for own in given[9:]]
        launched.append((given[:6], self.constants, tensors))

class Driver:
    utils, launcher_cls = Utils(), Launcher
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device: 7
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)

driver.set_active(Driver())
run = JITFunction.run
JITFunction.run = lambda self, *args, **options: looked.append(self) or run(self, *args, **options)

def tensor(*shape, dtype=torch.bfloat16, offset=0):
    count = torch.Size(shape).numel()
    return torch.empty(count + 16, dtype=dtype)[offset:offset + count].view(shape)

def rows_of(offset, rows, cols, heads=2):
    x, weight, gate = tensor(rows, cols, offset=offset), tensor(cols), tensor(rows, cols, offset=offset)
    root, factors, scales = (tensor(count, dtype=torch.float32) for count in (rows, cols, rows))
    query, key, angles = tensor(1, heads, rows, cols, offset=offset), tensor(1, 1, rows, cols), tensor(1, rows, cols)
    codes = tensor(rows, cols, dtype=torch.float8_e4m3fn, offset=offset)
    nf4 = tensor(rows, 64, dtype=torch.uint8, offset=offset), tensor(rows, 2, dtype=torch.uint8), root, factors, cols
    left, right = tensor(rows, 16, offset=offset), tensor(16, cols)
    return [
        lambda: fused_kernels.normed(x, weight, 1e-6, 0),
        lambda: fused_kernels.normed(x, None, 1e-6, 3),
        lambda: fused_kernels.normed_grad(x, x, weight, root, 0),
        lambda: fused_kernels.rotated(query, key, angles, angles, back=False),
        lambda: fused_kernels.gated(x, gate),
        lambda: fused_kernels.gated_grad(x, x, gate),
        lambda: fp8_kernels.quantise_rows(x, None, codes, scales),
        lambda: fp8_kernels.quantise_rows(x, factors, codes, scales),
        lambda: fp8_kernels.transposed(codes),
        lambda: nf4_kernels.dequantised(*nf4, torch.bfloat16),
        lambda: low_rank_kernel.added(x, left, right, 2.0, ()),
        lambda: low_rank_kernel.added(x, left, right, 2, [gate]),
    ]

launchers = [
    own for module in (fused_kernels, low_rank_kernel, fp8_kernels, nf4_kernels)
    for own in vars(module).values() if isinstance(own, gpu_kernels.KernelLauncher)
]
calls = [call for offset, rows in ((0, 32), (1, 32), (0, 1)) for call in rows_of(offset, rows, 128)]
kept = []  # so that nothing that is made lies where something else did

def forget():
    for launcher in launchers:
        launcher._compiled.clear()

for call in calls:
    forget()
    kept.append(call())
assert len({launch[0][4] for launch in launched}) > 2 * len(launchers), "the calls need kernels compiled for other arguments"

def without_addresses(launches):  # but for whether they are multiples of 16: what a call makes lies elsewhere each time
    return [
        (begin, constants, [(kind, value % 16) if kind == "tensor" else (kind, value) for kind, value in given])
        for begin, constants, given in launches
    ]

expected = without_addresses(launched)
forget()
kept += [call() for call in calls]
looks = len(looked)
launched.clear()
kept += [call() for call in calls]
assert without_addresses(launched) == expected, "a launch that is remembered is another than Triton's"
assert len(looked) == looks, "Triton looked at a launch that was made before"
"""


def test_a_launch_that_was_made_before_is_the_one_that_triton_makes(tmp_path: Path) -> None:
    run_with_triton(SAME_LAUNCHES, tmp_path)


class Kernel:
    """What Triton would be asked for."""

    def __init__(self) -> None:
        self.compiled: list[Any] = []
        self.again: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        def launch(*given: Any, **options: Any) -> Any:
            self.compiled.append((grid, given, options))
            return Compiled(self.again)

        return launch


class Compiled:
    """What it returns, by which a launch is made again."""

    def __init__(self, launched: list[Any]) -> None:
        self._launched = launched

    def __getitem__(self, grid: Any) -> Any:
        return lambda *given: self._launched.append((grid, given))


class Placed:
    """A tensor somewhere in memory."""

    def __init__(self, place: int, dtype: torch.dtype = torch.bfloat16, device: int = 0) -> None:
        self.dtype = dtype
        self.device = torch.device("cuda", device)
        self._place = place

    def data_ptr(self) -> int:
        return self._place


@pytest.mark.parametrize(
    ("other", "numbers", "constants", "warps", "made_anew"),
    [
        (Placed(32), (1.0,), (8,), 4, False),
        (Placed(4096), (1.0,), (8,), 4, False),
        (Placed(40), (1.0,), (8,), 4, True),
        (Placed(32, torch.float32), (1.0,), (8,), 4, True),
        (Placed(32, device=1), (1.0,), (8,), 4, True),
        (Placed(32), (2.0,), (8,), 4, True),
        (Placed(32), (1.0,), (16,), 4, True),
        (Placed(32), (1.0,), (8,), 8, True),
    ],
)
def test_a_kernel_is_compiled_anew_for_what_triton_compiles_it_for(
    other: Any, numbers: Any, constants: Any, warps: int, made_anew: bool
) -> None:
    kernel = Kernel()
    launch = KernelLauncher(kernel)
    first: Any = Placed(64)
    launch((1, 1, 1), [first], (1.0,), 8)
    assert kernel.compiled == [((1, 1, 1), (first, 1.0, 8), {"num_warps": 4, **AS_WRITTEN})]
    launch((2, 1, 1), [other], numbers, *constants, num_warps=warps)
    assert (len(kernel.compiled), len(kernel.again)) == ((2, 0) if made_anew else (1, 1))
    if not made_anew:
        assert kernel.again == [((2, 1, 1), (other, *numbers, *constants))]


def test_a_launcher_remembers_so_many_launches_and_begins_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_kernels, "_MOST_COMPILED", 2)
    kernel = Kernel()
    launch = KernelLauncher(kernel)
    tensors: Any = [Placed(64)]
    for number in (1.0, 2.0, 1.0, 2.0, 3.0, 1.0):
        launch((1, 1, 1), tensors, (number,))
    assert [given[1] for _, given, _ in kernel.compiled] == [1.0, 2.0, 3.0, 1.0]
    assert len(kernel.again) == 2
