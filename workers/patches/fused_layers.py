"""RMS norms, rotary positions and gated feed-forwards of transformers' layers by the kernels of
`workers.layers.fused`.

Which of a model's modules computes which formula is found out by calling a small copy of it, on a
processor in bf16, and comparing every bit. So it holds for any class, and for none that rounds
elsewhere. On tensors that the kernels do not take, a module's own forward is called, as it is under
a compiler, which fuses by itself.

Replaces: the forward of norms and feed-forwards of transformers' models, and `apply_rotary_pos_emb`
of their modules.
Written for: transformers 5.23
Fails when upstream changes: tests/workers/patches/test_fused_layers.py
"""

from __future__ import annotations

import copy
import functools
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workers.layers import fused
from workers.layers.experts import FrozenExperts
from workers.layers.fused import Form
from workers.patches.forward import replace_forward

ROTATION = "apply_rotary_pos_emb"
"""Function of query, key, cos and sin that attention calls in modules of transformers."""
_HIGHEST_EPSILON = 1e-2


@dataclass(frozen=True)
class FusedLayers:
    """The number of parts of a model that fused kernels compute."""

    norms: int
    gates: int
    rotations: int
    """Modeling modules whose function that rotates is replaced."""
    mixtures: int = 0
    """Of experts, whose rows they take, gate and add up."""

    def __str__(self) -> str:
        parts = [f"{self.norms} norms", f"{self.gates} feed-forwards"]
        if self.mixtures:
            parts.append(f"the rows of {self.mixtures} mixtures of experts")
        if self.rotations:
            parts.append("rotary positions")
        return ", ".join(parts[:-1]) + f" and {parts[-1]}"


def fuse(model: nn.Module) -> FusedLayers:
    """Let the kernels compute what they can of a model's layers, wherever its tensors are on a
    GPU.
    """
    norms, gates = norms_and_gates(model)
    for module, known in norms.items():
        replace_forward(module, _Norm(module, module.forward, *known))
    for module, parts in gates.items():
        replace_forward(module, _Gated(module, module.forward, parts))
    mixtures = [module for module in model.modules() if isinstance(module, FrozenExperts)]
    for mixture in mixtures:
        mixture.by_kernels = True
    modules = {sys.modules[type(part).__module__] for part in model.modules()}
    rotations = sum(_rotate_by_kernel(own) for own in modules)
    return FusedLayers(len(norms), len(gates), rotations, len(mixtures))


def norms_and_gates(
    model: nn.Module,
) -> tuple[dict[nn.Module, tuple[float, Form]], dict[nn.Module, tuple[str, str, str]]]:
    """The modules of a model that the kernels compute: norms as `norm_of` knows them, feed-forwards
    as `gated_of` does.
    """
    norms: dict[nn.Module, tuple[float, Form]] = {}
    gates: dict[nn.Module, tuple[str, str, str]] = {}
    tried: dict[Any, tuple[Any, Any]] = {}
    for module in model.modules():
        key = _like(module)
        if key not in tried:
            tried[key] = norm_of(module), gated_of(module)
        known, parts = tried[key]
        if known is not None:
            norms[module] = known
        elif parts is not None:
            gates[module] = parts
    return norms, gates


def _like(module: nn.Module) -> Any:
    """What modules that compute the same have in common: class, plain values, shapes, and the
    children's classes.
    """
    simple = (bool, int, float, str, FunctionType, BuiltinFunctionType)
    plain = tuple(
        (name, value) for name, value in vars(module).items() if isinstance(value, simple)
    )
    shapes = tuple((name, own.shape) for name, own in module.named_parameters(recurse=False))
    return (
        type(module),
        plain,
        shapes,
        tuple((name, type(child)) for name, child in module.named_children()),
    )


# Norms
# ------------------------------------------------------------------------------


def norm_of(module: nn.Module) -> tuple[float, Form] | None:
    """The epsilon and the form of a module that is an RMS norm of its last dimension; None: it is
    something else.
    """
    weights = list(module.named_parameters(recurse=False))
    if next(module.children(), None) is not None or [
        name for name, w in weights if name != "weight" or w.dim() != 1
    ]:
        return None
    small = {
        value
        for value in vars(module).values()
        if type(value) is float and 0 < value < _HIGHEST_EPSILON
    }
    return _found_norm(module, small.pop(), bool(weights)) if len(small) == 1 else None


def _found_norm(module: nn.Module, epsilon: float, has_weight: bool) -> tuple[float, Form] | None:
    weight: Any = module._parameters.get("weight")
    forms = [form for form in Form if (form is Form.NONE) != has_weight]
    for width in (
        (weight.shape[0],) if has_weight else (64, 96)
    ):  # its own: some divide a row into groups
        generator = torch.Generator().manual_seed(0)
        x = (
            torch.randn(2, 32, width, generator=generator)
            .mul_(torch.logspace(-4, 1, 32)[:, None])
            .bfloat16()
        )
        own = torch.randn(width, generator=generator).bfloat16() if has_weight else None
        found = _called(
            module, {} if own is None else {"weight": nn.Parameter(own, requires_grad=False)}, {}, x
        )
        forms = [form for form in forms if _equal(found, fused.norm(x, own, epsilon, form))]
    return (epsilon, forms[0]) if len(forms) == 1 else None


