"""Places of parameters in a base's files: transformers' own conversion rules, read the other way
round.

The files may hold other names than the model has (GPT-NeoX's `embed_out`), a base model's names
without its prefix, or experts one by one where the model stacks them. Every parameter becomes a
list of pieces whose rows follow each other, so that a rank can read any of its rows from wherever
they lie. A conversion that is more than renaming and stacking is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    dot_natural_key,
)
from transformers.pytorch_utils import Conv1D

from ft_service.bases.adapter_names import is_lora
from ft_service.errors import SpecError
from ft_service.spec import WeightFormat
from workers.base.expert_stacks import Stack
from workers.base.quantized_rows import StoredBase, StoredWeight
from workers.layers.experts import ExpertsLinear


@dataclass(frozen=True)
class ParameterPiece:
    """Consecutive rows of a parameter: a tensor of the base's files, or one of the matrices that it
    stacks.
    """

    tensor: str
    index: int | None = None
    """Which of the stacked matrices [matrices, rows, cols]; None: the whole tensor."""
    transposed: bool = False
    """Whether that matrix, or the whole tensor, is stored [cols, rows]; of a whole stack, whether
    its matrices are where its shape is not the parameter's.
    """


class NamedBase:
    """A base's frozen tensors under the names of a model's parameters; experts as rows [experts ·
    rows, cols].
    """

    def __init__(self, model: nn.Module, base: StoredBase, plain: Callable[[str], str]) -> None:
        """`plain` turns the parameter names of `model`, which PEFT and others may have wrapped,
        into the base's.

        Raises SpecError, naming the tensor, for one that the model needs and whose layout is
        unknown.
        """
        self._base = base
        bare: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore[reportCallIssue]
        wanted, stacked = _stock_names(model, plain)
        sources = find_pieces(bare, wanted, base.names())
        for stock_name, experts in stacked.items():
            pieces = sources.get(stock_name, [])
            if len(pieces) > 1 and is_stack(base.shape(pieces[0].tensor)):
                each = range(experts.num_experts)
                sources[stock_name] = [
                    ParameterPiece(piece.tensor, index) for index in each for piece in pieces
                ]
            elif len(pieces) == 1:
                tensor = pieces[0].tensor
                if pieces[0].transposed:
                    transposed = base.shape(tensor) != (
                        experts.num_experts,
                        experts.out_features,
                        experts.in_features,
                    )
                else:
                    transposed = experts.transposed and not base.by_outputs(tensor)
                sources[stock_name] = [
                    ParameterPiece(tensor, index, transposed)
                    for index in range(experts.num_experts)
                ]
        self._pieces = {ours: sources[stock] for stock, ours in wanted.items() if stock in sources}
        self.copies = share_pieces(self._pieces, model, plain)
        """First name of a tied parameter → the names under which the files hold it, where there are
        several.
        """

    def __contains__(self, name: str) -> bool:
        return name in self._pieces

    def pieces(self, name: str) -> list[ParameterPiece]:
        """The places of a parameter's rows, in the order of the rows."""
        return self._pieces[name]

    def stored(self, name: str) -> StoredWeight | None:
        """Return how the base quantises a parameter; None if it does not."""
        return stored_as(self._base, self._pieces[name]) if self._base.declared else None

    def shape(self, name: str) -> tuple[int, ...]:
        shapes = [self._shape(piece) for piece in self._pieces[name]]
        if len(shapes) == 1:
            return shapes[0]
        if len({shape[1:] for shape in shapes}) > 1:
            raise SpecError(
                f"The base's tensors of {name} have different shapes: {sorted(set(shapes))}.",
                param="model",
            )
        return sum(shape[0] for shape in shapes), *shapes[0][1:]

    def rows(self, name: str, start: int, end: int) -> Tensor:
        """Rows [start, end) of a parameter, in the dtype of the base's files; nothing else is
        read.
        """
        pieces = self._pieces[name]
        spans = rows_within([self._shape(piece)[0] for piece in pieces], start, end)
        parts = [self._rows(pieces[i], low, high) for i, low, high in spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def whole(self, name: str) -> Tensor:
        """All of a small parameter, which may be a scalar."""
        shape = self.shape(name)
        return (
            self.rows(name, 0, shape[0])
            if shape
            else self._base.whole(self._pieces[name][0].tensor)
        )

    def _rows(self, piece: ParameterPiece, start: int, end: int) -> Tensor:
        return self._base.rows(piece.tensor, start, end, piece.index, transposed=piece.transposed)

    def _shape(self, piece: ParameterPiece) -> tuple[int, ...]:
        shape = self._base.shape(piece.tensor)
        shape = shape if piece.index is None else shape[1:]
        return (*shape[:-2], shape[-1], shape[-2]) if piece.transposed else shape


def is_stack(shape: Sequence[int]) -> bool:
    """Whether a tensor of experts is the matrices of all of them, and not one of one expert."""
    return len(shape) == 3


def rows_within(heights: Sequence[int], start: int, end: int) -> list[tuple[int, int, int]]:
    """Number and own rows [low, high) of each of the stacked parts that hold rows [start, end) of
    the whole.

    `heights`: rows of the parts. An empty range is the first part without rows.
    """
    spans = []
    for i, (height, last) in enumerate(zip(heights, accumulate(heights), strict=True)):
        low = max(start - last + height, 0)
        high = min(end - last + height, height)
        if low < high:
            spans.append((i, low, high))
    return spans or [(0, 0, 0)]


def stored_as(base: StoredBase, pieces: Sequence[ParameterPiece]) -> StoredWeight | None:
    """Return how the tensors that make one parameter are quantised; None if they are not, or in
    different layouts.
    """
    stored = [_stored_piece(base, piece) for piece in pieces]
    quantized = [weight for weight in stored if weight is not None]
    if len(quantized) < len(pieces) or len({weight.layout for weight in quantized}) != 1:
        return None
    return quantized[0] if len(quantized) == 1 else StackedWeights(quantized)


def _stored_piece(base: StoredBase, piece: ParameterPiece) -> StoredWeight | None:
    stored = base.stored(piece.tensor)
    if piece.index is None:
        return stored
    return (
        stored.matrix(piece.index, transposed=piece.transposed)
        if isinstance(stored, Stack)
        else None
    )


class StackedWeights:
    """Weights of one layout stacked by rows, as the experts of a mixture are."""

    def __init__(self, weights: Sequence[StoredWeight]) -> None:
        self._weights = weights
        self.layout = weights[0].layout
        self.format: WeightFormat | None = weights[0].format
        self.exact = all(weight.exact for weight in weights)
        self.shape: tuple[int, ...] = (
            sum(weight.shape[0] for weight in weights),
            weights[0].shape[1],
        )

    def parts(self, start: int, end: int) -> tuple[Tensor, ...]:
        of_weights = [
            self._weights[i].parts(low, high) for i, low, high in self._within(start, end)
        ]
        return tuple(torch.cat(parts) for parts in zip(*of_weights, strict=True))

    def rows(self, start: int, end: int) -> Tensor:
        return torch.cat(
            [self._weights[i].rows(low, high) for i, low, high in self._within(start, end)]
        )

    def _within(self, start: int, end: int) -> list[tuple[int, int, int]]:
        return rows_within([weight.shape[0] for weight in self._weights], start, end)


def load_buffers(
    model: nn.Module,
    tensors: NamedBase,
    plain: Callable[[str], str],
    device: torch.device,
    compute_dtype: torch.dtype,
) -> None:
    """Read the buffers that a base's files hold (routers have such); they are small, and whole on
    every rank. What is made of one, such as the powers of a decay, is to have no less precision
    than the rest of the arithmetic.

    Raises SpecError for one that is missing.
    """
    for module_name, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set:
                continue
            ours = plain(f"{module_name}.{name}")
            if ours not in tensors:
                raise SpecError(
                    f"The base's safetensors lack {ours}: its layout is not supported.",
                    param="model",
                )
            held = tensors.whole(ours)
            dtype = (
                torch.promote_types(held.dtype, compute_dtype)
                if held.is_floating_point()
                else held.dtype
            )
            module._buffers[name] = held.to(device, dtype)


def find_pieces(
    base: PreTrainedModel, wanted: Iterable[str], held: Iterable[str]
) -> dict[str, list[ParameterPiece]]:
    """Parameter name, as transformers has it → the tensors of a base that make it, as far as `held`
    has them.
    """
    wanted = set(wanted)
    transforms = get_model_conversion_mapping(base)
    renamings = [t for t in transforms if not isinstance(t, WeightConverter)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    collected: dict[str, list[tuple[WeightConverter | None, str | None, str]]] = {}
    for key in sorted(held, key=dot_natural_key):
        name, converter, pattern = _renamed(key, renamings, converters)
        for target in (
            name,
            name.removeprefix(f"{base.base_model_prefix}."),
            f"{base.base_model_prefix}.{name}",
        ):
            if target in wanted:
                collected.setdefault(target, []).append((converter, pattern, key))
                break
    pieces = {target: _in_row_order(target, sources) for target, sources in collected.items()}
    turned = {
        target: [ParameterPiece(pieces[target][0].tensor, transposed=True)]
        for target in turned_weights(base) & pieces.keys()
    }
    return pieces | turned


def share_pieces(
    pieces: dict[str, list[ParameterPiece]], model: nn.Module, plain: Callable[[str], str] = str
) -> dict[str, list[str]]:
    """Give the names of each of `model`'s tied parameters that lack pieces those of a name that has
    some: files hold such a parameter under any of its names. `plain`: as of `NamedBase`; default:
    the names are the base's.

    Returns the first name of each one that the files hold under several names, with these.
    """
    names_of: dict[int, dict[str, None]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), {})[plain(name)] = None
    copies: dict[str, list[str]] = {}
    for names in map(list, names_of.values()):
        held = [name for name in names if name in pieces]
        if held:
            pieces.update({name: pieces[held[0]] for name in names if name not in pieces})
        if len(held) > 1:
            copies[names[0]] = held
    return copies


def _renamed(
    key: str, renamings: list[Any], converters: list[Any]
) -> tuple[str, WeightConverter | None, str | None]:
    """The model's name of a base's tensor; and the conversion, with the pattern of it, that makes
    it, if any.
    """
    name = key
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    for converter in converters:
        renamed, pattern = converter.rename_source_key(name)
        if pattern is not None:
            return renamed, converter, pattern
    return name, None, None


def _in_row_order(
    target: str, sources: list[tuple[WeightConverter | None, str | None, str]]
) -> list[ParameterPiece]:
    """Expert by expert, and inside an expert in the order of the conversion's patterns (gate above
    up).
    """
    converter = sources[0][0]
    if converter is None:
        return [ParameterPiece(sources[0][2])]
    if _turns_matrices(converter) and len(sources) == 1:
        return [ParameterPiece(sources[0][2], transposed=True)]
    if not _stacks_rows(converter):
        operations = ", ".join(type(operation).__name__ for operation in converter.operations)
        raise SpecError(
            f"The base stores {target} in a layout that is not supported ({sources[0][2]}, "
            f"converted by {operations}). "
            "Load it with transformers and save it with "
            "save_pretrained(save_original_format=False).",
            param="model",
        )
    of_patterns = [
        [key for _, pattern, key in sources if pattern == wanted]
        for wanted in converter.source_patterns
    ]
    if len({len(keys) for keys in of_patterns}) > 1:
        raise SpecError(
            f"The base's safetensors lack some of the tensors that make {target}.", param="model"
        )
    return [
        ParameterPiece(key)
        for of_one_expert in zip(*of_patterns, strict=True)
        for key in of_one_expert
    ]


def _stacks_rows(converter: WeightConverter) -> bool:
    """Whether a conversion does no more than put matrices of experts, one by one or in stacks, or
    any tensors of one layer, above each other.
    """
    described = [
        (type(operation), getattr(operation, "dim", None)) for operation in converter.operations
    ]
    merge = (MergeModulelist, 0)
    concatenate = (Concatenate, 1)
    expected = [merge] if len(converter.source_patterns) == 1 else [merge, concatenate]
    return (
        described in (expected, [(Concatenate, 0)], [concatenate])
        and len(converter.target_patterns) == 1
    )


def _turns_matrices(converter: WeightConverter) -> bool:
    """Whether a conversion does no more than turn the matrices of a stack round that lie the other
    way.
    """
    described = [
        (type(op), *(getattr(op, name, None) for name in ("dim0", "dim1", "check_dims")))
        for op in converter.operations
    ]
    return described == [(Transpose, 1, 2, True)]


def _stock_names(
    model: nn.Module, plain: Callable[[str], str]
) -> tuple[dict[str, str], dict[str, ExpertsLinear]]:
    """transformers' name → ours, for every tensor of the base; and the layer of each one that is
    stacked here.
    """
    wanted: dict[str, str] = {}
    stacked: dict[str, ExpertsLinear] = {}
    for module_name, module in model.named_modules():
        buffers = {
            n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set
        }
        for name, tensor in (module._parameters | buffers).items():
            full = f"{module_name}.{name}" if module_name else name
            if tensor is None or (tensor.requires_grad and is_lora(full)):
                continue
            ours = plain(full)
            stock = ours.removesuffix(".weight") if isinstance(module, ExpertsLinear) else ours
            wanted[stock] = ours
            if isinstance(module, ExpertsLinear):
                stacked[stock] = module
    return wanted, stacked


_TURNED = "_ft_turned"


def turn_convolutions(model: PreTrainedModel) -> None:
    """Put linear layers on meta in place of a model's convolutions of width one."""
    turned = [name for name, module in model.named_modules() if isinstance(module, Conv1D)]
    for name in turned:
        parent, _, last = name.rpartition(".")
        stock = model.get_submodule(name)
        assert isinstance(stock, Conv1D)
        linear = nn.Linear(stock.nx, stock.nf, device="meta", dtype=stock.weight.dtype)
        setattr(model.get_submodule(parent), last, linear)
    object.__setattr__(model, _TURNED, frozenset(f"{name}.weight" for name in turned))


def turned_weights(model: nn.Module) -> frozenset[str]:
    """Weights [out, in] of linear layers that the base's files, and its class, hold as [in,
    out].
    """
    return getattr(model, _TURNED, frozenset())
