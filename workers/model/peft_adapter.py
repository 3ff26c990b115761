"""A PEFT adapter's folder, read for merging, serving and exporting."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig
from peft.utils.other import get_pattern_key
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from ft_service.bases.adapter_names import AdapterNames
from ft_service.bases.safetensors_header import read_header
from ft_service.errors import SpecError
from workers.base.parameter_sources import ParameterPiece, is_stack
from workers.layers.experts import projections_of
from workers.layers.linear import magnitude_ratio

_INNER = ".base_layer"


def stack_of(module: str, inner: bool, model: nn.Module, parameters: Sequence[str]) -> str | None:
    """Full name of the stack that a module of an adapter changes.

    None: the module is not a stack of experts.

    `inner`: whether there is an adapter inside this module's; `parameters`: the config's
    `target_parameters`.
    """
    name = module.removesuffix(_INNER)
    try:
        experts = model.get_submodule(name)
    except AttributeError:
        return None
    if all(experts._parameters.get(projection) is None for projection in projections_of(experts)):
        return None
    first, last = (f"{name}.{projection}" for projection in projections_of(experts))
    if name != module or not (
        inner or any(f".{last}".endswith(f".{parameter}") for parameter in parameters)
    ):
        return first
    return last


@dataclass(frozen=True)
class ExpertsUpdate:
    """The change of a stack of experts, or of the part of it that one tensor holds.

    Matrices are fp32.
    """

    a: Tensor
    """[experts, r, wide]"""
    b: Tensor
    """[experts, high, r]"""
    scaling: float
    transposed: bool

    @classmethod
    def of(
        cls, a: Tensor, b: Tensor, experts: int, scaling: float, transposed: bool
    ) -> ExpertsUpdate:
        """The update of PEFT's matrices [experts · r, wide] and [high, r · experts], scaled by
        `scaling`.
        """
        return cls(
            a.unflatten(0, (experts, -1)),
            b.unflatten(1, (-1, experts)).permute(2, 0, 1),
            scaling,
            transposed,
        )

    def part(self, expert: int | None, start: int, end: int) -> ExpertsUpdate:
        """The update of rows [start, end) of one expert's matrix [high, wide]; None: of every
        expert's.
        """
        chosen = slice(None) if expert is None else slice(expert, expert + 1)
        return ExpertsUpdate(self.a[chosen], self.b[chosen, start:end], self.scaling, False)

    def rows(self, base: Tensor, start: int, end: int) -> Tensor:
        """Rows [start, end) of the merged tensor from the base's, fp32: of a stack, matrices."""
        if base.ndim == 2:
            return base + self.scaling * (self.b[0, start:end] @ self.a[0])
        change = self.b[start:end] @ self.a[start:end]
        return base + self.scaling * (change.mT if self.transposed else change)


def updates_by_tensor(
    pieces: Sequence[ParameterPiece],
    shapes: Callable[[str], Sequence[int]],
    whole: Callable[[], ExpertsUpdate],
) -> Mapping[str, Callable[[], ExpertsUpdate]]:
    """Tensor of the base's files → its update, made when it is called. `shapes`: of tensors."""
    if len(pieces) == 1:
        return {pieces[0].tensor: whole}
    updates: dict[str, Callable[[], ExpertsUpdate]] = {}
    stacked = is_stack(shapes(pieces[0].tensor))
    experts = 1 if stacked else whole().a.shape[0]
    of_one = len(pieces) // experts
    for expert in range(experts):
        first = 0
        for piece in pieces[expert * of_one : (expert + 1) * of_one]:
            span = (None if stacked else expert, first, first + shapes(piece.tensor)[-2])
            updates[piece.tensor] = lambda span=span: whole().part(*span)
            first = span[2]
    return updates


