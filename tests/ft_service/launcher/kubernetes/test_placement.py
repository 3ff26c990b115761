from __future__ import annotations

import pytest

from ft_service.launcher.kubernetes.placement import (
    MAX_RETRY_SECONDS,
    QUIET_SECONDS,
    RETRY_SECONDS,
    SILENT,
    Placements,
    was_in_vain,
)
from ft_service.launcher.kubernetes.status import PodWait
from ft_service.rundir.checkpoints import checkpoint_name
from ft_service.rundir.documents import Control, Desired, ExitReason

NO_ROOM = PodWait("no room", admitted=False)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_part_of_the_places_is_held_for_so_long_and_no_longer() -> None:
    clock = Clock()
    placements = Placements(120, clock)
    assert not placements.has_expired("a", 0)
    clock.now += 1000
    assert not placements.has_expired("a", 1), "it held none until now"
    clock.now += 119
    assert not placements.has_expired("a", 2)
    clock.now += 1
    assert placements.has_expired("a", 1)
    assert not placements.has_expired("b", 1), "another attempt has its own time"
    placements.forget("a")
    assert not placements.has_expired("a", 1)
    for_ever = Placements(None, clock)
    for_ever.has_expired("a", 1)
    clock.now += 1e6
    assert not for_ever.has_expired("a", 1)


def test_what_the_cluster_said_last_holds_until_there_is_a_place() -> None:
    clock = Clock()
    placements = Placements(120, clock)
    assert placements.waits("a", None) is None
    assert placements.waits("a", NO_ROOM) == NO_ROOM
    assert placements.waits("a", None) == NO_ROOM
    placements.forget("a")
    assert placements.waits("a", None) is None
    clock.now += QUIET_SECONDS
    assert placements.waits("a", None) == SILENT, (
        "without a word, for however long, is no reason to give up"
    )
    assert placements.waits("a", NO_ROOM) == NO_ROOM


def test_each_try_in_a_row_comes_later() -> None:
    placements = Placements(120)
    delays = [placements.put_off("ftjob-1", attempt) for attempt in range(1, 10) for _ in range(2)]
    assert delays[::2] == delays[1::2], "the same attempt, asked again"
    assert delays[::2] == [min(RETRY_SECONDS * 2**n, MAX_RETRY_SECONDS) for n in range(9)]
    placements.settled("ftjob-1")
    assert placements.put_off("ftjob-1", 10) == RETRY_SECONDS


@pytest.mark.parametrize("reason", [None, *ExitReason])
def test_only_an_attempt_that_was_stopped_can_be_in_vain(reason: ExitReason | None) -> None:
    """Failures are counted, and have pauses of their own."""
    assert was_in_vain(1, reason, None, []) is (reason is ExitReason.STOPPED)


@pytest.mark.parametrize(
    ("number", "written_by", "vain"),
    [
        (1, [], True),
        (1, [1], False),
        (2, [1], True),
        (2, [1, 2], False),
        (12, [1, 2], True),
        (2, [12], True),
    ],
)
def test_only_a_checkpoint_of_its_own_brings_a_job_on(
    number: int, written_by: list[int], vain: bool
) -> None:
    checkpoints = [
        checkpoint_name(10 * (index + 1), attempt) for index, attempt in enumerate(written_by)
    ]
    assert was_in_vain(number, ExitReason.STOPPED, None, checkpoints) is vain


@pytest.mark.parametrize(
    ("desired", "vain"), [(Desired.PAUSE, False), (Desired.RUN, False), (Desired.CANCEL, True)]
)
def test_what_was_asked_to_stop_is_not_put_off(desired: Desired, vain: bool) -> None:
    """RUN: it was paused, and resumed before it had ended. CANCEL: its places were given back."""
    assert was_in_vain(1, ExitReason.STOPPED, Control(generation=2, desired=desired), []) is vain
