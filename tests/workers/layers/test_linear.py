"""The LoRA layer as one function: against its formula in plain operations, on every storage,
watched or not.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from workers.layers import linear as lora_linear
from workers.layers.dropout import Dropping
from workers.layers.linear import FrozenLinear, Joint, LoraLinear
from workers.model.peft_adapter import Update
from workers.quant import frozen_linear
from workers.quant.weights import QUANTIZED

ROWS = 40
COLS = 72
R = 5
FORMATS = ["bf16", *QUANTIZED]


class Watching(TorchDispatchMode):
    """Looks at operators, as selective checkpointing does."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


def layer(
    stored: str, *, bias: bool, dtype: torch.dtype = torch.float32, rows: int = ROWS, r: int = R
) -> tuple[LoraLinear, Tensor]:
    """A layer with fp32 adapters, and its frozen weight as a dense one.

    Its scale is no power of two.
    """
    torch.manual_seed(rows)
    linear = nn.Linear(COLS, rows, bias=bias, dtype=dtype)
    dense = linear.weight.detach()
    if stored in QUANTIZED:
        kind = QUANTIZED[stored]  # pyright: ignore[reportArgumentType]
        frozen = FrozenLinear.on_meta(linear, kind)
        weight: Any = kind.quantize(dense)
        frozen.weight = nn.Parameter(weight, requires_grad=False)
        dense = weight.dequantize()
        linear = frozen
    config = LoraConfig(r=r, lora_alpha=7, target_modules=["0"])
    config._register_custom_module({nn.Linear: LoraLinear})
    adapted: Any = get_peft_model(
        nn.Sequential(linear), config, autocast_adapter_dtype=True
    ).base_model.model[0]  # pyright: ignore
    assert isinstance(adapted, LoraLinear)
    nn.init.normal_(adapted.lora_B["default"].weight)  # pyright: ignore[reportArgumentType]
    return adapted, dense


def by_formula(adapted: LoraLinear, dense: Tensor, x: Tensor) -> Tensor:
    a, b = (matrices["default"].weight for matrices in (adapted.lora_A, adapted.lora_B))
    base: Any = adapted.base_layer
    down = F.linear(x, a.to(x.dtype))  # pyright: ignore[reportArgumentType, reportCallIssue]
    return F.linear(x, dense, base.bias) + F.linear(down, b.to(x.dtype)) * (7 / len(a))  # pyright: ignore[reportArgumentType, reportCallIssue]


