"""Uploads in parts."""

from __future__ import annotations

import hashlib
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from api.routes import uploads
from ft_service.control.cleanup.housekeeping import remove_expired
from ft_service.errors import UnavailableError
from ft_service.store.records import NewKey, Upload, UploadPart
from tests.support.rest.service import LINE, Service, stored

BODY = LINE.encode() * 1000


def parts_left(service: Service) -> list[Path]:
    return (
        list(service.settings.uploads_dir.glob("*/*"))
        if service.settings.uploads_dir.exists()
        else []
    )


def start(client: openai.OpenAI, size: int = len(BODY), **more: Any) -> str:
    return client.uploads.create(
        bytes=size,
        filename="../big.jsonl",
        mime_type="application/jsonl",
        purpose="fine-tune",
        **more,
    ).id


def send(client: openai.OpenAI, upload_id: str, *bodies: bytes) -> list[str]:
    return [client.uploads.parts.create(upload_id, data=body).id for body in bodies]


def test_a_file_that_came_in_parts_is_a_file(service: Service, client: openai.OpenAI) -> None:
    upload = client.uploads.create(
        bytes=len(BODY),
        filename="../big.jsonl",
        mime_type="application/jsonl",
        purpose="fine-tune",
        expires_after={"anchor": "created_at", "seconds": 7200},
    )
    assert (upload.object, upload.status, upload.bytes, upload.filename) == (
        "upload",
        "pending",
        len(BODY),
        "big.jsonl",
    )
    assert (upload.file, upload.expires_at - upload.created_at, upload.purpose) == (
        None,
        3600,
        "fine-tune",
    )
    later, first, last = send(client, upload.id, BODY[50_000:90_000], BODY[:50_000], BODY[90_000:])

    done = client.uploads.complete(
        upload.id, part_ids=[first, later, last], md5=hashlib.md5(BODY).hexdigest()
    )

    assert (done.id, done.status) == (upload.id, "completed")
    assert done.file is not None
    assert (done.file.filename, done.file.bytes, done.file.status) == (
        "big.jsonl",
        len(BODY),
        "processed",
    )
    assert done.file.expires_at == done.file.created_at + 7200
    assert client.files.content(done.file.id).content == BODY
    assert (
        service.store.files.get_file("default", done.file.id).sha256
        == hashlib.sha256(BODY).hexdigest()
    )
    assert (
        client.fine_tuning.jobs.create(model="tiny", training_file=done.file.id).training_file
        == done.file.id
    )
    assert (stored(service), parts_left(service)) == ([done.file.id], [])


