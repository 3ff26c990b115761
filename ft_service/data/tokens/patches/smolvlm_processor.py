"""SmolVLM's processor without num2words, which writes the number of a film's frames in words.

Its class refuses to be made where that package is missing, for images too.

Replaces: `transformers.models.smolvlm.processing_smolvlm.num2words`, where it is missing.
Written for: transformers 5.23
Fails when upstream changes: tests/ft_service/data/tokens/patches/test_smolvlm_processor.py
"""

from __future__ import annotations

import importlib
from typing import Any


def need_no_num2words() -> None:
    """Let the class be made for images."""
    module: Any = importlib.import_module("transformers.models.smolvlm.processing_smolvlm")
    if module.num2words is None:
        module.num2words = str
