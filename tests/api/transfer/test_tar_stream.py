from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from api.transfer import tar_stream


def test_a_stream_is_a_tar_of_the_announced_length(tmp_path: Path) -> None:
    bodies = {
        "empty": b"",
        "one block": b"x" * 512,
        f"deep/{'n' * 120}/\N{SNOWMAN}": b"y" * 1_100_000,
    }
    for name, body in bodies.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(body)

    files = tar_stream.members(tmp_path, "adapter")
    body = b"".join(tar_stream.stream(files))

    assert len(body) == tar_stream.length(files)
    with tarfile.open(fileobj=io.BytesIO(body)) as tar:
        found = {member.name: tar.extractfile(member) for member in tar}
        assert {name: file and file.read() for name, file in found.items()} == {
            f"adapter/{name}": body for name, body in bodies.items()
        }


def test_a_file_that_shrinks_breaks_the_stream_instead_of_the_archive(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"xyz")
    files = tar_stream.members(tmp_path, "adapter")
    (tmp_path / "a").write_bytes(b"x")

    with pytest.raises(OSError, match="shorter"):
        list(tar_stream.stream(files))


def test_a_folder_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert tar_stream.members(tmp_path / "absent", "adapter") == []
