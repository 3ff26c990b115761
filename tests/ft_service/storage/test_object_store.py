from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ft_service.errors import SpecError, UnavailableError
from ft_service.storage.object_store import ObjectStore
from tests.support.storage import local_s3, new_bucket


@pytest.fixture(scope="module", autouse=True)
def s3() -> Iterator[None]:
    with local_s3():
        yield


@pytest.fixture
def objects() -> ObjectStore:
    return ObjectStore(new_bucket())


def test_objects(objects: ObjectStore, tmp_path: Path) -> None:
    assert objects.get("a/b") is None
    assert objects.size("a/b") is None
    assert objects.list("a") == {}
    objects.put("a/b", b"one")
    assert objects.put_if_absent("a/c", b"two!")
    assert not objects.put_if_absent("a/c", b"three")
    objects.put("ab", b"not below a/")
    assert objects.get("a/c") == b"two!"
    assert objects.list("a") == {"a/b": 3, "a/c": 4}
    objects.download("a/c", tmp_path / "deep/c")
    assert (tmp_path / "deep/c").read_bytes() == b"two!"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["c"]
    objects.upload(tmp_path / "deep/c", "d")
    assert objects.size("d") == 4
    objects.remove("d")
    objects.remove("d")
    assert objects.get("d") is None


def test_one_object_is_downloaded_by_two_at_once(
    objects: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither takes the other's half for the whole."""
    objects.put("a", b"all of it")
    get_file = objects._fs.get_file
    both = threading.Barrier(2, timeout=60)

    def slowly(key: str, path: str) -> None:
        Path(path).write_bytes(b"all")
        both.wait()
        get_file(key, path)
        both.wait()

    monkeypatch.setattr(objects._fs, "get_file", slowly)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda _: objects.download("a", tmp_path / "a"), range(2)))
    assert (tmp_path / "a").read_bytes() == b"all of it"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_nothing_of_a_failed_download_stays(
    objects: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(key: str, path: str) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("the connection broke")

    monkeypatch.setattr(objects._fs, "get_file", fail)
    with pytest.raises(UnavailableError):
        objects.download("a", tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_storage_that_is_away_is_told_apart_from_what_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    away = ObjectStore(
        "s3://bucket/ft", config_kwargs={"retries": {"max_attempts": 0}, "connect_timeout": 1}
    )
    with pytest.raises(UnavailableError, match="s3://bucket/ft cannot be used"):
        away.get("a")


@pytest.mark.parametrize("url", ["s3://", "http://host/x", "/folder"])
def test_other_places_are_refused(url: str) -> None:
    with pytest.raises(SpecError, match="expected s3://bucket/prefix or gs://bucket/prefix"):
        ObjectStore(url)
