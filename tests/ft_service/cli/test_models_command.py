"""`ft pull` against a hub on loopback: whole, interrupted, refused, without a network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from ft_service.bases.catalogue import Catalogue
from ft_service.bases.origin import portable_name
from ft_service.client.client import Client
from ft_service.control.bases.base_facts import base_facts
from ft_service.errors import FtError, SpecError
from ft_service.spec_files.spec_file import load_spec_file
from tests.support.bases import save_base
from tests.support.command_line import Ft
from tests.support.describing import described_here
from tests.support.hub import COMMIT, Hub, hub_serving
from tests.support.rest.stub_server import StubServer


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    folder = tmp_path / "published"
    save_base(folder)
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    (folder / "original").mkdir()
    (folder / "original/consolidated.safetensors").write_bytes(b"once more")
    monkeypatch.setenv("FT_MODELS", str(tmp_path / "models"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "none"))
    with hub_serving(folder) as serving:
        monkeypatch.setenv("HF_ENDPOINT", serving.url)
        yield serving


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return tmp_path / "models"


def test_a_pulled_base_is_whole_and_known_by_the_name_it_has_everywhere(
    ft: Ft, hub: Hub, models: Path
) -> None:
    ended = ft("pull", "org/tiny", "--json")
    assert ended.code == 0, ended.err
    folder = models / "org/tiny"
    assert json.loads(ended.out) == {
        "name": "org/tiny",
        "path": str(folder),
        "commit": COMMIT,
        "licence": "apache-2.0",
    }
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "origin.json"} <= names
    assert names.isdisjoint({"pytorch_model.bin", "original", ".cache"})
    assert [base.name for base in Catalogue([models]).list_models()] == ["org/tiny"]
    assert portable_name(folder, "whatever") == "org/tiny"
    facts = base_facts(folder, described_here(folder))
    assert (facts.trainable, facts.licence, facts.repository, facts.commit) == (
        True,
        "apache-2.0",
        "org/tiny",
        COMMIT,
    )
    again = ft("pull", "org/tiny@main")
    assert (again.code, "is there already" in again.err) == (0, True)


def test_a_pull_that_broke_off_goes_on_where_it_was(
    ft: Ft, hub: Hub, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = "model-00002-of-00002.safetensors"
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100_000)
    (hub.folder / large).write_bytes(bytes(600_000))
    hub.breaks_after = 550_000
    ended = ft("pull", "org/tiny")
    assert (ended.code, "Pull it again: it goes on with what has arrived." in ended.err) == (
        1,
        True,
    ), ended.err
    assert Catalogue([models]).list_models() == []
    assert not (models / "org").exists(), "nothing half done is where models are"
    hub.breaks_after = None
    hub.broken = False
    ended = ft("pull", "org/tiny")
    assert ended.code == 0, ended.err
    assert (models / "org/tiny" / large).stat().st_size == 600_000
    assert [asked for name, asked in hub.asked if name == large][-1] == "bytes=500000-", (
        "the rest, not all of it again"
    )
    assert [name for name, _ in hub.asked].count("config.json") == 1


def test_what_arrives_damaged_is_not_kept(ft: Ft, hub: Hub, models: Path) -> None:
    hub.damaged = "model.safetensors"
    ended = ft("pull", "org/tiny")
    assert (ended.code, "arrived damaged and was removed" in ended.err) == (1, True)
    hub.damaged = ""
    assert ft("pull", "org/tiny").code == 0


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("org/none", "There is no model org/none at "),
        ("org/tiny@v9", "org/tiny has no revision 'v9'."),
        ("tiny", "'tiny' names no model: write ORG/NAME"),
    ],
)
def test_a_name_that_the_hub_does_not_know_is_said_so(
    ft: Ft, hub: Hub, name: str, says: str
) -> None:
    ended = ft("pull", name)
    assert (ended.code, says in ended.err) == (64, True), ended.err


def test_a_gated_base_needs_a_token(ft: Ft, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_x"
    ended = ft("pull", "org/tiny")
    assert ended.code == 64
    assert (
        f"org/tiny is gated: accept its terms at {hub.url}/org/tiny; then set HF_TOKEN" in ended.err
    )
    monkeypatch.setenv("HF_TOKEN", "hf_é")
    ended = ft("pull", "org/tiny")
    assert (
        ended.code,
        "HF_TOKEN, or the token of `hf auth login`, has characters" in ended.err,
    ) == (64, True), ended.err
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    assert ft("pull", "org/tiny").code == 0


def test_without_a_network_it_is_said_what_else_works(
    ft: Ft, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    ended = ft("pull", "org/tiny")
    assert ended.code == 1
    assert "cannot be reached" in ended.err
    assert "copy the model's folder below one that FT_MODELS names" in ended.err


def test_a_base_that_cannot_be_tuned_is_refused_before_its_weights_come(
    ft: Ft, hub: Hub, models: Path
) -> None:
    config = json.loads((hub.folder / "config.json").read_text())
    (hub.folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "gptq"}})
    )
    ended = ft("pull", "org/tiny")
    assert ended.code == 64
    assert "No weights were fetched" in ended.err
    assert "model.safetensors" not in {name for name, _ in hub.asked}
    assert ft("pull", "org/tiny", "--anyway").code == 0
    assert not base_facts(models / "org/tiny", described_here(models / "org/tiny")).trainable


ODD = (
    "../x.json",
    "/etc/x.json",
    "a/../../x",
    "C:\\x.json",
    "tokenizer\n.json",
    "a//b",
    "./config.json",
    "x" * 256,
    "tok\x1b[2J.json",
)
"""Names in a hub's list that are no names below a folder."""


