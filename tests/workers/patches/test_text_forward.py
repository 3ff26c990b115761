"""Text passed through to the decoder of published classes gives the logits that the classes
give.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.support.training.wrapped import WRAPPERS
from workers.patches.text_forward import pass_text_through

IDS = torch.arange(3, 27).view(2, 12)


@pytest.mark.parametrize("family", ["gemma3", "llava", "mistral3"])
def test_logits_are_those_of_the_published_class(family: str) -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(family, **WRAPPERS[family])
    ).eval()
    positions = torch.arange(12).expand(2, -1)
    with torch.no_grad():
        published = model(input_ids=IDS, position_ids=positions, use_cache=False).logits
        pass_text_through(model, model.get_decoder(), model.get_output_embeddings())
        passed = model(input_ids=IDS, position_ids=positions, use_cache=False).logits
    assert type(model.model.forward).__name__ == "_Passing", "the class between is passed by"
    torch.testing.assert_close(passed, published, rtol=1e-5, atol=1e-5)
