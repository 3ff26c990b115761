"""Helper processes that the host kills for real while somebody waits for them: the work is done by
another one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ft_service.host.helper_process import HelperFailed, Program
from ft_service.rundir.directory import RunDir
from ft_service.serving.worker_tasks import run_worker
from ft_service.shared_work import losses
from ft_service.supervisor.object_mirror import TRIES, Mirror, MirrorError

BEFORE = "kill -9 $$"
HALF = "echo nothing yet; kill -9 $$"


def script(folder: Path, kills: int, how: str) -> Path:
    """A program that is killed so often, and then answers. It notes each start."""
    path = folder / "program"
    path.write_text(
        f"#!/bin/sh\necho >> {folder}/starts\n[ $(wc -l < {folder}/starts) -gt {kills} ] || {{ "
        f"{how}; }}\necho '{{}}'\n"
    )
    path.chmod(0o700)
    return path


def starts(folder: Path) -> int:
    return len((folder / "starts").read_text().splitlines())


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "pause_seconds", lambda *_, **__: 0.0)


def task(program: Path, _: pytest.MonkeyPatch) -> None:
    run_worker("workers.tasks.merge", [], python=str(program))


def mirror(verb: str) -> Callable[[Path, pytest.MonkeyPatch], None]:
    def run(program: Path, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Mirror, "_program", lambda *_: Program(command=(str(program),)))
        made = Mirror("memory://", RunDir(program.parent), 1, 0)
        (made.fetch if verb == "fetch" else made.finish)()

    return run


@pytest.mark.parametrize("how", [BEFORE, HALF])
@pytest.mark.parametrize(
    ("run", "tries", "error"),
    [
        (task, losses.TRIES, HelperFailed),
        (mirror("fetch"), TRIES, MirrorError),
        (mirror("finish"), TRIES, None),
    ],
    ids=["task", "fetch", "finish"],
)
def test_what_is_killed_is_run_again_and_so_often(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run: Callable[[Path, pytest.MonkeyPatch], None],
    tries: int,
    error: type[Exception] | None,
    how: str,
) -> None:
    run(script(tmp_path, 1, how), monkeypatch)
    assert starts(tmp_path) == 2
    (tmp_path / "starts").unlink()
    if error is None:  # it is told in the log
        run(script(tmp_path, 99, how), monkeypatch)
    else:
        with pytest.raises(error) as lost:
            run(script(tmp_path, 99, how), monkeypatch)
        assert getattr(lost.value, "is_lost", False)
    assert starts(tmp_path) == tries


def test_what_ends_by_itself_is_not_run_again(tmp_path: Path) -> None:
    with pytest.raises(HelperFailed) as ended:
        run_worker("workers.tasks.merge", [], python=str(script(tmp_path, 99, "exit 1")))
    assert (ended.value.is_lost, starts(tmp_path)) == (False, 1)
