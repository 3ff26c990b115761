"""Uploads in parts with two servers that share a database and object storage, and no disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx2
import openai
import pytest

from ft_service.control.cleanup.housekeeping import remove_expired
from ft_service.settings import Settings
from ft_service.storage.object_store import ObjectStore
from ft_service.store.records import NewKey
from ft_service.store.sql import Store
from tests.support.cluster_settings import cluster_settings
from tests.support.rest.service import LINE, serving_app
from tests.support.storage import local_s3, new_bucket

PARTS = [LINE.encode() * 700, LINE.encode() * 300]
BODY = b"".join(PARTS)


@dataclass
class TwoServers:
    clients: list[openai.OpenAI]
    settings: list[Settings]
    store: Store
    objects: ObjectStore

    def begun(self) -> str:
        """An upload announced to the first server, with a part from each: the second one first."""
        upload = self.clients[0].uploads.create(
            bytes=len(BODY), filename="a.jsonl", mime_type="application/jsonl", purpose="fine-tune"
        )
        for number, body in enumerate(PARTS):
            self.clients[1 - number].uploads.parts.create(upload.id, data=body)
        return upload.id

    def parts(self, upload_id: str) -> list[str]:
        return [part.id for part in self.store.uploads.list_parts("default", upload_id)]


@pytest.fixture
def servers(new_database: Path, tmp_path: Path, connections: httpx2.Client) -> Iterator[TwoServers]:
    with ExitStack() as stack:
        stack.enter_context(local_s3())
        url = new_bucket()
        database = tmp_path / "ft.db"
        shutil.copy(new_database, database)
        addresses, settings, apps = [], [], []
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            settings.append(cluster_settings(tmp_path / name).model_copy(update={"storage": url}))
            address, app = stack.enter_context(serving_app(settings[-1], database))
            apps.append(app)
            addresses.append(address)
        store = apps[0].state.services.store
        store.projects.ensure_project("default", "local")
        _, key = store.keys.create_key(NewKey(project_id="default", name="test", scope="admin"))
        yield TwoServers(
            [
                openai.OpenAI(
                    base_url=f"{address}/v1", api_key=key, max_retries=0, http_client=connections
                )
                for address in addresses
            ],
            settings,
            store,
            ObjectStore(url),
        )


def test_parts_sent_to_one_server_are_completed_by_another(servers: TwoServers) -> None:
    upload_id = servers.begun()
    part_ids = servers.parts(upload_id)
    assert sorted(servers.objects.list("uploads")) == sorted(
        f"uploads/{upload_id}/{part_id}" for part_id in part_ids
    )
    done = servers.clients[1].uploads.complete(upload_id, part_ids=part_ids)
    assert done.file is not None
    for client in servers.clients:
        assert client.files.content(done.file.id).read() == BODY
    again = servers.clients[0].uploads.complete(upload_id, part_ids=part_ids)
    assert (again.status, again.file and again.file.id) == ("completed", done.file.id)
    assert list(servers.objects.list("")) == [f"files/{done.file.id}"], "the parts are gone"
    for settings in servers.settings:
        assert [path.name for path in settings.files_dir.iterdir()] == [done.file.id]
        assert not settings.uploads_dir.exists()


def test_parts_of_an_ended_upload_go(servers: TwoServers) -> None:
    """By the server that cancels it, though another received them; those of an upload that has
    expired by housekeeping, which runs in a third process.
    """
    cancelled = servers.begun()
    servers.clients[1].uploads.cancel(cancelled)
    assert servers.objects.list("uploads") == {}
    expired = servers.begun()
    kept = servers.begun()
    with servers.store.writing() as connection:
        connection.exec_driver_sql("UPDATE uploads SET expires_at = 1 WHERE id = ?", (expired,))
    remove_expired(servers.settings[0], servers.store)
    assert {key.split("/")[1] for key in servers.objects.list("uploads")} == {kept}


def test_a_part_that_the_storage_lost_says_so(servers: TwoServers) -> None:
    upload_id = servers.begun()
    part_ids = servers.parts(upload_id)
    servers.objects.remove(f"uploads/{upload_id}/{part_ids[0]}")
    with pytest.raises(openai.BadRequestError, match="Start a new upload") as refused:
        servers.clients[0].uploads.complete(upload_id, part_ids=part_ids)
    assert refused.value.code == "invalid_state"
