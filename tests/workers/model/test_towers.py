"""A base of several models, one of which is built by a package that is not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModel, Gemma3nVisionConfig

from ft_service.spec import LoraOptions
from tests.support.training.composites import small_config
from workers.model.lora import adapted_modules, shortest_names
from workers.model.wrapped import text_decoder, text_only


class NotInstalled:
    @classmethod
    def _from_config(cls, *_: Any, **__: Any) -> Any:
        raise ImportError("it needs a package")


def test_the_text_decoder_is_built_without_a_tower_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows what is called as its layers are in there, so adapters are named in full."""
    monkeypatch.setitem(AutoModel._model_mapping._extra_content, Gemma3nVisionConfig, NotInstalled)  # pyright: ignore
    config = small_config("gemma3n")
    model = text_only(config, torch.bfloat16)
    assert type(text_decoder(model)).__name__ == "Gemma3nTextModel"
    assert not any("tower" in name for name, _ in model.named_modules())
    chosen = adapted_modules(model, LoraOptions(target_modules=["laurel.linear_left"]), shared_experts=True)
    assert len(chosen) == 4
    assert shortest_names(model, chosen) == chosen
    with pytest.raises(ImportError, match="needs a package"):
        AutoModel.from_config(config.vision_config)
