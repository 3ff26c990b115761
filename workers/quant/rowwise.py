"""The tensor subclass that carries a quantised weight through `fully_shard`: row-aligned parts
behind a [rows, cols] tensor.

    face       the tensor that modules and FSDP2 see: shape [rows, cols], dtype of the computation;
               holds no memory
    parts      the tensors that hold memory: plain, dim 0 is the face's dim 0, plus padding rows at
               the end, if any
    logical    rows of the face; the parts have at least as many (the stored rows)

FSDP2 shards on dim 0, pads the last shards to equal height, gathers the parts' bytes, and cuts the
padding off again. Three points need care:

* `narrow()` from the padded shard to its logical rows keeps the padding rows in the parts: the
  gathered shards must have one height on all ranks. `as_strided()` after the gather cuts the
  padding off.
* The gather hook has the one-argument signature. With five arguments FSDP2 checks that inputs have
  the face's padded size, which packed codes cannot have; only the ranks with a short shard would
  raise, and the others would hang.
* Every operation returns a new wrapper: since torch 2.13 a view that returns `self` is an error.

Operations that are not listed raise, naming class, parameter and operation: a silent fallback would
dequantise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from workers.quant.frozen_linear import Numerics, frozen_linear

aten = torch.ops.aten


class RowQuantized(Tensor):
    """A frozen weight [rows, cols] in a storage format.

    Subclasses name their parts and the arithmetic.
    """

    PARTS: ClassVar[tuple[str, ...]]
    """Attribute names of the parts, in the order in which they are gathered."""
    NUMERICS: ClassVar[Numerics]
    """The arithmetic of the format."""

    name = ""
    """Name of the parameter, once it is known, for messages."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, parts: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype
    ) -> RowQuantized:
        return Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=dtype, device=parts[0].device, requires_grad=False
        )

    def __init__(self, parts: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> None:
        for name, part in zip(self.PARTS, parts, strict=True):
            setattr(self, name, part)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in self.PARTS)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the parts, padding rows included."""
        return sum(part.nbytes for part in self.parts)

    def map(
        self,
        fn: Callable[[Tensor], Tensor],
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """The same wrapper around `fn` of every part."""
        made = type(self)(
            [fn(part) for part in self.parts], shape or self.shape, dtype or self.dtype
        )
        made.name = self.name
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return (
            f"{type(self).__name__}({tuple(self.shape)}, dtype={self.dtype}, device={self.device})"
        )

    def __tensor_flatten__(self) -> tuple[list[str], tuple[torch.Size, torch.dtype]]:
        return list(self.PARTS), (self.shape, self.dtype)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], meta: Any, outer_size: Any, outer_stride: Any
    ) -> Self:
        return cls([inner[name] for name in cls.PARTS], outer_size, meta[1])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            weight = next(arg for arg in args if isinstance(arg, cls))
            raise NotImplementedError(
                f"{cls.__name__} {weight.name or 'without a name'} does not implement {func}"
            )
        return handler(func, args, kwargs or {})

    @classmethod
    def quantize(cls, weight: Tensor) -> Self:
        """A weight from [rows, cols] in a float dtype, which becomes the face's dtype.

        Rows are independent of each other.
        """
        return cls(cls.NUMERICS.module.quantize(weight), weight.shape, weight.dtype)

    @classmethod
    def empty(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Self:
        """An uninitialised weight, also on meta."""
        return cls(cls.NUMERICS.module.empty_parts(shape[0], shape[1], device), shape, dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The logical rows as a plain [rows, cols] tensor, in the face's dtype unless another is
        given.
        """
        return self.NUMERICS.dense(self.parts, self.shape[1], dtype or self.dtype)[: self.shape[0]]

    def linear(self, x: Tensor) -> Tensor:
        """x [.., cols] → [.., rows] in x's dtype; saves the parts for backward, never a dequantised
        copy.
        """
        return frozen_linear(x, self.parts, self.NUMERICS.name, self.shape[1])

    # FSDP2's extension points
    # ------------------------------------------------------------------------------

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        """The parts of this rank's padded shard, as they are: nothing is copied or converted."""
        return self.parts, (self.shape[1:], self.name)

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Wrap the gathered parts.

        With `out`, a later gather has refilled the storage that `out` already wraps.
        """
        if out is not None:
            return None
        columns, name = metadata
        gathered = type(self)(outputs, (outputs[0].shape[0], *columns), param_dtype)
        gathered.name = name
        return gathered, outputs


Handler = Callable[[Any, Any, dict[str, Any]], Any]
_HANDLERS: dict[Any, Handler] = {}


def _implements(*ops: Any) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        for op in ops:
            _HANDLERS[op] = handler
        return handler

    return register


@_implements(
    aten.detach.default, aten.clone.default, aten.empty_like.default, aten.zeros_like.default
)
def _same_shape(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    keep = {key: kwargs[key] for key in ("device",) if key in kwargs}
    return return_and_correct_aliasing(
        func, args, kwargs, args[0].map(lambda part: func(part, **keep))
    )


@_implements(aten._to_copy.default)
def _to_copy(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A copy on another device moves the parts; another dtype changes only the face: codes have one
    dtype.
    """
    keep = {key: kwargs[key] for key in ("device", "non_blocking") if key in kwargs}
    return args[0].map(lambda part: func(part, **keep), dtype=kwargs.get("dtype"))


