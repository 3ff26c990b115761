"""The files of a base that determine its tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ft_service.data.tokenizer_files import stops_of, tokenizer_files, tokenizer_state


@pytest.mark.parametrize(
    ("own", "stops"),
    [({"eos_token_id": [7, 8]}, {7, 8}), ({"eos_token_id": 9}, {9}), ({}, {1}), (None, {1})],
)
def test_generation_config_decides_where_generation_ends(
    own: object, stops: set[int], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    if own is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(own))
    assert stops_of(tmp_path) == stops


def test_the_state_changes_with_the_tokenizers_files_and_not_with_weights(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    state = tokenizer_state(str(tmp_path))
    (tmp_path / "model.safetensors").write_text("weights")
    assert tokenizer_state(str(tmp_path)) == state
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert tokenizer_state(str(tmp_path)) != state
    assert [path.name for path in tokenizer_files(tmp_path)] == [
        "chat_template.jinja",
        "tokenizer.json",
    ]
