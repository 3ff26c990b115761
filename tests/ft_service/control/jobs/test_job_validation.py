"""Tokens that cannot be stored for now: the job waits, says why, and continues by itself.

Nothing is left half done.
"""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ft_service.bases.cache_folder import Cache
from ft_service.control.checks.data_checks import Checked, check_data
from ft_service.control.jobs import job_validation
from ft_service.data.tokens.token_cache import Recording, unkept
from ft_service.engines.tending import EngineOptions
from ft_service.jobs.states import Job, State
from ft_service.jobs.user_actions import Verb
from ft_service.rundir.directory import sha256_of
from ft_service.spec import BaseModelRef, DataFileRef
from ft_service.storage.locations import Places
from ft_service.store.sql import Store
from tests.support.attempts import wait_for
from tests.support.engines import SETTLED
from tests.support.fake_launcher import FakeLauncher
from tests.support.reconciling import (
    PROJECT,
    add_job,
    get,
    messages,
    new_reconciler,
    new_store,
    step_until,
)
from tests.support.training.models import save_tokenizer


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = new_store(tmp_path)
    yield store
    store.close()


def test_a_job_waits_until_its_tokens_can_be_stored(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the real process that reads files.

    What stands in the way is a file in the place of the folder.
    """
    monkeypatch.setattr(job_validation, "CHECK_AGAIN_SECONDS", 0.2)
    monkeypatch.setattr(job_validation, "MOST_CHECK_REST_SECONDS", 0.2)
    (tmp_path / "tokens").write_text("in the way")
    save_tokenizer(tmp_path / "tiny")
    file = tmp_path / "train.jsonl"
    file.write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
        * 3
    )
    made_of = {
        "model": BaseModelRef(name="tiny", path=str(tmp_path / "tiny")),
        "training_data": DataFileRef(name="train.jsonl", path=str(file), sha256=sha256_of(file)),
    }
    add_job(store, **made_of)
    add_job(store, "ftjob-2", **made_of)
    reconciler = new_reconciler(
        tmp_path, store, FakeLauncher(2), check=partial(check_data, places=Places(tmp_path))
    )
    try:
        for job_id in ("ftjob-1", "ftjob-2"):
            wait_for(lambda job_id=job_id: reconciler.step() and get(store, job_id).pending)
        wait_for(
            lambda: (
                (reconciler.step() or True) and reconciler._validation._lost.count("ftjob-1") >= 3
            )
        )
        job = get(store)
        said = f"train.jsonl: its tokens cannot be kept in {tmp_path}/tokens: "
        assert (job.state, (job.pending or "").startswith(said)) == (State.VALIDATING, True)
        assert [message for message in messages(store) if "The job waits." in message] == [
            f"The job waits. {job.pending}"
        ]
        store.jobs.request(PROJECT, "ftjob-2", Verb.CANCEL)
        assert get(store, "ftjob-2").state is State.CANCELLED
        (tmp_path / "tokens").unlink()
        job = step_until(reconciler, store, State.RUNNING)
        assert job.pending is None
    finally:
        reconciler.close()


def test_a_check_that_never_ends_well_costs_others_no_turn(tmp_path: Path, store: Store) -> None:
    checks = []

    def check(job: Job, *_: object) -> Checked:
        checks.append(job.id)
        return Checked(waits="There is no room.") if job.id == "ftjob-1" else Checked()

    add_job(store)
    reconciler = new_reconciler(tmp_path, store, FakeLauncher(2), check=check)
    try:
        for _ in range(2_000):
            reconciler._validation._lost.add("ftjob-1", "There is no room.")
        wait_for(lambda: reconciler.step() and get(store).pending)
        add_job(store, "ftjob-2")
        assert step_until(reconciler, store, State.RUNNING, job_id="ftjob-2").id == "ftjob-2"
        assert checks == ["ftjob-1", "ftjob-2"]
    finally:
        reconciler.close()


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (
            errno.ENOLCK,
            "its tokens cannot be kept: the file system of {} has no locks (No locks available). "
            "Have FT_TOKENS",
        ),
        (errno.ENOSPC, "its tokens find no room: {}: the disk is full, and "),
        (errno.EROFS, "its tokens cannot be kept in {}: Read-only file system."),
    ],
)
def test_the_cause_is_the_true_one_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, told: str
) -> None:
    folder = tmp_path / "tokens"

    def refuses(*_: object) -> None:
        raise OSError(
            number,
            {errno.ENOLCK: "No locks available", errno.EROFS: "Read-only file system"}.get(
                number, "full"
            ),
        )

    monkeypatch.setattr(fcntl, "flock", refuses)
    with Recording(Cache(folder), "key", 10) as recording:
        pass
    assert recording.error is not None
    assert unkept(folder, recording.error).startswith(told.format(folder))
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("seats", "options", "told"),
    [(8, {}, True), (0, {}, False), (8, SETTLED, False), (8, {"engine": "off"}, False)],
)
def test_a_job_says_that_it_is_alone_because_the_nodes_memory_is_not_known(
    tmp_path: Path, store: Store, seats: int, options: dict[str, Any], told: bool
) -> None:
    add_job(store, **options)
    reconciler = new_reconciler(
        tmp_path, store, FakeLauncher(), engines=EngineOptions(most_seats=seats)
    )
    step_until(reconciler, store, State.RUNNING)
    alone = [text for text in messages(store) if "without an engine" in text]
    assert len(alone) == told
    assert all("distributed.activation_checkpointing" in text for text in alone)
    assert (get(store).share_key is not None) == (options == SETTLED)
