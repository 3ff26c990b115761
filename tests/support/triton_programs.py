"""Programs that run beside Triton without a GPU, each in a process of its own, since its
interpreter is chosen on its import: forked, as ranks are, from one that has imported the rest.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_on_ranks

TRITON = Path(sys.prefix, "triton")
"""Where `make test` puts Triton if PyTorch has brought none."""


def run_with_triton(program: str, folder: Path, *arguments: str, **environment: str) -> None:
    """Run a program to its end.

    Raises AssertionError with its traceback, or skips the test. `folder`: for what is compiled.
    """
    if importlib.util.find_spec("triton") is None and not (TRITON / "triton").is_dir():
        pytest.skip("Triton is not installed")
    run_on_ranks(
        _run, 1, program, list(arguments), {"TRITON_CACHE_DIR": str(folder), **environment}
    )


def _run(
    rank: int, world: int, program: str, arguments: list[str], environment: dict[str, str]
) -> None:
    """In a process that has imported PyTorch and the workers, and is to import Triton."""
    os.environ.update(environment)
    sys.path.append(str(TRITON))
    sys.argv[1:] = arguments
    exec(compile(program, "<a program beside Triton>", "exec"), {"__name__": "__main__"})


def correct_casts(*, by_way_of_fp16: bool) -> None:
    """Let Triton's interpreter round to the nearest, as GPUs do: for fewer bits it cuts off, or
    rounds up ties and some others. In products it takes the bits of bf16 for whole numbers.

    Called by a program that runs in the interpreter. `by_way_of_fp16`: cast to FP8 as GPUs of
    compute capability 8.9 do.
    """
    import numpy as np
    import torch
    import triton.language as tl  # pyright: ignore[reportMissingImports]
    from triton.runtime import interpreter  # pyright: ignore[reportMissingImports]

    types = {
        tl.float32: torch.float32,
        tl.bfloat16: torch.bfloat16,
        tl.float8e4nv: torch.float8_e4m3fn,
    }
    whole = {1: (torch.uint8, np.uint8), 2: (torch.uint16, np.uint16), 4: (torch.int32, np.uint32)}

    def cast(values: np.ndarray, source: object, target: object, _: object) -> np.ndarray:
        numbers = torch.from_numpy(values.copy().view(np.uint8)).view(types[source])
        if by_way_of_fp16 and types[target] == torch.float8_e4m3fn:
            numbers = numbers.half()
        numbers = numbers.to(types[target])
        bits, shape = whole[numbers.element_size()]
        return numbers.view(bits).numpy().view(shape).reshape(values.shape)

    interpreter._convert_float = cast
    stock = interpreter.InterpreterBuilder.create_dot

    def multiplied(self: object, *given: Any) -> object:
        factors = [
            own.data if own.dtype == tl.float32 else cast(own.data, own.dtype, tl.float32, None)
            for own in given[:2]
        ]
        whole = [
            interpreter.TensorHandle(factor.view(np.float32), tl.float32) for factor in factors
        ]
        return stock(self, *whole, *given[2:])

    interpreter.InterpreterBuilder.create_dot = multiplied
