"""Turns of projects in the lanes, counted by the work that begins.

No process is needed: the work itself waits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from ft_service.control.checks.check_lanes import Lanes
from ft_service.data.examiner import Examiner
from tests.support.attempts import wait_for

begun: list[str] = []


class Some:
    """Work that lasts until it may end."""

    def __init__(self, name: str, *, is_long: bool, size: int = 1) -> None:
        self.name = name
        self.project = name[0]
        self.bytes = size
        self.is_long = is_long
        self.end = threading.Event()

    def run(self, examiner: Examiner) -> None:
        begun.append(self.name)
        self.end.wait(60)


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    begun.clear()
    lanes = Lanes()
    yield lanes
    lanes.close()
    wait_for(
        lambda: not [thread for thread in threading.enumerate() if thread.name == "data-check"]
    )


def put(lanes: Lanes, *names: str, is_long: bool) -> dict[str, Some]:
    work = {name: Some(name, is_long=is_long) for name in names}
    for each in work.values():
        lanes.put(each)
    return work


def test_a_project_has_one_long_lane_and_the_next_ones_go_to_the_others(lanes: Lanes) -> None:
    work = put(lanes, "a1", "a2", "a3", "b1", "c1", is_long=True)
    wait_for(lambda: len(begun) == 2)
    assert sorted(begun) == ["a1", "b1"]
    assert sorted(each.name for each in lanes.under_way() if isinstance(each, Some)) == ["a1", "b1"]
    work["b1"].end.set()
    wait_for(lambda: len(begun) == 3)
    assert begun[2] == "c1", "not the second of the first"
    lanes.drop(work["a2"])
    work["a1"].end.set()
    wait_for(lambda: len(begun) == 4)
    assert begun[3] == "a3", "the second was dropped"
    for each in work.values():
        each.end.set()
    wait_for(lambda: not lanes.under_way())


def test_a_lane_whose_thread_has_not_run_yet_counts_for_one_work_only(
    lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    with monkeypatch.context() as held:
        held.setattr(threading.Thread, "start", lambda thread: threads.append(thread))
        work = put(lanes, "a1", "b1", is_long=True)
    for each in threads:
        each.start()
    wait_for(lambda: len(begun) == 2)
    for each in work.values():
        each.end.set()


def test_projects_alternate_in_the_short_lane_however_many_one_of_them_has(lanes: Lanes) -> None:
    work = put(lanes, "a1", "a2", "a3", "b1", "b2", is_long=False)
    for each in range(5):
        wait_for(lambda each=each: len(begun) == each + 1)
        work[begun[each]].end.set()
    assert begun == ["a1", "b1", "a2", "b2", "a3"]
