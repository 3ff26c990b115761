"""Adapters on the frozen base, several in one forward: each span of tokens gets what its own
adapter adds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ft_service.errors import SpecError
from workers.model.peft_adapter import PeftAdapter, Update

KEPT = 32
"""Most adapters that stay loaded; beyond that, the least recently used ones are removed."""
KEPT_BYTES = 2 * 1024**3
"""Most bytes of adapters that stay loaded, except that the one used last always does."""


@dataclass(frozen=True)
class Matrices:
    """What an adapter adds to one linear layer: scale · (x Aᵀ) Bᵀ."""

    a: Tensor
    """[r, in], in the dtype of the arithmetic."""
    b: Tensor
    """[r, out]: transposed, as it is multiplied."""
    scale: float


Adapter = dict[str, Matrices]
"""Matrices by the full name of the module that they change."""


def _bytes(adapter: Adapter) -> int:
    return sum(own.a.nbytes + own.b.nbytes for own in adapter.values())


@dataclass(frozen=True)
class AdapterSpan:
    """Tokens [start, end) of the row that go through one adapter."""

    adapter: Adapter
    start: int
    end: int


class Adapters:
    """The adapters of one base in this process.

    `spans` says which tokens of the current row go through which.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        self._linears = {
            name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)
        }
        self._dtype = dtype
        self._device = device
        self._loaded: OrderedDict[str, Adapter] = OrderedDict()
        self._hooked: set[str] = set()
        self.spans: Sequence[AdapterSpan] = ()

    def get(self, folder: str) -> Adapter:
        """The adapter of a PEFT folder, loaded at its first use: another version has a folder of
        another name. Raises SpecError for one that does not fit the base, or is not there.
        """
        adapter = self._loaded.get(folder)
        if adapter is None:
            adapter = self._load(_files(folder))
            for name in adapter.keys() - self._hooked:
                self._hooked.add(name)
                self._linears[name].register_forward_hook(_Adding(self, name))
            self._loaded[folder] = adapter
        self._loaded.move_to_end(folder)
        while len(self._loaded) > KEPT or (
            len(self._loaded) > 1 and sum(map(_bytes, self._loaded.values())) > KEPT_BYTES
        ):
            self._loaded.popitem(last=False)  # sequences that still use it hold it themselves
        return adapter

    @property
    def count(self) -> int:
        return len(self._loaded)

    def _load(self, files: PeftAdapter) -> Adapter:
        if files.replaced:
            raise SpecError(
                f"The adapter replaces whole weights ({next(iter(files.replaced))}), which is not "
                "served here."
            )
        if files.config.target_parameters:
            raise SpecError(
                "The adapter changes stacks of experts (lora.target_parameters), which the "
                "preview does not put on: merge it "
                "(ft merge), and name the merged model, or use PEFT.",
                code="model_not_served",
            )
        adapter: Adapter = {}
        for weight, module in files.weights().items():
            name = weight.removesuffix(".weight")
            update = files.update(module)
            self._require_fitting(name, update)
            a, b = (
                tensor.to(self._device, self._dtype)
                for tensor in (update.a, update.b.t().contiguous())
            )
            adapter[name] = Matrices(a, b, update.scaling)
        return adapter

    def _require_fitting(self, name: str, update: Update) -> None:
        linear = self._linears.get(name)
        if linear is None:
            raise SpecError(
                f"The adapter changes {name}, which the base has not, or not as a linear layer."
            )
        if update.magnitude is not None:
            raise SpecError(
                f"The adapter has a magnitude for {name} (DoRA), which is not served here: merge "
                "it."
            )
        if (update.a.shape[1], update.b.shape[0]) != (linear.in_features, linear.out_features):
            raise SpecError(
                f"The adapter is of another base: its matrices for {name} do not fit that layer."
            )


def _files(folder: str) -> PeftAdapter:
    try:
        return PeftAdapter(Path(folder))
    except (OSError, ValueError, TypeError) as error:
        raise SpecError(
            f"The adapter's folder is not there, or cannot be read ({type(error).__name__}).",
            param="model",
        ) from error


class _Adding:
    """A forward hook of one linear layer."""

    def __init__(self, adapters: Adapters, name: str) -> None:
        self._adapters = adapters
        self._name = name

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        for span in self._adapters.spans:
            own = span.adapter.get(self._name)
            if own is None:
                continue
            x = inputs[0].flatten(0, -2)[span.start : span.end]
            y = output.flatten(0, -2)[span.start : span.end]
            y.addmm_(x @ own.a.t(), own.b, alpha=own.scale)
        return None
