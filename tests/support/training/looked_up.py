"""A model whose logits are looked up: losses of it are known by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ft_service.data.tokens.sample import Tokens
from workers.layers.segments import CURRENT
from workers.model.head import set_works_in_chunks

CHANCES = torch.tensor(
    [
        [0.1, 0.2, 0.3, 0.4],
        [0.5, 0.25, 0.125, 0.125],
        [0.2, 0.25, 0.45, 0.1],
        [0.7, 0.1, 0.15, 0.05],
    ]
)
"""Row i: the chances of every word behind token i."""


class LookedUp(PreTrainedModel):
    """The logits behind a token are its row of a table, whatever stands before it."""

    def __init__(
        self,
        chances: Tensor = CHANCES,
        *,
        in_chunks: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(PreTrainedConfig())
        words = chances.shape[1]
        self.table = nn.Parameter(chances.log().to(dtype))
        self.lm_head = nn.Linear(words, words, bias=False, dtype=dtype)
        self.lm_head.weight = nn.Parameter(torch.eye(words, dtype=dtype), requires_grad=False)
        self.given: list[dict[str, Any]] = []
        """Arguments of each forward, with what layers are told of its segments."""
        set_works_in_chunks(self, in_chunks)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor, **more: Any) -> Any:
        told = {"starts": CURRENT.starts.tolist() if CURRENT.packed else None}
        self.given.append({"lengths": CURRENT.lengths, **told, "training": self.training, **more})
        return SimpleNamespace(logits=self.lm_head(self.table[input_ids]))


def sample(ids: list[int], targets: int, label: bool | None = None) -> Tokens:
    """`targets`: so many tokens at the end."""
    learned = np.arange(len(ids)) >= len(ids) - targets
    return Tokens(np.array(ids, dtype=np.int32), learned, label=label)


def log_of(*chances: float) -> float:
    """The sum of their logarithms."""
    return float(torch.tensor(chances, dtype=torch.float64).log().sum())
