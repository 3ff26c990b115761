from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from ft_service.errors import ConflictError, LimitError, NotFoundError, SpecError
from ft_service.ids import new_id
from ft_service.store.records import Upload, UploadPart
from tests.support.records import OTHER, PROJECT, new_file


def add(store, *, seconds: int = 60, at_most: int = 5, size: int = 100) -> Upload:
    upload = Upload(
        id=new_id("upload_"),
        project_id=PROJECT,
        filename="a.jsonl",
        purpose="fine-tune",
        bytes=size,
        file_seconds=3600,
    )
    return store.uploads.add_upload(upload, seconds=seconds, at_most=at_most)


def part(upload: Upload, size: int = 10) -> UploadPart:
    return UploadPart(
        id=new_id("part_"), project_id=PROJECT, upload_id=upload.id, bytes=size, sha256="0" * 64
    )


def test_an_upload_becomes_a_file_once(store):
    upload = add(store)
    assert (upload.status, upload.expires_at - upload.created_at) == ("pending", 60)
    parts = [store.uploads.add_part(part(upload, size), slack=0, at_most=9) for size in (60, 40)]
    assert store.uploads.list_parts(PROJECT, upload.id) == parts
    assert store.uploads.list_parts(OTHER, upload.id) == []
    first = new_file(id="file-1")
    second = new_file(id="file-2")

    done = store.uploads.complete_upload(PROJECT, upload.id, ["b", "a"], first)

    assert (done.status, done.part_ids, done.file_id) == ("completed", ["b", "a"], "file-1")
    assert (
        store.uploads.complete_upload(PROJECT, upload.id, ["b", "a"], second)
        == done
        == store.uploads.get_upload(PROJECT, upload.id)
    )
    file = store.files.get_file(PROJECT, "file-1")
    assert file.expires_at == file.created_at + 3600
    with pytest.raises(NotFoundError):
        store.files.get_file(PROJECT, "file-2")
    assert store.uploads.list_parts(PROJECT, upload.id) == []
    with pytest.raises(SpecError, match="completed"):
        store.uploads.complete_upload(PROJECT, upload.id, ["a", "b"], second)


def test_parts_that_arrive_at_once_are_bounded_together(store):
    upload = add(store)

    def try_part(_: int) -> bool:
        try:
            store.uploads.add_part(part(upload), slack=5, at_most=100)
        except SpecError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(try_part, range(24))) == 10


def test_of_tries_at_once_one_stores_its_part(store):
    upload = add(store)
    first = store.uploads.add_part(part(upload, 7), slack=0, at_most=9)
    keyed = [replace(part(upload), idempotency_key="k") for _ in range(8)]
    repeats = [part(upload) for _ in range(8)]

    def try_part(new: UploadPart) -> UploadPart | None:
        try:
            return store.uploads.add_part(
                new, slack=0, at_most=3, is_repeat=new.idempotency_key is None
            )
        except ConflictError:
            return None

    with ThreadPoolExecutor(8) as pool:
        [repeated] = filter(None, pool.map(try_part, repeats))
        [kept] = filter(None, pool.map(try_part, keyed))

    assert store.uploads.list_parts(PROJECT, upload.id) == [first, repeated, kept]
    assert store.uploads.earlier_part(keyed[0]) == kept
    assert store.uploads.earlier_part(part(add(store))) is None


def test_uploads_announce_no_more_than_the_project_may_keep(store):
    store.projects.update_project(PROJECT, limits={"max_bytes": 250})
    store.files.add_file(new_file(bytes=50))
    first = add(store, size=100)
    with pytest.raises(
        LimitError,
        match="The file has 101 bytes; this project keeps 50, has announced 100 in uploads",
    ):
        add(store, size=101)
    add(store, size=100)
    store.uploads.cancel_upload(PROJECT, first.id)
    add(store, size=100)


def test_no_file_takes_the_room_that_an_upload_has_announced(store):
    store.projects.update_project(PROJECT, limits={"max_bytes": 250})
    first = add(store)
    _ = add(store)
    with pytest.raises(
        LimitError,
        match="The file has 51 bytes; this project keeps 0, has announced 200 in uploads",
    ):
        store.files.add_file(new_file(bytes=51))
    store.files.add_file(new_file(bytes=50))
    file = new_file(bytes=100)
    assert store.uploads.complete_upload(PROJECT, first.id, ["a"], file).file_id == file.id
    with pytest.raises(LimitError, match="keeps 150, has announced 100 in uploads"):
        store.files.refuse_bytes(PROJECT, 1)


def test_an_ended_upload_takes_nothing(store):
    expired = add(store, seconds=0)
    cancelled = add(store)
    store.uploads.cancel_upload(PROJECT, cancelled.id)
    assert store.uploads.get_upload(PROJECT, expired.id).status == "expired"
    for upload, word in ((expired, "expired"), (cancelled, "cancelled")):
        with pytest.raises(SpecError, match=word):
            store.uploads.add_part(part(upload), slack=0, at_most=9)
        with pytest.raises(SpecError, match=word):
            store.uploads.complete_upload(PROJECT, upload.id, ["a"], new_file())
    assert store.uploads.pending_uploads() == set()
