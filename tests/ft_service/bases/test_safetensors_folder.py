from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ft_service.bases.safetensors_folder import INDEX, SINGLE, read_tensors, weight_files
from ft_service.errors import SpecError
from tests.support.bases import save_headers


def save(folder: Path, weight_map: Any, **files: dict[str, tuple[int, ...]]) -> Path:
    for name, shapes in files.items():
        save_headers(folder / f"{name}.safetensors", shapes)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def refusal(folder: Path) -> SpecError:
    with pytest.raises(SpecError) as caught:
        read_tensors(folder)
    assert (caught.value.param, caught.value.code) == ("model", "model_unreadable")
    return caught.value


def test_the_index_decides_which_tensors_there_are(tmp_path: Path) -> None:
    save(
        tmp_path,
        {"x": "b.safetensors", "y": "a.safetensors"},
        a={"y": (2,), "unlisted": (3,)},
        b={"x": (4,)},
    )
    assert [(t.name, t.shape, t.path.name) for t in read_tensors(tmp_path).values()] == [
        ("y", (2,), "a.safetensors"),
        ("x", (4,), "b.safetensors"),
    ]
    assert [path.name for path in weight_files(tmp_path)] == ["a.safetensors", "b.safetensors"]


def test_without_an_index_one_file_holds_all(tmp_path: Path) -> None:
    assert "neither" in refusal(tmp_path).message
    save_headers(tmp_path / SINGLE, {"x": (4,)})
    assert list(read_tensors(tmp_path)) == ["x"]
    assert weight_files(tmp_path) == [tmp_path / SINGLE]


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../a.safetensors",
        "/etc/passwd",
        "sub/a.safetensors",
        "a\0",
        "a\ud800",
        "x" * 256,
        "a\\b",
        1,
        None,
        ["a"],
    ],
)
def test_a_file_outside_of_the_folder_is_refused(tmp_path: Path, name: Any) -> None:
    message = refusal(save(tmp_path, {"x": name})).message
    assert f"The base's {INDEX} in {tmp_path}: it says that tensor 'x' is in " in message
    assert "which is no file of this folder" in message
    assert message.isprintable()


@pytest.mark.parametrize("weight_map", [None, [], {}, "model.safetensors"])
def test_an_index_without_a_map_is_refused(tmp_path: Path, weight_map: Any) -> None:
    assert "it has no weight_map" in refusal(save(tmp_path, weight_map)).message


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{", b"[" * 200_000, b"\xff\xfe", b'{"weight_map": {"x": "a", "x": "b"}}']
)
def test_an_index_that_is_no_json_object_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / INDEX).write_bytes(text)
    assert f"The base's {INDEX}" in refusal(tmp_path).message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    save(tmp_path, {"x": "gone.safetensors"})
    assert f"The base's gone.safetensors in {tmp_path}: No such file" in refusal(tmp_path).message
    (tmp_path / "gone.safetensors").mkdir()
    assert "it is not a regular file" in refusal(tmp_path).message
    (tmp_path / "gone.safetensors").rmdir()
    (tmp_path / "gone.safetensors").symlink_to("nowhere")
    assert "No such file" in refusal(tmp_path).message


def test_index_and_headers_must_agree(tmp_path: Path) -> None:
    save(tmp_path, {"x": "a.safetensors", "y": "b.safetensors"}, a={"x": (1,)}, b={"z": (1,)})
    assert (
        f"The base's b.safetensors in {tmp_path}: it lacks tensor 'y', which {INDEX} says"
        in refusal(tmp_path).message
    )
    save(tmp_path, {"x": "a.safetensors", "y": "b.safetensors"}, a={"y": (1,)}, b={"x": (1,)})
    assert "it lacks tensor 'x'" in refusal(tmp_path).message


def test_a_tensor_of_two_files_is_refused(tmp_path: Path) -> None:
    save(
        tmp_path,
        {"x": "a.safetensors", "y": "b.safetensors"},
        a={"x": (1,)},
        b={"x": (1,), "y": (1,)},
    )
    assert "The base's b.safetensors" in refusal(tmp_path).message
    assert "tensor 'x' is in a.safetensors too" in refusal(tmp_path).message
