"""What is told of a base before anybody trains on it."""

from __future__ import annotations

from pathlib import Path

from ft_service.control.base_facts import base_facts
from tests.support.bases import LLAMA_8B, save_fp8_index


def test_a_base_in_fp8_by_blocks_is_told_as_fp8(tmp_path: Path) -> None:
    facts = base_facts(save_fp8_index(tmp_path, LLAMA_8B), "llama")
    assert (facts.format, facts.trainable) == ("fp8", True)
