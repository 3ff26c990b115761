"""The two linear layers of a job: the frozen one on a storage format, and PEFT's LoRA layer around
it.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import peft.tuners.lora
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from ft_service.bases.adapter_names import MAGNITUDE
from workers.layers import dropout, low_rank
from workers.layers.dropout import Dropping, Keys
from workers.quant import frozen_linear
from workers.quant.direct_function import DirectFunction, once_differentiable
from workers.quant.local_rows import local_rows
from workers.quant.rowwise import RowQuantized


def computes_as_linear(module: nn.Linear) -> bool:
    """Return whether a class derived from nn.Linear computes what nn.Linear does, by running a
    small copy of the module.
    """
    small = copy.copy(module)
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((6, 4), (6,), (2, 3, 4))
    )
    bias = bias if module.bias is not None else None
    values = {"weight": nn.Parameter(weight), "bias": bias if bias is None else nn.Parameter(bias)}
    vars(small).update(_parameters={**module._parameters, **values}, in_features=4, out_features=6)
    try:
        with torch.no_grad():
            found = small(x)
    except Exception:  # it takes other arguments, or has other tensors, which are on meta
        return False
    return (
        isinstance(found, Tensor)
        and found.shape == (2, 3, 6)
        and torch.allclose(found, F.linear(x, weight, bias))
    )


class FrozenLinear(nn.Linear):
    """A linear layer whose weight is a `RowQuantized`.

    It is an `nn.Linear`, so that PEFT finds it.
    """

    in_fp8 = False
    """Whether the product itself is in FP8; only for weights stored in it."""

    @classmethod
    def on_meta(cls, linear: nn.Linear, weight_class: type[RowQuantized]) -> FrozenLinear:
        """The same layer, on meta, with storage of another format. The bias, if any, is kept."""
        frozen = cls(
            linear.in_features,
            linear.out_features,
            bias=False,
            device="meta",
            dtype=linear.weight.dtype,
        )
        storage = weight_class.empty(linear.weight.shape, linear.weight.dtype, "meta")
        frozen.weight = nn.Parameter(storage, requires_grad=False)
        frozen.bias = linear.bias
        return frozen

    def forward(self, input: Tensor) -> Tensor:
        """[.., in_features] → [.., out_features], in the dtype of the input."""
        weight: Any = self.weight
        y = weight.linear_in_fp8(input) if self.in_fp8 else weight.linear(input)
        return y if self.bias is None else y + self.bias


class Factors(NamedTuple):
    """A low-rank matrix scale · B A, in the dtype of what it is multiplied with."""

    a: Tensor
    """[r, in]."""
    b: Tensor
    """[out, r]."""
    scale: float


class LoraLinear(peft.tuners.lora.Linear):
    """PEFT's LoRA layer, computing in the dtype of its input.

    PEFT casts the input to the adapter's dtype, which is fp32 when nothing is sharded and bf16
    inside a gathered FSDP2 group: two results, and a saved fp32 copy of every input. Casting A and
    B instead gives one result on every path.
    """

    dropping: Dropping | None = None
    """Replaces PEFT's dropout, which draws from the rank's own generator.

    None: nothing is dropped.
    """
    joint: Joint | None = None
    """The layers with which it shares its input, itself among them; None: it is computed alone."""
    instead: Factors | None = None
    """What stands in place of its own adapter; None: that adapter."""

    def add_magnitude(self) -> None:
        """Train DoRA's magnitude too, fp32 [out], on the device of the adapter; `begin_magnitude`
        gives it its first values.
        """
        name = self._adapter
        holder = nn.Module()
        b = self.lora_B[name].weight
        assert isinstance(b, nn.Parameter)
        holder.register_parameter("weight", nn.Parameter(torch.empty(b.shape[0], device=b.device)))
        self.lora_magnitude_vector[name] = holder
        self.adapter_layer_names = (*self.adapter_layer_names, MAGNITUDE)

    @property
    def magnitude(self) -> nn.Parameter | None:
        """DoRA's magnitude; None: the layer is plain LoRA."""
        vectors = self.lora_magnitude_vector
        return vectors[self._adapter].get_parameter("weight") if len(vectors) else None

    @property
    def _adapter(self) -> str:
        (name,) = self.active_adapters
        return name

    @torch.no_grad()
    def begin_magnitude(self, dtype: torch.dtype, rows: slice) -> None:
        """Set this rank's rows of the magnitude to the norms of these `rows` of the frozen weight,
        rounded to `dtype`, in which the layer computes: the tuned model then starts as the base.
        """
        assert self.magnitude is not None
        held: Any = self.base_layer.weight
        weight = local_rows(held.detach())
        parts, stored_as = stored_parts(weight)
        if not isinstance(held, DTensor):  # whole on every rank: `distributed.ignored`
            parts = [part[rows] for part in parts]
        local_rows(self.magnitude.detach()).copy_(
            row_norms(parts, stored_as, weight.shape[1]).to(dtype)
        )

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        bias: Any = self.base_layer.bias
        own = self.instead is None and self.scaling[self._adapter]
        if self.magnitude is None or not own:
            return self._forward(x, bias, *args, **kwargs)
        # DoRA (arXiv 2402.09353): m / ‖W + scale · B A‖ times what W + scale · B A makes of x,
        # without a gradient to the norm.
        y = self._forward(x, None, *args, **kwargs)
        y = y * self._magnitude_ratio(x.dtype)
        return y if bias is None else y + bias

    def _magnitude_ratio(self, dtype: torch.dtype) -> Tensor:
        name = self._adapter
        a, b = (getattr(self, part)[name].weight.detach() for part in ("lora_A", "lora_B"))
        norms = row_norms(
            *stored_parts(self.base_layer.weight), a.shape[1], a, b, self.scaling[name]
        )
        assert self.magnitude is not None
        return magnitude_ratio(self.magnitude.to(dtype), norms.to(dtype))

    def _forward(self, x: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        """W x + scale · B A x + bias."""
        base: Any = self.base_layer
        dropping = self.dropping if self.training else None
        dropping = dropping if dropping is None or dropping.concerns(x) else None
        if torch.compiler.is_compiling() or type(base) not in (nn.Linear, FrozenLinear):
            down = F.linear if dropping is None else dropping
            a, b, scale = self._factors()
            y = base(x, *args, **kwargs)
            y = y if bias is base.bias else y - base.bias
            return y + F.linear(down(x, a.to(x.dtype)), b.to(x.dtype)) * scale
        if (
            self.joint is not None
            and dropping is None
            and not frozen_linear.watched()
            and not x.is_inference()
        ):
            return self.joint.output(self, x)
        return products(x, [self._arguments(bias, dropping)])[0]

    def _arguments(
        self, bias: Tensor | None, dropping: Dropping | None
    ) -> tuple[_Call, Sequence[Any]]:
        base: Any = self.base_layer
        a, b, scale = self._factors()
        parts, stored_as = _stored(base)
        keys, rate = (None, 0.0) if dropping is None else (dropping.keys, dropping.rate)
        call = _Call(stored_as, base.in_features, scale, len(parts), keys, rate)
        return call, (a, b, bias, *parts)

    def _factors(self) -> Factors:
        if self.instead is not None:
            return self.instead
        name = self._adapter
        a: Any = self.lora_A[name].weight
        b: Any = self.lora_B[name].weight
        return Factors(a, b, self.scaling[name])


class Joint:
    """Layers that are always given one input, such as q, k and v: one call computes all of them,
    and the others' outputs wait.

    Their A matrices are multiplied as one, forward and backward, and the gradient of their input is
    added up where it is made: the input and its gradient are read and written once, and not once a
    layer.
    """

    def __init__(self, layers: Sequence[LoraLinear]) -> None:
        """`layers`: without a magnitude, in one group of FSDP2."""
        self._layers = tuple(layers)
        self._input: weakref.ref[Tensor] | None = None
        self._version = -1
        self._waiting: dict[LoraLinear, Tensor] = {}
        for layer in layers:
            layer.joint = self

    def output(self, layer: LoraLinear, x: Tensor) -> Tensor:
        """Return what one of the layers makes of x."""
        known = self._input is not None and self._input() is x and self._version == x._version
        if not known or layer not in self._waiting:
            arguments = [own._arguments(own.base_layer.bias, None) for own in self._layers]  # pyright: ignore
            self._waiting = dict(zip(self._layers, products(x, arguments), strict=True))
            self._input = weakref.ref(x)
            self._version = x._version
        return self._waiting.pop(layer)


def products(x: Tensor, layers: Sequence[tuple[_Call, Sequence[Any]]]) -> tuple[Tensor, ...]:
    """The outputs of LoRA layers that have one input.

    The tensors of a layer are A, B, its bias, and the storage of W.
    """
    made: Any = _LoraProduct.apply(
        x, [call for call, _ in layers], *(tensor for _, own in layers for tensor in own)
    )
    return made


class _Call(NamedTuple):
    """A layer's arguments of a `_LoraProduct` that get no gradient."""

    stored_as: str
    cols: int
    scale: float
    parts: int
    """Number of tensors that store W."""
    keys: Keys | None
    """Keys of dropout, with its `rate`; None: nothing is dropped.

    Only where one layer is computed.
    """
    rate: float


class _LoraProduct(DirectFunction):
    """x Wᵀ + bias + scale · (x Aᵀ) Bᵀ of each layer, with dropout before A if there are keys; x, A
    and B get gradients.

    The adapter's part is added into the frozen product, in forward and in backward: neither makes
    another tensor as wide as a layer. Backward keeps x, x Aᵀ, A and B in x's dtype, and the storage
    of W.

    On GPUs it is the other way round: the frozen product is added to the adapter's part. That one
    is bound by memory, and so is only written; the large product reads it while it computes.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, calls: Sequence[_Call], *tensors: Any) -> tuple[Tensor, ...]:
        own = list(_by_layer(calls, tensors, 3))
        factors = [a for a, *_ in own]
        ctx.of_a = factors[0].dtype
        ctx.of_b = [b.dtype for _, b, *_ in own]
        a_cast = (factors[0] if len(own) == 1 else torch.cat(factors)).to(x.dtype)
        b_casts = [b.to(x.dtype) for _, b, *_ in own]
        rows = x.flatten(0, -2)
        keys = calls[0].keys
        down = (
            rows @ a_cast.t()
            if keys is None
            else dropout.product(x, a_cast, keys, calls[0].rate).flatten(0, -2)
        )
        ctx.calls = calls
        ctx.ranks = [a.shape[0] for a in factors]
        ctx.save_for_backward(
            x, down, a_cast, *b_casts, *(part for _, _, _, *parts in own for part in parts)
        )
        return tuple(
            _output(x, rows, one, b, bias, parts, call)
            for one, b, (_, _, bias, *parts), call in zip(
                _parts(down, ctx.ranks, 1), b_casts, own, calls, strict=True
            )
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        calls: Sequence[_Call] = ctx.calls
        x, down, a, *rest = ctx.saved_tensors
        b_casts = rest[: len(calls)]
        parts = list(_by_layer(calls, rest[len(calls) :], 0))
        flat = [grad.flatten(0, -2) for grad in grads]
        rows = x.flatten(0, -2)
        of_down = torch.empty_like(down)
        of_b = []
        halves = (_parts(tensor, ctx.ranks, 1) for tensor in (of_down, down))
        for grad, b, of_one, one, call in zip(flat, b_casts, *halves, calls, strict=True):
            _put_product(of_one, grad, b, call.scale)
            of_b.append(_put_product(torch.empty_like(b), grad.t(), one, call.scale))
        of_x = None
        if calls[0].keys is None:
            of_a = of_down.t() @ rows
            if ctx.needs_input_grad[0]:
                of_x = _input_grad(flat, of_down, a, parts, calls).view_as(x)
        else:
            shape = *x.shape[:-1], down.shape[1]
            dropped, of_a = dropout.product_grad(
                of_down.view(shape), x, a, calls[0].keys, calls[0].rate
            )
            if ctx.needs_input_grad[0]:
                of_x = _input_grad(flat, dropped.flatten(0, -2), None, parts, calls).view_as(x)
        found: list[Any] = []
        for one, of_one, b_type, own in zip(
            _parts(of_a.to(ctx.of_a), ctx.ranks, 0), of_b, ctx.of_b, parts, strict=True
        ):
            found += [one, of_one.to(b_type), None, *[None] * len(own)]
        return of_x, None, *found


def _by_layer(
    calls: Sequence[_Call], tensors: Sequence[Any], before: int
) -> Iterator[Sequence[Any]]:
    """The tensors of each layer: those that store W, and so many `before` them."""
    end = 0
    for call in calls:
        start = end
        end = end + before + call.parts
        yield tensors[start:end]


def _parts(tensor: Tensor, sizes: Sequence[int], dim: int) -> Sequence[Tensor]:
    """A tensor cut along a dimension; itself, if there is one part."""
    return (tensor,) if len(sizes) == 1 else tensor.split_with_sizes(sizes, dim)


def _output(
    x: Tensor,
    rows: Tensor,
    down: Tensor,
    b: Tensor,
    bias: Tensor | None,
    parts: Sequence[Tensor],
    call: _Call,
) -> Tensor:
    """A layer's output. rows [n, cols]: x; down [n, r]: x Aᵀ; B [out, r]."""
    weight = _added_later(x, parts, call)
    if weight is not None:
        # Not made as rows, of which a view would be returned: see `frozen_linear.reshaped`.
        y = x.new_empty(*x.shape[:-1], weight.shape[0])
        _put_product(y.view(rows.shape[0], weight.shape[0]), down, b.t(), call.scale).addmm_(
            rows, weight.t()
        )
        return y if bias is None else y.add_(bias)
    added = down, b.t()
    y = frozen_linear.product(x, parts, call.stored_as, call.cols)
    if bias is not None:
        y = y.add_(bias) if not frozen_linear.watched() else y + bias
    if frozen_linear.watched():  # selective checkpointing keeps the frozen product as it was
        return frozen_linear.reshaped(
            torch.addmm(y.flatten(0, -2), *added, alpha=call.scale), *y.shape
        )
    low_rank.add(y.flatten(0, -2), *added, call.scale)
    return y


def _input_grad(
    grads: Sequence[Tensor],
    adapted: Tensor,
    a: Tensor | None,
    parts: Sequence[Sequence[Tensor]],
    calls: Sequence[_Call],
) -> Tensor:
    """The gradient of the layers' input [rows, cols], from those of their outputs.

    `adapted`: the part that comes back through the adapters; with `a` [r, cols] its factor [rows,
    r], of which it is the product.
    """
    total = None
    added = False
    more: list[Tensor] = []
    """Gradients that the kernel adds, together with the adapters' part."""
    for grad, own, call in zip(grads, parts, calls, strict=True):
        weight = _added_later(grad, own, call)
        if weight is None:
            made = frozen_linear.product_grad(grad, own, call.stored_as, call.cols)
            if total is None:
                total = made
            elif (
                a is not None
                and not added
                and len(more) < low_rank.MOST_MORE
                and low_rank.takes(made, len(a))
            ):
                more.append(made)
            else:
                total.add_(made)
        elif total is None:
            total = (adapted if a is None else adapted @ a).addmm_(grad, weight)
            added = True
        else:
            total.addmm_(grad, weight)
    assert total is not None
    if added:
        return total
    return total.add_(adapted) if a is None else low_rank.add(total, adapted, a, more=more)


def _added_later(x: Tensor, parts: Sequence[Tensor], call: _Call) -> Tensor | None:
    """The dense weight, where its product is to be added to the adapter's part; None: the adapter's
    part is added to it.
    """
    if not x.is_cuda or frozen_linear.watched():
        return None
    return frozen_linear.multiplied(parts, call.stored_as, call.cols, x.dtype)


def _put_product(into: Tensor, left: Tensor, right: Tensor, scale: float) -> Tensor:
    """left @ right · scale, scaled within the product, before it is rounded.

    Returns `into`, which it overwrites.
    """
    return into.addmm_(left, right, beta=0, alpha=scale)


def _stored(layer: nn.Linear) -> tuple[Sequence[Tensor], str]:
    """The tensors that hold a layer's weight, and the name of the arithmetic on them."""
    weight: Any = layer.weight
    if not isinstance(weight, RowQuantized):
        return stored_parts(weight)
    in_fp8 = isinstance(layer, FrozenLinear) and layer.in_fp8
    numerics = weight.IN_FP8 if in_fp8 else weight.NUMERICS  # pyright: ignore
    return weight.parts, numerics.name


def stored_parts(weight: Any) -> tuple[Sequence[Tensor], str]:
    """The tensors that hold a weight, and the name of its format."""
    return (
        (weight.parts, weight.NUMERICS.name)
        if isinstance(weight, RowQuantized)
        else ((weight,), frozen_linear.PLAIN)
    )


NORM_ROWS = 1024
"""Rows of a weight that are dequantised at once for their norms."""


def magnitude_ratio(magnitude: Tensor, norms: Tensor) -> Tensor:
    """magnitude / norms, which DoRA's rows are multiplied by; both [rows]. 1 where a norm is 0.

    Published bases have rows of zeros. Such a row is LoRA's until B has changed it; 0 in place of 1
    would give B no gradient.
    """
    zero = norms == 0
    return torch.where(zero, 1.0, magnitude / norms.masked_fill(zero, 1.0))


def row_norms(
    parts: Sequence[Tensor],
    stored_as: str,
    cols: int,
    a: Tensor | None = None,
    b: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """‖W + scale · B A‖ of every row of a stored weight W [rows, cols], fp32 [rows].

    A [r, cols], B [rows, r]; None: of W.

    A row's norm needs that row of W and B only, so that any split by rows gives the same norms.
    """
    if a is None or b is None:
        a = parts[0].new_zeros(1, cols, dtype=torch.float32)
        b = parts[0].new_zeros(parts[0].shape[0], 1, dtype=torch.float32)
    return _norms_operator(list(parts), stored_as, cols, a, b, scale)


# One opaque operator: a compiler would keep dequantised weights alive for the backward (see
# frozen_linear).
@torch.library.custom_op("ft_service::row_norms", mutates_args=())
def _norms_operator(
    parts: list[Tensor], stored_as: str, cols: int, a: Tensor, b: Tensor, scale: float
) -> Tensor:
    norms = a.new_empty(parts[0].shape[0], dtype=torch.float32)
    for start in range(0, norms.shape[0], NORM_ROWS):
        rows = slice(start, start + NORM_ROWS)
        weight = frozen_linear.rows_of(parts, stored_as, cols, rows)
        norms[rows] = torch.addmm(weight, b[rows].float(), a.float(), alpha=scale).norm(dim=1)
    return norms


@_norms_operator.register_fake
def _(parts: list[Tensor], stored_as: str, cols: int, a: Tensor, b: Tensor, scale: float) -> Tensor:
    return a.new_empty(parts[0].shape[0], dtype=torch.float32)


def use_keys(model: nn.Module, tokens: Tensor | None) -> None:
    """Set dropout's keys before a forward in training: int32 [samples, length].

    None: the job has no dropout.
    """
    if tokens is None:
        return
    for module in model.modules():
        if isinstance(module, LoraLinear) and module.dropping is not None:
            module.dropping.use(tokens)
