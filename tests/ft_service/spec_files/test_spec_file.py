from __future__ import annotations

import hashlib
import math
from datetime import datetime
from pathlib import Path

import pytest

from ft_service.errors import SpecError
from ft_service.settings import Settings
from ft_service.spec_files.spec_file import (
    is_data,
    load_spec_file,
    parse_option,
    parse_yaml,
    resolve_spec_file,
)
from tests.support.bases import save_base
from tests.support.run_directories import CHAT


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with data/train.jsonl, a catalogue in models/ with the base `tiny`, and specs/ to
    write SPEC files into.
    """
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train.jsonl").write_text(CHAT)
    save_base(tmp_path / "models/tiny")
    (tmp_path / "specs").mkdir()
    return tmp_path


def write(place: Path, text: str) -> Path:
    path = place / "specs/job.yaml"
    path.write_text(text)
    return path


def settings(place: Path) -> Settings:
    return Settings(home=place / "home", models=[place / "models"])


def test_paths_are_relative_to_the_file_and_become_absolute_with_a_digest(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(
        place, "model: tiny\ntraining_file: ../data/train.jsonl\ntraining: {learning_rate: 2e-3}\n"
    )
    monkeypatch.chdir(path.parent)
    spec = resolve_spec_file(
        load_spec_file(Path("job.yaml")), settings(place), job_id="ftjob-1", seed=11
    )
    assert spec.data_files[0].path == str(place / "data/train.jsonl")
    assert spec.data_files[0].sha256 == hashlib.sha256(CHAT.encode()).hexdigest()
    assert spec.validation_data is None
    assert (spec.model.name, spec.model.path) == ("tiny", str(place / "models/tiny"))
    assert (spec.seed, spec.training.learning_rate) == (11, 0.002)


def test_a_seed_of_the_files_own_is_kept(place: Path) -> None:
    path = write(place, "model: tiny\ntraining_file: ../data/train.jsonl\nseed: 5\n")
    assert (
        resolve_spec_file(load_spec_file(path), settings(place), job_id="ftjob-1", seed=11).seed
        == 5
    )


def test_what_is_set_aside_is_a_share_of_all_samples_not_of_those_that_are_counted(
    place: Path,
) -> None:
    (place / "data/many.jsonl").write_text('{"text": "a"}\n' * 60_000)
    path = write(
        place,
        "model: tiny\ntraining_file: ../data/many.jsonl\nvalidation_split: 0.5\ntraining: "
        "{n_epochs: auto}\n",
    )
    spec = resolve_spec_file(load_spec_file(path), settings(place), job_id="ftjob-1", seed=11)
    assert spec.training.n_epochs == 1, "30,000 are left"


def test_a_range_needs_no_quotes(place: Path) -> None:
    """YAML 1.1 reads `1:2` as 62, and `1:30.5` as 90.5."""
    text = (
        "model: tiny\ntraining_file: ../data/train.jsonl\ndistributed:\n  nnodes: 1:2\n  "
        "nproc_per_node: 2:8\n"
    )
    assert load_spec_file(write(place, text)).body["distributed"] == {
        "nnodes": "1:2",
        "nproc_per_node": "2:8",
    }
    assert parse_option("distributed.nproc_per_node=1:2") == ("distributed.nproc_per_node", "1:2")
    kept = parse_yaml(
        "{a: 0x10, b: -1_000, c: 1.5, d: .inf, e: 2026-01-01T10:00:00Z, f: 1:30.5, g: [-1:2]}", "x"
    )
    assert (kept["a"], kept["b"], kept["c"], kept["d"], kept["f"], kept["g"]) == (
        16,
        -1000,
        1.5,
        math.inf,
        "1:30.5",
        ["-1:2"],
    )
    assert isinstance(kept["e"], datetime), "has colons, and is no number"


@pytest.mark.parametrize("name", ["../elsewhere/base", "{place}/elsewhere/base"])
def test_a_model_may_be_a_folder(place: Path, name: str) -> None:
    save_base(place / "elsewhere/base")
    path = write(place, f"model: {name.format(place=place)}\ntraining_file: ../data/train.jsonl\n")
    spec = resolve_spec_file(load_spec_file(path), settings(place), job_id="ftjob-1", seed=11)
    assert (spec.model.name, spec.model.path) == ("base", str(place / "elsewhere/base"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected options such as `model: …` and `training_file: …`, found nothing"),
        ("- model\n", "found a list"),
        ("model: tiny\nmodel: other\n", "job.yaml, line 2: model is given twice: keep one"),
        ("lora:\n  r: 8\n  r: 9\n", "job.yaml, line 3: r is given twice"),
        ("model: [tiny\n", "job.yaml, line 2: "),
        (
            "model: !!python/object:os.system {}\n",
            "job.yaml, line 1: could not determine a constructor",
        ),
        ("model: tiny\n", "training_file is required"),
        ("model: tiny\ntraining_file: x\nlora: {rank: 8}\n", "lora.rank: there is no such option"),
        ("model: tiny\ntraining_file: x\nlora: {r: 0}\n", "lora.r = 0: "),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(place: Path, text: str, message: str) -> None:
    path = write(place, text)
    with pytest.raises(SpecError) as caught:
        load_spec_file(path)
    assert message in caught.value.message


def test_what_cannot_be_read_is_refused(place: Path) -> None:
    with pytest.raises(SpecError, match=r"absent\.yaml cannot be read: No such file"):
        load_spec_file(place / "absent.yaml")
    (place / "binary.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(SpecError, match="not a text file in UTF-8"):
        load_spec_file(place / "binary.yaml")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.json", '[{"text": "a"}]', True),
        ("a.json", '{"text": "a"}\n{"text": "b"}\n', True),
        ("a.json", '{"model": "tiny", "training_file": "x"}', False),
        ("a.json", '{\n"model": "tiny",\n"training_file": "x"}', False),
        ("a.json", "", False),
        ("a.txt", '{"text": "a"}\n', False),
    ],
)
def test_json_is_data_where_it_holds_records(
    name: str, content: str, expected: bool, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    assert is_data(tmp_path / name) == expected


@pytest.mark.parametrize("content", [b'{"text": "a"}\n{"text": "b"}\n', b"PK\x03\x04\xff", b"text"])
def test_data_under_the_name_of_a_spec_is_refused_with_the_names_of_data(
    content: bytes, tmp_path: Path
) -> None:
    (tmp_path / "train.txt").write_bytes(content)
    with pytest.raises(
        SpecError, match=r"By its name it is a SPEC, in YAML; names of data end in \.jsonl, \.json"
    ):
        load_spec_file(tmp_path / "train.txt", options={"model": "tiny"})


def test_a_data_file_that_is_not_there_is_named_with_its_field(place: Path) -> None:
    spec = load_spec_file(
        write(
            place, "model: tiny\ntraining_file: ../data/train.jsonl\nvalidation_file: gone.jsonl\n"
        )
    )
    with pytest.raises(SpecError, match="there is no file") as caught:
        resolve_spec_file(spec, settings(place), job_id="ftjob-1", seed=11)
    assert caught.value.param == "validation_file"
    assert str(place / "specs/gone.jsonl") in caught.value.message


def test_an_unknown_model_lists_what_there_is(place: Path) -> None:
    spec = load_spec_file(write(place, "model: huge\ntraining_file: ../data/train.jsonl\n"))
    with pytest.raises(SpecError, match="There are: tiny"):
        resolve_spec_file(spec, settings(place), job_id="ftjob-1", seed=11)


def test_data_in_place_of_a_spec_are_called_so(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}\n{}\n")
    with pytest.raises(SpecError, match="is a data file, by its name: name a base"):
        load_spec_file(tmp_path / "train.jsonl")
