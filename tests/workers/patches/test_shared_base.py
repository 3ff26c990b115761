"""The patch of a PEFT model whose base is another model."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from workers.patches.shared_base import replace_base


class Base(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.proj = nn.Linear(2, 2, bias=False)
        nn.init.constant_(self.proj.weight, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x)


def test_the_other_base_is_called_and_named_and_no_part_of_the_model() -> None:
    model = get_peft_model(Base(1.0), LoraConfig(target_modules=["proj"]))  # pyright: ignore[reportArgumentType]
    names = [name for name, _ in model.named_parameters()]
    other = Base(3.0)
    hooked: list[bool] = []
    other.register_forward_pre_hook(lambda module, args: hooked.append(True))
    replace_base(model, other)
    assert model(torch.ones(1, 2)).tolist() == [[6.0, 6.0]]
    assert hooked == [True]
    assert model.get_base_model() is other
    assert [name for name, _ in model.named_parameters()] == names
