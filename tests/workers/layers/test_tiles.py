"""A feed-forward by tiles of rows: what it gives, keeps and computes, against itself as a whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ft_service import kernel_limits
from ft_service.kernel_limits import tile_rows, tiles_of
from workers.layers.dropout import Dropping
from workers.layers.tiles import Tiled, by_tiles
from workers.patches.forward import replace_forward

TILE = 8


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(6, 20)
        self.down = nn.Linear(20, 6)
        self.rows: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(x.shape[-2])
        return self.down(F.silu(self.up(x)))


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def tiled() -> FeedForward:
    module = FeedForward()
    replace_forward(module, Tiled(module, module.forward))
    return module


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setattr(kernel_limits, "TILE_ROWS", TILE)


@pytest.mark.parametrize(("rows", "tiles", "height"), [(1, 1, 1), (8, 1, 8), (9, 2, 5), (30, 4, 8)])
def test_tiles_are_as_even_as_they_can_be(rows: int, tiles: int, height: int) -> None:
    assert (tiles_of(rows), tile_rows(rows)) == (tiles, height)


@pytest.mark.parametrize("shape", [(1, 33, 6), (3, 11, 6), (33, 6)])
@pytest.mark.parametrize("of_input", [True, False])
def test_tiles_give_what_all_rows_give(shape: tuple[int, ...], of_input: bool) -> None:
    found: list[list[Tensor | None]] = []
    for module in (FeedForward(), tiled()):
        module.up.bias.requires_grad_(False)
        x = drawn(*shape).requires_grad_(of_input)
        y = module(x)
        y.backward(torch.ones_like(y).cumsum(0))
        found.append([y, x.grad, *(own.grad for own in module.parameters())])
    whole, parts = found
    for one, other in zip(whole, parts, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert (one - other).norm() <= 1e-6 * one.norm()


def test_each_tile_is_computed_once_in_forward_and_once_in_backward_though_its_layer_is_computed_again() -> (
    None
):
    """The layer's own recomputation ends where the input was kept."""
    module = tiled()

    def layer(x: Tensor) -> Tensor:
        return x + module(torch.sin(x))

    x = drawn(1, 30, 6).requires_grad_()
    y = checkpoint(layer, x, use_reentrant=False)
    assert module.rows == [8, 8, 8, 6]
    y.sum().backward()
    assert module.rows == 2 * [8, 8, 8, 6]


def test_nothing_between_the_layers_is_kept() -> None:
    kept: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.shape)
        return tensor

    module = tiled()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(drawn(1, 30, 6).requires_grad_())
    assert kept == [torch.Size([1, 30, 6])]


def test_without_a_gradient_rows_go_by_tiles_too_and_few_rows_as_they_are() -> None:
    module = tiled()
    with torch.no_grad():
        module(drawn(1, 30, 6))
        module(drawn(1, 1, 6))
    assert module.rows == [8, 8, 8, 6, 1]


def test_bf16_gradients_are_summed_in_fp32() -> None:
    tiles = 16
    module = tiled().to(torch.bfloat16)
    module.down.weight.requires_grad_(False)
    y = module(torch.zeros(1, tiles * TILE, 6, dtype=torch.bfloat16))
    grad = torch.ones_like(y)
    grad[:, :TILE] = 1024
    y.backward(grad)
    found = module.down.bias.grad
    assert found is not None
    expected = torch.tensor(1024.0 * TILE + (tiles - 1) * TILE).bfloat16()
    assert found.tolist() == [float(expected)] * 6, "in bf16 the first tile's sum would not grow"


def test_dropout_of_a_tile_is_that_of_its_rows() -> None:
    dropping = Dropping(0.5, "mlp.up")
    tokens = torch.arange(12, dtype=torch.int32).view(3, 4)
    dropping.use(tokens)
    Dropping.look_at([dropping], slice(11, 12))
    assert dropping.keys.tokens.tolist() == [11]
    assert dropping.concerns(torch.zeros(1, 1, 6)), "one row, and of the current tokens"
    Dropping.look_at([dropping], None)
    assert dropping.keys.tokens is tokens
    assert not dropping.concerns(torch.zeros(1, 1, 6))


def test_what_looks_at_other_rows_differs_by_tiles() -> None:
    x = drawn(1, 9, 4)
    assert torch.equal(by_tiles(torch.sin, x, 4), torch.sin(x))
    assert not torch.allclose(by_tiles(lambda own: own.cumsum(1), x, 4), x.cumsum(1))