def _called(
    module: nn.Module, parameters: dict[str, Any], children: dict[str, Any], x: Tensor
) -> Any:
    """What a copy of a module with these parameters and children makes of x; None if it cannot be
    called so.
    """
    small = copy.copy(module)
    vars(small).update(
        _parameters={**module._parameters, **parameters}, _modules={**module._modules, **children}
    )
    try:
        with torch.no_grad():
            return small(x)
    except Exception:  # it takes other arguments, or has other tensors, which are on meta
        return None


def _equal(found: Any, expected: Tensor) -> bool:
    return (
        isinstance(found, Tensor) and found.dtype == expected.dtype and torch.equal(found, expected)
    )


class _Norm:
    """The forward of a norm.

    The module that it holds is not a submodule, so that it keeps one name.
    """

    def __init__(
        self, module: nn.Module, stock: Callable[..., Any], epsilon: float, form: Form
    ) -> None:
        self._module = module
        self._stock = stock
        self._epsilon = epsilon
        self._form = form

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        weight: Tensor | None = self._module._parameters.get("weight")
        kernels = None if args or kwargs else _kernels(x)
        if kernels is None or not fused.takes_norm(x, weight):
            return self._stock(x, *args, **kwargs)
        return fused.FusedNorm.apply(x, weight, self._epsilon, self._form, kernels)


def _kernels(x: Tensor) -> Any:
    """The kernels for a tensor's device, unless a compiler looks on."""
    return None if torch.compiler.is_compiling() else fused.KERNEL.on(x.device)


# Feed-forwards
# ------------------------------------------------------------------------------


def gated_of(module: nn.Module) -> tuple[str, str, str] | None:
    """Names of a feed-forward's layers gate, up and down, if it is down(silu(gate(x)) · up(x));
    None: it is something else.
    """
    linears = {name: own for name, own in module.named_children() if isinstance(own, nn.Linear)}
    others = [own for name, own in module.named_children() if name not in linears]
    if (
        len(linears) != 3
        or any(True for own in others for _ in own.parameters())
        or module._parameters
    ):
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 16, generator=generator).bfloat16()
    for names in itertools.permutations(linears, 3):
        gate, up, down = (linears[name] for name in names)
        inner = {gate.out_features, up.out_features, down.in_features}
        outer = {gate.in_features, up.in_features, down.out_features}
        if len(inner) != 1 or len(outer) != 1:
            continue
        small = [_small(own, generator, 16, 48) for own in (gate, up)] + [
            _small(down, generator, 48, 16)
        ]
        with torch.no_grad():
            expected = small[2](F.silu(small[0](x)) * small[1](x))
        if _equal(_called(module, {}, dict(zip(names, small, strict=True)), x), expected):
            return names
    return None


def _small(layer: nn.Linear, generator: torch.Generator, cols: int, rows: int) -> nn.Linear:
    """A linear layer of this size, with a bias where `layer` has one."""
    small = nn.Linear(cols, rows, bias=layer.bias is not None, dtype=torch.bfloat16)
    for own in small.parameters():
        own.data = torch.randn(own.shape, generator=generator).bfloat16()
    return small


class _Gated:
    """The forward of a gated feed-forward, whose layers are called as modules: adapters are put
    around them later.
    """

    def __init__(
        self, module: nn.Module, stock: Callable[..., Any], names: tuple[str, str, str]
    ) -> None:
        self._module = module
        self._stock = stock
        self._names = names

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        kernels = None if args or kwargs else _kernels(x)
        if kernels is None:
            return self._stock(x, *args, **kwargs)
        gate, up, down = (self._module.get_submodule(name) for name in self._names)
        factors = gate(x), up(x)
        return down(
            fused.FusedGate.apply(*factors, kernels)
            if fused.takes_gate(*factors)
            else fused.gate(*factors)
        )


# Rotary positions
# ------------------------------------------------------------------------------


def rotates(function: Any) -> bool:
    """Whether a function of query, key, cos and sin rotates halves of all channels, by angles of
    their own.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, 5, 16), (2, 2, 5, 16), (2, 5, 16), (2, 5, 16)
    query, key, cos, sin = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    try:
        found = function(query, key, cos, sin)
    except Exception:  # it takes other arguments
        return False
    expected = fused.rotate(query, key, cos, sin)
    return isinstance(found, tuple) and len(found) == 2 and all(map(_equal, found, expected))


def _rotate_by_kernel(modeling: Any) -> bool:
    """Replace the function of a modeling module that rotates, if the kernel computes it."""
    stock = vars(modeling).get(ROTATION)
    if isinstance(stock, _Rotation):
        return True
    if (
        stock is None
        or not modeling.__name__.startswith("transformers.models.")
        or not rotates(stock)
    ):
        return False
    setattr(modeling, ROTATION, _Rotation(stock))
    return True


class _Rotation:
    """A function of query, key, cos and sin in place of a modeling module's."""

    def __init__(self, stock: Callable[..., Any]) -> None:
        self._stock = stock
        functools.update_wrapper(self, stock)

    def __call__(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        kernels = None if args or kwargs else _kernels(query)
        if kernels is None or not fused.takes_rotation(query, key, cos, sin):
            return self._stock(query, key, cos, sin, *args, **kwargs)
        return fused.FusedRotation.apply(query, key, cos, sin, kernels)