@pytest.mark.parametrize(
    "name",
    [*ODD, "tokenizer*", "tokenizer .json", "tokenizer\u202egpj.json", "model;x.safetensors"],
)
def test_a_hub_with_odd_names_is_refused_before_anything_is_written(
    ft: Ft, hub: Hub, models: Path, name: str
) -> None:
    hub.listed[name] = 1
    ended = ft("pull", "org/tiny")
    assert (ended.code, ended.out) == (64, ""), ended.err
    assert "org/tiny lists a file '" in ended.err
    assert "nothing of it is fetched" in ended.err
    assert "\x1b" not in ended.err
    assert (hub.asked, models.exists()) == ([], False)


def test_names_that_are_not_fetched_may_be_hidden_or_hold_spaces(
    ft: Ft, hub: Hub, models: Path
) -> None:
    for name in (
        ".gitattributes",
        "a picture (1).png",
        "tokenizer/nested.json",
        "sub/config.json",
        "vocab/x/y",
        ".x.safetensors",
    ):
        (hub.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (hub.folder / name).write_bytes(b"{}")
    assert ft("pull", "org/tiny").code == 0
    assert not [
        path
        for path in (models / "org/tiny").rglob("*")
        if path.is_dir() or path.name.startswith(".")
    ]
    assert not list((models / ".pulls").iterdir())


def test_files_larger_than_any_base_s_are_refused_by_the_hub_s_list(
    ft: Ft, hub: Hub, models: Path
) -> None:
    hub.listed["vocab.json"] = 2**33
    ended = ft("pull", "org/tiny")
    assert ended.code == 64
    assert (
        "org/tiny lists vocab.json with 8.6 GB, which is more than such a file of a base may have"
        in ended.err
    )
    assert not models.exists()


def test_a_commit_that_is_a_path_is_refused(ft: Ft, hub: Hub, models: Path) -> None:
    hub.commit = "../../../x"
    ended = ft("pull", "org/tiny")
    assert (ended.code, "names no commit of org/tiny, but '../../../x'" in ended.err) == (
        1,
        True,
    ), ended.err
    assert not models.exists()


@pytest.mark.parametrize(
    "name",
    [
        "",
        "ft:x",
        "-x",
        "a\nb",
        "../x",
        "/x",
        ".x",
        "a/.b",
        "a//b",
        "a\\b",
        " x",
        "a/b/c/d/e",
        "x" * 256,
    ],
)
def test_a_name_that_no_job_could_give_is_refused(
    ft: Ft, hub: Hub, models: Path, name: str
) -> None:
    ended = ft("pull", "org/tiny", f"--as={name}")
    assert (ended.code, "must be a name as in ORG/NAME" in ended.err) == (64, True), ended.err
    assert (hub.asked, models.exists()) == ([], False)


def test_what_the_library_refuses_is_no_traceback(ft: Ft, hub: Hub, models: Path) -> None:
    ended = ft("pull", "org/tiny--x")
    assert ended.code in (1, 64)
    assert "Traceback" not in ended.err


def test_a_base_that_is_refused_leaves_nothing(ft: Ft, hub: Hub, models: Path) -> None:
    config = json.loads((hub.folder / "config.json").read_text())
    (hub.folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "gptq"}})
    )
    assert ft("pull", "org/tiny").code == 64
    assert not list((models / ".pulls").iterdir())


