"""A tower whose package is missing is made by AutoModel, and becomes `MissingTower` only while the
patch is entered.
"""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText, LlamaConfig, LlamaModel

from tests.support.training.wrapped import WRAPPERS
from workers.patches.absent_towers import MissingTower, allow_missing_towers


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a base whose tower cannot be made here."""
    config = AutoConfig.for_model("mistral3", **WRAPPERS["mistral3"])
    missing = AutoModel._model_mapping[type(config.vision_config)]  # pyright: ignore[reportIndexIssue]
    monkeypatch.setattr(missing, "__init__", lacks_a_package)
    return config


def lacks_a_package(*_: Any, **__: Any) -> None:
    raise ImportError("No package of this name.")


def test_towers_are_made_by_auto_model_and_left_out_where_their_package_is_missing(
    config: Any,
) -> None:
    with pytest.raises(ImportError):
        AutoModelForImageTextToText.from_config(config)
    stock = AutoModel.__dict__["from_config"]
    with allow_missing_towers(type(config.text_config)):
        model = AutoModelForImageTextToText.from_config(config)
    assert any(isinstance(module, MissingTower) for module in model.modules())
    assert AutoModel.__dict__["from_config"] is stock


def test_a_decoder_that_cannot_be_made_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaModel, "__init__", lacks_a_package)
    with allow_missing_towers(LlamaConfig), pytest.raises(ImportError):
        AutoModel.from_config(LlamaConfig())
