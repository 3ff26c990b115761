"""What replacing a forward on the instance stands on: torch looks it up there, inside of hooks, and
renames nothing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workers.patches.forward import replace_forward, restore_forward


def test_the_replaced_forward_is_called_inside_of_hooks_and_no_name_changes() -> None:
    layer = nn.Linear(3, 3)
    names = list(layer.state_dict())
    called = []
    layer.register_forward_pre_hook(lambda *_: called.append("before"))
    layer.register_forward_hook(lambda *_: called.append("after"))

    def own(x: Tensor) -> Tensor:
        called.append("own")
        return x

    replace_forward(layer, own)
    x = torch.ones(2, 3)
    assert torch.equal(layer(x), x)
    assert called == ["before", "own", "after"]
    assert list(layer.state_dict()) == names
    restore_forward(layer)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


def test_a_forward_that_was_not_replaced_cannot_be_restored() -> None:
    layer: Any = nn.Linear(3, 3)
    with pytest.raises(AttributeError):
        restore_forward(layer)
