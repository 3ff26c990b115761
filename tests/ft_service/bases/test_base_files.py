from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ft_service.bases.base_files import (
    DOCUMENT,
    copy_base_file,
    is_base_file,
    open_base_file,
    read_config,
    read_document,
    require_openable,
)
from ft_service.bases.safetensors_folder import read_tensors
from ft_service.errors import SpecError
from tests.support.bases import save_base
from tests.support.hostile_bases import KINDS

CACHED = "models--org--name/snapshots/0123abcd"


def cached_base(cache: Path) -> Path:
    """A base as Hugging Face's cache holds it: a snapshot of links into the model's own folder."""
    folder = save_base(cache / CACHED)
    blobs = folder.parents[1] / "blobs"
    blobs.mkdir()
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tools.jinja").write_text("{{ tools }}")
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        path.rename(blobs / path.name)
        path.symlink_to(os.path.relpath(blobs / path.name, path.parent))
    return folder


@pytest.mark.parametrize("through_link", [False, True])
def test_links_of_the_hubs_cache_stay_inside_their_model(
    tmp_path: Path, *, through_link: bool
) -> None:
    folder = cached_base(tmp_path / "cache")
    if through_link:
        (tmp_path / "name").symlink_to(folder)
        folder = tmp_path / "name"
    require_openable(folder)
    assert read_tensors(folder)
    assert is_base_file(folder / "additional_chat_templates/tools.jinja", folder)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("../../../models--org--other/blobs/config.json")
    (tmp_path / "cache/models--org--other/blobs").mkdir(parents=True)
    (tmp_path / "cache/models--org--other/blobs/config.json").write_text("{}")
    with pytest.raises(SpecError, match="a link that leads out of the base's folder"):
        require_openable(folder)


def test_links_within_the_folder_are_files_of_it(tmp_path: Path) -> None:
    folder = save_base(tmp_path / "base")
    (folder / "config.json").rename(folder / "other.json")
    (folder / "config.json").symlink_to("other.json")
    require_openable(folder)
    assert read_document(folder / "config.json")["model_type"] == "llama"
    copy_base_file(folder / "config.json", tmp_path / "copy.json")
    assert not (tmp_path / "copy.json").is_symlink()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "loop"])
@pytest.mark.parametrize(
    "name", ["config.json", "LICENSE", "README.md", "preprocessor_config.json"]
)
def test_nothing_but_regular_files_inside_is_opened(tmp_path: Path, kind: str, name: str) -> None:
    folder = save_base(tmp_path / "base")
    (folder / name).unlink(missing_ok=True)
    KINDS[kind](folder / name)
    assert not is_base_file(folder / name)
    for look in (open_base_file, lambda path: copy_base_file(path, tmp_path / "copy")):
        with pytest.raises(
            SpecError, match=rf"{name} in .*: it is (not a regular file|a link that leads)"
        ) as caught:
            look(folder / name)
        assert (caught.value.param, caught.value.code) == ("model", "model_unreadable")
    assert not (tmp_path / "copy").exists()
    if kind != "folder":  # which is not taken for a file
        with pytest.raises(SpecError, match=f"The base's {name}"):
            require_openable(folder)


def test_what_has_not_arrived_is_absent_and_a_loop_is_an_error(tmp_path: Path) -> None:
    folder = save_base(tmp_path / "base")
    (folder / "generation_config.json").symlink_to("nowhere")
    require_openable(folder)
    with pytest.raises(FileNotFoundError):
        open_base_file(folder / "generation_config.json")
    KINDS["loop"](folder / "merges.txt")
    assert not is_base_file(folder / "merges.txt")
    with pytest.raises(SpecError, match=r"merges\.txt in .*Too many levels of symbolic links"):
        require_openable(folder)


def test_a_pipe_in_the_folder_of_templates_is_found_too(tmp_path: Path) -> None:
    folder = save_base(tmp_path / "base")
    (folder / "additional_chat_templates").mkdir()
    os.mkfifo(folder / "additional_chat_templates/tools.jinja")
    with pytest.raises(SpecError, match=r"tools\.jinja in .*not a regular file"):
        require_openable(folder)


def nested(depth: int) -> bytes:
    return b'{"a": ' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b" " * (DOCUMENT.bytes + 1), "it has more than 8 MiB"),
        (b'{"a": [' + b"0," * DOCUMENT.values + b"0]}", "it holds more than 500,000 values"),
        (nested(65), "it holds more than 64 lists or objects inside each other"),
        (nested(100_000), r"it cannot be read as JSON \(RecursionError"),
        (b'{"a": ' + b"9" * 5000 + b"}", r"it cannot be read as JSON \(ValueError"),
        (b"[]", "it is no JSON object"),
        (b"\xff", r"it cannot be read as JSON \(UnicodeDecodeError"),
    ],
)
def test_a_document_is_bounded(tmp_path: Path, text: bytes, reason: str) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(SpecError, match=rf"The base's config\.json in .*: {reason}"):
        read_document(tmp_path / "config.json")


def test_infinity_is_read_where_transformers_writes_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"limit": float("inf"), "deep": json.loads(nested(60))})
    )
    assert read_document(tmp_path / "config.json")["limit"] == float("inf")


def test_a_name_that_is_not_one_is_refused_with_its_place(tmp_path: Path) -> None:
    folder = save_base(tmp_path / "base", model_type=["llama"])
    with pytest.raises(
        SpecError, match=r"it says model_type = \['llama'\], and that must be a name"
    ):
        read_config(folder)
    save_base(folder, text_config={"model_type": {}})
    with pytest.raises(
        SpecError, match=r"it says text_config\.model_type = \{\}, and that must be a name"
    ):
        read_config(folder)
