"""Pixtral's processor without torchvision, which only its other image processor needs.

The module of the processor takes a function that sizes images from the image processor on
torchvision; the one on Pillow has the same function.

Replaces: `transformers.models.pixtral.image_processing_pixtral`, while the processor is imported.
Written for: transformers 5.23
Fails when upstream changes: tests/ft_service/data/tokens/patches/test_pixtral_processor.py
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_PACKAGE = "transformers.models.pixtral"
_MODULE = f"{_PACKAGE}.image_processing_pixtral"


@contextmanager
def without_torchvision() -> Iterator[None]:
    """While the block runs, the image processor on Pillow stands for that on torchvision."""
    before = sys.modules.get(_MODULE)
    sys.modules[_MODULE] = importlib.import_module(f"{_PACKAGE}.image_processing_pil_pixtral")
    try:
        yield
    finally:
        if before is None:
            del sys.modules[_MODULE]
        else:
            sys.modules[_MODULE] = before
