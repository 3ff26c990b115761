"""What is told of a base before anybody trains on it."""

from __future__ import annotations

from pathlib import Path

from ft_service.control.base_facts import base_facts
from tests.support.bases import LLAMA_8B, save_base, save_fp8_index


def test_a_base_in_fp8_by_blocks_is_told_as_fp8(tmp_path: Path) -> None:
    facts = base_facts(save_fp8_index(tmp_path, LLAMA_8B), "llama")
    assert (facts.format, facts.trainable) == ("fp8", True)


def test_a_base_whose_weights_are_pickled_says_why_it_cannot_be_tuned(tmp_path: Path) -> None:
    save_base(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    facts = base_facts(tmp_path, "pickled")
    assert not facts.trainable
    assert facts.why_not == "It has no weights in safetensors, only pytorch_model.bin, which is pickled and never read."
