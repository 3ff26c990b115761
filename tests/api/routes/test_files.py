from __future__ import annotations

import base64
import errno
import hashlib
import io
import socket
from pathlib import Path
from typing import Any

import openai
import pytest

from ft_service.control.cleanup.housekeeping import remove_expired
from ft_service.errors import UnavailableError
from ft_service.ids import new_id
from ft_service.store.records import File
from tests.support.rest.service import TRAINING, Service, stored, wait_until


def add_result(service: Service, body: bytes) -> str:
    file = File(
        id=new_id("file-"),
        project_id="default",
        filename="metrics.csv",
        purpose="fine-tune-results",
        bytes=len(body),
        sha256=hashlib.sha256(body).hexdigest(),
        created_at=0.0,
    )
    service.settings.files_dir.mkdir(exist_ok=True)
    (service.settings.files_dir / file.id).write_bytes(body)
    return service.store.files.add_file(file).id


def test_an_uploaded_file_can_be_read_listed_and_deleted(
    service: Service, client: openai.OpenAI
) -> None:
    body = TRAINING * 50_000  # several megabytes: more than one buffer
    file = client.files.create(file=("../dir/train.jsonl", body), purpose="fine-tune")

    assert file.id.startswith("file-")
    assert (file.filename, file.bytes, file.purpose, file.status) == (
        "train.jsonl",
        len(body),
        "fine-tune",
        "processed",
    )
    assert (
        service.store.files.get_file("default", file.id).sha256 == hashlib.sha256(body).hexdigest()
    )
    assert client.files.wait_for_processing(file.id).id == file.id
    assert client.files.content(file.id).content == body
    assert [item.id for item in client.files.list()] == [file.id]

    deleted = client.files.delete(file.id)

    assert (deleted.id, deleted.deleted) == (file.id, True)
    assert stored(service) == []
    with pytest.raises(openai.NotFoundError) as caught:
        client.files.retrieve(file.id)
    assert caught.value.request_id


def test_bytes_from_memory_need_no_name(service: Service, client: openai.OpenAI) -> None:
    for given in (TRAINING, io.BytesIO(TRAINING), ("train", TRAINING)):
        file = client.files.create(file=given, purpose="fine-tune")
        assert file.filename == ("train" if isinstance(given, tuple) else "upload"), (
            "the client's own name"
        )
        assert client.files.content(file.id).content == TRAINING


def test_a_file_without_a_name_is_asked_for_one(client: openai.OpenAI) -> None:
    """Whatever its size: without a name it is a field of the form, and those are small."""
    for body in (TRAINING, TRAINING * 1000):
        with pytest.raises(
            openai.BadRequestError, match="file is required: a part of that name with a filename"
        ) as caught:
            client.files.create(file=("", body), purpose="fine-tune")
        assert (caught.value.param, caught.value.code) == ("file", "missing_required_parameter")


def test_files_are_paged_in_both_orders(service: Service, client: openai.OpenAI) -> None:
    ids = [
        client.files.create(file=(f"{n}.jsonl", TRAINING), purpose="fine-tune").id for n in range(5)
    ]

    assert [file.id for file in client.files.list(limit=2)] == ids[::-1]
    assert [file.id for file in client.files.list(limit=2, order="asc")] == ids
    assert [file.id for file in client.files.list(purpose="fine-tune-results")] == []
    page = service.http("GET", "/v1/files?limit=2").json()
    assert (page["object"], page["has_more"], page["first_id"], page["last_id"]) == (
        "list",
        True,
        ids[4],
        ids[3],
    )


