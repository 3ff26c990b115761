"""Adapters on stacks of experts under the names and in the shapes that vLLM's loader reads.

There are two layouts in vLLM 0.32.0 (its package vllm.lora). Where the base's files
hold every expert's matrices on their own (Mixtral, Qwen3-MoE), so does the adapter, under the
files' names: `….experts.0.w1.lora_A.weight` [r, in], `….lora_B.weight` [out, r]; gate and up have
one A, as the stack's adapter has. Where the files hold stacks (gpt-oss), the layout is PEFT's:
`….experts.base_layer` for the first projection, `….experts` for the last, A [experts · r, in] and B
[out, r · experts]. In both, vLLM wants all projections: zeros stand for one without an adapter. It
computes such adapters by Triton's kernels alone, and so not on processors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ft_service.errors import SpecError
from workers.base.load import Safetensors
from workers.base.parameter_sources import ParameterPiece, find_pieces, is_stack
from workers.base.quantized_rows import PlainBase
from workers.layers.experts import SCALES_INPUT, projections_of
from workers.model.build import base_on_meta
from workers.model.peft_adapter import (
    ExpertsUpdate,
    PeftAdapter,
    expected_shapes,
    updates_by_tensor,
)

_PREFIX = "base_model.model."


@dataclass(frozen=True)
class ServedExperts:
    """The adapter of some matrices of one layer's experts, by one name."""

    name: str
    """Of the module in the adapter's file, without `.lora_A.weight`."""
    a: Tensor
    """[matrices, r, in] fp32"""
    b: Tensor
    """[matrices, out, r] fp32, scaled"""
    stacked: bool
    """Whether the file holds all matrices as one tensor."""

    def tensors(self, rank: int) -> dict[str, Tensor]:
        """The tensors of the file, with r padded by zeros to `rank`."""
        missing = rank - self.a.shape[1]
        a = torch.nn.functional.pad(self.a, (0, 0, 0, missing))
        b = torch.nn.functional.pad(self.b, (0, missing))
        if self.stacked:
            a = a.flatten(0, 1)
            b = b.permute(1, 2, 0).flatten(1)
        else:
            a = a[0]
            b = b[0]
        return {
            f"{self.name}.lora_A.weight": a.contiguous(),
            f"{self.name}.lora_B.weight": b.contiguous(),
        }


def served_experts(adapter: PeftAdapter, base: Path) -> Iterator[ServedExperts]:
    """What an adapter changes in stacks of experts.

    `base`: the folder of its base, of which only headers are read. Raises SpecError for experts
    that vLLM computes otherwise, and for an adapter that does not fit the base.
    """
    model = base_on_meta(str(base))
    of_stack = {stack: module for module, stack in adapter.stacks(model).items()}
    with Safetensors(base) as files:
        tensors = PlainBase(files, base)
        for name in dict.fromkeys(stack.rpartition(".")[0] for stack in of_stack):
            experts = model.get_submodule(name)
            if getattr(experts, SCALES_INPUT, False):
                raise SpecError(
                    f"The adapter changes {name}, whose experts scale their input, which vLLM's "
                    "loader of adapters does not "
                    "know: merge the tuned model (ft merge).",
                    param="format",
                )
            first, last = (f"{name}.{projection}" for projection in projections_of(experts))
            pieces = find_pieces(model, [first, last], tensors.names())
            for stack, whole in ((first, f"{name}.base_layer"), (last, name)):
                if stack not in pieces:
                    raise SpecError(
                        f"The adapter changes {stack}, which the base in {base} does not hold.",
                        param="base",
                    )
                update = _update(adapter, model, stack, of_stack)
                yield from _in_layout(whole, update, pieces[stack], tensors)


def _in_layout(
    whole: str, update: ExpertsUpdate, pieces: Sequence[ParameterPiece], tensors: PlainBase
) -> Iterator[ServedExperts]:
    """An update as one tensor for all experts, under the name `whole`, or as many, as the base's
    files hold the weights.
    """
    if len(pieces) == 1:
        yield ServedExperts(f"{_PREFIX}{whole}", update.a, update.b * update.scaling, stacked=True)
        return
    if is_stack(tensors.shape(pieces[0].tensor)):
        raise SpecError(
            "The base holds its experts as stacks of their own for gates and other rows "
            f"({pieces[0].tensor}), of which "
            "adapters were tried on no inference server: merge the tuned model.",
            param="base",
        )
    for tensor, part in updates_by_tensor(pieces, tensors.shape, lambda: update).items():
        own = part()
        yield ServedExperts(
            f"{_PREFIX}{tensor.removesuffix('.weight')}", own.a, own.b * own.scaling, stacked=False
        )


def _update(
    adapter: PeftAdapter, model: PreTrainedModel, stack: str, of_stack: dict[str, str]
) -> ExpertsUpdate:
    """What an adapter does to a stack; zeros where it has nothing for it."""
    shape = model.get_parameter(stack).shape
    experts = model.get_parameter(stack).shape[0]
    transposed = getattr(model.get_submodule(stack.rpartition(".")[0]), "is_transposed", False)
    r = adapter.rank(stack)
    of_a, of_b = expected_shapes(shape, experts, r, transposed)
    module = of_stack.get(stack)
    if module is None:
        return ExpertsUpdate.of(torch.zeros(of_a), torch.zeros(of_b), experts, 1.0, transposed)
    if (adapter.shape(f"{module}.lora_A.weight"), adapter.shape(f"{module}.lora_B.weight")) != (
        of_a,
        of_b,
    ):
        raise SpecError(
            f"The adapter changes {stack}, which the base does not hold in this shape.",
            param="base",
        )
    return adapter.experts_update(module, stack, experts, transposed)
