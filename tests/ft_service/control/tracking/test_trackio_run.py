"""Runs of trackio: by its real package in a folder of this disk and on a server of its own, and
against a place that fails.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ft_service.control.tracking.metric_points import RunDescription, RunError
from ft_service.control.tracking.trackio_run import AT_ONCE, SentRun, TrackioAccount, TrackioRun

ASKED: dict[str, Any] = {
    "kind": "trackio",
    "id": "ftjob-1",
    "project": "tuning",
    "entity": None,
    "tags": None,
}
CONFIG = {"lora": {"r": 4}, "seed": 7}

PROGRAM = """
import os, sys
from ft_service.control.tracking.metric_points import RunDescription
from ft_service.control.tracking.metric_points import RunError
from ft_service.control.tracking.trackio_run import TrackioAccount, TrackioRun

folder, how = sys.argv[1:]
account = TrackioAccount("file://" + folder, None, 3600.0)
account.enter()
if how == "server":
    import trackio
    _, url, _, full = trackio.show(open_browser=False, block_thread=False, footer=False)
    account = TrackioAccount(url, full.partition("write_token=")[2].partition("&")[0], 3600.0)
    assert account.token
    try:
        other = TrackioRun(TrackioAccount(url, "wrong", 0.0), RunDescription(
            kind="trackio", id="ftjob-0", project="tuning", entity=None, group=None, name=None, tags=None, config=None))
        other.log(1, {"train_loss": 1.0})
        raise SystemExit("a wrong token was taken")
    except RunError as error:
        assert "wrong" not in str(error), error
asked = dict(kind="trackio", id="ftjob-1", project="tuning", entity=None, tags=None)
config = {"lora": {"r": 4}, "seed": 7}
run = TrackioRun(account, RunDescription(**asked, group="sweep-1", name="mine", config=config))
assert run.next_step == 0
for step in range(1, 1002):
    run.log(step, {"train_loss": 1 / step, "evaluation/exact_match": 0.5, "_timestamp": 1e9 + step})
run.confirm(1001)
run.rest()
again = TrackioRun(account, RunDescription(**asked, group=None, name=None, config=None))
assert (again.next_step, again.url) == (1002, run.url), again.next_step
again.log(1002, {"train_loss": 0.0})
try:
    again.confirm(1003)
    raise SystemExit("there is no step 1003")
except RunError as error:
    assert "step 1003 has not arrived" in str(error)
again.finish(0)

from trackio.sqlite_storage import SQLiteStorage  # as the dashboard reads it
(record,) = SQLiteStorage.get_run_records("tuning")
assert (record["id"], record["name"]) == ("ftjob-1", "mine"), record
history = SQLiteStorage.get_logs("tuning", run="mine", run_id="ftjob-1")
assert [entry["step"] for entry in history] == list(range(1, 1003)), "each step once, in order"
assert history[1]["train_loss"] == 0.5 and history[1]["evaluation/exact_match"] == 0.5, history[1]
assert how == "server" or history[0]["timestamp"].startswith("2001-09-09T01:46:41"), history[0]
found = SQLiteStorage.get_run_config("tuning", "mine", run_id="ftjob-1")
assert (found["lora"], found["seed"], found["_Group"]) == ({"r": 4}, 7, "sweep-1"), found
print("done", flush=True)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["folder", "server"])
def test_a_run_has_every_step_once_and_is_gone_on_with(how: str, tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason="the extra `trackio` is not installed")
    command = [sys.executable, "-P", "-c", PROGRAM, str(tmp_path / "runs"), how]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
        cwd=tmp_path,
        check=False,
    )
    assert done.stdout.endswith("done\n"), done.stdout + done.stderr


class Remembering:
    """A place that keeps what it is sent, once it answers."""

    def __init__(self, name: str | None = None, last_step: int | None = None) -> None:
        self.had, self.entries, self.away = SentRun(name, last_step), list[dict[str, Any]](), False

    def known(self, project: str, run_id: str) -> SentRun:
        last = self.entries[-1]["step"] if self.entries else self.had.last_step
        return SentRun(self.had.name, last)

    def send(self, entries: list[dict[str, Any]]) -> None:
        if self.away:
            raise OSError("503 for se-cret")
        self.entries += entries


def opened(place: Remembering, **given: Any) -> TrackioRun:
    account = TrackioAccount("http://127.0.0.1:1/", "se-cret", 3600.0)
    return TrackioRun(
        account,
        RunDescription(**{**ASKED, "group": None, "name": "mine", "config": CONFIG, **given}),
        place,
    )


def test_steps_wait_for_company_and_are_sent_again_after_a_failure() -> None:
    place = Remembering()
    run = opened(place)
    run.log(1, {"train_loss": 1.0})
    for step in range(2, AT_ONCE + 10):
        run.log(step, {"train_loss": 1.0})
    assert [entry["step"] for entry in place.entries] == [1], "the first at once, the others wait"
    place.away = True
    with pytest.raises(RunError, match="503 for …"):
        run.finish(0)
    place.away = False
    run.finish(0)
    assert [entry["step"] for entry in place.entries] == list(range(1, AT_ONCE + 10))
    assert [entry["config"] is not None for entry in place.entries[:2]] == [True, False], (
        "the options go with the first"
    )
    assert run.url == "http://127.0.0.1:1/?project=tuning"


def test_a_run_that_is_there_is_gone_on_with_under_the_name_that_it_has_there() -> None:
    place = Remembering("renamed there", 5)
    run = opened(place, name=None, config=None)
    assert run.next_step == 6
    run.log(6, {"train_loss": 1.0})
    assert (place.entries[0]["run"], place.entries[0]["run_id"]) == ("renamed there", "ftjob-1")
    place.entries.clear()
    with pytest.raises(RunError, match="step 6 has not arrived"):
        run.confirm(6)
