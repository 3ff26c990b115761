"""Weights that each rank of a job stores: frozen ones in their formats, adapters, and the groups in
which FSDP2 gathers them.

Every tensor is split by rows: a rank keeps ceil(rows / shard) of them, padding included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ft_service.bases.description import Description, Kind, Weight
from ft_service.bases.module_rules import (
    assign_formats,
    choose_ignored,
    choose_parameters,
    choose_targets,
    choose_tower_targets,
    refuse_resharding_of_held,
    refuse_served,
    refuse_with_towers,
    values_by_module,
)
from ft_service.errors import SpecError
from ft_service.kernel_limits import moments_bytes
from ft_service.spec import FORMATS, JobSpec, WeightFormat
from ft_service.spec.mesh import mesh_shape

COMPUTE_BYTES = {"bf16": 2, "fp32": 4}
BF16_BYTES = 2
FP32_BYTES = 4


@dataclass(frozen=True)
class ShardLayout:
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
class WeightStorage:
    """A frozen weight in its storage format.

    `row_bytes`: bytes of a row at rest; `gathered_row_bytes`: those in a gather.
    """

    weight: Weight
    format: WeightFormat
    row_bytes: int
    gathered_row_bytes: int
    sharded: bool

    @classmethod
    def of(
        cls, weight: Weight, weight_format: WeightFormat, sharded: bool, compute_bytes: int
    ) -> WeightStorage:
        """A weight in its format.

        An unsharded weight is never converted again, so it is stored in the compute dtype. So are
        vectors: some architectures read a norm's dtype before the norm is gathered. What the model
        keeps in fp32 is neither sharded nor converted.
        """
        plain = BF16_BYTES if sharded and len(weight.shape) > 1 else compute_bytes
        plain, sharded = (FP32_BYTES, False) if weight.kept_fp32 else (plain, sharded)
        cols = weight.numel_of_row
        return cls(
            weight,
            weight_format,
            row_bytes(weight_format, cols, plain),
            row_bytes(weight_format, cols, compute_bytes),
            sharded,
        )

    def bytes_on_rank(self, layout: ShardLayout) -> int:
        return (
            layout.rows(self.weight.rows) if self.sharded else self.weight.rows
        ) * self.row_bytes

    @property
    def bytes_whole(self) -> int:
        """Bytes of the whole weight."""
        return self.weight.rows * self.row_bytes


@dataclass(frozen=True)
class AdapterShape:
    """The two matrices of one adapted module, A [r, cols] and B [rows, r]; or with r = 0 a
    parameter that is trained whole.
    """

    module: str
    layer: int | None
    rows: int
    cols: int
    r: int
    """Rows of A; on a stack of experts, the sum over all experts."""
    experts: int = 1
    """Matrices of the adapted stack."""
    magnitude: bool = False
    """Whether there is a vector [rows] besides (DoRA)."""

    kind: Kind = "linear"
    """Of the parameter."""
    on_every_rank: bool = False
    """Whether it lies whole on every rank: those of towers."""

    @property
    def whole(self) -> bool:
        return self.r == 0

    @property
    def tensors(self) -> int:
        return 1 if self.whole else 2 + self.magnitude

    @property
    def numel(self) -> int:
        return (
            self.rows * self.cols
            if self.whole
            else self.r * (self.rows + self.cols) + self.magnitude * self.rows
        )

    def numel_on_rank(self, layout: ShardLayout) -> int:
        if self.on_every_rank:
            return self.numel
        if self.whole:
            return layout.rows(self.rows) * self.cols
        return layout.rows(self.r) * self.cols + layout.rows(self.rows) * (self.r + self.magnitude)

    def moments_on_rank(self, layout: ShardLayout, *, in_8_bits: bool) -> int:
        """Bytes of AdamW's moments; of vectors in fp32."""
        rows, r = (
            (self.rows, self.r) if self.on_every_rank else map(layout.rows, (self.rows, self.r))
        )
        if self.whole:
            return moments_bytes(rows, self.cols, in_8_bits=in_8_bits)
        matrices = ((r, self.cols), (rows, self.r))
        vector = moments_bytes(rows, int(self.magnitude), in_8_bits=False)
        return vector + sum(moments_bytes(*size, in_8_bits=in_8_bits) for size in matrices)


