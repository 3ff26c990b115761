"""The audit log: who created and changed what, and for how long it is known; on both databases."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
from sqlalchemy import text

from ft_service.errors import SpecError
from ft_service.jobs.user_actions import Verb
from ft_service.settings import Settings
from ft_service.store.records import NewJob, NewKey, NewSweep
from ft_service.store.sql import Store
from ft_service.store.tenants import audit
from ft_service.store.tenants.audit import Actor, acting
from tests.support.creating import create_job
from tests.support.records import OTHER, PROJECT, move_project, new_file, new_job


def types(store: Store, project_id: str = PROJECT) -> list[str]:
    """Oldest first."""
    return [
        entry.type
        for entry in reversed(store.audit.list_audit(project_id=project_id, limit=100).data)
    ]


def test_jobs_sweeps_and_files_are_there_with_their_key_and_address(store: Store) -> None:
    with acting(Actor("key_u", "10.0.0.1")):
        file = store.files.add_file(new_file(bytes=12))
        job = create_job(store, new_job())
        sweep = NewSweep(id="ftsweep-1", project_id=PROJECT, request={}, settings={})
        store.sweeps.create_sweep(sweep, [NewJob(new_job(sweep_id="ftsweep-1")) for _ in range(3)])
        store.jobs.request(PROJECT, job.id, Verb.CANCEL)
        store.files.delete_file(PROJECT, file.id)
    entries = store.audit.list_audit(project_id=PROJECT).data[::-1]
    assert [(entry.type, entry.target) for entry in entries] == [
        ("file.created", file.id),
        ("job.created", job.id),
        ("sweep.created", "ftsweep-1"),  # one for all its jobs
        ("job.cancel", job.id),
        ("file.deleted", file.id),
    ]
    assert {(entry.key_id, entry.address) for entry in entries} == {("key_u", "10.0.0.1")}
    assert [entries[0].detail, entries[2].detail] == [
        {"filename": file.filename, "bytes": 12},
        {"jobs": 3},
    ]
    assert types(store, OTHER) == []


def test_what_changes_nothing_leaves_no_entry(store: Store) -> None:
    move_project(store, OTHER, store.projects.get_project(PROJECT).organization)
    key, _ = store.keys.create_key(NewKey(project_id=PROJECT, name="k", scope="user"))
    job = create_job(store, new_job())
    for _ in range(2):
        store.keys.revoke_key(PROJECT, key.id)
        store.models.delete_model(PROJECT, "ft:a")
        store.models.grant(PROJECT, "ft:b", [OTHER])
        store.projects.update_project(PROJECT, name="New", limits={"bases": ("a",)})
        store.jobs.call(PROJECT, job.id, {"name": "Refunds"})
        store.jobs.request(PROJECT, job.id, Verb.CANCEL)
    assert types(store)[2:] == [
        "key.revoked",
        "model.deleted",
        "permission.created",
        "project.updated",
        "job.named",
        "job.cancel",
    ]
    store.models.grant(PROJECT, "ft:b", [OTHER, PROJECT])
    store.projects.update_project(PROJECT, name="New", limits={"max_slots": 1})
    limits, grant = store.audit.list_audit(project_id=PROJECT, limit=2).data
    assert limits.detail == {"max_slots": 1}
    assert grant.detail == {"project_ids": [PROJECT]}


def test_old_entries_are_removed_however_many_they_are(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "_AT_ONCE", 2)
    for _ in range(5):
        create_job(store, new_job())
    with store.writing() as connection:
        connection.execute(text("UPDATE audit SET created_at = created_at - 1000"))
    store.files.add_file(new_file())
    store.audit.forget_audit(2000.0)
    assert len(types(store)) == 6
    store.audit.forget_audit(500.0)
    assert types(store) == ["file.created"]


def test_each_entry_is_a_line_once_its_change_is_stored(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "audit.jsonl"
    store.keep_rules(Settings(home=tmp_path, audit_log=str(path)))
    with acting(Actor("key_u", "10.0.0.1")):
        file = store.files.add_file(new_file(bytes=12))
    with suppress(RuntimeError), store.writing() as connection:
        audit.record(connection, PROJECT, "never.stored", "x")
        raise RuntimeError
    path.rename(tmp_path / "rotated")
    job = create_job(store, new_job())
    (first,) = map(json.loads, (tmp_path / "rotated").read_text().splitlines())
    (second,) = map(json.loads, path.read_text().splitlines())
    (kept,) = [one for one in store.audit.list_audit().data if one.target == file.id]
    assert first.pop("created_at") == pytest.approx(kept.created_at, abs=5.0)
    assert first == {
        "object": "organization.audit_log",
        "id": kept.id,
        "project_id": PROJECT,
        "type": "file.created",
        "target": file.id,
        "detail": {"filename": file.filename, "bytes": 12},
        "key_id": "key_u",
        "address": "10.0.0.1",
    }
    assert (second["type"], second["target"]) == ("job.created", job.id)
    assert path.stat().st_mode & 0o777 == 0o600

    store.keep_rules(Settings(home=tmp_path, audit_log="stdout"))
    store.files.delete_file(PROJECT, file.id)
    assert json.loads(capsys.readouterr().out)["type"] == "file.deleted"


def test_a_stream_that_cannot_be_written_costs_no_change(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    missing = tmp_path / "no" / "audit.jsonl"
    with pytest.raises(SpecError, match=r"FT_AUDIT_LOG = .*: No such file or directory") as wrong:
        store.keep_rules(Settings(home=tmp_path, audit_log=str(missing)))
    assert wrong.value.param == "FT_AUDIT_LOG"
    missing.parent.mkdir()
    store.keep_rules(Settings(home=tmp_path, audit_log=str(missing)))
    missing.unlink()
    missing.parent.rmdir()
    job = create_job(store, new_job())
    assert store.jobs.get_job(PROJECT, job.id).id == job.id
    assert "was not written to FT_AUDIT_LOG" in caplog.text


def test_commands_keep_their_standard_output(store: Store, tmp_path: Path, capsys) -> None:
    store.keep_rules(Settings(home=tmp_path, audit_log="stdout"), is_command=True)
    store.files.add_file(new_file())
    assert capsys.readouterr().out == ""
