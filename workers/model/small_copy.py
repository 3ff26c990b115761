"""A copy of a base on meta that can be run on the CPU: one layer of every kind, random weights,
almost no memory.

Widths are the base's own. A large matrix is a Hankel matrix, W[i, j] = v[i + j]: generic, of full
rank, and stored as its rows + cols numbers. A product with it is a correlation, which linear layers
compute by Fourier transforms, so that the matrix is never made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from workers.layers.experts import ExpertsLinear, experts_of, projections_of
from workers.model.buffers import is_poisoned, poisoned, restore_buffers, with_owners
from workers.model.multimodal import decoder_layers, text_decoder
from workers.model.precision import put_experts
from workers.patches.forward import replace_forward

DENSE = 2**20
"""Elements of a parameter up to which it is stored as it is."""
MOST_LAYERS = 12
"""Layers that a copy keeps at most; a base with more kinds of them is copied without the last
kinds.
"""
_NUMBER = re.compile(r"\d+$")
_SPREAD = 0.2
"""Standard deviation of what is added to norms, biases and scales, so that they show whether they
are used.
"""
_EMBEDDED = 0.3
"""Standard deviation of embeddings."""


@dataclass(frozen=True)
class SmallCopy:
    """A model that runs in fp32, in evaluation mode, without gradients of its parameters."""

    model: PreTrainedModel
    alike: dict[str, tuple[str, ...]]
    """Full name of a layer that it keeps → names of the base's layers that it represents, itself
    first.
    """

    @property
    def leaves_out(self) -> bool:
        """Whether some kinds of the base's layers are not in the copy."""
        return sum(map(len, self.alike.values())) < len(decoder_layers(self.model))

    def alike_of(self, name: str) -> Sequence[str]:
        """A module of the copy, and those at its place in the layers that its layer represents."""
        for layer, others in self.alike.items():
            if name.startswith(f"{layer}."):
                return [other + name[len(layer) :] for other in others]
        return [name]


def small_copy(base: PreTrainedModel) -> SmallCopy:
    """The copy of a base that `base_on_meta` built, which is left as it is; the same at every call.

    Raises SpecError for a base that cannot be built for training either: experts or buffers that
    are not known. Else raises what the architecture's own code raises.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = deepcopy(base)
        alike = _skip_layers_alike(model)
        kept = [model.get_submodule(name) for name in alike]
        skipped = {
            id(part)
            for layer in decoder_layers(model)
            if layer not in kept
            for part in layer.modules()
        }
        parts = [part for part in model.modules() if id(part) not in skipped]
        _give_memory(parts)
        restore_buffers(model, torch.device("cpu"), torch.float32)
        _initialise(model, parts)
        put_all_experts(model, kept)  # only now: a model's rules fill the experts that it knows
        _give_values([part for part in model.modules() if id(part) not in skipped])
    return SmallCopy(model.eval(), alike)


def give_values(model: PreTrainedModel, passed_by: Iterable[nn.Module]) -> None:
    """Random weights for a model on meta that is run on the CPU in fp32.

    `passed_by`: layers that do without (`pass_by`), and stay on meta. Raises SpecError for a buffer
    that no rule computes.
    """
    skipped = {id(part) for layer in passed_by for part in layer.modules()}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        parts = [part for part in model.modules() if id(part) not in skipped]
        _give_memory(parts)
        restore_buffers(model, torch.device("cpu"), torch.float32)
        _initialise(model, parts)
        _give_values(parts)


def put_all_experts(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Put our module in place of the experts in these layers, as training does, with weights in
    their own dtype on meta.
    """
    stacks = {id(module) for module in experts_of(layers)}
    for name, module in list(model.named_modules()):
        if id(module) in stacks:
            put_experts(model, name, dict.fromkeys(projections_of(module)))


# Layers
# ------------------------------------------------------------------------------