@dataclass(frozen=True)
class GatherGroup:
    """Weights and adapters gathered by one collective."""

    name: str
    frozen: tuple[WeightStorage, ...]
    adapters: tuple[AdapterShape, ...]
    held: bool
    """Whether it stays gathered from its forward to the end of its backward."""
    in_backward: bool = True
    """Whether the backward needs its weights."""
    kept_over: int | None = None
    """Number of ranks over which it stays sharded after its forward; None: all that share a
    copy.
    """

    def gathered_bytes_on_rank(self, layout: ShardLayout, compute_bytes: int) -> int:
        """Bytes that a rank puts into a gather, padding rows included."""
        frozen = sum(
            layout.rows(s.weight.rows) * s.gathered_row_bytes for s in self.frozen if s.sharded
        )
        return frozen + sum(a.numel_on_rank(layout) for a in self.adapters) * compute_bytes

    def reduced_bytes_on_rank(self, layout: ShardLayout) -> int:
        """Bytes that a rank gets from the reduction of gradients."""
        return sum(a.numel_on_rank(layout) for a in self.adapters) * FP32_BYTES


@dataclass(frozen=True)
class ShardedJob:
    """A job with everything that its ranks store."""

    base: Description
    spec: JobSpec
    layout: ShardLayout
    frozen: tuple[WeightStorage, ...]
    adapters: tuple[AdapterShape, ...]
    groups: tuple[GatherGroup, ...]

    @classmethod
    def of(cls, base: Description, spec: JobSpec) -> ShardedJob:
        """Raises SpecError for patterns and names that match nothing in the base."""
        layout = layout_of(spec)
        frozen = stored_weights(base, spec, layout)
        adapters = adapters_of(base, spec)
        return cls(
            base,
            spec,
            layout,
            tuple(frozen),
            tuple(adapters),
            tuple(groups_of(frozen, adapters, spec)),
        )

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number in precision.compute."""
        return COMPUTE_BYTES[self.spec.precision.compute]

    @property
    def trains_embedding(self) -> bool:
        return any(a.kind == "embedding" for a in self.adapters)

    @property
    def quantised(self) -> list[WeightStorage]:
        return [storage for storage in self.frozen if storage.format != "bf16"]


def trained_head(base: Description, adapters: Sequence[AdapterShape]) -> int:
    """Numbers of the head's weight if it is trained, which may be the embedding; else 0."""
    return sum(a.numel for a in adapters if a.kind == ("embedding" if base.outer.tied else "head"))


def layout_of(spec: JobSpec) -> ShardLayout:
    return ShardLayout(*mesh_shape(spec.distributed.replicate, spec.world_size))


def row_bytes(weight_format: WeightFormat, cols: int, plain_bytes: int) -> int:
    """Bytes of a row of `cols` columns.

    `plain_bytes`: bytes of an element that is not quantised.
    """
    return (
        cols * plain_bytes if weight_format == "bf16" else FORMATS[weight_format].bytes_of_row(cols)
    )


def stored_weights(base: Description, spec: JobSpec, layout: ShardLayout) -> list[WeightStorage]:
    """Every frozen weight in the format that the spec gives it.

    Raises SpecError for a pattern that matches nothing.
    """
    _refuse_empty_rows(base)
    formats = assign_formats(base.names, spec.precision, base.held)
    refuse_resharding_of_held(spec.distributed.reshard_size, base.held, formats)
    trained = trained_whole(base, spec)
    frozen = [weight for weight in base.weights if weight not in trained]
    ignored = choose_ignored([weight.name for weight in frozen], spec.distributed.ignored)
    weights = []
    for weight in frozen:
        weight_format = (
            formats.get(weight.module, "bf16") if weight.parameter == "weight" else "bf16"
        )
        sharded = layout.shard > 1 and weight.name not in ignored
        weights.append(
            WeightStorage.of(weight, weight_format, sharded, COMPUTE_BYTES[spec.precision.compute])
        )
    return weights


def trained_whole(base: Description, spec: JobSpec) -> list[Weight]:
    """The parameters of embedding and head that are trained whole.

    Raises SpecError as `OuterModules.chosen` does.
    """
    chosen = base.outer.chosen(spec.lora.modules_to_save, base.held)
    return [weight for weight in base.weights if weight.module in chosen]


