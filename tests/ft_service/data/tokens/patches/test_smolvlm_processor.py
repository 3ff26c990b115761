"""SmolVLM's processor asks for num2words alone, which images do not need."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from ft_service.data.tokens.patches.smolvlm_processor import need_no_num2words

MODULE = "transformers.models.smolvlm.processing_smolvlm"


def test_the_class_is_made_without_num2words(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = importlib.import_module(MODULE)
    monkeypatch.setattr(module, "num2words", None)

    class Tokenizer:
        def convert_tokens_to_ids(self, token: str) -> int:
            return 1

    def made() -> Any:
        return module.SmolVLMProcessor(None, Tokenizer(), None)

    with pytest.raises(ImportError, match="num2words"):
        made()
    need_no_num2words()
    with pytest.raises(TypeError, match="Received a NoneType for argument image_processor"):
        made()


def test_num2words_is_used_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = importlib.import_module(MODULE)
    monkeypatch.setattr(module, "num2words", repr)
    need_no_num2words()
    assert module.num2words is repr