def test_a_file_that_a_waiting_job_needs_is_hidden_and_keeps_its_bytes(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    client.fine_tuning.jobs.create(model="tiny", training_file=training_file)
    client.files.delete(training_file)

    assert stored(service) == [training_file]
    with pytest.raises(openai.NotFoundError):
        client.files.content(training_file)


def test_a_file_expires_and_then_is_hidden_and_freed(
    service: Service, client: openai.OpenAI
) -> None:
    kept, file = (
        client.files.create(
            file=(name, TRAINING),
            purpose="fine-tune",
            expires_after={"anchor": "created_at", "seconds": seconds},
        )
        for name, seconds in (("kept.jsonl", 2_592_000), ("a.jsonl", 3600))
    )
    assert file.expires_at == file.created_at + 3600
    assert client.files.retrieve(file.id).expires_at == file.expires_at
    remove_expired(service.settings, service.store)
    assert stored(service) == sorted([file.id, kept.id])

    service.sql("UPDATE files SET expires_at = 1 WHERE id = :id", id=file.id)

    assert [item.id for item in client.files.list()] == [kept.id]
    for ask in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            ask(file.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.fine_tuning.jobs.create(model="tiny", training_file=file.id)
    assert caught.value.param == "training_file"
    remove_expired(service.settings, service.store)
    assert stored(service) == [kept.id]


def test_the_bytes_of_an_expired_file_live_as_long_as_a_job_needs_them(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    job = client.fine_tuning.jobs.create(model="tiny", training_file=training_file)
    client.fine_tuning.jobs.pause(job.id)
    service.sql("UPDATE files SET expires_at = 1 WHERE id = :id", id=training_file)
    remove_expired(service.settings, service.store)
    assert stored(service) == [training_file]

    client.fine_tuning.jobs.cancel(job.id)
    remove_expired(service.settings, service.store)

    assert stored(service) == []
    assert service.store.files.freeable_files() == []


EXPIRY = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
REFUSED_PARTS: list[tuple[str, dict[str, Any], str, str]] = [
    ("a.jsonl", {"purpose": "batch"}, "purpose", "'batch'"),
    ("a.jsonl", {}, "purpose", "required"),
    ("a.pdf", {"purpose": "fine-tune"}, "file", "'a.pdf'"),
    ("", {"purpose": "fine-tune"}, "file", "with a filename"),
    (".jsonl/", {"purpose": "fine-tune"}, "file", ".jsonl"),
    (
        "a.jsonl",
        {"purpose": "fine-tune", "expires_after[anchor]": "created_at"},
        "expires_after.seconds",
        "required",
    ),
    (
        "a.jsonl",
        {"purpose": "fine-tune", "expires_after[seconds]": "3600"},
        "expires_after.anchor",
        "required",
    ),
    (
        "a.jsonl",
        {"purpose": "fine-tune", **EXPIRY, "expires_after[seconds]": "3599"},
        "expires_after.seconds",
        "= 3599",
    ),
    (
        "a.jsonl",
        {"purpose": "fine-tune", **EXPIRY, "expires_after[seconds]": "2592001"},
        "expires_after.seconds",
        "= 2592001",
    ),
    (
        "a.jsonl",
        {"purpose": "fine-tune", **EXPIRY, "expires_after[seconds]": "1e4"},
        "expires_after.seconds",
        "'1e4'",
    ),
    (
        "a.jsonl",
        {"purpose": "fine-tune", **EXPIRY, "expires_after[anchor]": "now"},
        "expires_after.anchor",
        "'now'",
    ),
    (
        "a.jsonl",
        {"purpose": "fine-tune", **EXPIRY, "expires_after[x]": "1"},
        "expires_after[x]",
        "no such part",
    ),
    ("a.jsonl", {"purpose": "fine-tune", "colour": "red"}, "colour", "no such part"),
    ("a.jsonl", {"purpose": "x" * 20_000}, "purpose", "16384"),
    ("a.jsonl", {"purpose": ["fine-tune", "batch"]}, "purpose", "twice"),
]


def test_a_refused_upload_names_the_part_and_leaves_nothing(
    service: Service, subtests: pytest.Subtests
) -> None:
    for name, parts, param, says in REFUSED_PARTS:
        with subtests.test(name=name, parts=parts):
            answer = service.http("POST", "/v1/files", data=parts, files={"file": (name, TRAINING)})

            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == param
            assert says in answer.json()["error"]["message"]
            assert stored(service) == []
            assert service.store.files.list_files("default").data == []


PART = b"--x\r\nContent-Disposition: form-data; name="
NO_UPLOADS = [
    ("application/json", b"{}", "multipart/form-data"),
    ("multipart/form-data", b"", "multipart/form-data"),
    ("multipart/form-data; boundary=x", b"", "ends early"),
    ("multipart/form-data; boundary=x", b"nonsense", "cannot be read"),
    ("multipart/form-data; boundary=x", PART + b"file; filename=a.jsonl\r\n\r\n{}", "ends early"),
    ("multipart/form-data; boundary=x", PART + b"file\r\n\r\n{}\r\n--x--\r\n", "required"),
    (
        "multipart/form-data; boundary=x",
        PART + b"other; filename=a.jsonl\r\n\r\n{}\r\n--x--\r\n",
        "the part named file",
    ),
    ("multipart/form-data; boundary=x", PART + b"y" * 20_000 + b"\r\n\r\n", "cannot be read"),
    (
        "multipart/form-data; boundary=x",
        b"".join(PART + b"p%d\r\n\r\n\r\n" % n for n in range(1000)),
        "16384",
    ),
]


def test_a_body_that_is_no_upload_is_a_400(service: Service, subtests: pytest.Subtests) -> None:
    for content_type, body, says in NO_UPLOADS:
        with subtests.test(content_type=content_type, body=body[:80]):
            answer = service.http(
                "POST", "/v1/files", content=body, headers={"content-type": content_type}
            )

            assert answer.status_code == 400
            assert says in answer.json()["error"]["message"]
            assert stored(service) == []


class TestLimit:
    @pytest.fixture
    def configure(self, configure: dict[str, Any]) -> dict[str, Any]:
        return configure | {"max_file_bytes": 3_000_000}

    def test_a_file_above_the_limit_is_refused_by_number_and_leaves_nothing(
        self, service: Service, client: openai.OpenAI
    ) -> None:
        client.files.create(file=("fits.jsonl", b"x" * 3_000_000), purpose="fine-tune")
        with pytest.raises(openai.BadRequestError, match="3000000") as caught:
            client.files.create(file=("large.jsonl", b"x" * 3_000_001), purpose="fine-tune")

        assert (caught.value.param, caught.value.code) == ("file", "file_too_large")
        assert len(stored(service)) == 1


def test_a_client_that_hangs_up_leaves_nothing(service: Service) -> None:
    host, port = service.url.removeprefix("http://").split(":")
    head = (
        "POST /v1/files HTTP/1.1\r\nhost: x\r\nauthorization: Bearer "
        f"{service.key}\r\ncontent-length: 9999999\r\n"
        "content-type: multipart/form-data; boundary=x\r\n\r\n"
        "--x\r\nContent-Disposition: form-data; name=file; filename=a.jsonl\r\n\r\n{}"
    )
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode())
        wait_until(lambda: stored(service) != [])

    wait_until(lambda: stored(service) == [])


def test_a_full_disk_is_said_and_leaves_nothing(
    service: Service, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("api.transfer.multipart.os.fsync", full)
    with pytest.raises(openai.InternalServerError, match="disk is full") as caught:
        client.files.create(file=("a.jsonl", TRAINING), purpose="fine-tune")

    assert caught.value.code == "disk_full"
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert stored(service) == []


def test_a_file_whose_record_cannot_be_stored_leaves_nothing(
    service: Service, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(file: File, **_: Any) -> File:
        raise UnavailableError("The database is away.")

    monkeypatch.setattr(service.store.files, "add_file", away)
    with pytest.raises(openai.InternalServerError, match="away"):
        client.files.create(file=("a.jsonl", TRAINING), purpose="fine-tune")

    assert stored(service) == []


def test_a_file_whose_record_was_stored_although_the_connection_was_lost_keeps_its_contents(
    service: Service, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_file = service.store.files.add_file

    def lost_behind_the_commit(file: File, **more: Any) -> File:
        add_file(file, **more)
        raise UnavailableError("The connection is lost.")

    monkeypatch.setattr(service.store.files, "add_file", lost_behind_the_commit)
    with pytest.raises(openai.InternalServerError, match="lost"):
        client.files.create(file=("a.jsonl", TRAINING), purpose="fine-tune")

    [file] = client.files.list().data
    assert client.files.content(file.id).read() == TRAINING


def test_metrics_files_are_base64_as_scripts_expect(
    service: Service, client: openai.OpenAI
) -> None:
    body = b"step,train_loss\n" + b"1,2.5\n" * 200_000
    file_id = add_result(service, body)

    assert base64.b64decode(client.files.content(file_id).text) == body


class TestPlainResults:
    @pytest.fixture
    def configure(self, configure: dict[str, Any]) -> dict[str, Any]:
        return configure | {"result_files_plain": True}

    def test_an_operator_may_have_them_plain(self, service: Service, client: openai.OpenAI) -> None:
        assert client.files.content(add_result(service, b"step\n")).content == b"step\n"


def test_contents_that_are_gone_are_a_404_that_says_so(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    Path(service.settings.files_dir / training_file).unlink()

    with pytest.raises(openai.NotFoundError, match="gone"):
        client.files.content(training_file)


def test_contents_that_have_changed_are_not_given_away(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    path = Path(service.settings.files_dir / training_file)
    before = path.read_bytes()
    for changed in (before[:-2] + b"!" + before[-1:], before + b"x"):
        path.write_bytes(changed)
        for _ in range(2):
            with pytest.raises(
                openai.NotFoundError, match="damaged on the service's disk"
            ) as refused:
                client.files.content(training_file)
            assert refused.value.code == "file_damaged"
    path.write_bytes(before)
    assert client.files.content(training_file).content == before


def test_an_upload_that_the_client_repeats_is_one_file(service: Service) -> None:
    def upload(retry: int) -> str:
        headers = {"x-stainless-retry-count": str(retry)}
        files = {"file": ("a.jsonl", TRAINING)}
        return service.http(
            "POST", "/v1/files", data={"purpose": "fine-tune"}, files=files, headers=headers
        ).json()["id"]

    first = upload(0)
    second = upload(0)

    assert first != second
    assert upload(1) == second
    wait_until(lambda: stored(service) == sorted([first, second]))


def test_samples_are_those_of_a_job_with_the_same_options(
    service: Service, client: openai.OpenAI
) -> None:
    row = b'{"q": "Two?", "a": "Four."}\n'
    file = client.files.create(file=("own.jsonl", row), purpose="fine-tune")
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|im_end|>{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% if loud %}!{% endif %}{% endif %}"
    given = {
        "model": "tiny",
        "chat_template": template,
        "data": '{"instruction": "q", "output": "a"}',
    }

    def shown(**more: str) -> Any:
        answer = service.http("GET", f"/v1/files/{file.id}/samples", params=given | more)
        assert answer.status_code == 200, answer.text
        (sample,) = answer.json()["data"]
        return "".join(token["text"] for token in sample["tokens"]), sample["error"]

    assert shown()[0].startswith("<user>Two?<|im_end|><assistant>Four.")
    assert shown(chat_template_kwargs='{"loud": true}')[0].startswith(
        "<user>Two?<|im_end|><assistant>!Four."
    )
    for wrong, param in (
        ('{"loud": [1]}', "chat_template_kwargs.loud"),
        ('{"quiet": 1}', "chat_template_kwargs.quiet"),
    ):
        refused = service.http(
            "GET", f"/v1/files/{file.id}/samples", params=given | {"chat_template_kwargs": wrong}
        )
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
