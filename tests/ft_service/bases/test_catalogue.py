from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ft_service.bases.catalogue import Catalogue
from ft_service.bases.describing import Descriptions
from ft_service.bases.description import Described, Refusal
from ft_service.errors import SpecError
from ft_service.settings import Settings
from tests.support.describing import small_document


def make_model(
    folder: Path, *, weights: str = "model.safetensors", tokenizer: str = "tokenizer.json"
) -> Path:
    folder.mkdir(parents=True)
    for name in ("config.json", weights, tokenizer):
        (folder / name).write_text("{}")
    return folder


def refusal(catalogue: Catalogue, name: str) -> SpecError:
    with pytest.raises(SpecError) as caught:
        catalogue.find(name)
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    return caught.value


def test_a_model_is_named_by_its_path_below_the_folder(tmp_path: Path) -> None:
    make_model(tmp_path / "tiny")
    nested = make_model(tmp_path / "meta-llama" / "Llama-3")
    catalogue = Catalogue([tmp_path])

    assert [model.name for model in catalogue.list_models()] == ["meta-llama/Llama-3", "tiny"]
    assert catalogue.find("meta-llama/Llama-3").ref().path == str(nested)


def test_the_first_folder_wins_and_a_folder_that_is_not_there_is_empty(tmp_path: Path) -> None:
    first = make_model(tmp_path / "a" / "tiny")
    make_model(tmp_path / "b" / "tiny")
    catalogue = Catalogue([tmp_path / "absent", tmp_path / "a", tmp_path / "b"])

    assert [model.path for model in catalogue.list_models()] == [first]
    assert catalogue.find("tiny").path == first


def test_a_refusal_names_only_bases_that_can_be_tuned(tmp_path: Path) -> None:
    make_model(tmp_path / "good")
    (make_model(tmp_path / "bad") / "model.safetensors").write_text("another")

    def refuse_all_but(name: str) -> Descriptions:
        refused = Refusal("It cannot be tuned.")

        def make(folder: Path, stop: object) -> Described:
            found = small_document(folder)
            return found if folder.name == name else replace(found, base=None, refused=refused)

        descriptions = Descriptions(None, "tests", make)
        for folder in (tmp_path / "good", tmp_path / "bad"):
            descriptions.describe(folder)
        return descriptions

    assert refusal(Catalogue([tmp_path]), "gone").message.endswith("There are: bad, good.")
    message = refusal(Catalogue([tmp_path], descriptions=refuse_all_but("good")), "gone").message
    assert message.endswith("There are: good.")
    message = refusal(Catalogue([tmp_path], descriptions=refuse_all_but("none")), "x").message
    assert "The bases that are here cannot be tuned." in message


def test_an_unknown_name_is_told_with_the_one_that_was_meant_or_the_way_to_fetch_it(
    tmp_path: Path,
) -> None:
    make_model(tmp_path / "tiny-llama")
    catalogue = Catalogue([tmp_path])
    assert (
        "Did you mean tiny-llama? There are: tiny-llama." in refusal(catalogue, "Tiny-Lama").message
    )
    assert (
        "ft pull meta-llama/Llama-3.1-8B-Instruct. There are"
        in refusal(catalogue, "meta-llama/Llama-3.1-8B-Instruct").message
    )
    assert refusal(catalogue, "gpt-4o").message.endswith(
        "there is no such base model. There are: tiny-llama."
    )


