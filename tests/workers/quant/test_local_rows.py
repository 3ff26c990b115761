from __future__ import annotations

import torch
from torch import nn

from workers.quant.local_rows import local_rows


def test_a_tensor_that_is_not_sharded_is_itself() -> None:
    parameter = nn.Parameter(torch.ones(2))

    assert local_rows(parameter) is parameter