@_implements(aten.split.Tensor)
def _split(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    weight = args[0]
    height = args[1]
    _only_rows(func, args[2] if len(args) > 2 else kwargs.get("dim", 0))
    return [
        _rows(weight, start, min(start + height, weight.shape[0]))
        for start in range(0, weight.shape[0], height)
    ]


@_implements(aten.new_zeros.default, aten.new_empty.default)
def _new(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    weight = args[0]
    size = args[1]
    return weight.map(
        lambda part: func(part, (size[0], *part.shape[1:]), device=kwargs.get("device")), shape=size
    )


@_implements(aten.slice.Tensor)
def _slice(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`narrow()` to a shard's logical rows: from the first row on, the padding rows stay in the
    parts.
    """
    weight = args[0]
    dim, start, end = _arguments(args[1:], (0, 0, None))
    _only_rows(func, dim)
    if start not in (0, None):
        raise NotImplementedError(
            f"{type(weight).__name__} can only be cut at its end, not from row {start}"
        )
    rows = weight.shape[0] if end is None else min(end, weight.shape[0])
    return weight.map(lambda part: part.view(part.shape), shape=(rows, *weight.shape[1:]))


@_implements(aten.copy_.default)
def _copy(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    target = args[0]
    source = args[1]
    rows = source.shape[0]
    for ours, theirs in zip(target.parts, source.parts, strict=True):
        ours[:rows].copy_(theirs[:rows])
    return target


@_implements(aten.view.default)
def _view(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A flat view of the shard, which FSDP2 keeps for later; what it gathers are the parts."""
    return args[0].map(lambda part: part.view(part.shape))


@_implements(aten.as_strided.default)
def _as_strided(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The logical rows of the gathered ones: the padding is cut off."""
    rows = args[1][0]
    return args[0].map(lambda part: part[:rows], shape=args[1])


def _arguments(given: Sequence[Any], defaults: tuple[Any, ...]) -> tuple[Any, ...]:
    """Positional arguments of an operator, completed by the defaults of those left out."""
    return (*given[: len(defaults)], *defaults[len(given) :])


def _rows(weight: RowQuantized, start: int, end: int) -> RowQuantized:
    return weight.map(lambda part: part[start:end], shape=(end - start, *weight.shape[1:]))


def _only_rows(func: Any, dim: int) -> None:
    if dim != 0:
        raise NotImplementedError(
            f"{func}: a row-aligned weight is split by rows (dim 0), not along dim {dim}"
        )
