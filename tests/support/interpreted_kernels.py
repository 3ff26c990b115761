"""A training step on a processor with the kernels for GPUs in place, computed by Triton's
interpreter, against the same step without.

For a process with TRITON_INTERPRET=1 (tests/support/triton_programs.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from ft_service.data.tokens.sample import Tokens
from ft_service.spec import JobSpec
from tests.support.training.models import spec_for
from tests.support.training.parity import set_adapters
from tests.support.triton_programs import correct_casts
from workers.base.load import load
from workers.data.batches import make_batch
from workers.layers import dropout, expert_rows, fused
from workers.model import build
from workers.model.probes import Probed
from workers.patches.fused_layers import fuse
from workers.quant import nf4
from workers.training.step import cross_entropies

CPU = torch.device("cpu")
LENGTHS = (11, 14, 2)


CLOSE = 1e-3
"""Largest relative distance of gradients in bf16.

Sums in another order change the last bit of a number in some thousand.
"""


def compare(base: Path, *, packed: bool, close: float = CLOSE, **options: Any) -> Counter[str]:
    """Raise AssertionError if the loss or a gradient is another with the kernels.

    `close`: the largest relative distance. Returns how often each kernel was called.
    """
    options["precision"] = {"compute": "bf16", **options["precision"]}
    spec = spec_for(base, lora={"r": 4, "lora_dropout": 0.1}, **options)
    expected = step(spec, packed=packed)
    with kernels_in_place() as called:
        found = step(spec, packed=packed)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        apart = float((tensor - expected[name]).norm() / expected[name].norm())
        assert apart < close, f"{name}: {apart:.1e}"
    return called


def step(spec: JobSpec, *, packed: bool) -> dict[str, Tensor]:
    """The loss and the gradients of one micro-batch."""
    built = build.build(spec, CPU, Probed(True))
    load(built.peft_model, spec.model.path, seed=0, compute_dtype=torch.bfloat16, device=CPU)
    set_adapters(built.peft_model)
    model = built.peft_model.train()
    generator = np.random.default_rng(0)
    samples = [
        Tokens(generator.integers(0, 64, n, dtype=np.int32), np.ones(n, bool)) for n in LENGTHS
    ]
    loss, _ = cross_entropies(model, make_batch(samples, CPU, [1, 2, 3], packed=packed))
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


@contextmanager
def kernels_in_place() -> Iterator[Counter[str]]:
    """Let tensors on the processor be computed with the kernels while this is entered.

    Yields how often each was called.
    """
    from workers.layers import expert_rows_kernels, fused_kernels, mask_kernel
    from workers.quant import nf4_kernels

    correct_casts(by_way_of_fp16=False)
    called: Counter[str] = Counter()

    def dequantise(parts: nf4.NF4Parts, cols: int, dtype: torch.dtype) -> Tensor:
        return nf4_kernels.dequantised(*parts, nf4.values(CPU), cols, dtype)

    with ExitStack() as stack:
        for module in (expert_rows_kernels, fused_kernels, mask_kernel, nf4_kernels):
            for name in _functions(module):
                stack.enter_context(
                    patch.object(module, name, _counted(getattr(module, name), called))
                )
        stack.enter_context(patch.object(build, "choose_arithmetic", _with_fused_layers))
        for kernel, module in (
            (fused.KERNEL, fused_kernels),
            (expert_rows.KERNEL, expert_rows_kernels),
        ):
            stack.enter_context(patch.object(kernel, "on", partial(_on_the_processor, module)))
        stack.enter_context(patch.object(dropout, "_kept_by_parts", mask_kernel.kept_mask))
        stack.enter_context(patch.object(nf4, "_dequantize_by_parts", dequantise))
        yield called


def _on_the_processor(module: ModuleType, device: torch.device) -> ModuleType | None:
    return module if device == CPU else None


def _with_fused_layers(base: nn.Module, *_: Any) -> build.Arithmetic:
    return build.Arithmetic(fused=str(fuse(base)))


def _functions(module: ModuleType) -> list[str]:
    names = [
        name
        for name, own in vars(module).items()
        if getattr(own, "__module__", None) == module.__name__
    ]
    return [name for name in names if not name.startswith("_")]


def _counted(function: Any, called: Counter[str]) -> Any:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        called[function.__name__] += 1
        return function(*args, **kwargs)

    return call
