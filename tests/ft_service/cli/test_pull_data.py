"""`ft pull --data` against a hub on loopback, and hf://ORG/NAME in a SPEC."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ft_service.errors import FtError, SpecError
from ft_service.local.spec_file import load_spec_file
from tests.support.command_line import Ft
from tests.support.hub import COMMIT, Hub, hub_serving

LINE = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}) + "\n"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    folder = tmp_path / "published"
    (folder / "data").mkdir(parents=True)
    (folder / "data/train-00000-of-00001.jsonl").write_text(LINE * 3)
    (folder / "data/test-00000-of-00001.jsonl").write_text(LINE)
    (folder / "README.md").write_text("about it")
    (folder / "load.py").write_text("raise SystemExit('nobody runs this')")
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "none"))
    with hub_serving(folder) as serving:
        monkeypatch.setenv("HF_ENDPOINT", serving.url)
        yield serving


def spec_naming(folder: Path, name: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(f"model: tiny\ntraining_file: {name}\n")
    return path


def test_a_data_set_is_fetched_and_named_in_a_spec(ft: Ft, hub: Hub, home: Path, tmp_path: Path) -> None:
    ended = ft("pull", "--data", "org/tiny", "--json")
    assert ended.code == 0, ended.err
    folder = home / "datasets/org/tiny"
    assert json.loads(ended.out) == {"name": "hf://org/tiny", "path": str(folder), "commit": COMMIT, "licence": "apache-2.0"}
    assert {path.name for path in folder.rglob("*") if path.is_file()} == {
        *("train-00000-of-00001.jsonl", "test-00000-of-00001.jsonl", "origin.json")
    }, "data files only"
    spec = load_spec_file(spec_naming(tmp_path, "hf://org/tiny"), datasets=home / "datasets")
    assert spec.training_file.files == ("data/train-00000-of-00001.jsonl",)
    one = load_spec_file(spec_naming(tmp_path, "hf://org/tiny/data/test-00000-of-00001.jsonl"), datasets=home / "datasets")
    assert one.training_file.path.read_text() == LINE
    again = ft("pull", "--data", "hf://org/tiny")
    assert (again.code, "is there already" in again.err) == (0, True)


def test_a_data_set_that_was_not_fetched_is_named_with_the_command_that_does(tmp_path: Path) -> None:
    spec = load_spec_file(spec_naming(tmp_path, "hf://org/other"), datasets=tmp_path / "datasets")
    with pytest.raises(FtError, match="ft pull --data org/other"):
        assert spec.training_file
    for name in ("hf://org", "hf://../../etc/passwd", "hf://org/.hidden", "hf:///a"):
        with pytest.raises(SpecError, match="hf://ORG/NAME"):
            assert load_spec_file(spec_naming(tmp_path, name), datasets=tmp_path / "datasets").training_file


def test_a_repository_without_data_files_is_refused(ft: Ft, hub: Hub, home: Path) -> None:
    for path in (hub.folder / "data").iterdir():
        path.unlink()
    ended = ft("pull", "--data", "org/tiny")
    assert (ended.code, "holds no data files" in ended.err) == (64, True)
    assert not (home / "datasets").exists()


def test_one_file_beside_where_it_came_from_is_the_data_set(ft: Ft, hub: Hub, home: Path, tmp_path: Path) -> None:
    for path in (hub.folder / "data").iterdir():
        path.unlink()
    (hub.folder / "data").rmdir()
    (hub.folder / "chats.jsonl").write_text(LINE)
    assert ft("pull", "--data", "org/tiny").code == 0
    spec = load_spec_file(spec_naming(tmp_path, "hf://org/tiny"), datasets=home / "datasets")
    assert spec.training_file.files == ("chats.jsonl",), "origin.json is not data"
