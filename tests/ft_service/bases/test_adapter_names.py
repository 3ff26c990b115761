"""The names of an adapter's tensors in its file, where PEFT renames them as it loads them."""

from __future__ import annotations

import pytest

from ft_service.bases.adapter_names import AdapterNames

OURS, THEIRS = (
    f"base_model.model.model.layers.1.mlp.shared_expert{end}.up_proj.lora_A.weight"
    for end in ("s", "")
)
PLAIN = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
NAMES = AdapterNames({OURS.partition(".lora_")[0]: THEIRS.partition(".lora_")[0]})


def test_a_file_says_itself_how_its_names_are_read() -> None:
    read = AdapterNames.of_file({"format": "pt", **NAMES.metadata})
    assert read.in_model(NAMES.in_file(OURS)) == OURS
    assert NAMES.in_file(OURS) == THEIRS
    assert read.in_model(PLAIN) == NAMES.in_file(PLAIN) == PLAIN


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}])
def test_a_file_that_says_nothing_has_the_names_of_the_model(
    metadata: dict[str, str] | None,
) -> None:
    assert AdapterNames.of_file(metadata).in_model(THEIRS) == THEIRS
    assert not AdapterNames.of_file(metadata).metadata


@pytest.mark.parametrize("written", ["", "[]", '{"a": 1}', "{", "[" * 100_000])
def test_metadata_of_another_kind_is_refused(written: str) -> None:
    with pytest.raises(ValueError, match=r"renamed_modules|Expecting"):
        AdapterNames.of_file({"renamed_modules": written})
