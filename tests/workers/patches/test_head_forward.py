"""A head replaced for a forward: classes call it on all hidden states, and cap what it returns
where their config has a cap.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support.training.models import save_tiny
from workers.patches.head_forward import CAP, head_replaced

IDS = torch.arange(3, 15)[None]


@pytest.mark.parametrize(("family", "cap"), [("llama", None), ("gemma2", 0.01)])
def test_logits_are_what_is_put_in_place_of_the_head(
    family: str, cap: float | None, tmp_path: Path
) -> None:
    given: dict[str, Any] = {} if cap is None else {CAP: cap}
    model: Any = AutoModelForCausalLM.from_pretrained(
        save_tiny(family, tmp_path / "base", **given), dtype=torch.float32
    ).eval()
    head = model.get_output_embeddings()
    seen = []

    def own(hidden: Tensor) -> Tensor:
        seen.append(hidden)
        return torch.nn.functional.linear(hidden, head.weight)

    with torch.no_grad():
        stock = model(input_ids=IDS, use_cache=False).logits
        with head_replaced(head, model.config, own):
            ours = model(input_ids=IDS, use_cache=False).logits
        assert torch.equal(model(input_ids=IDS, use_cache=False).logits, stock), "as it was"
    assert seen[0].shape[:2] == IDS.shape
    expected = ours if cap is None else torch.tanh(ours / cap) * cap
    torch.testing.assert_close(stock, expected)
    assert cap is None or float(ours.abs().max()) > cap, "not capped by the class"
