"""Falcon's linear layers compute what plain ones do, and have nothing else of their own."""

from __future__ import annotations

import torch
from torch import nn
from transformers.models.falcon.modeling_falcon import FalconLinear

from workers.patches.plain_linears import make_linears_plain


def test_a_falcon_linear_computes_what_a_plain_one_does() -> None:
    model = nn.Sequential(FalconLinear(6, 5), FalconLinear(5, 4, bias=False))
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    before = model(x)
    make_linears_plain(model)
    assert {type(layer) for layer in model} == {nn.Linear}
    torch.testing.assert_close(model(x), before)


def test_a_falcon_linear_has_a_forward_of_its_own_and_nothing_else() -> None:
    own = {name for name in vars(FalconLinear) if not name.startswith("__")} - {"_abc_impl"}
    assert own == {"forward"}
