"""The layer that rounds base and adapter together, next to autograd through an explicit
straight-through product, and its rounding next to compressed-tensors' own.
"""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from ft_service import kernel_limits
from ft_service.spec import SERVED_FORMS, PrecisionOptions, ServedAs
from workers.layers.linear import FrozenLinear
from workers.layers.served import ServedLinear, first_rounded_step, unrounded
from workers.quant import served_forms
from workers.quant.served_forms import (
    AdapterFactors,
    rounded,
    rounded_rows,
    served_inputs,
    served_weight,
    values_of,
    whole_scale,
)
from workers.quant.weights import QUANTIZED

ROWS, COLS, R, SCALE = 96, 128, 3, 7 / 3
FORMS: tuple[ServedAs, ...] = get_args(ServedAs)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer(form: ServedAs, stored_as: str | None, dtype: torch.dtype) -> tuple[Any, Tensor]:
    """A layer with a bias, and its base as values."""
    weight = (0.05 * drawn(ROWS, COLS)).bfloat16()
    linear = nn.Linear(COLS, ROWS, device="meta", dtype=dtype)
    if stored_as is None:
        linear.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
        values = weight.float()
    else:
        linear = FrozenLinear.on_meta(linear, QUANTIZED[stored_as])  # pyright: ignore
        stored = QUANTIZED[stored_as].quantize(weight)  # pyright: ignore
        linear.weight = nn.Parameter(stored, requires_grad=False)
        values = stored.dequantize(torch.float32)
    linear.bias = nn.Parameter(0.1 * drawn(ROWS, seed=1).to(dtype), requires_grad=False)
    config = LoraConfig(r=R, lora_alpha=7, target_modules=["0"])
    config._register_custom_module({nn.Linear: ServedLinear})
    get_peft_model(model := nn.Sequential(linear), config)  # type: ignore[arg-type]
    (served,) = model
    assert isinstance(served, ServedLinear)
    served.served_as = form
    matrices: Any = (served.lora_A["default"], served.lora_B["default"])
    with torch.no_grad():
        matrices[0].weight.copy_(0.1 * drawn(R, COLS, seed=2))
        matrices[1].weight.copy_(0.1 * drawn(ROWS, R, seed=3))
    return served, values


def rounding(rows: Tensor, form: ServedAs) -> Tensor:
    """The values of a form, written down once more."""
    group = SERVED_FORMS[form].group
    if form in ("nvfp4", "mxfp4"):
        return fp4_values(rows, form, group)
    if form == "int8":
        scale = rows.abs().amax(1, keepdim=True) / 127.5
        return (rows * (1 / scale)).round().clamp(-128, 127) * scale
    if not group:
        scale = (rows.abs().amax(1, keepdim=True) / 448).bfloat16().float()
        return (rows / scale).to(torch.float8_e4m3fn).float() * scale
    grouped = rows.view(rows.shape[0], -1, group)
    scale = (grouped.abs().amax(2, keepdim=True) / 7.5).bfloat16().float()
    return ((grouped / scale).round().clamp(-8, 7) * scale).view_as(rows)


def fp4_values(rows: Tensor, form: ServedAs, group: int) -> Tensor:
    """By a search among all magnitudes."""
    grouped = rows.view(rows.shape[0], -1, group)
    largest = grouped.abs().amax(2, keepdim=True)
    if form == "nvfp4":
        whole = 2.0 ** (math.floor(math.log2(float(rows.abs().max()) / 448 / 6)) + 1)
        scale = (largest / 6 / whole).clamp(2**-6, 448).to(torch.float8_e4m3fn).float() * whole
    else:  # 7 is halfway between 6, the largest, and the 8 of the next power
        power = 2 ** torch.floor(torch.log2(largest))
        scale = torch.where(largest >= 1.75 * power, 2 * power, power) / 4
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nearest = (grouped.abs()[..., None] / scale[..., None] - magnitudes).abs().argmin(-1)
    return (magnitudes[nearest] * grouped.sign() * scale).view_as(rows)