def test_without_a_base_it_is_said_how_to_get_one(
    ft: Ft, server: StubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Client, "models", lambda self: [])
    assert ft("models").out.startswith(
        "The server knows no bases: fetch one (ft pull ORG/NAME), or put "
    )


LINE = (
    json.dumps(
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    )
    + "\n"
)


@pytest.fixture
def data_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    folder = tmp_path / "published"
    (folder / "data").mkdir(parents=True)
    (folder / "data/train-00000-of-00001.jsonl").write_text(LINE * 3)
    (folder / "data/test-00000-of-00001.jsonl").write_text(LINE)
    (folder / "README.md").write_text("about it")
    (folder / "load.py").write_text("raise SystemExit('this must not run')")
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "none"))
    with hub_serving(folder) as serving:
        monkeypatch.setenv("HF_ENDPOINT", serving.url)
        yield serving


def spec_naming(folder: Path, name: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(f"model: tiny\ntraining_file: {name}\n")
    return path


def test_a_data_set_is_fetched_and_named_in_a_spec(
    ft: Ft, data_hub: Hub, home: Path, tmp_path: Path
) -> None:
    ended = ft("pull", "--data", "org/tiny", "--json")
    assert ended.code == 0, ended.err
    folder = home / "datasets/org/tiny"
    assert json.loads(ended.out) == {
        "name": "hf://org/tiny",
        "path": str(folder),
        "commit": COMMIT,
        "licence": "apache-2.0",
    }
    assert {path.name for path in folder.rglob("*") if path.is_file()} == {
        *("train-00000-of-00001.jsonl", "test-00000-of-00001.jsonl", "origin.json")
    }, "data files only"
    spec = load_spec_file(spec_naming(tmp_path, "hf://org/tiny"), datasets=home / "datasets")
    assert spec.training_file.files == ("data/train-00000-of-00001.jsonl",)
    one = load_spec_file(
        spec_naming(tmp_path, "hf://org/tiny/data/test-00000-of-00001.jsonl"),
        datasets=home / "datasets",
    )
    assert one.training_file.path.read_text() == LINE
    again = ft("pull", "--data", "hf://org/tiny")
    assert (again.code, "is there already" in again.err) == (0, True)


def test_a_data_set_that_was_not_fetched_is_named_with_the_command_that_does(
    tmp_path: Path,
) -> None:
    spec = load_spec_file(spec_naming(tmp_path, "hf://org/other"), datasets=tmp_path / "datasets")
    with pytest.raises(FtError, match="ft pull --data org/other"):
        assert spec.training_file
    for name in ("hf://org", "hf://../../etc/passwd", "hf://org/.hidden", "hf:///a"):
        with pytest.raises(SpecError, match="hf://ORG/NAME"):
            assert load_spec_file(
                spec_naming(tmp_path, name), datasets=tmp_path / "datasets"
            ).training_file


def test_a_repository_without_data_files_is_refused(ft: Ft, data_hub: Hub, home: Path) -> None:
    for path in (data_hub.folder / "data").iterdir():
        path.unlink()
    ended = ft("pull", "--data", "org/tiny")
    assert (ended.code, "holds no data files" in ended.err) == (64, True)
    assert not (home / "datasets").exists()


def test_one_file_beside_where_it_came_from_is_the_data_set(
    ft: Ft, data_hub: Hub, home: Path, tmp_path: Path
) -> None:
    for path in (data_hub.folder / "data").iterdir():
        path.unlink()
    (data_hub.folder / "data").rmdir()
    (data_hub.folder / "chats.jsonl").write_text(LINE)
    assert ft("pull", "--data", "org/tiny").code == 0
    spec = load_spec_file(spec_naming(tmp_path, "hf://org/tiny"), datasets=home / "datasets")
    assert spec.training_file.files == ("chats.jsonl",), "origin.json is not data"