def expected_shapes(
    stack: torch.Size, experts: int, r: int, transposed: bool
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of A and B for a stack as transformers has it."""
    _, high, wide = (stack[0], stack[2], stack[1]) if transposed else stack
    return (experts * r, wide), (high, r * experts)


@dataclass(frozen=True)
class Update:
    """What an adapter does to one weight [out, in]."""

    a: Tensor
    """[r, in] fp32"""
    b: Tensor
    """[out, r] fp32"""
    scaling: float
    magnitude: Tensor | None
    """[out] fp32, with DoRA."""

    def part(self, start: int, end: int) -> Update:
        """The update of rows [start, end) of the weight."""
        magnitude = None if self.magnitude is None else self.magnitude[start:end]
        return Update(self.a, self.b[start:end], self.scaling, magnitude)

    def turned(self) -> Update:
        """The same of a weight that is stored [in, out]."""
        assert self.magnitude is None, "no job has one there"
        return Update(self.b.t(), self.a.t(), self.scaling, None)

    def rows(self, base: Tensor, start: int, end: int) -> Tensor:
        """Rows [start, end) of the merged weight, from the base's, in fp32."""
        merged = base + self.scaling * (self.b[start:end] @ self.a)
        if self.magnitude is None:
            return merged
        return merged * magnitude_ratio(self.magnitude[start:end], merged.norm(dim=1)).unsqueeze(1)


class PeftAdapter:
    """A PEFT folder: which weights it changes, and how.

    Matrices are read on demand; names are the model's.
    """

    def __init__(self, folder: Path) -> None:
        config = PeftConfig.from_pretrained(str(folder))
        if not isinstance(config, LoraConfig) or config.bias != "none":
            raise SpecError(f"{folder}: only LoRA adapters without bias can be merged.")
        self.config = config
        self._file = folder / "adapter_model.safetensors"
        try:
            header = read_header(self._file)
            self.names = AdapterNames.of_file(header.metadata)
        except ValueError as error:
            raise SpecError(f"The adapter in {folder} cannot be read: {error}.") from None
        self._shapes = {
            self.names.in_model(name): entry.shape for name, entry in header.tensors.items()
        }
        self.modules = sorted(
            n.removesuffix(".lora_A.weight") for n in self._shapes if n.endswith(".lora_A.weight")
        )
        lora = {
            f"{m}.{kind}"
            for m in self.modules
            for kind in ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
        }
        self.replaced = {
            name.removeprefix("base_model.model."): name
            for name in sorted(self._shapes.keys() - lora)
        }
        """Base weight → tensor of the adapter that takes its place (`modules_to_save`)."""

    def weights(self) -> dict[str, str]:
        """Name of a base weight → module of the adapter that changes it."""
        return {
            f"{module.removeprefix('base_model.model.')}.weight": module for module in self.modules
        }

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str) -> Tensor:
        with safe_open(self._file, framework="pt") as tensors:
            return tensors.get_tensor(self.names.in_file(name)).float()

    def update(self, module: str) -> Update:
        magnitude = f"{module}.lora_magnitude_vector"
        return Update(
            a=self.read(f"{module}.lora_A.weight"),
            b=self.read(f"{module}.lora_B.weight"),
            scaling=self.scaling(module.removeprefix("base_model.model.")),
            magnitude=self.read(magnitude) if magnitude in self._shapes else None,
        )

    def stacks(self, model: PreTrainedModel) -> dict[str, str]:
        """Module of the adapter → the stack of experts that it changes."""
        parameters = sorted(self.config.target_parameters or ())
        named = {module: module.removeprefix("base_model.model.") for module in self.modules}
        found = {
            module: stack_of(name, f"{module}.base_layer" in named, model, parameters)
            for module, name in named.items()
        }
        return {module: stack for module, stack in found.items() if stack is not None}

    def experts_update(
        self, module: str, stack: str, experts: int, transposed: bool
    ) -> ExpertsUpdate:
        a = self.read(f"{module}.lora_A.weight")
        b = self.read(f"{module}.lora_B.weight")
        return ExpertsUpdate.of(a, b, experts, self.scaling(stack), transposed)

    def rank(self, module: str) -> int:
        return _by_pattern(self.config.rank_pattern, module, self.config.r)

    def scaling(self, module: str) -> float:
        rank = self.rank(module)
        alpha = _by_pattern(self.config.alpha_pattern, module, self.config.lora_alpha)
        return alpha / (math.sqrt(rank) if self.config.use_rslora else rank)


def _by_pattern(patterns: dict[str, Any] | None, module: str, default: Any) -> Any:
    return (patterns or {}).get(get_pattern_key(list(patterns or {}), module), default)
