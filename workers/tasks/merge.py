"""Merges a base and its adapter into one model: `python -m workers.tasks.merge ADAPTER OUT --to
bf16|fp8|int4|nvfp4|mxfp4`.

Row by row: merged = base + scaling · B · A in fp32, then cast, so that memory does not grow with
the model. Needs neither a GPU nor a process group. What is written has the base's own tensor names,
config and tokenizer, and loads wherever the base does; all but `--to bf16` store the linear layers
of the decoder layers in compressed-tensors' layouts (`workers.exports.compressed_tensors`), which
vLLM and transformers load.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, get_args

from ft_service.host.quick_imports import begin_imports, end_imports
from workers.patches.absent_torchao import keep_torchao_out

if __name__ == "__main__":  # before transformers is imported
    keep_torchao_out()
    begin_imports()
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ft_service.bases.base_files import copy_base_file, is_base_file, read_config
from ft_service.data.tokenizer_files import IMAGE_FILES
from ft_service.errors import SpecError
from ft_service.rundir.file_digest import FileDigest
from ft_service.rundir.manifest import (
    EXPORT_MANIFEST,
    MANIFEST,
    Manifest,
    base_files,
    base_of,
    spec_beside,
)
from ft_service.spec import SERVED_FORMS, JobSpec, Merged, PrecisionOptions, ServedAs
from workers.base.frozen_weights import fill
from workers.base.layouts import MXFP4_CODES, MXFP4_SCALES
from workers.base.load import Safetensors
from workers.base.parameter_sources import NamedBase, ParameterPiece, find_pieces
from workers.base.quantized_rows import PlainBase, StoredBase
from workers.exports.compressed_tensors import (
    CODES,
    PACKED,
    SCALE,
    SHAPE,
    WHOLE,
    RestoredFolder,
    group_of,
    layout,
    packed,
    restore,
)
from workers.exports.own_template import take_template
from workers.layers.experts import SCALES_INPUT
from workers.layers.linear import stored_parts
from workers.model.buffers import STORAGE_DTYPE
from workers.model.build import base_on_meta, decoder_layers
from workers.model.merged_linears import merged_weights
from workers.model.peft_adapter import (
    ExpertsUpdate,
    PeftAdapter,
    Update,
    expected_shapes,
    updates_by_tensor,
)
from workers.model.precision import formats_of_base, precision_map
from workers.output.model_shards import DTYPES, TensorPlan, in_files, write_file, write_index
from workers.output.outcome import new_folder
from workers.quant import mxfp4
from workers.quant.served_forms import (
    AdapterFactors,
    Codes,
    RoundedRows,
    rounded_rows,
    scale_of_whole,
    to_fp8,
    to_int4,
    to_nvfp4,
    values_of,
    whole_scale,
)
from workers.quant.weights import QUANTIZED
from workers.ranks.runtime import COMPUTE_DTYPE
from workers.tasks import print_result
from workers.tasks.fidelity import measure

CHUNK_BYTES = 16 * 1024**2
"""fp32 rows that are worked on at once."""
GIB = 1024**3
COPIED = (
    *(
        "tokenizer*",
        "chat_template*",
        "*.model",
        "vocab*",
        "merges.txt",
        "special_tokens_map.json",
        "added_tokens.json",
    ),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    *("generation_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*"),
    "spk_dict.pt",  # the voices of Qwen2.5-Omni, without which its class does not load
)
"""Files of the base that the merged model needs, or must carry."""
FIDELITY = "fidelity.json"
FLOATS = ("F64", "F32", "F16", "BF16")
WIDE = ("F64", "F32")
"""Floating-point dtypes whose values bf16 does not hold."""


@dataclass
class Rounding:
    """The loss by the cast to the stored format: squared 2-norms over all weights that the adapter
    changes.
    """

    exact: float = 0.0
    update: float = 0.0
    lost: float = 0.0

    def add(self, base: Tensor, exact: Tensor, stored: Tensor) -> None:
        self.exact += _squared_norm(exact)
        self.update += _squared_norm(exact - base)
        self.lost += _squared_norm(stored - exact)

    def report(self) -> dict[str, float]:
        """2-norm of the loss, as a share of the merged weights, and of the adapter's update to
        them.
        """
        return {
            "relative_to_weights": math.sqrt(self.lost / self.exact) if self.exact else 0.0,
            "relative_to_update": math.sqrt(self.lost / self.update) if self.update else 0.0,
        }


def _squared_norm(rows: Tensor) -> float:
    return float(torch.linalg.vector_norm(rows, dtype=torch.float64)) ** 2


def merge(
    base: Path,
    adapter_folder: Path,
    out: Path,
    *,
    to: str,
    precision: PrecisionOptions | None = None,
    max_file_bytes: int = 5 * GIB,
) -> Rounding:
    """Write the merged model to the new folder `out`.

    `precision`: the options of the job that trained the adapter; None: not known, and the adapter
    is for no form of its own. Raises SpecError for an adapter that does not fit the base, or `to`.
    """
    refuse_other_form(precision, to)
    adapter = PeftAdapter(adapter_folder)
    model = base_on_meta(str(base))
    with Safetensors(base) as files_of_base, new_folder(out) as folder:
        tensors = PlainBase(files_of_base, base)
        targets = Targets(base, model, tensors, adapter)
        # In MXFP4 such a base goes back to what it was published as, and to nothing else.
        stacks = {name for name in tensors.names() if to == "mxfp4" and tensors.mxfp4_stack(name)}
        quantised = set[str]() if to == "bf16" or stacks else merged_weights(model, tensors, to)
        trained = (
            None
            if precision is None or precision.served_as is None
            else TrainedRows(model, files_of_base, base, precision, precision.served_as)
        )
        stored = MergedStorage(to, quantised, tensors, targets.changed, trained, stacks)
        of_unit = {stored.unit(name): name for name in tensors.names()}
        files = in_files(list(of_unit), max_file_bytes)
        rounding = Rounding()
        wholes = WholeScales(stored, targets)
        for file, units in files.items():
            pieces = (
                piece
                for unit in units
                for piece in _pieces(of_unit[unit], unit, stored, targets, wholes, rounding)
            )
            write_file(folder / file, [plan for unit in units for plan in unit], pieces)
        write_index(folder, files)
        _write_config(base, model, folder, stored)
        for path in (
            path for pattern in COPIED for path in base.glob(pattern) if is_base_file(path)
        ):
            copy_base_file(path, folder / path.name)
        take_template(adapter_folder, folder)
        for own in (adapter_folder / name for name in IMAGE_FILES):
            if own.is_file():  # with the bounds of pixels of its job
                shutil.copyfile(own, folder / own.name)
    return rounding


class Targets:
    """The tensors of the base's files that an adapter changes: files may hold other names than the
    model has.
    """

    def __init__(
        self, base: Path, model: PreTrainedModel, tensors: PlainBase, adapter: PeftAdapter
    ) -> None:
        """Raises SpecError naming the first weight that the base does not hold, or holds in another
        shape.
        """
        self._stack_of = adapter.stacks(model)
        weights = {
            name: module
            for name, module in adapter.weights().items()
            if module not in self._stack_of
        }
        names_of = _names_of_tied(model)
        _refuse_parting(names_of, weights.keys(), adapter.replaced.keys())
        replaced = _replaced_once(model, adapter, names_of)
        wanted = [*((name,) for name in weights), *replaced]
        pieces = find_pieces(model, chain.from_iterable(wanted), tensors.names())
        missing = [names[0] for names in wanted if pieces.keys().isdisjoint(names)]
        if missing:
            raise SpecError(
                f"The adapter changes {len(missing)} weights that {base} does not hold, the "
                f"first: {missing[0]}. "
                "It belongs to another base, or the base's layout is not supported.",
                param="base",
            )
        self.adapter = adapter
        self.stacks = self._of_stacks(model, tensors)
        self.replaced = {
            piece.tensor: theirs
            for names, theirs in replaced.items()
            for piece in _one_of(names, pieces)
        }
        self._modules: dict[str, tuple[str, int]] = {}
        """Tensor of the base's files → module of the adapter that changes it, and the row of that
        module which is its first.
        """
        self._turned = {pieces[name][0].tensor for name in weights if pieces[name][0].transposed}
        for name, module in weights.items():
            self._modules |= self._of_module(
                module, [piece.tensor for piece in pieces[name]], tensors, base
            )
        self.changed = self.stacks.keys() | self._modules.keys() | self.replaced.keys()
        """Tensors of the base's files."""

    def _of_module(
        self, module: str, names: Sequence[str], tensors: PlainBase, base: Path
    ) -> dict[str, tuple[str, int]]:
        """Tensor → module and first row, for the tensors whose rows follow each other in a linear
        layer's weight.
        """
        rows = self.adapter.shape(f"{module}.lora_B.weight")[0]
        cols = self.adapter.shape(f"{module}.lora_A.weight")[1]
        shapes = [
            tensors.shape(name)[::-1] if name in self._turned else tensors.shape(name)
            for name in names
        ]
        if {shape[1:] for shape in shapes} != {(cols,)} or sum(
            shape[0] for shape in shapes
        ) != rows:
            held = " and ".join(str(tensors.shape(name)) for name in names)
            raise SpecError(
                f"The adapter changes {names[0]} of shape {(rows, cols)}; {base} has {held}.",
                param="base",
            )
        firsts = accumulate((shape[0] for shape in shapes), initial=0)
        return {name: (module, first) for name, first in zip(names, firsts, strict=False)}

    def _of_stacks(
        self, model: PreTrainedModel, tensors: PlainBase
    ) -> dict[str, Callable[[], ExpertsUpdate]]:
        """Tensor → what the adapters on experts change in it."""
        pieces = find_pieces(model, self._stack_of.values(), tensors.names())
        updates: dict[str, Callable[[], ExpertsUpdate]] = {}
        for module, stack in self._stack_of.items():
            parameter = model.get_parameter(stack)
            experts = model.get_submodule(stack.rpartition(".")[0])
            # As PEFT has it, whose layers ask the published class, and that says nothing where the
            # shares scale the input.
            transposed = getattr(experts, "is_transposed", False) and not getattr(
                experts, SCALES_INPUT, False
            )
            r = self.adapter.rank(stack)
            found = (
                self.adapter.shape(f"{module}.lora_A.weight"),
                self.adapter.shape(f"{module}.lora_B.weight"),
            )
            if stack not in pieces or found != expected_shapes(
                parameter.shape, parameter.shape[0], r, transposed
            ):
                raise SpecError(
                    f"The adapter changes {stack}, which the base does not hold in this shape.",
                    param="base",
                )
            of_file = pieces[stack][0]
            if of_file.transposed and tensors.shape(of_file.tensor) != tuple(parameter.shape):
                transposed = not transposed
            whole = partial(
                self.adapter.experts_update, module, stack, parameter.shape[0], transposed
            )
            updates |= updates_by_tensor(pieces[stack], tensors.shape, whole)
        return updates

    def update(self, name: str, rows: int) -> Update | ExpertsUpdate | None:
        """What the adapter does to a tensor of the base's files, which holds so many `rows`; None:
        nothing.
        """
        if name in self.stacks:
            return self.stacks[name]()
        if name not in self._modules:
            return None
        module, first = self._modules[name]
        update = self.adapter.update(module)
        return update.turned() if name in self._turned else update.part(first, first + rows)