def inputs(x: Tensor, form: ServedAs) -> Tensor:
    """What a layer multiplies, written down once more; straight through."""
    if form != "8da4w":
        return x
    least = x.detach().amin(-1, keepdim=True).clamp(max=0)
    scale = (x.detach().amax(-1, keepdim=True).clamp(min=0) - least) / 255
    zero = -128 - (least / scale).round()
    codes = ((x.detach() / scale).round() + zero).clamp(-128, 127)
    return x + ((codes - zero) * scale - x.detach())


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, form: ServedAs) -> Tensor:
        return rounding(rows, form)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        return grad, None


@pytest.mark.parametrize(
    ("form", "stored_as"),
    [(form, None) for form in FORMS]
    + [("int4_g32", "nf4"), ("fp8", "fp8"), ("fp8", "nvfp4"), ("nvfp4", "nf4"), ("mxfp4", "fp8")],
)
def test_gradients_are_those_of_autograd_straight_through_the_rounding(
    form: ServedAs, stored_as: str | None
) -> None:
    served, base = layer(form, stored_as, torch.float32)
    a, b = (getattr(served, name)["default"].weight for name in ("lora_A", "lora_B"))
    theirs_a, theirs_b = (matrix.detach().clone().requires_grad_() for matrix in (a, b))
    x = drawn(5, 4, COLS, seed=4).requires_grad_()
    theirs_x = x.detach().clone().requires_grad_()
    # In fp64, and rounded to fp32 once: what is next to a border between two codes decides nothing.
    sums = (base.double() + SCALE * (theirs_b.double() @ theirs_a.double())).float()
    assert served.base_layer.bias is not None
    multiplied = inputs(theirs_x, form)
    expected = F.linear(multiplied, StraightThrough.apply(sums, form), served.base_layer.bias)  # type: ignore[arg-type]
    found = served(x)
    weights = drawn(*found.shape, seed=5)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    pairs: Any = (
        (found, expected),
        (x.grad, theirs_x.grad),
        (a.grad, theirs_a.grad),
        (b.grad, theirs_b.grad),
    )
    for ours, truth in pairs:
        assert float((ours - truth).detach().norm() / truth.detach().norm()) < 1e-6
    x, a, b = x.detach(), a.detach(), b.detach()
    alone = F.linear(inputs(x, form), rounding(base, form), served.base_layer.bias)
    apart = alone + SCALE * F.linear(F.linear(inputs(x, form), a), b)
    assert float((found.detach() - apart).norm() / apart.norm()) > 1e-3, (
        "the sum is rounded, not the base"
    )


def test_backward_keeps_no_rounded_weight_and_compute_in_bf16_rounds_the_adapter_first() -> None:
    served, base = layer("int4_g64", "nf4", torch.bfloat16)
    kept: list[Tensor] = []
    x = drawn(6, COLS, seed=4).bfloat16().requires_grad_()
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        found = served(x)
    wide = [own for own in kept if own.numel() >= ROWS * COLS]
    assert not any(own.is_floating_point() for own in wide)
    a, b = (
        getattr(served, name)["default"].weight.bfloat16().float() for name in ("lora_A", "lora_B")
    )
    values = rounding((base.double() + SCALE * (b.double() @ a.double())).float(), "int4_g64")
    bias = served.base_layer.bias
    assert torch.equal(found, F.linear(x, values.bfloat16()) + bias)
    found.sum().backward()
    assert (served.lora_B["default"].weight.grad != 0).any()


def test_before_its_step_a_layer_multiplies_base_and_adapter_as_they_are() -> None:
    served, base = layer("nvfp4", None, torch.float32)
    a, b = (getattr(served, name)["default"].weight for name in ("lora_A", "lora_B"))
    x = drawn(6, COLS, seed=4)
    bias = served.base_layer.bias
    sums = F.linear(x, base + SCALE * (b @ a), bias)
    rounded_sums = served(x)
    with unrounded(nn.Sequential(served), True):
        assert torch.allclose(served(x), sums, atol=1e-5)
    with unrounded(nn.Sequential(served), False):
        assert torch.equal(served(x), rounded_sums)
    assert torch.equal(served(x), rounded_sums)
    assert not torch.allclose(rounded_sums, sums, atol=1e-2)
    options = PrecisionOptions(served_as="fp8", served_from_step=0.25)
    assert [first_rounded_step(options, steps) for steps in (1, 3, 10)] == [0, 0, 2]
    assert first_rounded_step(PrecisionOptions(), 10) == 0


