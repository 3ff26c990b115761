"""SIGKILL, SIGTERM, pause, a torn checkpoint, a full disk, in the middle of each phase: the job
continues by itself, and its outcome is that of an uninterrupted one.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ft_service.rundir.attempt import last_attempt
from ft_service.rundir.checkpoints import complete_checkpoints
from tests.e2e.kills import KINDS, Blow, campaign, compare, play, schedule, uninterrupted
from tests.support.service import (
    Server,
    eventually,
    nothing_left,
    processes_of,
    submit,
    wait_until,
    wait_until_step,
)

STEPS = 80


def test_a_schedule_follows_from_its_seed_and_plays_every_kind() -> None:
    assert (
        schedule(3, 20, ranks=(1, 2, 3))
        == schedule(3, 20, ranks=(1, 2, 3))
        != schedule(4, 20, ranks=(1, 2, 3))
    )
    counts = Counter(blow.kind for blow in schedule(3, 20))
    assert set(counts) == set(KINDS)
    assert set(counts.values()) == {2, 3}


# each blow by itself: test_torchrun.py, test_recovery.py, test_checkpoint.py, test_train.py,
# test_service.py
@pytest.mark.slow
def test_whatever_strikes_a_job_its_outcome_is_the_uninterrupted_one(
    server: Server, data: Path, tmp_path: Path
) -> None:
    blows = [Blow("rank", victim=1), Blow("server"), Blow("torn", ranks=1)]
    story = play(server, data, blows, steps=STEPS)
    assert story.struck == [blow.kind for blow in blows], "the job was not done before"
    assert last_attempt(story.run) >= 3, (
        "one attempt more for the killed rank, and one behind the pause"
    )
    assert len(story.torn) == 1
    assert len(story.resized_at) == 1
    compare(story, uninterrupted(story.run, tmp_path / "whole"), STEPS)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_fifty_blows(tmp_path: Path) -> None:
    *_, figures = campaign(tmp_path, blows=50, seed=1, steps=2 * STEPS)
    assert figures["blows"] >= 50
    assert set(figures["by_kind"]) == set(KINDS)


@pytest.mark.slow
def test_a_killed_server_leaves_training_alone_and_the_next_one_takes_it_up(
    server: Server, data: Path
) -> None:
    client = server.client()
    job = submit(client, data, steps=STEPS)
    run = server.run(job.id)
    step = wait_until_step(client, job.id, 2)
    before = processes_of(run)
    server.kill()
    eventually(lambda: any(int(name.split("-")[1]) > step for name in complete_checkpoints(run)))
    assert processes_of(run) == before, "training went on without the server"

    server.start()
    done: Any = wait_until(server.client(), job.id, "succeeded")
    assert done.attempt == 1, "taken up, not started again"
    events: Any = server.client().fine_tuning.jobs.list_events(job.id)
    steps = [event.data["step"] for event in events if event.type == "metrics"]
    assert sorted(steps) == list(range(1, STEPS + 1)), "what was reported meanwhile is there, once"
    eventually(lambda: nothing_left(run))
