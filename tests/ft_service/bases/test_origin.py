from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ft_service.bases.origin import ORIGIN, portable_name, read_origin


@pytest.mark.parametrize(
    ("folder", "config", "name"),
    [
        ("models/llama", {"_name_or_path": "meta-llama/Llama-3.1-8B"}, "meta-llama/Llama-3.1-8B"),
        ("models/llama", {"_name_or_path": "/home/somebody/llama"}, "catalogue/name"),
        ("models/llama", {"_name_or_path": "./llama"}, "catalogue/name"),
        ("models/llama", {"_name_or_path": ""}, "catalogue/name"),
        ("models/llama", {}, "catalogue/name"),
        ("models/llama", None, "catalogue/name"),
        ("hub/models--Qwen--Qwen3-8B/snapshots/0123abc", {"_name_or_path": "a/b"}, "Qwen/Qwen3-8B"),
    ],
)
def test_a_base_is_called_as_others_find_it_and_never_by_a_path(
    tmp_path: Path, folder: str, config: dict[str, str] | None, name: str
) -> None:
    base = tmp_path / folder
    base.mkdir(parents=True)
    if config is not None:
        (base / "config.json").write_text(json.dumps(config))
    assert portable_name(base, "catalogue/name") == name


def test_somebody_else_s_origin_file_is_no_origin(tmp_path: Path) -> None:
    broken: list[Any] = [
        {},
        [],
        {"repository": "../x", "revision": "main", "commit": "1"},
        {"repository": 1},
    ]
    for body in broken:
        (tmp_path / ORIGIN).write_text(json.dumps(body))
        assert read_origin(tmp_path) is None
