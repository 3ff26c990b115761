"""Pixtral's processor takes nothing from torchvision's image processor that Pillow's has not."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest

from ft_service.data.tokens.patches.pixtral_processor import without_torchvision

PACKAGE = "transformers.models.pixtral"
REPLACED = f"{PACKAGE}.image_processing_pixtral"


def test_the_processor_needs_what_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("torchvision") is None:
        monkeypatch.delitem(sys.modules, f"{PACKAGE}.processing_pixtral", raising=False)
        monkeypatch.delitem(sys.modules, REPLACED, raising=False)
        with pytest.raises(ImportError):
            importlib.import_module(f"{PACKAGE}.processing_pixtral")


def test_the_processor_sizes_images_as_pillow_s_processor_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, f"{PACKAGE}.processing_pixtral", raising=False)
    before = sys.modules.get(REPLACED)
    with without_torchvision():
        made = importlib.import_module(f"{PACKAGE}.processing_pixtral")
    own = importlib.import_module(f"{PACKAGE}.image_processing_pil_pixtral")
    assert made.get_resize_output_image_size is own.get_resize_output_image_size
    assert sys.modules.get(REPLACED) is before
