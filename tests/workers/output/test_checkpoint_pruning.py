"""Which checkpoints stay, and what a job remembers of its validations."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ft_service.errors import SpecError
from ft_service.rundir.attempt_seal import Fence, SealedError
from ft_service.rundir.checkpoints import complete_checkpoints, remove_marker, step_of
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import CheckpointMarker
from ft_service.rundir.file_digest import NamedFile
from ft_service.spec import JobSpec
from tests.support.training.models import spec_for
from workers.job.training_state import Validations
from workers.output.checkpoint import take_weights
from workers.output.checkpoint_pruning import (
    CheckpointEntry,
    best,
    kept_checkpoints,
    remove_others,
    remove_unfinished,
)
from workers.output.outcome import PublishedStep, use_best
from workers.training.loop import Schedule

LOSSES = {2: 3.0, 4: 1.0, 6: 1.0, 8: None, 10: 2.0}


def spec(checkpoint: dict[str, Any], **training: Any) -> JobSpec:
    return spec_for(Path("base"), validation_file="file", checkpoint=checkpoint, training=training)


@pytest.mark.parametrize(
    ("checkpoint", "training", "steps"),
    [
        ({"save_total_limit": 2}, {}, {8, 10}),
        ({"save_total_limit": 1, "keep_best": True}, {}, {4, 10}),
        ({"save_total_limit": 1}, {"load_best_model_at_end": True}, {4, 10}),
        ({"save_total_limit": 1, "keep_every": 3}, {}, {6, 10}),
        ({"save_total_limit": 1, "keep_every": 2}, {}, {2, 4, 6, 8, 10}),
        ({"save_total_limit": 9}, {}, {2, 4, 6, 8, 10}),
    ],
)
def test_newest_best_and_every_nth_stay(
    checkpoint: dict[str, Any], training: dict[str, Any], steps: set[int]
) -> None:
    found = [CheckpointEntry(step, 1, loss) for step, loss in LOSSES.items()]
    assert {c.step for c in kept_checkpoints(found, spec(checkpoint, **training))} == steps


def test_a_step_belongs_to_its_newest_attempt() -> None:
    found = [
        CheckpointEntry(2, 1, 1.0),
        CheckpointEntry(4, 1, 1.5),
        CheckpointEntry(4, 2, 1.5),
        CheckpointEntry(6, 2, 2.0),
    ]
    assert kept_checkpoints(found, spec({"save_total_limit": 3})) == {found[0], found[2], found[3]}
    assert best([CheckpointEntry(4, 1, 1.5), CheckpointEntry(4, 2, 1.5)]) == CheckpointEntry(
        4, 2, 1.5
    )
    assert best([CheckpointEntry(8, 1)]) is None


def test_what_does_not_stay_is_removed_and_so_is_what_was_never_completed(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for step in (2, 4, 6):
        run.put(f"checkpoints/step-{step}-a1/__0_0.distcp", b"shard")
        marker = CheckpointMarker(step=step, attempt=1, world_size=1, files=[], criterion=1 / step)
        run.write(f"checkpoints/step-{step}-a1/COMPLETE", marker)
    run.put("checkpoints/step-5-a1/__0_0.distcp", b"half a checkpoint")
    run.put("checkpoints/step-4-a1/DAMAGED", b"{}")
    assert complete_checkpoints(run) == ["step-2-a1", "step-6-a1"], (
        "one that was set aside does not exist"
    )
    remove_others(run, spec({"save_total_limit": 1}), Fence(run, 1))
    assert [folder.name for folder in run.path("checkpoints").iterdir()] == ["step-6-a1"]


def test_what_earlier_attempts_did_not_complete_is_removed_and_nothing_else(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    remove_unfinished(run, Fence(run, 3))
    for name in ("step-2-a1", "step-4-a1", "step-4-a2", "step-4-a3", "step-4-a4", "other"):
        run.put(f"checkpoints/{name}/__0_0.distcp", b"shard")
    run.write(
        "checkpoints/step-2-a1/COMPLETE",
        CheckpointMarker(step=2, attempt=1, world_size=1, files=[]),
    )
    remove_unfinished(run, Fence(run, 3))
    left = {"step-2-a1", "step-4-a3", "step-4-a4", "other"}
    assert {folder.name for folder in run.path("checkpoints").iterdir()} == left

    run.put("attempts/5/start.json", b"{}")
    with pytest.raises(SealedError):
        remove_unfinished(run, Fence(run, 4))
    assert {folder.name for folder in run.path("checkpoints").iterdir()} == left


def test_the_best_one_is_not_of_an_attempt_whose_step_was_redone() -> None:
    found = [
        CheckpointEntry(2, 1, 1.0),
        CheckpointEntry(4, 1, 0.5),
        CheckpointEntry(4, 2, 1.5),
        CheckpointEntry(6, 2, 2.0),
    ]
    assert kept_checkpoints(found, spec({"save_total_limit": 1, "keep_best": True})) == {
        found[0],
        found[3],
    }


def test_a_marker_goes_before_its_checkpoint_and_one_that_cannot_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    for step in (2, 4):
        run.put(f"checkpoints/step-{step}-a1/__0_0.distcp", b"shard")
        run.write(
            f"checkpoints/step-{step}-a1/COMPLETE",
            CheckpointMarker(step=step, attempt=1, world_size=1, files=[]),
        )
    seen: list[list[str]] = []

    def look(folder: Path, ignore_errors: bool) -> None:
        seen.append([path.name for path in folder.iterdir()])

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(path)

    monkeypatch.setattr("workers.output.checkpoint_pruning.shutil.rmtree", look)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        remove_others(run, spec({"save_total_limit": 1}), Fence(run, 1))
    assert seen == []
    remove_others(run, spec({"save_total_limit": 1}), Fence(run, 1))
    assert seen == [["__0_0.distcp"]]


def test_validations_count_what_is_no_progress() -> None:
    found = Validations()
    for step, loss in enumerate([3.0, 2.0, 1.95, math.nan, 1.5], start=1):
        found = found.after(step, loss, 0.1)
        expected = {1: (1, 0), 2: (2, 0), 3: (3, 1), 4: (3, 2), 5: (5, 0)}[step]
        assert (found.best_step, found.without_progress) == expected
        assert found.loss_at(step) == (None if math.isnan(loss) else loss)
        assert found.loss_at(step + 1) is None
        assert Validations.model_validate_json(found.model_dump_json()) == found, (
            "as in a checkpoint"
        )
    assert (found.best_loss, found.undercut) == (1.5, 1.5)


def test_a_validation_at_a_rung_is_no_patience() -> None:
    before = Validations().after(10, 2.0, 0.0)
    for loss in (1.0, 3.0):
        at_rung = before.after(12, loss, 0.0, counts=False)
        assert (at_rung.without_progress, at_rung.undercut, at_rung.last_loss) == (0, 2.0, loss)
        assert (at_rung.best_step, at_rung.best_loss) == ((12, 1.0) if loss < 2 else (10, 2.0))


def test_when_training_ends_and_saves() -> None:
    options = spec(
        {"save_steps": 10, "keep_every": 4, "keep_best": True},
        max_steps=30,
        early_stopping_patience=2,
    )
    schedule = Schedule.of(options, samples=8)
    plain = Validations(best_step=7)
    assert [step for step in range(1, 21) if schedule.saves_at(step, plain)] == [
        4,
        7,
        8,
        10,
        12,
        16,
        20,
    ]
    assert not schedule.ends_at(29, Validations(without_progress=1))
    assert schedule.ends_at(29, Validations(without_progress=2))
    assert schedule.ends_at(30, Validations())


def test_a_job_that_does_not_say_when_saves_at_ends_of_epochs_and_ten_times_at_most() -> None:
    for epochs, saved in (
        (3, [2, 4, 6]),
        (10, [*range(2, 21, 2)]),
        (11, [*range(4, 22, 4)]),
        (50, [*range(10, 101, 10)]),
    ):
        options = spec({}, n_epochs=epochs, batch_size=4)
        schedule = Schedule.of(options, samples=8)
        assert [
            step
            for step in range(1, schedule.total_steps + 1)
            if schedule.saves_at(step, Validations())
        ] == saved


def test_a_job_of_a_sweep_is_validated_at_its_rungs_too() -> None:
    options = spec({}, max_steps=30, eval_steps=20)
    usual, swept = (
        Schedule.of(one, samples=8)
        for one in (options, options.model_copy(update={"rungs": (0.25, 0.5)}))
    )
    validated = [
        [step for step in range(1, 31) if schedule.validates_at(step)]
        for schedule in (usual, swept)
    ]
    assert validated == [[20, 30], [8, 15, 20, 30]]
    counted = [
        [step for step in range(1, 31) if schedule.counts_at(step)] for schedule in (usual, swept)
    ]
    assert counted == [[20, 30], [20, 30]], "its patience is the same in a sweep"


def test_a_damaged_checkpoint_is_neither_published_as_the_best_nor_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    restored = list[str]()
    told = list[str]()

    def restore(job: Any, run: RunDir, name: str, spec: JobSpec) -> None:
        restored.append(name)
        job.step = step_of(name)

    def published(options: JobSpec) -> PublishedStep:
        job: Any = SimpleNamespace(step=8, trained_tokens=80, validations=Validations(best_step=2))
        return use_best(run, options, job, told.append)

    for step, loss in {2: 1.0, 4: 1.5, 6: 3.0, 8: 2.0}.items():
        run.put(f"checkpoints/step-{step}-a1/__0_0.distcp", b"shard")
        shard = NamedFile.below(
            run.path(f"checkpoints/step-{step}-a1"),
            run.path(f"checkpoints/step-{step}-a1/__0_0.distcp"),
        )
        marker = CheckpointMarker(step=step, attempt=1, world_size=1, files=[shard], criterion=loss)
        run.write(f"checkpoints/step-{step}-a1/COMPLETE", marker)
    monkeypatch.setattr("workers.output.outcome.checkpoint.restore", restore)
    options = spec({}, load_best_model_at_end=True)
    assert published(spec({})) == PublishedStep(None, 8, 80)
    assert (published(options).checkpoint, told) == ("step-2-a1", [])

    run.put("checkpoints/step-2-a1/__0_0.distcp", b"shArd")
    assert published(options).checkpoint == "step-4-a1"
    assert told.pop().startswith(
        "The best step, 2, has no intact checkpoint (step-2-a1: __0_0.distcp has other contents"
    )
    run.put("checkpoints/step-4-a1/__0_0.distcp", b"")
    assert (published(options).checkpoint, restored) == (None, ["step-2-a1", "step-4-a1"]), (
        "the last step is better than 6"
    )
    assert told.pop().endswith("): the adapter of step 8 is published instead.")
    for step in (2, 4):
        remove_marker(run.path(f"checkpoints/step-{step}-a1"))
    published(options)
    assert "(it could not be written)" in told.pop()

    job: Any = SimpleNamespace(tensors=dict)
    run.put("checkpoints/step-6-a1/__0_0.distcp", b"shArd")
    with pytest.raises(
        SpecError, match="step-6-a1 of the saved weights is damaged on the disk: __0_0"
    ):
        take_weights(job, run, "step-6-a1", with_optimizer=True)