def test_the_clients_helper_works(service: Service, client: openai.OpenAI, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(BODY)
    digest = hashlib.md5(BODY).hexdigest()

    upload = client.uploads.upload_file_chunked(
        file=path, mime_type="application/jsonl", purpose="fine-tune", part_size=40_000, md5=digest
    )

    assert upload.file is not None
    assert client.files.content(upload.file.id).content == BODY


def test_completing_again_gives_the_same_answer(service: Service, client: openai.OpenAI) -> None:
    upload_id = start(client)
    part_ids = send(client, upload_id, BODY)
    with ThreadPoolExecutor(4) as pool:
        done = list(
            pool.map(lambda _: client.uploads.complete(upload_id, part_ids=part_ids), range(4))
        )

    assert (
        len(
            {
                upload.model_dump_json()
                for upload in [*done, client.uploads.complete(upload_id, part_ids=part_ids)]
            }
        )
        == 1
    )
    assert done[0].file is not None
    assert [file.id for file in client.files.list()] == stored(service) == [done[0].file.id]
    with pytest.raises(openai.BadRequestError, match="completed"):
        client.uploads.complete(upload_id, part_ids=[*part_ids, "part_x"])
    with pytest.raises(openai.BadRequestError, match="completed"):
        client.uploads.cancel(upload_id)


def test_a_file_that_was_made_although_the_connection_was_lost_keeps_its_contents(
    service: Service, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = service.store.uploads.complete_upload

    def lost_behind_the_commit(*given: Any) -> Upload:
        complete(*given)
        monkeypatch.undo()
        raise UnavailableError("The connection is lost.")

    upload_id = start(client)
    part_ids = send(client, upload_id, BODY)
    monkeypatch.setattr(service.store.uploads, "complete_upload", lost_behind_the_commit)
    with pytest.raises(openai.InternalServerError, match="lost"):
        client.uploads.complete(upload_id, part_ids=part_ids)

    done = client.uploads.complete(upload_id, part_ids=part_ids)
    assert done.file is not None
    assert client.files.content(done.file.id).read() == BODY


def test_a_part_that_was_stored_although_the_connection_was_lost_keeps_its_bytes(
    service: Service, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client sends it again by itself, and is answered with the part that is stored."""
    add_part = service.store.uploads.add_part

    def lost_behind_the_commit(*given: Any, **more: Any) -> UploadPart:
        add_part(*given, **more)
        monkeypatch.undo()
        raise UnavailableError("The connection is lost.")

    upload_id = start(client)
    monkeypatch.setattr(service.store.uploads, "add_part", lost_behind_the_commit)
    part_ids = send(client.with_options(max_retries=1), upload_id, BODY)
    assert [part.id for part in service.store.uploads.list_parts("default", upload_id)] == part_ids
    done = client.uploads.complete(upload_id, part_ids=part_ids)
    assert done.file is not None
    assert client.files.content(done.file.id).read() == BODY


def test_who_finds_the_parts_gone_gets_the_answer_of_who_was_faster(
    service: Service, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload_id = start(client)
    part_ids = send(client, upload_id, BODY)
    assemble = uploads._assemble
    answers = []

    def after_another(*arguments: Any) -> Any:
        monkeypatch.setattr(uploads, "_assemble", assemble)
        answers.append(client.uploads.complete(upload_id, part_ids=part_ids))
        return assemble(*arguments)

    monkeypatch.setattr(uploads, "_assemble", after_another)
    assert client.uploads.complete(upload_id, part_ids=part_ids) == answers[0]


def test_what_is_not_the_announced_file_is_refused_and_may_be_mended(
    service: Service, client: openai.OpenAI
) -> None:
    upload_id = start(client)
    first, second = send(client, upload_id, BODY[:1000], BODY[1000:])
    other = send(client, start(client), BODY)[0]
    for part_ids, md5, code, param in (
        ([first], None, "bytes_mismatch", "part_ids"),
        ([first, second, second], None, "bytes_mismatch", "part_ids"),
        ([first, other], None, "part_not_found", "part_ids.1"),
        ([first, second], "0" * 32, "checksum_mismatch", "md5"),
        ([first, second], "nonsense", "invalid_value", "md5"),
        ([], None, "invalid_value", "part_ids"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.uploads.complete(upload_id, part_ids=part_ids, md5=md5 or openai.omit)
        assert (caught.value.code, caught.value.param) == (code, param)
    assert stored(service) == []

    assert client.uploads.complete(upload_id, part_ids=[first, second]).status == "completed"


def test_a_part_that_the_client_repeats_is_one_part(
    service: Service, client: openai.OpenAI
) -> None:
    upload_id = start(client)

    def post(body: bytes, retry: int) -> str:
        headers = {"x-stainless-retry-count": str(retry)}
        return service.http(
            "POST", f"/v1/uploads/{upload_id}/parts", files={"data": body}, headers=headers
        ).json()["id"]

    first = post(BODY[:10], 0)

    assert post(BODY[:10], 1) == first
    assert post(BODY[:10], 0) != first
    assert post(BODY[:11], 1) != first
    assert len(parts_left(service)) == 3


def test_a_cancelled_upload_is_over_and_leaves_nothing(
    service: Service, client: openai.OpenAI
) -> None:
    upload_id = start(client)
    part_ids = send(client, upload_id, BODY)

    assert client.uploads.cancel(upload_id).status == "cancelled"
    assert client.uploads.cancel(upload_id).status == "cancelled"

    assert parts_left(service) == []
    for ask in (
        lambda: send(client, upload_id, BODY),
        lambda: client.uploads.complete(upload_id, part_ids=part_ids),
    ):
        with pytest.raises(openai.BadRequestError, match="cancelled") as caught:
            ask()
        assert caught.value.code == "invalid_state"
    assert parts_left(service) == []


def test_an_upload_expires_after_an_hour(service: Service, client: openai.OpenAI) -> None:
    expired = start(client)
    going_on = start(client)
    part_ids = send(client, expired, BODY)
    send(client, going_on, BODY)
    service.sql("UPDATE uploads SET expires_at = 1 WHERE id = :id", id=expired)

    for ask in (
        lambda: send(client, expired, BODY),
        lambda: client.uploads.complete(expired, part_ids=part_ids),
        lambda: client.uploads.cancel(expired),
    ):
        with pytest.raises(openai.BadRequestError, match="expired"):
            ask()
    remove_expired(service.settings, service.store)
    assert {path.parent.name for path in parts_left(service)} == {going_on}


def test_the_room_that_uploads_take_is_bounded(
    service: Service, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.routes.uploads.MAX_PART_BYTES", 50_000)
    monkeypatch.setattr("api.routes.uploads.MAX_PENDING", 2)
    upload_id = start(client, 60_000)
    with pytest.raises(
        openai.BadRequestError, match=r"larger than 50000 bytes\. Send it in more parts"
    ) as caught:
        send(client, upload_id, BODY[:50_001])
    assert caught.value.param == "data"
    send(client, upload_id, BODY[:50_000], BODY[:50_000])
    with pytest.raises(openai.BadRequestError) as caught:
        send(client, upload_id, BODY[:10_001])
    assert (caught.value.code, caught.value.param) == ("too_many_bytes", "data")
    assert len(parts_left(service)) == 2

    second = start(client)
    with pytest.raises(openai.BadRequestError, match="Cancel one first"):
        start(client)
    client.uploads.cancel(second)
    start(client)
    monkeypatch.setattr("api.routes.uploads.MAX_PARTS", 2)
    with pytest.raises(openai.BadRequestError, match="at most 2 parts"):
        send(client, upload_id, b"x")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"bytes": 0}, "bytes"),
    ({"bytes": 8 * 1024**3 + 1}, "bytes"),
    ({"bytes": "9"}, "bytes"),
    ({"filename": "a.pdf"}, "filename"),
    ({"filename": ""}, "filename"),
    ({"purpose": "batch"}, "purpose"),
    ({"mime_type": None}, "mime_type"),
    ({"expires_after": {"anchor": "created_at"}}, "expires_after.seconds"),
    ({"expires_after": {"anchor": "created_at", "seconds": 60}}, "expires_after.seconds"),
    ({"colour": "red"}, "colour"),
]


def test_a_refused_upload_names_the_field(service: Service, subtests: pytest.Subtests) -> None:
    for change, param in REFUSED:
        with subtests.test(change=change):
            body = {
                "bytes": 10,
                "filename": "a.jsonl",
                "mime_type": "text/plain",
                "purpose": "fine-tune",
                **change,
            }
            answer = service.http("POST", "/v1/uploads", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert service.http("POST", "/v1/uploads", json=[]).status_code == 400
    assert service.store.uploads.pending_uploads() == set()


def test_another_projects_upload_does_not_exist(service: Service, client: openai.OpenAI) -> None:
    service.store.projects.ensure_project("other", "rival")
    other = service.client(
        service.store.keys.create_key(NewKey(project_id="other", name="k", scope="user"))[1]
    )
    upload_id = start(client)
    for ask in (
        lambda: send(other, upload_id, BODY),
        lambda: other.uploads.complete(upload_id, part_ids=["part_x"]),
        lambda: other.uploads.cancel(upload_id),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()
    assert parts_left(service) == []


def test_parts_that_this_disk_has_not_say_so(service: Service, client: openai.OpenAI) -> None:
    """As after a restart of a pod whose disk is its own."""
    upload_id = start(client)
    parts = send(client, upload_id, BODY)
    shutil.rmtree(service.settings.uploads_dir)
    with pytest.raises(
        openai.BadRequestError, match=r"not on this server's disk\. Start a new upload"
    ):
        client.uploads.complete(upload_id, part_ids=parts)
