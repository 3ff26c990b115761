"""Two attempts that give the outcome its names: whatever the order, the later one's stays,
whole.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from unittest.mock import patch

import pytest

from ft_service.rundir.attempt_seal import Fence, SealedError
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import CheckpointMarker, Start
from tests.support.training.models import spec_for
from workers.output.checkpoint_pruning import remove_others
from workers.output.publishing import adapter_folder, put_document


def begin(run: RunDir, attempt: int) -> Fence:
    start = Start(job_id="ftjob-1", attempt=attempt, world_size=1, generation=1, checkpoint=None)
    run.write(f"attempts/{attempt}/start.json", start)
    return Fence(run, attempt)


def publish(run: RunDir, fence: Fence) -> None:
    with adapter_folder(run.path("adapter"), fence) as folder:
        (folder / "weights").write_text(f"of attempt {fence.attempt}")
        (folder / "manifest.json").write_text(json.dumps({"attempt": fence.attempt}))
    put_document(run, "metrics.csv", f"of attempt {fence.attempt}".encode(), fence)


def published(run: RunDir) -> set[str]:
    assert [path.name for path in run.root.glob("adapter*")] == ["adapter"], "nothing else is left"
    return {run.path("adapter/weights").read_text(), run.path("metrics.csv").read_text()}


def test_what_an_attempt_left_that_ended_before_its_result_is_replaced(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    publish(run, begin(run, 1))
    run.path("adapter.tmp-a1").mkdir()
    publish(run, begin(run, 2))
    assert published(run) == {"of attempt 2"}
    with pytest.raises(SealedError):
        publish(run, Fence(run, 1))
    assert published(run) == {"of attempt 2"}


def test_an_attempt_that_is_stopped_between_its_look_and_its_act_overwrites_nothing(
    tmp_path: Path,
) -> None:
    """The later attempt begins and publishes right behind each of its looks in turn."""
    looks = [outrun(RunDir(tmp_path / str(stopped_at)), stopped_at) for stopped_at in range(1, 4)]
    assert looks == [2, 3, 2], (
        "behind the first and the second it looks once more, and a third there is not"
    )


def outrun(run: RunDir, stopped_at: int) -> int:
    """How often the old attempt has looked, in all."""
    old = begin(run, 1)
    looks = 0
    real = Fence.check

    def check(fence: Fence, max_age: float = 0.0) -> None:
        nonlocal looks
        looks += fence.attempt == 1
        real(fence, max_age)
        if fence.attempt == 1 and looks == stopped_at:
            publish(run, begin(run, 2))

    with patch.object(Fence, "check", check), contextlib.suppress(SealedError):
        publish(run, old)
    if looks >= stopped_at:
        assert published(run) == {"of attempt 2"}, f"stopped behind look {stopped_at}"
    return looks


def test_an_attempt_that_takes_away_what_an_earlier_one_left_gives_back_what_is_a_later_ones(
    tmp_path: Path,
) -> None:
    run = RunDir(tmp_path)
    publish(run, begin(run, 1))
    second = begin(run, 2)
    real = Fence.check

    def check(fence: Fence, max_age: float = 0.0) -> None:
        real(fence, max_age)
        if fence.attempt == 2 and not run.path("attempts/3").exists() and len(looked) == 1:
            publish(run, begin(run, 3))
        looked.append(fence.attempt)

    looked: list[int] = []
    with patch.object(Fence, "check", check), pytest.raises(SealedError):
        publish(run, second)
    assert published(run) == {"of attempt 3"}


def test_a_sealed_attempt_removes_no_checkpoint(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    spec = spec_for(Path("base"), checkpoint={"save_total_limit": 1})
    old = begin(run, 1)
    for step in (2, 4):
        marker = CheckpointMarker(step=step, attempt=1, world_size=1, files=[])
        run.write(f"checkpoints/step-{step}-a1/COMPLETE", marker)
    run.put("checkpoints/step-3-a2/__0_0.distcp", b"on its way")
    remove_others(run, spec, old)
    left = sorted(path.name for path in run.path("checkpoints").iterdir())
    assert left == ["step-3-a2", "step-4-a1"], "what a later attempt writes is its own"
    run.write(
        "checkpoints/step-2-a1/COMPLETE",
        CheckpointMarker(step=2, attempt=1, world_size=1, files=[]),
    )
    start = Start(job_id="ftjob-1", attempt=2, world_size=1, generation=1, checkpoint="step-4-a1")
    run.write("attempts/2/start.json", start)
    with pytest.raises(SealedError):
        remove_others(run, spec, old)
    assert run.path("checkpoints/step-2-a1/COMPLETE").exists()
