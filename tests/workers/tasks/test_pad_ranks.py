"""One rank and one scale say what patterns said: PEFT computes the same with either."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from ft_service.errors import SpecError
from tests.support.training.adapters import save_adapter
from tests.support.training.models import adapter_value, save_tiny
from workers.tasks.pad_ranks import pad_ranks


def test_a_padded_adapter_computes_the_same(tmp_path: Path) -> None:
    base = save_tiny("llama", tmp_path / "base")
    patterns: dict[str, Any] = {
        "rank_pattern": {"q_proj": 2, "down_proj": 7},
        "alpha_pattern": {"v_proj": 3},
    }
    config = LoraConfig(
        r=4,
        lora_alpha=12,
        target_modules="all-linear",
        use_rslora=True,
        task_type="CAUSAL_LM",
        **patterns,
    )
    tuned = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(adapter_value(name, parameter.shape))
    tuned.save_pretrained(str(tmp_path / "a"))
    (tmp_path / "padded").mkdir()

    assert pad_ranks(tmp_path / "a", tmp_path / "padded") == 7
    written = json.loads((tmp_path / "padded/adapter_config.json").read_text())
    assert (written["r"], written["rank_pattern"], written["alpha_pattern"]) == (7, {}, {})
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    padded = PeftModel.from_pretrained(plain, str(tmp_path / "padded"))
    ids = torch.tensor([[5, 9, 100, 3]])
    with torch.inference_mode():
        torch.testing.assert_close(
            padded(ids).logits, tuned.eval()(ids).logits, atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize(
    ("options", "what"),
    [({"modules_to_save": ["lm_head"]}, "lm_head"), ({"use_dora": True}, "DoRA")],
)
def test_what_is_more_than_a_and_b_is_refused_with_the_way_to_serve_it(
    options: dict[str, Any], what: str, tmp_path: Path
) -> None:
    adapter = save_adapter(save_tiny("llama", tmp_path / "base"), tmp_path / "a", **options)
    with pytest.raises(SpecError, match=rf"{what}.*vLLM does not read: merge the tuned model"):
        pad_ranks(adapter, tmp_path / "out")
