from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import create_engine, select

from ft_service.errors import ConflictError, LimitError, NotFoundError, SpecError
from ft_service.jobs.decisions import fail
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import State
from ft_service.store.records import File, JobChange
from ft_service.store.tables import files, referred_to
from tests.support.creating import create_job
from tests.support.records import OTHER, PROJECT, claim, new_file, new_job


def test_a_file_is_stored_with_the_databases_time(store):
    before = store.now()
    file = store.files.add_file(new_file(created_at=1.0))
    assert before <= file.created_at <= store.now()
    assert store.files.get_file(PROJECT, file.id) == file
    assert file.bytes == 3_000_000_000
    with pytest.raises(ConflictError):
        store.files.add_file(file)


def test_of_tries_at_once_one_stores_its_file(store):
    first = store.files.add_file(new_file())
    keyed = [new_file(idempotency_key="k") for _ in range(8)]
    repeats = [new_file(filename="other.jsonl") for _ in range(8)]

    def try_file(file: File) -> File | None:
        try:
            return store.files.add_file(file, repeats_within=None if file.idempotency_key else 60.0)
        except ConflictError:
            return None

    with ThreadPoolExecutor(8) as pool:
        [kept] = filter(None, pool.map(try_file, keyed))
        [repeated] = filter(None, pool.map(try_file, repeats))

    assert {file.id for file in store.files.list_files(PROJECT).data} == {
        first.id,
        kept.id,
        repeated.id,
    }
    assert store.files.earlier_file(keyed[0], 60.0) == kept
    assert store.files.earlier_file(repeats[0], 60.0) == repeated
    assert store.files.earlier_file(repeats[0], 0.0) is None
    store.files.delete_file(PROJECT, kept.id)
    store.files.delete_file(PROJECT, repeated.id)
    assert store.files.earlier_file(keyed[0], 60.0) == kept
    assert store.files.earlier_file(repeats[0], 60.0) is None
    with pytest.raises(ConflictError):
        store.files.add_file(keyed[0])


def test_a_try_that_was_stored_takes_no_room_twice(store):
    store.projects.update_project(PROJECT, limits={"max_bytes": 150})
    store.files.add_file(new_file(bytes=100, idempotency_key="k"))
    with pytest.raises(ConflictError):
        store.files.add_file(new_file(bytes=100, idempotency_key="k"))
    with pytest.raises(ConflictError):
        store.files.add_file(new_file(bytes=100), repeats_within=60.0)


def test_files_are_found_by_their_ids_whosever_they_are(store):
    mine, theirs, gone, over = (
        store.files.add_file(new_file(project_id=who)) for who in (PROJECT, OTHER, PROJECT, PROJECT)
    )
    store.files.delete_file(PROJECT, gone.id)
    expired = store.files.add_file(new_file(), seconds=0)
    asked = {mine.id, theirs.id, gone.id, expired.id, "file-unknown", "file-\x00"}
    assert store.files.find_files(asked) == {mine.id: mine, theirs.id: theirs}
    assert store.files.find_files({over.id}) == {over.id: store.files.get_file(PROJECT, over.id)}
    assert store.files.find_files(()) == {}


def test_an_unknown_cursor_names_the_parameter(store):
    theirs = store.files.add_file(new_file(project_id=OTHER))
    for after in ("file-nowhere", theirs.id, "\x00"):
        with pytest.raises(SpecError) as caught:
            store.files.list_files(PROJECT, after=after)
        assert caught.value.param == "after"


@pytest.mark.parametrize("field", ["training_file", "validation_file"])
def test_the_bytes_stay_while_a_job_needs_them(store, field):
    first = store.files.add_file(new_file())
    second = store.files.add_file(new_file())
    create_job(store, new_job(request={"training_file": "file-x", field: first.id}))
    assert store.files.delete_file(PROJECT, first.id) is False

    ended = create_job(
        store, new_job(id="ftjob-ended", request={"training_file": "file-x", field: second.id})
    )
    claims = [claim(store), claim(store)]
    mine = next(c for c in claims if c.job.id == ended.id)
    assert store.leases.apply(
        mine, JobChange(job=fail(mine.job, Reason.INVALID_FILE, None, mine.now))
    )
    assert store.jobs.get_job(PROJECT, ended.id).state is State.FAILED
    assert store.files.delete_file(PROJECT, second.id) is True


def test_which_files_jobs_need_is_read_once_for_all_files(store, store_url):
    """Else thousands of waiting jobs are read for each of thousands of files."""
    engine = create_engine(store_url)
    compiled = (
        select(files.c.id)
        .where(~referred_to())
        .compile(engine, compile_kwargs={"literal_binds": True})
    )
    with engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            plan = str(connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {compiled}").all())
            assert "LIST SUBQUERY" in plan
            assert "CORRELATED" not in plan
        else:
            assert "hashed SubPlan" in str(connection.exec_driver_sql(f"EXPLAIN {compiled}").all())
    engine.dispose()


def test_a_file_without_a_job_that_needs_it_is_freed_once(store):
    kept = store.files.add_file(new_file(), seconds=3600)
    deleted = store.files.add_file(new_file())
    needed = store.files.add_file(new_file())
    other = store.files.add_file(new_file(project_id=OTHER, id=f"{needed.id}x"))
    assert kept.expires_at == kept.created_at + 3600
    create_job(store, new_job(request={"training_file": needed.id}))
    for file in (deleted, needed, other):
        store.files.delete_file(file.project_id, file.id)

    assert store.files.freeable_files() == [deleted.id, other.id]
    assert store.files.freeable_files(1) == [deleted.id]
    store.files.mark_freed([deleted.id, other.id])
    assert store.files.freeable_files() == []


def test_what_counts_towards_a_projects_limit_is_what_is_kept(store):
    store.projects.update_project(PROJECT, limits={"max_bytes": 100})
    expired = store.files.add_file(new_file(bytes=80), seconds=0)
    with pytest.raises(LimitError, match="keeps 80 and may keep 100"):
        store.files.add_file(new_file(bytes=80))
    store.files.mark_freed([expired.id])
    needed = store.files.add_file(new_file(bytes=80))
    waiting = create_job(store, new_job(request={"training_file": needed.id}))
    store.files.delete_file(PROJECT, needed.id)
    with pytest.raises(LimitError):
        store.files.add_file(new_file(bytes=80))  # the job still needs the other
    mine = claim(store)
    assert mine.job.id == waiting.id
    assert store.leases.apply(
        mine, JobChange(job=fail(mine.job, Reason.INVALID_FILE, None, mine.now))
    )
    store.files.add_file(new_file(bytes=80))


def test_text_that_a_database_cannot_hold_is_made_storable(store):
    file = store.files.add_file(new_file(filename="a\x00b\ud800c"))
    assert file.filename == "a\ufffdb?c"
    with pytest.raises(NotFoundError):
        store.files.get_file(PROJECT, "file-\x00")
