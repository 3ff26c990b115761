"""What replacing a module's call stands on: torch asks for a compiled call first, before all
hooks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from workers.patches.module_call import call_itself, replace_call, restore_call


def test_the_replaced_call_comes_before_all_hooks_and_no_name_changes() -> None:
    layer = nn.Linear(3, 3)
    names = list(layer.state_dict())
    called = []
    layer.register_forward_pre_hook(lambda *_: called.append("before"))
    layer.register_forward_hook(lambda *_: called.append("after"))

    def instead(x: Tensor, **options: Any) -> Tensor:
        called.append(("instead", options))
        return x

    x = torch.ones(2, 3)
    replace_call(layer, instead)
    assert torch.equal(nn.Sequential(layer)(x), x)
    assert torch.equal(layer(x, scale=2), x)
    assert called == [("instead", {}), ("instead", {"scale": 2})]
    expected = nn.functional.linear(x, layer.weight, layer.bias)
    assert torch.equal(call_itself(layer, x), expected)
    assert called[2:] == ["before", "after"]
    assert list(layer.state_dict()) == names
    restore_call(layer)
    assert torch.equal(layer(x), expected)
    assert called[4:] == ["before", "after"]
