"""The fused kernels without a GPU, computed by Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.fused_layers import kernels_of_the_processor
from tests.support.triton_programs import run_with_triton
from workers.layers import fused

COMPUTES = """
import torch
from tests.support.triton_programs import correct_casts
correct_casts(by_way_of_fp16=False)
from workers.layers import fused, fused_kernels

fused._compare(fused_kernels, torch.device("cpu"))
generator = torch.Generator().manual_seed(1)

def drawn(*shape):
    return torch.randn(shape, generator=generator).bfloat16().requires_grad_()

def differences(stock, found, inputs):
    grad = torch.randn(stock.shape, generator=generator).bfloat16()
    pairs = [(stock, found)]
    pairs += zip(*(torch.autograd.grad(y, inputs, grad, retain_graph=True) for y in (stock, found)))
    return [float((a != b).float().mean()) for a, b in pairs]

for form in fused.Form:
    for shape in ((16, 1024), (3, 7, 5, 128), (2, 33), (1, 5000)):
        x, weight = drawn(*shape), None if form is fused.Form.NONE else drawn(shape[-1]).detach()
        found = fused.FusedNorm.apply(x, weight, 1e-6, form, fused_kernels)
        assert max(differences(fused.norm(x, weight, 1e-6, form), found, [x])) <= 1e-3, (form, shape)
for rows, length, heads, keys, width in ((2, 7, 8, 4, 64), (1, 3, 9, 9, 80), (2, 1, 1, 1, 2)):
    query, key = drawn(rows, length, heads, width).transpose(1, 2), drawn(rows, keys, length, width)
    angles = drawn(rows, length, width).detach(), drawn(rows, length, width).detach()
    stock, found = fused.rotate(query, key, *angles), fused.FusedRotation.apply(query, key, *angles, fused_kernels)
    for number, tensor in enumerate((query, key)):
        assert differences(stock[number], found[number], [tensor]) == [0, 0]
        assert found[number].stride() == stock[number].stride()
for shape in ((16, 1000), (1, 1), (3, 5, 1025)):
    factors = [drawn(*shape), drawn(*shape)]
    assert max(differences(fused.gate(*factors), fused.FusedGate.apply(*factors, fused_kernels), factors)) <= 1e-3
empty = drawn(0, 64)
assert fused.FusedNorm.apply(empty, None, 1e-6, fused.Form.NONE, fused_kernels).shape == (0, 64)
assert fused.FusedGate.apply(empty, empty, fused_kernels).shape == (0, 64)
"""


def test_the_fused_kernels_round_where_separate_operations_do(tmp_path: Path) -> None:
    run_with_triton(COMPUTES, tmp_path, TRITON_INTERPRET="1")


def test_kernels_that_compute_something_else_are_not_used() -> None:
    good = kernels_of_the_processor()
    device = torch.device("cpu")
    fused._compare(good, device)
    for name, wrong, said in (
        (
            "normed",
            lambda x, w, eps, form: good.normed(x, w, eps, 2 if form == 1 else form),
            "norm IN_FP32, forward",
        ),
        ("normed_grad", lambda grad, *_: grad, "norm ROUNDED, backward"),
        (
            "rotated",
            lambda q, k, c, s, back: good.rotated(q, k, c, s, back=False),
            "rotation, backward",
        ),
        ("gated", lambda gate, up: gate.sigmoid() * up, "gating, forward"),
        (
            "gated_grad",
            lambda grad, gate, up: good.gated_grad(grad, gate, up)[::-1],
            "gating, backward",
        ),
    ):
        with pytest.raises(AssertionError, match=said):
            fused._compare(SimpleNamespace(**{**vars(good), name: wrong}), device)