def _skip_layers_alike(model: PreTrainedModel) -> dict[str, tuple[str, ...]]:
    """Let a decoder pass by the layers that are like one before them.

    Returns the names of those kept, as in `SmallCopy`.

    No layer is removed: configs, and layers among themselves, name layers by number.
    """
    layers = decoder_layers(model)
    names = {id(module): name for name, module in model.named_modules()}
    by_kind: dict[Hashable, list[nn.Module]] = {}
    for layer in layers:
        by_kind.setdefault(_kind(model, names[id(layer)], layer, len(layers)), []).append(layer)
    kinds = list(by_kind.values())[:MOST_LAYERS]
    if (
        len(kinds) == 1 and len(kinds[0]) > 1
    ):  # two layers at least: what one mixes, the next one reads
        kinds = [kinds[0][:1], kinds[0][1:]]
    kept = {id(kind[0]) for kind in kinds}
    said: list[Any] = [None]
    for layer in layers:
        if id(layer) in kept:
            layer.register_forward_hook(partial(_note, said))
        else:
            replace_forward(layer, _PassedBy(said))
    return {names[id(kind[0])]: tuple(names[id(layer)] for layer in kind) for kind in kinds}


def _kind(model: PreTrainedModel, name: str, layer: nn.Module, count: int) -> Hashable:
    """What two layers have in common that compute alike: modules, shapes, switches, and their
    entries in the config's lists.
    """
    match = _NUMBER.search(name)
    number = int(match[0]) if match else 0
    values = vars(text_decoder(model).config).values()
    lists = [
        value
        for value in values
        if isinstance(value, (list, tuple)) and len(value) >= count > number
    ]
    entries = tuple(value[number] for value in lists if isinstance(value[number], (bool, int, str)))
    parts = (
        (
            part_name,
            type(part).__name__,
            tuple((key, tuple(p.shape)) for key, p in part.named_parameters(recurse=False)),
            tuple(
                (key, value)
                for key, value in vars(part).items()
                if value is None or isinstance(value, (bool, str))
            ),
        )
        for part_name, part in layer.named_modules()
    )
    return entries, frozenset(parts)


def pass_by(layers: Iterable[nn.Module], alike: Callable[[nn.Module], Hashable]) -> list[nn.Module]:
    """Let layers of a stack that are like one before them do without weights, and return them: they
    are passed by, or, where that one gives another shape than it is given, computed by it.

    `alike`: what layers have in common that compute alike.
    """
    first: dict[Hashable, nn.Module] = {}
    said: dict[nn.Module, list[Any]] = {}
    passed: list[nn.Module] = []
    for layer in layers:
        own = first.setdefault(alike(layer), layer)
        if own is layer:
            said[own] = [None]
            own.register_forward_hook(partial(_note, said[own]))
            continue
        replace_forward(layer, _PassedBy(said[own], own))
        passed.append(layer)
    return passed


def _note(said: list[Any], _layer: nn.Module, _inputs: Any, output: Any) -> None:
    said[0] = output


class _PassedBy:
    """Replaces a layer's forward: returns the hidden states that it is given and, where layers
    return more, what the previous layer returned.
    """

    def __init__(self, said: list[Any], alike: nn.Module | None = None) -> None:
        """`alike`: the layer that `said` is of, which computes in this one's place where it gives
        another shape than it is given; None: none does.
        """
        self._said = said
        self._alike = alike

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        before = self._said[0]
        made = before[0] if isinstance(before, tuple) else before
        if self._alike is not None and made.shape != hidden.shape:
            return self._alike(*args, **kwargs)
        return (hidden, *before[1:]) if isinstance(before, tuple) else hidden


# Weights
# ------------------------------------------------------------------------------


def _give_memory(parts: Sequence[nn.Module]) -> None:
    """Move small parameters, and buffers that files hold, from meta to the CPU, filled with what no
    rule computes. Large parameters stay on meta, where initialising them costs nothing.
    """
    moved: dict[int, nn.Parameter] = {}
    for part in parts:
        for key, own in part._parameters.items():
            if own is None:
                continue
            place = "cpu" if own.numel() <= DENSE else "meta"
            empty = torch.empty(
                own.shape,
                dtype=torch.float32 if own.is_floating_point() else own.dtype,
                device=place,
            )
            moved.setdefault(id(own), nn.Parameter(poisoned(empty), requires_grad=False))
            part._parameters[key] = moved[id(own)]
        for key in part._buffers.keys() - part._non_persistent_buffers_set:
            buffer = part._buffers[key]
            if buffer is not None:
                dtype = torch.float32 if buffer.is_floating_point() else buffer.dtype
                part._buffers[key] = poisoned(torch.empty(buffer.shape, dtype=dtype))


