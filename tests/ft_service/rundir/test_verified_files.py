from __future__ import annotations

from pathlib import Path

import pytest

from ft_service.errors import NotFoundError
from ft_service.rundir import verified_files
from ft_service.rundir.directory import sha256_of
from ft_service.rundir.verified_files import adapter_faults, refuse_damaged
from tests.support.run_directories import finished_run, flip_a_bit


def test_an_adapter_is_read_once_for_each_state_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = finished_run(tmp_path).path("adapter")
    read = []

    def reading(path: Path) -> str:
        read.append(path.name)
        return sha256_of(path)

    monkeypatch.setattr(verified_files, "sha256_of", reading)
    for _ in range(3):
        refuse_damaged(folder, "ft:tiny")
    assert len(read) == len(set(read)) >= 2
    flip_a_bit(folder / "adapter_model.safetensors")
    for _ in range(2):
        with pytest.raises(
            NotFoundError,
            match=r"adapter_model\.safetensors has other contents than when it was written",
        ):
            refuse_damaged(folder, "ft:tiny")
    assert read.count("adapter_model.safetensors") == 2


@pytest.mark.parametrize("how", ["missing", "edited", "no_json"])
def test_a_manifest_that_does_not_fit_is_told(tmp_path: Path, how: str) -> None:
    folder = finished_run(tmp_path).path("adapter")
    manifest = folder / "manifest.json"
    if how == "missing":
        (folder / "adapter_config.json").unlink()
    elif how == "edited":
        manifest.write_text(manifest.read_text().replace('"seed": ', '"seed": 1'))
    else:
        manifest.write_text("{")
    expected = {
        "missing": "adapter_config.json is missing",
        "edited": "was edited",
        "no_json": "is not JSON",
    }[how]
    assert expected in adapter_faults(folder)[0]
