"""Layers' inputs in the host's memory: when they go and come back, what the device holds, and what
becomes of the blocks. Copies are done as late as a GPU may do them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from ft_service.errors import SpecError
from ft_service.kernel_limits import OFFLOAD_BLOCK_BYTES
from tests.support.training.late_copies import LateCopies, on_small_scale
from workers.model import offloaded_inputs
from workers.model.activation_checkpointing import checkpoint_activations
from workers.model.offloaded_inputs import CudaCopies, copies_for

LAYERS = 5
WIDTH = 6
ROWS = 50
BLOCK = 1000
"""Bytes: an input takes two blocks, the second one in part."""


class Layer(nn.Module):
    """One that notes when it computes."""

    def __init__(self, number: int, noted: list[str]) -> None:
        super().__init__()
        self._name = f"layer {number}"
        self._noted = noted
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, hidden_states: Tensor, angles: Tensor, *, factor: float) -> Tensor:
        self._noted.append(self._name)
        return hidden_states + torch.tanh(hidden_states @ self.weight) * angles * factor


class NotedCopies(LateCopies):
    """Copies that are noted in the same list, by their direction."""

    noted: list[str]

    def copy(self, into: Tensor, source: Tensor) -> None:
        is_block = any(block.data_ptr() == into.data_ptr() for block in self.blocks)
        direction = "out" if is_block else "in"
        if self.noted[-1:] != [direction]:
            self.noted.append(direction)
        super().copy(into, source)


def stack(noted: list[str]) -> list[Layer]:
    torch.manual_seed(0)
    return [Layer(number, noted) for number in range(LAYERS)]


def forward_of(layers: list[Layer]) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x, angles = (torch.randn(1, ROWS, WIDTH, generator=generator) for _ in range(2))
    for layer in layers:
        x = layer(x, angles, factor=0.5)
    return x.square().sum()


def offloaded(noted: list[str]) -> tuple[list[Layer], NotedCopies]:
    layers = stack(noted)
    copies = NotedCopies()
    copies.noted = noted
    checkpoint_activations(layers, "offload", 4, copies=copies)
    return layers, copies


def gradients(layers: list[Layer]) -> list[Tensor]:
    return list(torch.autograd.grad(forward_of(layers), [layer.weight for layer in layers]))


def test_an_input_leaves_beside_its_layer_and_is_fetched_while_the_one_behind_it_has_its_backward() -> (
    None
):
    noted: list[str] = []
    with on_small_scale(block_bytes=BLOCK):
        layers, copies = offloaded(noted)
        found = gradients(layers)
        expected = gradients(stack([]))
    assert all(map(torch.equal, found, expected))
    assert noted == [
        *(word for number in range(4) for word in ("out", f"layer {number}")),
        "layer 4",  # whose input stays
        *(word for number in (4, 3, 2, 1) for word in ("in", f"layer {number}")),
        "layer 0",
    ]
    assert copies.most == 1, "of the layer that computes, and one that is copied"


def test_blocks_are_used_again_by_every_later_step_whatever_became_of_the_one_before() -> None:
    with on_small_scale(block_bytes=BLOCK):
        layers, copies = offloaded([])
        gradients(layers)
        assert len(copies.blocks) == 2 * (LAYERS - 1)
        forward_of(layers)  # without a backward
        with torch.no_grad():
            forward_of(layers)
        asked = copies.asked
        found = gradients(layers)
        expected = gradients(stack([]))
    assert len(copies.blocks) == 2 * (LAYERS - 1)
    assert copies.asked - asked == 2 * (LAYERS - 1), "no copy where there is no backward"
    assert all(map(torch.equal, found, expected))


def test_two_forwards_may_await_their_backward() -> None:
    with on_small_scale(block_bytes=BLOCK):
        layers, copies = offloaded([])
        loss = forward_of(layers) + forward_of(layers)
        loss.backward()
        expected = gradients(stack([]))
    assert len(copies.blocks) == 4 * (LAYERS - 1)
    for layer, grad in zip(layers, expected, strict=True):
        assert layer.weight.grad is not None
        assert torch.allclose(layer.weight.grad, 2 * grad)


def test_a_processor_is_refused_and_so_is_more_memory_than_a_rank_may_pin() -> None:
    with pytest.raises(SpecError) as caught:
        copies_for(torch.device("cpu"))
    assert caught.value.param == "distributed.activation_checkpointing"

    pinned: list[int] = []

    def empty(size: int, **options: Any) -> Tensor:
        assert options["pin_memory"]
        if len(pinned) == 2:
            raise RuntimeError("CUDA error: out of memory")
        pinned.append(size)
        return torch.zeros(0)

    streamless = SimpleNamespace(Stream=lambda device: None)
    with (
        patch.object(offloaded_inputs.torch, "cuda", streamless),
        patch.object(offloaded_inputs.torch, "empty", empty),
    ):
        for most in (OFFLOAD_BLOCK_BYTES, 10 * OFFLOAD_BLOCK_BYTES):
            pinned.clear()
            copies = CudaCopies(torch.device("cuda", 0), most)
            for _ in range(min(2, most // OFFLOAD_BLOCK_BYTES)):
                copies.block()
            with pytest.raises(SpecError) as caught:
                copies.block()
            assert caught.value.code == "out_of_memory"
            assert pinned == [OFFLOAD_BLOCK_BYTES] * min(2, most // OFFLOAD_BLOCK_BYTES)
