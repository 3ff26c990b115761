"""Digests of files: what is written, and what they find wrong."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path

import pytest

from ft_service.rundir.directory import sha256_of
from ft_service.rundir.documents import CheckpointMarker
from ft_service.rundir.file_digest import FileDigest, NamedFile

SHA = hashlib.sha256(b"abc").hexdigest()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "shards" / "a.bin"
    path.parent.mkdir()
    path.write_bytes(b"abc")
    return path


def test_a_file_is_known_by_size_and_sha256(path: Path) -> None:
    assert FileDigest.of(path) == FileDigest(bytes=3, sha256=SHA)
    assert NamedFile.below(path.parents[1], path) == NamedFile(
        name="shards/a.bin", bytes=3, sha256=SHA
    )


def test_a_checkpoints_marker_is_written_as_ever_and_that_of_an_earlier_version_is_read() -> None:
    files = [NamedFile(name="a", bytes=3, sha256="s")]
    marker = CheckpointMarker(step=5, attempt=1, world_size=2, files=files, criterion=1.5)
    written = '{"step":5,"attempt":1,"world_size":2,"files":[{"name":"a","bytes":3,"sha256":"s"}],"criterion":1.5}'
    assert marker.model_dump_json() == written
    for text in (written, written.replace("criterion", "valid_loss")):
        assert CheckpointMarker.model_validate_json(text) == marker


def test_what_is_wrong_with_a_file_follows_its_name(path: Path) -> None:
    digest = FileDigest.of(path)
    assert digest.fault(3, partial(sha256_of, path)) is None
    assert digest.fault(3, lambda: None) is None, "its place cannot tell"
    assert digest.fault(None, partial(sha256_of, path)) == "is missing"
    assert digest.fault(2, partial(sha256_of, path)) == "has 2 bytes instead of 3"
    path.write_bytes(b"abd")
    assert (
        digest.fault(3, partial(sha256_of, path)) == "has other contents than when it was written"
    )
