"""Keys of token sets."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ft_service.data.tokens import token_cache
from ft_service.data.tokens.token_cache import tokens_key
from tests.support.training.models import save_tokenizer


def test_the_key_is_that_of_the_data_and_of_what_makes_tokens_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "base"
    save_tokenizer(base)
    copy = Path(shutil.copytree(base, tmp_path / "copy"))
    key = tokens_key(str(base), "12")
    assert key.startswith("12.")
    (copy / "model.safetensors").write_text("weights")
    assert tokens_key(str(copy), "12") == key, "wherever the base lies"
    assert tokens_key(str(copy), "34") != key
    found = [key]
    for name in (
        "tokenizer.json",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
        "merges.txt",
    ):
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_text("another")
        found.append(tokens_key(str(copy), "12"))
    monkeypatch.setattr(token_cache, "RENDERING", 0)
    found.append(tokens_key(str(copy), "12"))
    monkeypatch.setattr(token_cache.transformers, "__version__", "0")
    found.append(tokens_key(str(copy), "12"))
    assert len(set(found)) == len(found) == 7, found


def test_tokens_of_pairs_are_no_tokens_of_chats(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    assert tokens_key(str(tmp_path), "12") != tokens_key(str(tmp_path), "12", pairs=True)