@pytest.mark.parametrize("form", FORMS)
def test_codes_depend_neither_on_how_many_rows_are_rounded_at_once_nor_on_the_others(
    form: ServedAs, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = drawn(200, 256).bfloat16()
    adapter = AdapterFactors(drawn(40, 256, seed=1), drawn(200, 40, seed=2), 0.3)

    def codes(parts: Tensor, factors: AdapterFactors) -> tuple[Tensor, Tensor]:
        rows = [own.codes for own in rounded_rows([parts], "", factors, form)]
        return (
            torch.cat([own.codes.float() for own in rows]),
            torch.cat([own.scales.float() for own in rows]),
        )

    whole = codes(weight, adapter)
    for block in (3 * 256, 7 * 256, 200 * 256):
        monkeypatch.setitem(kernel_limits.SERVED_BLOCK, "cpu", block)
        assert all(map(torch.equal, codes(weight, adapter), whole))
    some = slice(30, 141)
    assert torch.equal(
        served_weight([weight], "", adapter, form, torch.float32),
        torch.cat([values_of(*own.codes) for own in rounded_rows([weight], "", adapter, form)]),
    )
    if form == "nvfp4":  # whose scale of the whole is that of all rows
        return
    ours = codes(weight[some], adapter._replace(b=adapter.b[some]))
    assert all(torch.equal(own, all_of[some]) for own, all_of in zip(ours, whole, strict=True))


KINDS = ("random", "zeros", "one large", "tiny", "ties")


def matrix(kind: str) -> Tensor:
    rows = drawn(16, COLS)
    if kind == "zeros":
        rows[3:9] = 0
    elif kind == "one large":
        rows[:, 5] = 1e4
    elif kind == "tiny":
        rows *= 1e-30
    elif kind == "ties":
        rows = (rows * 4).round() / 4
    return rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["int4_g128", "int4_g64", "int4_g32", "fp8", "nvfp4", "mxfp4"])
