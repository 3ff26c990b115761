"""Checkpoints during training: true copies, one at a time, agreed on; what a full or forbidden disk
and torn files do.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ft_service.rundir.attempt import Attempt
from ft_service.rundir.checkpoints import checkpoint_faults, complete_checkpoints, newest_checkpoint
from ft_service.rundir.directory import RunDir, sha256_of
from ft_service.rundir.documents import Outcome, OutcomeKind, Result, Start
from ft_service.rundir.events import Event, read_segments
from ft_service.rundir.manifest import Manifest
from ft_service.rundir.verify import verify
from ft_service.spec import DataFileRef, JobSpec
from tests.support.attempts import HANG_SECONDS
from tests.support.ranks import run_on_ranks
from tests.support.training.attempts import adapter, attempt_on_rank, losses, run_attempt, run_spec
from tests.support.training.kept_tokens import give_tokens
from tests.support.training.models import save_chat_base, save_chats, spec_for
from workers.job.training_state import JobState
from workers.output import checkpoint
from workers.output.checkpoint import Stager
from workers.output.checkpoint_saver import WITH_ADAPTERS
from workers.output.report import metrics_of_all_attempts
from workers.ranks.runtime import CheckpointError
from workers.training.loop import Trainer

STEPS = 6


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> JobSpec:
    folder = tmp_path_factory.mktemp("job")
    return spec_for(
        save_chat_base(folder / "base"),
        save_chats(folder / "train.jsonl", 7),
        valid=save_chats(folder / "valid.jsonl", 2),
        ranks=2,
        precision={"default": "nf4", "compute": "fp32", "compare_served": "off"},
        training={"max_steps": STEPS, "batch_size": 3, "learning_rate": 1e-2},
        checkpoint={"save_steps": 2, "save_total_limit": 10},
        lora={"r": 3},
    )


@pytest.fixture(scope="module")
def waited_for(spec: JobSpec, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """The job with checkpoints that training waits for."""
    run = new_run(tmp_path_factory.mktemp("waited"), spec, async_save=False)
    assert run_attempt(run, 1, 2) == Outcome(kind=OutcomeKind.SUCCEEDED)
    return run


def new_run(folder: Path, spec: JobSpec, **changes: Any) -> RunDir:
    run = RunDir(folder)
    run.write(
        "spec.json",
        spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update=changes)}),
    )
    give_tokens(run, run_spec(run))
    return run


def events_of(run: RunDir, attempt: int) -> list[Event]:
    return [event for segment in read_segments(run, attempt) for event in segment.events]


def warnings_of(run: RunDir, attempt: int) -> list[str]:
    return [event.message for event in events_of(run, attempt) if event.level == "warn"]


def tensors_of(run: RunDir, name: str) -> dict[str, torch.Tensor]:
    """Everything that a checkpoint holds, whole."""
    folder = run.path(f"checkpoints/{name}")
    held: dict[str, Any] = FileSystemReader(folder).read_metadata().state_dict_metadata
    found = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in held.items()
    }
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        load(dict(found), checkpoint_id=folder, no_dist=True)
    return found


def assert_same_state(run: RunDir, other: RunDir, name: str) -> None:
    assert checkpoint_faults(run, name) == []
    ours = tensors_of(run, name)
    theirs = tensors_of(other, name)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in ours.items()), (
        f"{name}: not of its own step"
    )
    assert run.get(f"checkpoints/{name}/position.json") == other.get(
        f"checkpoints/{name}/position.json"
    )


def slowly_written(rank: int, world: int, root: str, attempt: int) -> tuple[Outcome, int]:
    """An attempt in which every write in the background begins only once training has gone on for a
    step, and told it.

    How many writes were on their way at once, at most.
    """
    stepped = threading.Semaphore(0)
    write = checkpoint.write
    step = Trainer._report
    now = 0
    most = 0

    def slow_write(*arguments: Any) -> str:
        nonlocal now, most
        now += 1
        most = max(most, now)
        if threading.current_thread() is not threading.main_thread():
            assert stepped.acquire(timeout=HANG_SECONDS), (
                "training stands still while a checkpoint is written"
            )
        name = write(*arguments)
        now -= 1
        return name

    def told_step(trainer: Trainer, *arguments: Any) -> Any:
        metrics = step(trainer, *arguments)
        # the last one is waited for
        if metrics.step in (3, 5, 6):
            stepped.release()
        return metrics

    with patch.object(checkpoint, "write", slow_write), patch.object(Trainer, "_report", told_step):
        return attempt_on_rank(rank, world, root, attempt), most


def test_training_goes_on_and_the_checkpoint_is_of_its_own_step(
    waited_for: RunDir, spec: JobSpec, tmp_path: Path
) -> None:
    run = new_run(tmp_path, spec)
    shutil.copytree(waited_for.path("attempts"), run.path("attempts"))
    shutil.rmtree(run.path("attempts/1/events"))
    for outcome, at_once in run_on_ranks(slowly_written, 2, str(run.root), 1):
        assert (outcome.kind, at_once) == ("succeeded", 1)
    assert (
        complete_checkpoints(run)
        == complete_checkpoints(waited_for)
        == ["step-2-a1", "step-4-a1", "step-6-a1"]
    )
    for name in complete_checkpoints(run):
        assert_same_state(run, waited_for, name)
    order = [(e.kind, e.metrics.step) for e in events_of(run, 1) if e.metrics is not None]
    assert order.index(("checkpoint", 2)) > order.index(("metrics", 3))


def slowly_written_with_adapters(
    rank: int, world: int, root: str, attempt: int
) -> tuple[Outcome, int]:
    os.environ[WITH_ADAPTERS] = "1"
    return slowly_written(rank, world, root, attempt)


def test_the_adapter_in_a_checkpoint_is_of_its_own_step_on_one_rank_too(
    spec: JobSpec, tmp_path: Path
) -> None:
    """Where nothing is sharded and nothing moved, what is gathered could be the very tensor that
    training continues with.
    """
    run = new_run(tmp_path / "run", spec)
    run.write(
        "attempts/1/start.json",
        Start(job_id=spec.job_id, attempt=1, world_size=1, generation=1, checkpoint=None),
    )
    assert run_on_ranks(slowly_written_with_adapters, 1, str(run.root), 1)[0][0].kind == "succeeded"
    for name in ("step-2-a1", "step-4-a1"):
        made = load_file(run.path(f"checkpoints/{name}/adapter/adapter_model.safetensors"))
        stored = tensors_of(run, name)
        assert made
        for key, tensor in made.items():
            assert torch.equal(
                tensor, stored[f"adapter/{key.replace('.weight', '.default.weight')}"]
            ), f"{name}: {key}"


def test_a_snapshot_is_one_buffer_and_a_checkpoint_no_larger_than_its_tensors(
    spec: JobSpec, tmp_path: Path
) -> None:
    job = JobState({f"w{n}": nn.Parameter(torch.randn(n, 7)) for n in range(1, 200)}, spec.training)
    stager = Stager()
    first = stager.snapshot(job, spec)
    assert all(torch.equal(copy, job.tensors()[name]) for name, copy in first.tensors.items())
    (address,) = {copy.untyped_storage().data_ptr() for copy in first.tensors.values()}
    assert {
        copy.untyped_storage().data_ptr() for copy in stager.snapshot(job, spec).tensors.values()
    } == {address}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        save(dict(first.tensors), checkpoint_id=tmp_path, no_dist=True)
    written = sum(file.stat().st_size for file in tmp_path.glob("*.distcp"))
    assert written < first.bytes + 4096 * len(first.tensors), (
        "a tensor of a buffer is written without the rest of it"
    )


def test_the_stall_is_reported_beside_the_whole_time(waited_for: RunDir) -> None:
    rows = {row.step: row for row in metrics_of_all_attempts(waited_for, 1)}
    assert [step for step, row in rows.items() if row.checkpoint_seconds is not None] == [2, 4, 6]
    assert all(
        rows[step].checkpoint_stall_seconds == rows[step].checkpoint_seconds for step in (2, 4, 6)
    ), "it waited"
    table = waited_for.path("metrics.csv").read_text().splitlines()
    assert ",checkpoint_stall_seconds,checkpoint_seconds," in f"{table[0]},"


def killed_at_step_4(rank: int, world: int, root: str, attempt: int) -> Outcome:
    """An attempt that is killed when the shards of step 4 are there, and its marker is not."""
    complete = checkpoint._complete

    def kill(snapshot: checkpoint.Snapshot, *arguments: Any) -> None:
        if snapshot.position.step == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        complete(snapshot, *arguments)

    with patch.object(checkpoint, "_complete", kill):
        return attempt_on_rank(rank, world, root, attempt)


def test_a_job_that_is_killed_at_each_checkpoint_keeps_what_one_of_them_left(
    spec: JobSpec, tmp_path: Path
) -> None:
    run = new_run(tmp_path, spec)
    for attempt, begins in ((1, None), (2, "step-2-a1")):
        run.path(f"adapter.tmp-a{attempt - 1}").mkdir()
        with pytest.raises(AssertionError, match="exit code -9"):
            run_attempt(run, attempt, 1, begins, killed_at_step_4)
        assert sorted(path.name for path in run.path("checkpoints").iterdir()) == [
            "step-2-a1",
            f"step-4-a{attempt}",
        ]
        assert not list(run.root.glob("adapter*"))


def on_a_full_disk(rank: int, world: int, root: str, attempt: int) -> Outcome:
    """An attempt whose shards of step 4 (rank 1) and step 6 (rank 0) go to the device that is
    always full.
    """
    write = checkpoint.write

    def write_there(
        snapshot: checkpoint.Snapshot, run: RunDir, number: int, group: Any, *arguments: Any
    ) -> str:
        step = snapshot.position.step
        dist.barrier(group)  # rank 0, behind the checkpoint before, removes what is not complete
        if (step, rank) in ((4, 1), (6, 0)):
            folder = run.path(f"checkpoints/step-{step}-a{attempt}")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"__{rank}_0.distcp").symlink_to("/dev/full")
        return write(snapshot, run, number, group, *arguments)

    with patch.object(checkpoint, "write", write_there):
        return attempt_on_rank(rank, world, root, attempt)


def test_a_full_disk_costs_that_checkpoint_and_nothing_else(
    waited_for: RunDir, spec: JobSpec, tmp_path: Path
) -> None:
    run = new_run(tmp_path, spec)
    shutil.copytree(waited_for.path("attempts"), run.path("attempts"))
    shutil.rmtree(run.path("attempts/1/events"))
    with pytest.raises(
        AssertionError, match=rf"{CheckpointError.__name__}.*step-6-a1 could not be written"
    ) as failed:
        run_on_ranks(on_a_full_disk, 2, str(run.root), 1)
    assert str(failed.value).count(CheckpointError.__name__) >= 2, "both ranks, though one met it"
    (warning,) = warnings_of(run, 1)
    assert f"{run.path('checkpoints/step-4-a1/__1_0.distcp')}: the disk is full. " in warning
    assert " bytes are needed, and " in warning
    assert "The checkpoint of step 2 stands." in str(failed.value)
    assert warning.endswith(
        "The checkpoint of step 2 stands; training continues and tries again at the next one."
    )
    assert complete_checkpoints(run) == ["step-2-a1"]
    assert [folder.name for folder in run.path("checkpoints").iterdir()] == ["step-2-a1"], (
        "what was written is removed"
    )
    assert newest_checkpoint(run) == "step-2-a1"
    # From which the job goes on, as behind a torn one below.
    assert_same_state(run, waited_for, "step-2-a1")


def without_privileges(rank: int, world: int, root: str, attempt: int) -> Outcome:
    """An attempt to which permissions apply even if root runs it: in Linux each thread has its own,
    and passes them on.
    """
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    nothing = (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None, use_errno=True).capset(header, nothing) == 0
    return attempt_on_rank(rank, world, root, attempt)


def test_a_forbidden_folder_is_named_with_who_needs_it(
    waited_for: RunDir, spec: JobSpec, tmp_path: Path
) -> None:
    run = new_run(tmp_path, spec)
    shutil.copytree(waited_for.path("attempts"), run.path("attempts"))
    shutil.copytree(waited_for.path("checkpoints/step-4-a1"), run.path("checkpoints/step-4-a1"))
    start = Attempt(run, 1).read_start()
    assert start is not None
    changes = {"attempt": 2, "checkpoint": "step-4-a1", "world_size": 1}
    assert Attempt(run, 2).write_start(start.model_copy(update=changes))
    run.path("checkpoints").chmod(0o555)
    try:
        with pytest.raises(
            AssertionError,
            match=r"checkpoints/step-6-a2: Permission denied. Let user \d+ write there",
        ):
            run_on_ranks(without_privileges, 1, str(run.root), 2)
    finally:
        run.path("checkpoints").chmod(0o755)
    assert newest_checkpoint(run) == "step-4-a1"


def test_a_torn_checkpoint_is_set_aside_and_the_one_before_it_used(
    waited_for: RunDir, spec: JobSpec, tmp_path: Path
) -> None:
    run = new_run(tmp_path, spec)
    for name in ("attempts", "checkpoints"):
        shutil.copytree(waited_for.path(name), run.path(name))
    shard = run.path("checkpoints/step-4-a1/__1_0.distcp")
    marker = run.path("checkpoints/step-6-a1/COMPLETE")
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size // 2)
    marker.write_bytes(marker.read_bytes()[:100])
    assert newest_checkpoint(run) == "step-2-a1"
    assert run_attempt(run, 2, 2, "step-2-a1").kind == "succeeded"
    torn, unreadable = warnings_of(run, 2)
    assert torn.startswith("Checkpoint step-4-a1 is damaged (__1_0.distcp has ")
    assert torn.endswith(" and not used: training begins with step-2-a1.")
    assert "step-6-a1 is damaged (COMPLETE cannot be read: it is not JSON)" in unreadable
    assert losses(run) == losses(waited_for)
    assert "step-4-a2" in complete_checkpoints(run)
    assert not {"step-4-a1", "step-6-a1"} & set(complete_checkpoints(run))


def overfitting(folder: Path, spec: JobSpec) -> RunDir:
    """A job whose validation loss makes no progress behind step 2, validated at every second
    step.
    """
    path = folder / "valid.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": "XY"}, {"role": "assistant", "content": text}]}
        for text in ("QZJ", "KWV")
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    training = {
        "eval_steps": 2,
        "early_stopping_patience": 2,
        "early_stopping_threshold": 50.0,
        "max_steps": 20,
    }
    training |= {"load_best_model_at_end": True, "learning_rate": 0.1}
    changes = {
        "training": spec.training.model_copy(update=training),
        "validation_data": DataFileRef(name=path.name, path=str(path), sha256=sha256_of(path)),
    }
    return new_run(
        folder / "run", spec.model_copy(update=changes), save_steps=5, save_total_limit=2
    )


def test_early_stopping_goes_by_what_the_checkpoint_remembers(
    spec: JobSpec, tmp_path: Path
) -> None:
    run = overfitting(tmp_path, spec)
    assert run_attempt(run, 1, 2).kind == "succeeded"
    assert list(losses(run)) == [1, 2, 3, 4, 5, 6], "progress at step 2, none at 4 and 6"
    assert any(
        "no progress 2 times: training ends at step 6" in event.message
        for event in events_of(run, 1)
    )
    found = losses(run, "valid_loss")
    best = min(found, key=lambda step: found[step])
    assert best < 5, "the best is not one of the newest two"
    kept = f"step-{best}-a1"
    assert complete_checkpoints(run) == [kept, "step-5-a1", "step-6-a1"], (
        "the best and the newest two"
    )
    result = run.read("result.json", Result)
    manifest = run.read("manifest.json", Manifest)
    assert result is not None
    assert manifest is not None
    assert (result.steps, result.valid_loss) == (6, found[best])
    assert (manifest.step, manifest.checkpoint) == (best, kept)
    assert verify(run.root).faults == []
    stored = tensors_of(run, kept)
    published = {
        f"adapter/{name.replace('.weight', '.default.weight')}": tensor
        for name, tensor in adapter(run).items()
    }
    assert all(torch.equal(tensor, stored[name]) for name, tensor in published.items())

    resumed = new_run(tmp_path / "resumed", run_spec(run))
    for name in ("attempts", f"checkpoints/{kept}", "checkpoints/step-5-a1"):
        shutil.copytree(run.path(name), resumed.path(name))
    assert run_attempt(resumed, 2, 1, "step-5-a1").kind == "succeeded"
    assert losses(resumed, "valid_loss") == pytest.approx(found, rel=1e-5), "ends at the same step"
    assert all(torch.equal(tensor, adapter(run)[name]) for name, tensor in adapter(resumed).items())