def _initialise(model: PreTrainedModel, parts: Sequence[nn.Module]) -> None:
    """Fill small parameters and buffers by the architecture's own rules."""
    wanted = {id(part) for part in parts} & {id(part) for part in text_decoder(model).modules()}
    for module, owner in with_owners(model, model):
        if id(module) in wanted:
            owner._init_weights(module)


def _give_values(parts: Sequence[nn.Module]) -> None:
    """Random values for matrices, and for what no rule filled; norms, biases and scales become
    unlike each other.
    """
    given: dict[int, nn.Parameter] = {}
    for part in parts:
        for key, own in part._parameters.items():
            if own is not None:
                given.setdefault(id(own), _valued(part, own))
                part._parameters[key] = given[id(own)]
        for key, buffer in part._buffers.items():
            if buffer is not None and is_poisoned(buffer):
                part._buffers[key] = torch.zeros_like(buffer)
        if isinstance(part, (nn.Linear, ExpertsLinear)) and _is_hankel(part.weight):
            product: Callable[..., Tensor] = (
                _of_experts if isinstance(part, ExpertsLinear) else _of_linear
            )
            if isinstance(part, ExpertsLinear) or type(part) is nn.Linear:
                replace_forward(part, partial(product, part))


def _valued(part: nn.Module, own: nn.Parameter) -> nn.Parameter:
    matrix = isinstance(part, (nn.Linear, nn.Embedding, ExpertsLinear)) and own.ndim == 2
    spread = (
        _EMBEDDED if isinstance(part, nn.Embedding) else own.shape[-1] ** -0.5 if own.ndim else 1.0
    )
    if own.numel() > DENSE:
        values = _hankel(tuple(own.shape), spread)
    elif not own.is_floating_point():
        values = torch.zeros_like(own) if is_poisoned(own) else own.data
    elif matrix or is_poisoned(own):
        values = torch.randn(own.shape) * spread
    elif own.ndim <= 1 or not own.any():
        values = own.data + _SPREAD * torch.randn(own.shape)
    else:
        values = own.data
    return nn.Parameter(values, requires_grad=False)


def _hankel(shape: tuple[int, ...], spread: float) -> Tensor:
    """A tensor whose matrices, the last two dimensions, are Hankel matrices that follow each
    other.
    """
    strides = [1, 1][-len(shape) :]
    for size in reversed(shape[1:-1]):
        strides.insert(0, size * strides[0])
    reach = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return (torch.randn(reach) * spread).as_strided(shape, strides)


def _is_hankel(weight: Tensor) -> bool:
    return weight.ndim == 2 and weight.numel() > DENSE and weight.stride() == (1, 1)


def _of_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """x [.., in] → [.., out]."""
    vector = layer.weight.as_strided((layer.out_features + layer.in_features - 1,), (1,))
    y = _correlated(vector, x, layer.out_features)
    return y if layer.bias is None else y + layer.bias


def _of_experts(layer: ExpertsLinear, x: Tensor, counts: Tensor) -> Tensor:
    """x [n, in], sorted by expert, with `counts` rows each → [n, out]."""
    length = layer.out_features + layer.in_features - 1
    vectors = layer.weight.as_strided((layer.num_experts, length), (layer.out_features, 1))
    experts = torch.arange(layer.num_experts).repeat_interleave(counts)
    return _correlated(vectors[experts], x, layer.out_features)


def _correlated(vector: Tensor, x: Tensor, rows: int) -> Tensor:
    """y[i] = sum over j of vector[i + j] · x[j], for i < rows."""
    length = vector.shape[-1]
    step = 1 << max(0, length.bit_length() - 4)  # sizes with small factors are transformed faster
    size = -(-length // step) * step
    spectrum = torch.fft.rfft(vector, size) * torch.fft.rfft(x.float(), size).conj()
    return torch.fft.irfft(spectrum, size)[..., :rows].to(x.dtype)