def test_a_weight_is_rounded_as_compressed_tensors_rounds_it(form: ServedAs, kind: str) -> None:
    group = SERVED_FORMS[form].group
    how: Any = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    how |= {"num_bits": 4, "type": "int"} if group else {"num_bits": 8, "type": "float"}
    if form in ("nvfp4", "mxfp4"):
        how |= {"type": "float", "scale_dtype": torch.uint8}
    if form == "nvfp4":
        how |= {"strategy": "tensor_group", "scale_dtype": torch.float8_e4m3fn}
    args = QuantizationArgs(symmetric=True, **how)
    grouped = matrix(kind).unflatten(1, (-1, group or COLS)).bfloat16()
    exact = grouped.flatten(1).float()
    own = rounded(exact, form)
    divisor = None if own.whole is None else own.whole.reciprocal()
    low, high = grouped.amin(2), grouped.amax(2)
    if how.get("scale_dtype"):
        low, high = low.float(), high.float()
    theirs, zero = calculate_qparams(low, high, args, global_scale=divisor)
    nonzero = grouped.abs().amax(2) > 0
    scales = own.scales
    if form == "mxfp4":
        scales = scales.view(torch.float8_e8m0fnu)
    elif form != "nvfp4":
        theirs = theirs.to(torch.bfloat16)
    assert torch.equal(scales.float()[nonzero], theirs.float()[nonzero])
    wanted = quantize(
        exact, scales.float(), torch.zeros_like(zero).float(), args, global_scale=divisor
    )
    if form in ("nvfp4", "mxfp4"):
        each = scales.float() * (1 if own.whole is None else own.whole)
        wanted = (wanted.unflatten(1, (-1, group)) * each[:, :, None]).flatten(1)
        assert torch.equal(values_of(*own), wanted)
    else:
        assert torch.equal(own.codes.float(), wanted.float())
        assert torch.equal(values_of(*own), rounding(exact, form).nan_to_num(0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_and_inputs_are_rounded_as_torchao_rounds_them(kind: str) -> None:
    """Bit for bit, in fp32; NVFP4 by a scale of the whole that is a power of two."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, ScaleCalculationMode
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
    from torchao.quantization import IntxUnpackedToInt8Tensor, PerRow
    from torchao.quantization.quantize_.workflows import Int8Tensor
    from torchao.quantization.quantize_.workflows.intx import intx_unpacked_to_int8_tensor as intx

    rows = matrix(kind)
    nvfp4 = rounded(rows, "nvfp4")
    assert nvfp4.whole is not None
    largest = float(rows.abs().max()) / 448 / 6
    assert largest < float(nvfp4.whole) <= 2 * largest
    theirs: Any = NVFP4Tensor.to_nvfp4(rows, per_tensor_scale=nvfp4.whole)
    assert torch.equal(nvfp4.codes, theirs.qdata)
    assert torch.equal(nvfp4.scales.float(), theirs.scale.float())
    assert torch.equal(values_of(*nvfp4), theirs.dequantize(torch.float32))
    assert torch.equal(values_of(*nvfp4), values_of(*nvfp4).bfloat16().float())

    mxfp4 = rounded(rows, "mxfp4")
    theirs = MXTensor.to_mx(rows, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.EVEN)
    assert torch.equal(mxfp4.codes, theirs.qdata.view(torch.uint8))
    assert torch.equal(mxfp4.scales, theirs.scale.view(torch.uint8))

    int8 = rounded(rows, "int8")
    theirs = Int8Tensor.from_hp(rows, PerRow())
    assert torch.equal(int8.codes, theirs.qdata.float())
    assert torch.equal(int8.scales, theirs.scale)
    assert torch.equal(values_of(*int8), theirs.dequantize())

    phone = rounded(rows, "8da4w")
    theirs = IntxUnpackedToInt8Tensor.from_hp(
        rows,
        (1, 32),  # pyright: ignore[reportArgumentType]
        torch.int4,  # pyright: ignore[reportAttributeAccessIssue]
        intx_choose_qparams_algorithm=None,
        custom_scale=phone.scales.float(),
        custom_zero_point=torch.zeros_like(phone.scales, dtype=torch.int8),
    )
    assert torch.equal(phone.codes, theirs.qdata.float())
    held = rows.bfloat16()
    theirs = IntxUnpackedToInt8Tensor.from_hp(held, (1, 32), torch.int4)  # pyright: ignore
    assert torch.equal(rounded(held.float(), "8da4w").scales, theirs.scale)
    quantised = intx._apply_int8_act_asym_per_token_quant_dequant
    assert torch.equal(served_inputs(rows, "8da4w"), quantised(rows))
    assert served_inputs(rows, "int8") is rows


def test_the_whole_s_scale_is_a_power_of_two_also_of_zeros() -> None:
    scales = [float(whole_scale(torch.tensor(x))) for x in (0.0, 1e-38, 2688.0, 1e38)]
    assert all(math.log2(scale).is_integer() for scale in scales)
    assert scales[2] == 2.0
    assert (values_of(*rounded(torch.zeros(2, 32), "nvfp4")) == 0).all()


def test_training_rounds_once_where_merging_alone_looks_for_the_best_scale() -> None:
    rows = drawn(8, 64)
    codes, scales, _ = served_forms.to_int4(rows, 32)
    once, its_scales, _ = rounded(rows, "int4_g32")
    searched, plain = (
        float((values_of(*own) - rows).square().sum())
        for own in ((codes, scales), (once, its_scales))
    )
    assert searched < plain
    assert (scales <= its_scales).all()