def by_gpus(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Let frozen products be added to the adapters' parts, as on GPUs.

    The list takes the weights that they are made with.
    """
    weights: list[Tensor] = []

    def dense(x: Tensor, parts: Any, call: Any) -> Tensor | None:
        found = frozen_linear.multiplied(parts, call.stored_as, call.cols, x.dtype)
        assert found is not None
        weights.append(found)
        return found

    monkeypatch.setattr(lora_linear, "_added_later", dense)
    return weights


@pytest.mark.parametrize("how", ["", "watched", "as on GPUs"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("stored", FORMATS)
def test_a_lora_linear_is_its_formula_with_its_gradients(
    stored: str, bias: bool, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapted, dense = layer(stored, bias=bias)
    if how == "as on GPUs":
        by_gpus(monkeypatch)
    x = torch.randn(2, 6, COLS, requires_grad=True)
    inputs = (x, *(p for p in adapted.parameters() if p.requires_grad))
    assert len(inputs) == 3
    expected = by_formula(adapted, dense, x)
    kept = x.detach().clone()
    with Watching() if how == "watched" else nullcontext():
        y = adapted(x)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    y.mul_(2)  # Falcon and Gemma 3n write into what a layer returns
    expected = expected * 2
    grad = torch.randn(6, 2, ROWS).transpose(0, 1)  # not contiguous
    for found, right in zip(
        torch.autograd.grad(y, inputs, grad),
        torch.autograd.grad(expected, inputs, grad),
        strict=True,
    ):
        # fp32 sums in another order, on some processors.
        torch.testing.assert_close(found, right, rtol=1e-5, atol=4e-5)
    assert torch.equal(x, kept)


@pytest.mark.parametrize("stored", ["bf16", "nf4"])
def test_dropout_is_the_same_as_on_gpus(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adapted, _ = layer(stored, bias=True)
    adapted.train()
    adapted.dropping = Dropping(0.3, "a.module")
    adapted.dropping.use(torch.arange(12, dtype=torch.int32).view(2, 6))
    inputs = (
        torch.randn(2, 6, COLS, requires_grad=True),
        *(p for p in adapted.parameters() if p.requires_grad),
    )
    grad = torch.randn(2, 6, ROWS)
    results = []
    for by_gpu in (False, True):
        weights = by_gpus(monkeypatch) if by_gpu else []
        y = adapted(inputs[0])
        results.append([y, *torch.autograd.grad(y, inputs, grad)])
        assert len(weights) == 2 * by_gpu, "one in forward and one in backward"
    for here, there in zip(*results, strict=True):
        torch.testing.assert_close(there, here, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("by_gpu", [False, True], ids=["", "as on GPUs"])
@pytest.mark.parametrize("stored", [("bf16",) * 3, ("nf4", "bf16", "fp8")], ids=["bf16", "mixed"])
def test_layers_with_one_input_are_their_formulas(
    stored: tuple[str, ...], by_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = ((ROWS, 5), (24, 3), (8, 5))
    made = [
        layer(own, bias=rows != 8, rows=rows, r=r)
        for own, (rows, r) in zip(stored, sizes, strict=True)
    ]
    layers = [adapted for adapted, _ in made]
    Joint(layers)
    if by_gpu:
        by_gpus(monkeypatch)
    x = torch.randn(2, 6, COLS, requires_grad=True)
    inputs = (x, *(p for adapted in layers for p in adapted.parameters() if p.requires_grad))
    assert len(inputs) == 7
    outputs = [adapted(x) for adapted in layers]
    assert len({y.grad_fn for y in outputs}) == 1, "one call has made them all"
    expected = [by_formula(*own, x) for own in made]
    grads = [torch.randn(6, 2, rows).transpose(0, 1) for rows, _ in sizes]
    for y, right in zip(outputs, expected, strict=True):
        torch.testing.assert_close(y, right, rtol=1e-5, atol=1e-5)
    found, right = (torch.autograd.grad(ys, inputs, grads) for ys in (outputs, expected))
    for ours, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=4e-5)


def test_outputs_wait_for_the_layers_of_the_very_input_alone() -> None:
    made = [layer("bf16", bias=True, rows=rows) for rows in (ROWS, 24)]
    (first, second), joint = (
        (adapted for adapted, _ in made),
        Joint([adapted for adapted, _ in made]),
    )
    x = torch.randn(2, 6, COLS)
    other = torch.randn(2, 6, COLS)
    first(x)
    torch.testing.assert_close(second(other), by_formula(*made[1], other))
    torch.testing.assert_close(first(x), by_formula(*made[0], x))
    with torch.no_grad():
        x.mul_(2)
    torch.testing.assert_close(second(x), by_formula(*made[1], x))
    torch.testing.assert_close(first(x), by_formula(*made[0], x))
    assert not joint._waiting
    with torch.inference_mode():
        inference = other.clone()
        torch.testing.assert_close(second(inference), by_formula(*made[1], inference))


def test_an_input_without_a_gradient_costs_no_product_in_backward() -> None:
    adapted, _ = layer("nf4", bias=False)
    y = adapted(torch.randn(2, 6, COLS))
    with Watching() as watching:
        y.sum().backward()
    assert "ft_service.frozen_linear_grad" not in watching.seen
    assert all(p.grad is not None for p in adapted.parameters() if p.requires_grad)


def test_products_are_operators_only_where_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    adapted, _ = layer("nf4", bias=False)
    x = torch.randn(2, 6, COLS, requires_grad=True)
    assert "LoraProduct" in type(adapted(x).grad_fn).__name__
    with Watching() as watching:
        adapted(x).sum().backward()
        adapted.base_layer(x).sum().backward()
    assert (
        watching.seen["ft_service.frozen_linear"]
        == watching.seen["ft_service.frozen_linear_grad"]
        == 2
    )
    assert "bitsandbytes.dequantize_4bit" not in watching.seen, "they are not read"
    monkeypatch.setattr(frozen_linear, "_operator", None)
    adapted(x).sum().backward()


@pytest.mark.parametrize("stored", FORMATS)
def test_masters_get_fp32_gradients_and_bf16_inputs_are_kept_as_they_are(stored: str) -> None:
    adapted, dense = layer(stored, bias=True, dtype=torch.bfloat16)
    x = torch.randn(2, 6, COLS, dtype=torch.bfloat16, requires_grad=True)
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        y = adapted(x)
    torch.testing.assert_close(y, by_formula(adapted, dense, x), rtol=2e-2, atol=2e-2)
    y.sum().backward()
    assert {p.grad.dtype for p in adapted.parameters() if p.grad is not None} == {torch.float32}
    assert [t.data_ptr() for t in saved if t.shape == x.shape] == [x.data_ptr()]
    wide = [t for t in saved if t.shape == (ROWS, COLS) and t.dtype.itemsize > 1]
    assert len(wide) == (stored == "bf16"), "of a weight its storage"


def test_dora_of_a_row_of_zeros_is_lora_and_that_of_the_others_is_pefts() -> None:
    """PEFT divides 0 by 0 there (huggingface/peft#3237), so that it has a layer without the row."""
    adapted, dense = layer("bf16", bias=False)
    others = torch.arange(ROWS) != 2
    with torch.no_grad():
        dense[2] = 0
        adapted.lora_B["default"].weight.zero_()  # pyright: ignore[reportCallIssue]
    adapted.add_magnitude()
    adapted.begin_magnitude(torch.float32, slice(None))
    rest = nn.Linear(COLS, ROWS - 1, bias=False)
    rest.weight = nn.Parameter(dense[others])
    config = LoraConfig(r=R, lora_alpha=7, target_modules=["0"], use_dora=True)
    theirs: Any = get_peft_model(nn.Sequential(rest), config).base_model.model[0]  # pyright: ignore
    theirs.lora_A["default"].weight.data.copy_(adapted.lora_A["default"].weight)  # pyright: ignore[reportArgumentType]
    x = torch.randn(5, COLS)
    factors = torch.randn(5, ROWS)
    for changed in (False, True):
        if changed:  # all rows but that one
            b = torch.randn(ROWS, R).masked_fill(~others[:, None], 0)
            adapted.lora_B["default"].weight.data.copy_(b)  # pyright: ignore[reportCallIssue]
            theirs.lora_B["default"].weight.data.copy_(b[others])
            adapted.zero_grad()
            theirs.zero_grad()
        y = adapted(x)
        expected = theirs(x)
        assert torch.allclose(y[:, others], expected, atol=1e-5)
        assert not y[:, 2].any()
        (y * factors).sum().backward()
        (expected * factors[:, others]).sum().backward()
        for part in (adapted.lora_A, adapted.lora_B, adapted.lora_magnitude_vector):
            own: Any = part["default"].weight.grad
            own = own[others] if len(own) == ROWS else own
            name = next(
                n
                for n in ("lora_A", "lora_B", "lora_magnitude_vector")
                if getattr(adapted, n) is part
            )
            assert torch.allclose(own, getattr(theirs, name)["default"].weight.grad, atol=1e-4), (
                name
            )
        of_row: Any = adapted.lora_B["default"].weight.grad
        assert of_row[2].any(), "it is learned"
    update = Update(torch.zeros(R, COLS), torch.zeros(ROWS, R), 1.0, dense.norm(dim=1))
    assert torch.allclose(update.rows(dense, 0, ROWS), dense)
