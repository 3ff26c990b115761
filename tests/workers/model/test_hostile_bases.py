"""Folders without permission to open, where a worker, an examiner or a preview opens them by a
library or copies them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ft_service.data.tokens.tokenize import load_tokenizer
from ft_service.errors import SpecError
from tests.support.bases import save_base
from tests.support.hostile_bases import KINDS
from workers.model.build import base_on_meta


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "folder"])
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_no_library_is_given_what_it_would_open_by_itself(
    tmp_path: Path, name: str, kind: str
) -> None:
    folder = save_base(tmp_path / "base")
    (folder / name).unlink()
    KINDS[kind](folder / name)
    for look in (load_tokenizer, base_on_meta):
        with pytest.raises(SpecError, match=f"The base's {name} in "):
            look(str(folder))


def test_more_layers_than_any_memory_holds_are_refused_before_they_are_built(
    tmp_path: Path,
) -> None:
    folder = save_base(tmp_path / "base")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(
        text.replace('"num_hidden_layers": 2', '"num_hidden_layers": 1000000000')
    )
    with pytest.raises(
        SpecError, match=r"num_hidden_layers = 1000000000, with which .* it must be below 10,000"
    ):
        base_on_meta(str(folder))
