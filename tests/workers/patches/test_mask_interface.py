"""transformers asks its registry for the mask of an implementation, and forgets ours when the trial
ends.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AttentionMaskInterface, AutoModelForCausalLM
from transformers.masking_utils import sdpa_mask

from tests.support.training.models import save_tiny_llama
from workers.layers.segment_attention import NAME
from workers.patches.mask_interface import masks_made_by


def test_masks_are_made_by_the_function_while_it_is_entered(tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(
        save_tiny_llama(tmp_path / "base"), attn_implementation=NAME
    ).eval()
    asked: list[Any] = []

    def mask(*args: Any, **options: Any) -> Any:
        asked.append(options["mask_function"])
        assert (options["q_length"], options["kv_length"]) == (6, 6)
        made = sdpa_mask(*args, **{**options, "allow_is_causal_skip": False})
        assert made is not None
        return made[:, :, :0, :0]  # an empty one says nothing

    ids = torch.arange(3, 9)[None]
    with torch.no_grad():
        without = model(input_ids=ids, use_cache=False).logits
        assert not asked
        with masks_made_by(mask, NAME):
            with_mask = model(input_ids=ids, use_cache=False).logits
        assert len(asked) == 1
        model(input_ids=ids, use_cache=False)
    assert len(asked) == 1
    assert torch.equal(without, with_mask)
    assert NAME not in AttentionMaskInterface._global_mapping
