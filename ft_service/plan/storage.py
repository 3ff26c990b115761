"""What of a job each rank stores: frozen weights in their formats, adapters, and how both are grouped for gathering.

Every tensor is split by rows: a rank keeps ceil(rows / shard) of them, padding included, as FSDP2 does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ft_service.errors import SpecError
from ft_service.plan.base import Base, Weight
from ft_service.selection import assign_formats, choose_targets
from ft_service.spec import JobSpec, WeightFormat

BLOCK = 64
"""Columns that share one NF4 block scale; a row is padded to whole blocks."""
COMPUTE_BYTES = {"bf16": 2, "fp32": 4}
STORAGE_BYTES = 2
"""Of an element of a sharded frozen weight without a quantised format (bf16)."""
FP32_BYTES = 4


@dataclass(frozen=True)
class Layout:
    """How the ranks share the weights: `replicate` groups of `shard` ranks each."""

    replicate: int
    shard: int

    @property
    def world(self) -> int:
        return self.replicate * self.shard

    def rows(self, rows: int) -> int:
        """Rows that each rank stores."""
        return -(-rows // self.shard)


@dataclass(frozen=True)
class Stored:
    """A frozen weight in its storage format. `row_bytes`: of one row at rest; `gathered_row_bytes`: of one in a gather."""

    weight: Weight
    format: WeightFormat
    row_bytes: int
    gathered_row_bytes: int

    def bytes_on_rank(self, layout: Layout) -> int:
        return layout.rows(self.weight.rows) * self.row_bytes

    @property
    def bytes_whole(self) -> int:
        """Unsharded."""
        return self.weight.rows * self.row_bytes


@dataclass(frozen=True)
class Adapter:
    """The two matrices of one adapted module, A [r, cols] and B [rows, r]."""

    module: str
    layer: int | None
    rows: int
    cols: int
    r: int

    @property
    def numel(self) -> int:
        return self.r * (self.rows + self.cols)

    def numel_on_rank(self, layout: Layout) -> int:
        return layout.rows(self.r) * self.cols + layout.rows(self.rows) * self.r


@dataclass(frozen=True)
class Group:
    """What is gathered by one collective."""

    name: str
    frozen: tuple[Stored, ...]
    adapters: tuple[Adapter, ...]
    held: bool
    """Stays gathered from its forward to the end of the backward."""

    def gathered_bytes_on_rank(self, layout: Layout, compute_bytes: int) -> int:
        """What a rank puts into a gather, padding rows included."""
        frozen = sum(layout.rows(s.weight.rows) * s.gathered_row_bytes for s in self.frozen)
        return frozen + sum(a.numel_on_rank(layout) for a in self.adapters) * compute_bytes

    def reduced_bytes_on_rank(self, layout: Layout) -> int:
        """What a rank gets out of the reduction of the adapters' gradients."""
        return sum(a.numel_on_rank(layout) for a in self.adapters) * FP32_BYTES


def layout_of(spec: JobSpec) -> Layout:
    return Layout(replicate=1, shard=spec.world_size)


def row_bytes(weight_format: WeightFormat, cols: int, plain_bytes: int) -> int:
    """Bytes of one row of `cols` columns. `plain_bytes`: of an element that is not quantised."""
    if weight_format == "nf4":
        width = -(-cols // BLOCK) * BLOCK
        return width // 2 + width // BLOCK + FP32_BYTES
    if weight_format == "fp8":
        return cols + FP32_BYTES
    return cols * plain_bytes


def stored_weights(base: Base, spec: JobSpec, layout: Layout) -> list[Stored]:
    """Every frozen weight in the format that the spec gives it. Raises SpecError for a pattern that matches nothing."""
    compute = COMPUTE_BYTES[spec.precision.compute]
    at_rest = STORAGE_BYTES if layout.shard > 1 else compute  # what is not sharded is never converted again
    formats = assign_formats([weight.module for weight in base.linears()], spec.precision)
    _refuse_empty_rows(base)
    found = []
    for weight in base.weights:
        decides = weight.kind in ("linear", "experts") and weight.layer is not None
        weight_format = formats[weight.module] if decides else "bf16"
        cols = weight.numel_of_row
        found.append(
            Stored(weight, weight_format, row_bytes(weight_format, cols, at_rest), row_bytes(weight_format, cols, compute))
        )
    return found


def adapters_of(base: Base, spec: JobSpec) -> list[Adapter]:
    """The adapters that the spec asks for. Raises SpecError for target_modules that match nothing."""
    adaptable = {weight.module: weight for weight in base.adaptable()}
    chosen = choose_targets(list(adaptable), spec.lora.target_modules)
    weights = [adaptable[name] for name in chosen]
    return [Adapter(w.module, w.layer, w.rows, w.numel_of_row, spec.lora.r) for w in weights]


def groups_of(stored: Sequence[Stored], adapters: Sequence[Adapter]) -> list[Group]:
    """One group a decoder layer, and one for all the rest, which stays gathered: as `workers.parallel` shards."""
    layers = sorted({s.weight.layer for s in stored if s.weight.layer is not None})
    found = [_group("rest", stored, adapters, None)]
    return found + [_group(f"layer {layer}", stored, adapters, layer) for layer in layers]


def _group(name: str, stored: Sequence[Stored], adapters: Sequence[Adapter], layer: int | None) -> Group:
    frozen = tuple(s for s in stored if s.weight.layer == layer)
    return Group(name, frozen, tuple(a for a in adapters if a.layer == layer), held=layer is None)


def _refuse_empty_rows(base: Base) -> None:
    for weight in base.linears():
        if not weight.numel:
            raise SpecError(f"The base's {weight.module} has shape {weight.shape}: there is nothing to store.", param="model")
