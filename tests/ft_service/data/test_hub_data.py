"""Data sets from the hub, by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from ft_service.data.hub_data import fetched
from ft_service.errors import FtError, SpecError


def test_a_name_is_a_path_below_the_folder(tmp_path: Path) -> None:
    (tmp_path / "org/name/data").mkdir(parents=True)
    assert fetched("hf://org/name", tmp_path) == tmp_path / "org/name"
    assert fetched("hf://org/name/data", tmp_path) == tmp_path / "org/name/data"
    with pytest.raises(SpecError, match=r"org/name was fetched, and holds no b\.csv"):
        fetched("hf://org/name/b.csv", tmp_path)
    with pytest.raises(FtError, match="ft pull --data org/other"):
        fetched("hf://org/other/b.csv", tmp_path)


@pytest.mark.parametrize("name", ["hf://org", "hf://org/../secret", "hf://"])
def test_other_names_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="write hf://ORG/NAME"):
        fetched(name, tmp_path)