def adapters_of(base: Description, spec: JobSpec) -> list[AdapterShape]:
    """The adapters that the spec asks for, and what is trained whole.

    Raises SpecError for names and patterns that match nothing.
    """
    linears = {weight.module: weight for weight in base.linears}
    experts = [weight.module for weight in base.experts]
    wanted = spec.lora.target_modules
    shared = spec.shared_experts
    outer = base.outer
    chosen = choose_targets(
        list(linears),
        experts,
        wanted,
        shared_experts=shared,
        not_adapted=base.not_adapted,
        outer=outer,
        towers=base.tower_linears,
    )
    # Of a pattern nobody knows before the samples are counted: without images it means text alone.
    by_name = not isinstance(wanted, str)
    towers = choose_tower_targets(base.tower_linears, wanted, list(linears)) if by_name else []
    refuse_with_towers(spec, towers)
    stacks = choose_parameters(experts, spec.lora.target_parameters, spec.lora.lora_dropout, chosen)
    ranks = values_by_module([*chosen, *stacks], spec.lora.rank_pattern, "lora.rank_pattern")
    values_by_module([*chosen, *stacks], spec.lora.alpha_pattern, "lora.alpha_pattern")
    rounded = {w.module: w.numel_of_row for w in base.quantizable if w.kind == "linear"}
    refuse_served(spec.precision.served_as, rounded, set(chosen), bool(experts))
    weights = [linears[name] for name in chosen]
    shapes = [
        AdapterShape(
            w.module,
            w.layer,
            w.rows,
            w.numel_of_row,
            ranks.get(w.module, spec.lora.r),
            magnitude=spec.lora.use_dora,
        )
        for w in weights
    ]
    count = base.dimensions.experts
    for weight in (weight for weight in base.experts if weight.module in stacks):
        r = ranks.get(weight.module, spec.lora.r)
        shapes.append(
            AdapterShape(
                weight.module,
                weight.layer,
                weight.rows // count,
                weight.numel_of_row,
                r * count,
                count,
            )
        )
    for name in towers:
        rows, columns = base.tower_linears[name]
        shapes.append(AdapterShape(name, None, rows, columns, spec.lora.r, on_every_rank=True))
    whole = trained_whole(base, spec)
    return shapes + [
        AdapterShape(w.module, None, w.rows, w.numel_of_row, r=0, kind=w.kind) for w in whole
    ]


def groups_of(
    stored: Sequence[WeightStorage], adapters: Sequence[AdapterShape], spec: JobSpec
) -> list[GatherGroup]:
    """The groups that `workers.ranks.grouping` makes: the embedding, which is freed after it was
    read; every decoder layer; and norm with head, kept for the backward that begins with them. A
    head tied to the embedding shares a group with it and the norm. Groups by size carry the same
    bytes in other pieces, and are planned as decoder layers.
    """
    options = spec.distributed
    adapters = [own for own in adapters if not own.on_every_rank]
    if options.wrap == "none":
        return [GatherGroup("all", tuple(stored), tuple(adapters), held=True)]
    embedding = tuple(s for s in stored if s.weight.kind == "embedding")
    rest = tuple(s for s in stored if s.weight.layer is None and s.weight.kind != "embedding")
    outer = tuple(a for a in adapters if a.layer is None)
    embedded = tuple(a for a in outer if a.kind == "embedding")
    held = options.keep_unsharded or options.reshard_after_forward is False
    layers = sorted({s.weight.layer for s in stored if s.weight.layer is not None})
    middle = [
        _layer_group(stored, adapters, layer, held, None if held else options.reshard_size)
        for layer in layers
    ]
    if not any(s.weight.kind == "head" for s in rest) and not any(a.kind == "head" for a in outer):
        return _filled(
            [GatherGroup("embedding and head", embedding + rest, outer, held=True), *middle]
        )
    first = GatherGroup(
        "embedding", embedding, embedded, held=options.keep_unsharded, in_backward=False
    )
    last = tuple(a for a in outer if a not in embedded)
    return _filled([first, *middle, GatherGroup("norm and head", rest, last, held=True)])


def _layer_group(
    stored: Sequence[WeightStorage],
    adapters: Sequence[AdapterShape],
    layer: int,
    held: bool,
    kept_over: int | None,
) -> GatherGroup:
    frozen = tuple(s for s in stored if s.weight.layer == layer)
    return GatherGroup(
        f"layer {layer}",
        frozen,
        tuple(a for a in adapters if a.layer == layer),
        held,
        kept_over=kept_over,
    )


def _filled(groups: Sequence[GatherGroup]) -> list[GatherGroup]:
    """The groups that have anything to gather."""
    return [group for group in groups if group.adapters or any(s.sharded for s in group.frozen)]


def _refuse_empty_rows(base: Description) -> None:
    for weight in base.quantizable:
        if not weight.numel:
            raise SpecError(
                f"The base's {weight.module} has shape {weight.shape}: there is nothing to store.",
                param="model",
            )