def test_aliases_are_mapped_first(tmp_path: Path) -> None:
    make_model(tmp_path / "models" / "tiny")
    aliases = tmp_path / "aliases.yaml"
    aliases.write_text("gpt-4o-mini-2024-07-18: tiny\ngone: absent\n")
    catalogue = Catalogue.from_settings(
        Settings(models=[tmp_path / "models"], model_aliases=aliases)
    )

    assert catalogue.find("gpt-4o-mini-2024-07-18").name == "tiny"
    assert "an alias of 'absent'" in refusal(catalogue, "gone").message
    assert refusal(catalogue, "gpt-4o-mini").message.endswith(
        "There are: tiny. Aliases: gpt-4o-mini-2024-07-18."
    )


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: 1\n", "a: [\n", None])
def test_a_wrong_alias_file_is_refused_by_name(tmp_path: Path, text: str | None) -> None:
    aliases = tmp_path / "aliases.yaml"
    if text is not None:
        aliases.write_text(text)

    with pytest.raises(SpecError, match="FT_MODEL_ALIASES"):
        Catalogue.from_settings(Settings(models=[tmp_path], model_aliases=aliases))


def test_an_unknown_model_lists_the_first_twenty(tmp_path: Path) -> None:
    for number in range(23):
        make_model(tmp_path / f"m{number:02d}")

    message = refusal(Catalogue([tmp_path]), "m99").message

    assert "'m99'" in message
    assert "m00, m01" in message
    assert "m19 and 3 more" in message
    assert "m20" not in message


@pytest.mark.parametrize(
    "name",
    [
        "../secret",
        "..",
        "tiny/../../secret",
        "",
        "/etc",
        "a//b",
        "tiny/.",
        ".hidden",
        "a\\b",
        "a\0b",
        "x" * 300,
    ],
)
def test_names_never_escape_the_folder(tmp_path: Path, name: str) -> None:
    make_model(tmp_path / "models" / "tiny")
    make_model(tmp_path / "models" / ".hidden")
    make_model(tmp_path / "secret")

    refusal(Catalogue([tmp_path / "models"]), name)


def test_a_folder_that_is_named_by_its_path_is_refused_without_a_list_of_its_neighbours(
    tmp_path: Path,
) -> None:
    """Which are no choice: their names are none of FT_MODELS', whose absence the message would
    complain of.
    """
    make_model(tmp_path / "other")
    (tmp_path / "empty").mkdir()
    assert Catalogue.find_folder(tmp_path / "other").path == tmp_path / "other"
    for name, fault in (
        ("empty", "the folder holds no config.json"),
        ("missing", "there is no such folder"),
    ):
        with pytest.raises(SpecError) as caught:
            Catalogue.find_folder(tmp_path / name)
        assert caught.value.message == f"model = '{tmp_path / name}': {fault}."


def test_a_link_out_of_the_folder_is_refused_and_a_link_inside_is_not(tmp_path: Path) -> None:
    make_model(tmp_path / "secret")
    make_model(tmp_path / "models" / "tiny")
    (tmp_path / "models" / "out").symlink_to(tmp_path / "secret")
    (tmp_path / "models" / "up").symlink_to(tmp_path)
    (tmp_path / "models" / "alias").symlink_to(tmp_path / "models" / "tiny")
    catalogue = Catalogue([tmp_path / "models"])

    assert [model.name for model in catalogue.list_models()] == ["alias", "tiny"]
    assert "symbolic link" in refusal(catalogue, "out").message
    assert "symbolic link" in refusal(catalogue, "up/secret").message


def test_of_a_hugging_face_cache_only_snapshots_are_models(tmp_path: Path) -> None:
    for name in ("blobs", "snapshots/0123abc"):
        make_model(tmp_path / "models--org--tiny" / name)
    catalogue = Catalogue([tmp_path])
    assert [model.name for model in catalogue.list_models()] == ["org/tiny"]
    folder = tmp_path / "models--org--tiny/snapshots/0123abc"
    assert catalogue.find("org/tiny").path == folder
    assert catalogue.find("models--org--tiny/snapshots/0123abc").path == folder, (
        "by its path below the model folder"
    )


def test_of_several_snapshots_of_a_cache_main_has_the_plain_name(tmp_path: Path) -> None:
    cached = tmp_path / "hub" / "models--org--tiny"
    for commit in ("0" * 40, "1" * 40):
        make_model(cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("0" * 40)
    names = {model.name: model.path.name for model in Catalogue([tmp_path]).list_models()}
    assert names == {"org/tiny": "0" * 40, "org/tiny@111111111111": "1" * 40}
    assert Catalogue([tmp_path]).find("org/tiny@111111111111").path.name == "1" * 40


def test_what_cannot_be_trained_on_is_refused_by_name(tmp_path: Path) -> None:
    make_model(tmp_path / "pickled", weights="pytorch_model.bin")
    make_model(tmp_path / "hollow", weights="README")
    make_model(tmp_path / "mute", tokenizer="README")
    make_model(tmp_path / "remote", tokenizer="tiktoken.model")
    (tmp_path / "remote/tokenizer_config.json").write_text("{}")
    (tmp_path / "bare").mkdir()
    catalogue = Catalogue([tmp_path])

    assert [model.name for model in catalogue.list_models()] == ["pickled"], "whose reason is shown"
    assert (
        "no weights in safetensors, only pytorch_model.bin, which is pickled"
        in refusal(catalogue, "pickled").message
    )
    assert "no weights" in refusal(catalogue, "hollow").message
    assert "no tokenizer" in refusal(catalogue, "mute").message
    assert "tiktoken.model without a tokenizer.json" in refusal(catalogue, "remote").message
    assert "no config.json" in refusal(catalogue, "bare").message


def test_a_folder_that_cannot_be_listed_or_was_removed_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path / "good")
    closed = make_model(tmp_path / "closed")
    removed = make_model(tmp_path / "removed")
    catalogue = Catalogue([tmp_path])
    listed = Path.iterdir
    state = Path.lstat

    def iterdir(path: Path) -> Iterator[Path]:
        if path == closed:
            raise PermissionError(13, "Permission denied")
        return listed(path)

    def lstat(path: Path) -> os.stat_result:
        if path == removed / "config.json":
            raise FileNotFoundError(2, "No such file or directory")
        return state(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    monkeypatch.setattr(Path, "lstat", lstat)
    assert [model.name for model in catalogue.list_models()] == ["good"]
    assert "the folder cannot be read: Permission denied" in refusal(catalogue, "closed").message
    assert "There are: good." in refusal(catalogue, "none").message
    assert "There are: good." in refusal(catalogue, "removed").message
