"""The files of a folder that hold a dataset."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ft_service.data.formats.folders import dataset_files
from ft_service.data.formats.reading import open_data
from ft_service.data.sample_kinds import Text
from ft_service.errors import DataError
from tests.support.data_formats import good, in_arrow, in_parquet


class TestFolders:
    def test_one_that_datasets_saved(self, tmp_path: Path) -> None:
        for number in (1, 0):
            (tmp_path / f"data-{number}.arrow").write_bytes(in_arrow([{"text": f"{number}"}] * 2))
        state = {"_data_files": [{"filename": "data-0.arrow"}, {"filename": "data-1.arrow"}]}
        (tmp_path / "state.json").write_text(json.dumps(state))
        files = dataset_files(tmp_path, "train")
        assert files == ("data-0.arrow", "data-1.arrow")
        with open_data(tmp_path, files) as reader:
            assert list(reader) == [(1, Text("0")), (2, Text("0")), (3, Text("1")), (4, Text("1"))]
        assert open_data(tmp_path, files).digest() != open_data(tmp_path, files[::-1]).digest()

    def test_one_as_the_hub_keeps_it(self, tmp_path: Path) -> None:
        (tmp_path / "data").mkdir()
        for name in ("train-00001-of-00002", "train-00000-of-00002", "test-00000-of-00001"):
            (tmp_path / f"data/{name}.parquet").write_bytes(in_parquet(good()))
        (tmp_path / "README.md").write_text("# data")
        expected = ("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet")
        assert dataset_files(tmp_path, "train") == expected
        assert dataset_files(tmp_path, "test") == ("data/test-00000-of-00001.parquet",)
        with pytest.raises(
            DataError, match=r"has the splits test, train, and none is called validation"
        ):
            dataset_files(tmp_path, "validation")

    def test_several_splits_that_datasets_saved(self, tmp_path: Path) -> None:
        (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
        (tmp_path / "train").mkdir()
        (tmp_path / "train/a.arrow").write_bytes(in_arrow(good()))
        (tmp_path / "train/state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
        assert dataset_files(tmp_path, "train") == ("train/a.arrow",)
        (tmp_path / "train/state.json").write_text('{"_data_files": [{"filename": "../a.arrow"}]}')
        with pytest.raises(DataError, match="which the folder does not hold"):
            dataset_files(tmp_path, "train")