def _one_of(
    names: Sequence[str], pieces: Mapping[str, Sequence[ParameterPiece]]
) -> Iterator[ParameterPiece]:
    """The tensors, of which the files may hold several alike, of a weight under any of its
    names.
    """
    return (piece for name in names for piece in pieces.get(name, ()))


def _names_of_tied(model: PreTrainedModel) -> dict[str, tuple[str, ...]]:
    """Name of a parameter → all its names, several of a tied one."""
    by_id: dict[int, tuple[str, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id[id(parameter)] = (*by_id.get(id(parameter), ()), name)
    return {name: names for names in by_id.values() for name in names}


def _refuse_parting(
    names_of: Mapping[str, Sequence[str]], added_to: Set[str], replaced: Set[str]
) -> None:
    """Raise SpecError for an adapter that changes one name of a tied weight and leaves another, as
    PEFT lets it.

    `added_to`: weights with an adapter of their own, of which two names never have one together;
    `replaced`: those with other values.
    """
    for name in sorted(added_to | replaced):
        left = [other for other in names_of.get(name, ()) if other not in replaced]
        if len(names_of.get(name, ())) > 1 and left:
            others = " and ".join(other for other in names_of[name] if other != name)
            raise SpecError(
                f"The adapter changes {name} apart from {others}, and the base ties them: a "
                "merged model has one weight for "
                "both. Serve the base with the adapter beside it, or train one that keeps the "
                "tie: with "
                "lora.modules_to_save: [lm_head] here, or ensure_weight_tying=True in PEFT.",
                param="base",
            )


def _replaced_once(
    model: PreTrainedModel, adapter: PeftAdapter, names_of: Mapping[str, tuple[str, ...]]
) -> dict[tuple[str, ...], str]:
    """Names of a base weight, several of a tied one, of which the base's files may hold one or all
    → tensor of the adapter in its place. Raises SpecError for weights of another shape, and for two
    values of a tied one that differ.
    """
    found: dict[tuple[str, ...], str] = {}
    for name, theirs in adapter.replaced.items():
        if name not in names_of:
            raise SpecError(
                f"The adapter replaces {name}, which the base does not have.", param="base"
            )
        shape = tuple(model.get_parameter(name).shape)
        if adapter.shape(theirs) != shape:
            raise SpecError(
                f"The adapter replaces {name} by {adapter.shape(theirs)}; the base has {shape}.",
                param="base",
            )
        known = found.setdefault(names_of[name], theirs)
        if not torch.equal(adapter.read(known), adapter.read(theirs)):
            raise SpecError(
                f"The adapter's {known} and {theirs} differ, and the base ties them: a merged "
                "model has one weight for both.",
                param="base",
            )
    return found


def refuse_other_form(precision: PrecisionOptions | None, to: str) -> None:
    """Raise SpecError for an adapter that was trained for another form than one merged to `to`
    has.
    """
    form = None if precision is None else precision.served_as
    if form is not None and to not in (
        SERVED_FORMS[form].merged_to,
        SERVED_FORMS[form].exported_as,
    ):
        raise SpecError(
            f"The adapter was trained to be served in {form} (precision.served_as), and in {to} it "
            f"is a model whose loss nobody has seen: use {SERVED_FORMS[form].how}.",
            param="to",
        )


class TrainedRows:
    """The weights by which a job with `precision.served_as` has multiplied."""

    def __init__(
        self,
        model: PreTrainedModel,
        files: Safetensors,
        base: Path,
        precision: PrecisionOptions,
        form: ServedAs,
    ) -> None:
        """`model`: on meta, as it was published."""
        layers = decoder_layers(model)
        stored = StoredBase.open(files, base)
        self._formats = precision_map(
            model, layers, precision, formats_of_base(model, layers, str(base))
        )
        self._base = NamedBase(model, stored, lambda name: name)
        self._compute = COMPUTE_DTYPE[precision.compute]
        self.form: ServedAs = form

    def rows(self, name: str, shape: tuple[int, ...], update: Update) -> Iterator[RoundedRows]:
        """The rows of a tensor of the base: stored as the job stored them, and rounded as
        `workers.layers.served` rounds them.
        """
        return rounded_rows(*self._operands(name, shape, update), self.form)

    def whole_scale(self, name: str, shape: tuple[int, ...], update: Update) -> Tensor:
        """The scale of the whole tensor in NVFP4."""
        return scale_of_whole(*self._operands(name, shape, update))

    def _operands(
        self, name: str, shape: tuple[int, ...], update: Update
    ) -> tuple[Sequence[Tensor], str, AdapterFactors]:
        kind = QUANTIZED.get(self._formats[name.removesuffix(".weight")])
        weight = (
            torch.empty(shape, dtype=STORAGE_DTYPE)
            if kind is None
            else kind.empty(shape, STORAGE_DTYPE, "cpu")
        )
        fill(weight, self._base, name, 0, shape[0], STORAGE_DTYPE)
        a, b = (matrix.to(self._compute) for matrix in (update.a, update.b))
        return *stored_parts(weight), AdapterFactors(a, b, update.scaling)


class MergedStorage:
    """How the merged weights are stored: bf16, unless they are quantised, or the base holds them in
    fp32 on purpose.

    That it does of vectors, such as the biases of routers, which bf16 rounds by more than they
    differ; and, where most of its weights are not in fp32, of all that is. What the adapter changes
    is in bf16 in any case.
    """

    def __init__(
        self,
        to: str,
        quantised: Set[str],
        tensors: PlainBase,
        changed: Set[str],
        trained: TrainedRows | None = None,
        stacks: Set[str] = frozenset(),
    ) -> None:
        """`quantised`: tensors of the base that are not in bf16; `stacks`: those of experts that
        are in MXFP4, as they were published.

        `changed`: those that the adapter changes; `trained`: what the job has multiplied by; None:
        the sum of base and adapter is rounded here. Raises SpecError where no group of INT4 fits
        them.
        """
        self.trained = trained
        self.to = to
        self.quantised = quantised
        self.tensors = tensors
        self.stacks = stacks
        self._changed = changed
        widths = (tensors.shape(name)[1] for name in quantised)
        if trained is not None:
            self.group = SERVED_FORMS[trained.form].group
        else:
            self.group = group_of(to, widths)
        self._beside: dict[str, list[str]] = {}
        for name in sorted(quantised):
            self._beside.setdefault(_parent(name), []).append(name)
        values: Counter[str] = Counter()
        for name in tensors.names():
            values[tensors.dtype(name)] += math.prod(tensors.shape(name))
        self._usual = max(FLOATS, key=lambda dtype: values[dtype])
        """dtype of most of the base's weights."""

    def unit(self, name: str) -> tuple[TensorPlan, ...]:
        """The planned tensors for one tensor of the base: itself, or codes and what belongs to
        them.
        """
        shape = self.tensors.shape(name)
        dtype = self.tensors.dtype(name)
        if name in self.stacks:
            experts, cols, rows = shape
            blocks = experts, rows, cols // mxfp4.BLOCK
            return (
                TensorPlan(name + MXFP4_CODES, (*blocks, mxfp4.BLOCK // 2), "U8"),
                TensorPlan(name + MXFP4_SCALES, blocks, "U8"),
            )
        if name not in self.quantised:
            return (
                TensorPlan(
                    name, shape, dtype if dtype not in FLOATS or self._stays(name) else "BF16"
                ),
            )
        rows, cols = shape
        scales = rows, cols // (self.group or cols)
        if self.to == "fp8":
            return TensorPlan(name, shape, "F8_E4M3"), TensorPlan(name + SCALE, scales, "BF16")
        if self.to == "int4":
            return (
                TensorPlan(name + PACKED, (rows, cols // 8), "I32"),
                TensorPlan(name + SCALE, scales, "BF16"),
                TensorPlan(name + SHAPE, (2,), "I64"),
            )
        if self.to == "nvfp4":
            return (
                TensorPlan(name + PACKED, (rows, cols // 2), "U8"),
                TensorPlan(name + SCALE, scales, "F8_E4M3"),
                TensorPlan(name + WHOLE, (1,), "F32"),
            )
        if self.to == "mxfp4":
            packed_codes = TensorPlan(name + PACKED, (rows, cols // 2), "U8")
            return packed_codes, TensorPlan(name + SCALE, scales, "U8")
        codes = TensorPlan(name + CODES, shape, "I8")
        return codes, TensorPlan(name + SCALE, scales, "BF16" if self.group else "F32")

    def _stays(self, name: str) -> bool:
        """Whether a tensor is stored in its dtype because bf16 would take away what the base holds
        on purpose.
        """
        dtype = self.tensors.dtype(name)
        is_vector = sum(side > 1 for side in self.tensors.shape(name)) < 2
        return dtype in WIDE and name not in self._changed and (is_vector or dtype != self._usual)

    def quantise(self, rows: Tensor, whole: Tensor | None) -> Codes:
        """fp32 rows in the form, of which merging may look for the best scales.

        `whole`: the scale of the whole tensor in NVFP4.
        """
        if self.to == "fp8":
            return to_fp8(rows)
        if self.to == "int4":
            return to_int4(rows, self.group)
        if whole is not None:
            return to_nvfp4(rows, whole)
        return Codes(*mxfp4.quantize(rows))

    def written(self, codes: Tensor) -> Tensor:
        """Codes as the file holds them."""
        if self.to == "int4":
            return packed(codes)
        return codes.to(torch.int8) if codes.dtype == torch.float32 else codes

    def siblings(self, name: str) -> list[str]:
        """Quantised tensors of the modules beside a tensor's own.

        What reads NVFP4 fuses some of them, such as those of queries, keys and values, into one
        weight, and takes one scale of the whole for all: so they get the same.
        """
        return self._beside[_parent(name)]


def _parent(name: str) -> str:
    """Of the module that has a tensor."""
    return name.rpartition(".")[0].rpartition(".")[0]


class WholeScales:
    """The scales of whole tensors in NVFP4, one for all siblings, each found once."""

    def __init__(self, stored: MergedStorage, targets: Targets) -> None:
        self._stored = stored
        self._targets = targets
        self._own: dict[str, Tensor] = {}

    def shared(self, name: str) -> Tensor:
        """The largest of all siblings: no scale of a block is above 448 by it."""
        return torch.stack([self._of(other) for other in self._stored.siblings(name)]).amax()

    def _of(self, name: str) -> Tensor:
        if name not in self._own:
            self._own[name] = self._found(name)
        return self._own[name]

    def _found(self, name: str) -> Tensor:
        shape = self._stored.tensors.shape(name)
        update = self._targets.update(name, shape[0])
        trained = self._stored.trained
        if trained is not None:
            return trained.whole_scale(name, shape, _of_job(trained, name, update))
        exact = _exact_rows(self._stored.tensors, name, update)
        return whole_scale(torch.stack([sums.abs().amax() for _, _, sums in exact]).amax())


def _of_job(trained: TrainedRows, name: str, update: Update | ExpertsUpdate | None) -> Update:
    """The update that a job with `precision.served_as` has for every tensor that is rounded."""
    if not isinstance(update, Update):
        raise SpecError(
            f"The adapter was trained to be served in {trained.form}, and has nothing for {name}: "
            "it is not the whole adapter of its job.",
            param="base",
        )
    return update


def with_scale(own: Codes, whole: Tensor) -> Codes:
    """The same values with another scale of the whole, a power of two, if scales of blocks hold
    them; else as they are.
    """
    assert own.whole is not None
    exact = own.scales.float() * (own.whole / whole)
    scales = exact.to(torch.float8_e4m3fn)
    zeros = (own.codes.unflatten(1, (scales.shape[1], -1)) & 0x77).amax(2) == 0
    fits = bool(((scales.float() == exact) | zeros).all())
    return Codes(own.codes, scales, whole) if fits else own


def _pieces(
    name: str,
    unit: tuple[TensorPlan, ...],
    stored: MergedStorage,
    targets: Targets,
    wholes: WholeScales,
    rounding: Rounding,
) -> Iterator[Tensor]:
    """A tensor's rows in their stored form, CHUNK_BYTES of fp32 at a time; what belongs to codes
    comes last.
    """
    plan = unit[0]
    tensors = stored.tensors
    shape = tensors.shape(name)
    replacement = targets.replaced.get(name)
    if tensors.dtype(name) not in FLOATS or replacement or not shape:
        whole = targets.adapter.read(replacement) if replacement else tensors.whole(name)
        yield whole.to(DTYPES[plan.dtype])
        return
    update = targets.update(name, shape[0])
    if name in stored.stacks:
        assert update is None or isinstance(update, ExpertsUpdate)
        yield from _stack_in_mxfp4(name, shape[0], update, stored, rounding)
        return
    if len(unit) > 1:
        yield from _quantised(name, shape, update, stored, wholes, rounding)
        return
    for _, held, exact in _exact_rows(tensors, name, update):
        values = exact.to(DTYPES[plan.dtype])
        if update:
            rounding.add(held.float(), exact, values.float())
        yield values


def _stack_in_mxfp4(
    name: str,
    experts: int,
    update: ExpertsUpdate | None,
    stored: MergedStorage,
    rounding: Rounding,
) -> Iterator[Tensor]:
    """The codes of a stack's matrices, one by one, and then all exponents: as they were published,
    byte by byte, where nothing changes them.
    """
    stack = stored.tensors.mxfp4_stack(name)
    assert stack is not None
    rows = stack.shape[1]
    scales = list[Tensor]()
    for expert in range(experts):
        parts = stack.parts_of(expert, 0, rows)
        if update is not None:
            held = stored.tensors.rows(name, expert, expert + 1).float()
            exact = update.rows(held, expert, expert + 1)
            parts = mxfp4.quantize(exact[0].mT.contiguous())
            rounding.add(held, exact, values_of(*parts).mT[None])
        scales.append(parts.scales)
        yield parts.codes.unflatten(1, (-1, mxfp4.BLOCK // 2))
    yield torch.stack(scales)


def _exact_rows(
    tensors: PlainBase, name: str, update: Update | ExpertsUpdate | None
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """First row, rows of a tensor of the base, and the same with its update in fp32, CHUNK_BYTES of
    fp32 at a time; without an update, the latter as they are held.
    """
    shape = tensors.shape(name)
    height = max(1, CHUNK_BYTES // (4 * math.prod(shape[1:])))
    for start in range(0, shape[0], height):
        held = tensors.rows(name, start, min(start + height, shape[0]))
        yield start, held, update.rows(held.float(), start, start + len(held)) if update else held


def _quantised(
    name: str,
    shape: tuple[int, ...],
    update: Update | ExpertsUpdate | None,
    stored: MergedStorage,
    wholes: WholeScales,
    rounding: Rounding,
) -> Iterator[Tensor]:
    """A tensor's codes, some rows at a time, then its scales, and what else belongs to them."""
    scales = list[Tensor]()
    whole = wholes.shared(name) if stored.to == "nvfp4" else None
    if stored.trained is not None:
        found = list[Codes]()
        for some in stored.trained.rows(name, shape, _of_job(stored.trained, name, update)):
            held = stored.tensors.rows(name, some.rows.start, some.rows.stop).float()
            rounding.add(held, some.sums, values_of(*some.codes))
            yield stored.written(some.codes.codes)
            found.append(some.codes)
        scales = [own.scales for own in found]
        if whole is not None:
            codes = torch.cat([own.codes for own in found])
            shared = with_scale(Codes(codes, torch.cat(scales), found[0].whole), whole)
            scales = [shared.scales]
            whole = shared.whole
    else:
        for _, held, exact in _exact_rows(stored.tensors, name, update):
            codes = stored.quantise(exact.float(), whole)
            scales.append(codes.scales)
            if update:
                rounding.add(held.float(), exact, values_of(*codes))
            yield stored.written(codes.codes)
    yield torch.cat(scales)
    if stored.to == "int4":
        yield torch.tensor(shape)
    elif whole is not None:
        yield whole.reciprocal().reshape(1)


def _write_config(base: Path, model: PreTrainedModel, folder: Path, stored: MergedStorage) -> None:
    """The base's config, with the dtype and layout of what was written."""
    config = read_config(base)
    for part in (config, config.get("text_config") or {}):
        if not stored.stacks:  # what was quantised is written as its values
            part.pop("quantization_config", None)
    config.pop("torch_dtype", None)
    config["dtype"] = "bfloat16"
    if stored.quantised and stored.to in get_args(Merged):
        ignored = _ignored(model, stored)
        config["quantization_config"] = layout(stored.to, ignored, stored.group)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _ignored(model: PreTrainedModel, stored: MergedStorage) -> list[str]:
    """Modules that readers must not take for quantised: other linear layers, and other matrices of
    the files, such as routers, which are linear layers for some readers.
    """
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    matrices = [
        name.removesuffix(".weight")
        for name in stored.tensors.names()
        if name.endswith(".weight") and len(stored.tensors.shape(name)) == 2
    ]
    names = dict.fromkeys([*linears, *matrices])
    return [name for name in names if f"{name}.weight" not in stored.quantised]


def main(arguments: list[str]) -> int:
    """Merge, measure, and leave `fidelity.json` in the merged model's folder; the process's exit
    code.
    """
    parser = argparse.ArgumentParser(prog="python -m workers.tasks.merge", description=__doc__)
    parser.add_argument("adapter", type=Path, help="an adapter's folder with its manifest")
    parser.add_argument("out", type=Path)
    parser.add_argument("--to", choices=get_args(Merged), required=True)
    parser.add_argument(
        "--base", type=Path, help="the base's folder; default: where the job found it"
    )
    parser.add_argument("--max-file-gib", type=float, default=5.0)
    parser.add_argument(
        "--samples",
        type=int,
        default=64,
        help="of the validation file, for the fidelity report; 0: none",
    )
    given = parser.parse_args(arguments)
    size = int(given.max_file_gib * GIB)
    return print_result(
        lambda: merge_and_measure(
            given.adapter, given.out, given.to, given.base, given.samples, max_file_bytes=size
        )
    )


def merge_and_measure(
    adapter: Path,
    out: Path,
    to: str,
    base: Path | None,
    samples: int,
    *,
    max_file_bytes: int = 5 * GIB,
) -> dict[str, Any]:
    """Merge into the new folder `out`, and write `fidelity.json` next to the weights; returns its
    content.

    `base`: None: where the job found it. Raises SpecError for another base than it was trained on.
    """
    manifest = Manifest.model_validate_json((adapter / MANIFEST).read_bytes())
    spec = spec_beside(adapter, manifest)
    folder = base or base_of_job(spec)
    check_base(manifest, folder)
    rounding = merge(
        folder, adapter, out, to=to, precision=spec.precision, max_file_bytes=max_file_bytes
    )
    shutil.copy(adapter / MANIFEST, out / EXPORT_MANIFEST)
    with _readable(out, to) as model:
        report = {
            "to": to,
            "rounding": rounding.report(),
            **measure(spec, folder, adapter, model, samples),
        }
    (out / FIDELITY).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


@contextmanager
def _readable(merged: Path, to: str) -> Iterator[Path]:
    """The merged model as our loader reads it: INT4 as plain weights, while it is needed."""
    if to != "int4":
        yield merged
        return
    with tempfile.TemporaryDirectory(prefix=".restored-", dir=merged) as scratch:
        restore(merged, Path(scratch) / "model")
        yield Path(scratch) / "model"


def restore_codes(stored: Path, folder: Path) -> None:
    """Write a model that `merge` has stored as codes for torchao to the new folder `folder` as
    plain weights, those of the layers in fp32.
    """
    target = RestoredFolder(folder, stored)
    with Safetensors(stored) as files:
        for name in files.names():
            if not name.endswith((CODES, SCALE)):
                target.put(name, files.whole(name))
            elif name.endswith(CODES):
                weight = name.removesuffix(CODES)
                target.put(weight, values_of(files.whole(name), files.whole(weight + SCALE)))
    target.close()


def base_of_job(spec: JobSpec) -> Path:
    """The base's folder. Raises SpecError where the adapter lies in no run directory, and tells of
    none.
    """
    if not spec.model.path:
        raise SpecError(
            f"Where the base {spec.model.name} lies is not known here: name its folder with "
            "--base.",
            param="base",
        )
    return Path(spec.model.path)


def check_base(manifest: Manifest, base: Path) -> None:
    """Raises SpecError if `base` is not the one that the adapter was trained on."""
    there = base_of(
        manifest.base.name, base, {path.name: FileDigest.of(path) for path in base_files(base)}
    )
    if there.digest != manifest.base.digest:
        theirs = manifest.base.files
        ours = there.files
        changed = sorted(
            name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name)
        )
        raise SpecError(
            f"{base} is not the base that the adapter was trained on: {', '.join(changed)} differ.",
            param="base",
        )


if __name__ == "__main__":
    end_imports()
    sys.exit(main(sys.argv[1:]))
