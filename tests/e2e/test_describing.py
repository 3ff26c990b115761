"""Bases that nothing can train on, described by the real process."""

from __future__ import annotations

from pathlib import Path

import pytest

from ft_service.bases.describing import describe_in_process
from ft_service.bases.description import Versions, description_key
from ft_service.host.processor import processor_kind
from tests.support.bases import save_base
from tests.support.hostile_bases import save_hostile

LONG = (
    "deep-config.json",
    "deeper-config.json",
    "many-lists-config.json",
    "many-lists-model.safetensors.index.json",
)
HOSTILE = ("layers", *LONG)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    save_hostile(folder)
    return folder


def test_a_base_is_described_by_a_process_under_its_limits(tmp_path: Path) -> None:
    found = describe_in_process(save_base(tmp_path))
    assert found.base is not None
    assert found.base.model_type == "llama"
    assert found.base.products is not None
    assert found.base.products.kind == processor_kind(), "whose speed the plan takes"
    assert found.versions == Versions.installed()
    assert found.key == description_key(tmp_path, found.versions)


# each by itself, in one process: tests/workers/test_describe.py
@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_folder_is_refused_in_words_by_the_process_itself(
    hostile: Path, name: str
) -> None:
    found = describe_in_process(hostile / name)
    assert found.refused is not None, name
    assert found.refused.param == "model"
    assert 20 < len(found.refused.message) < 2000
