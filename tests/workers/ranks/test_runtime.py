"""How a rank reports what stopped it."""

from __future__ import annotations

import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from ft_service.data.examiner import ExaminerLost
from ft_service.errors import DataError
from ft_service.launcher.kubernetes.status import NEVER_CAME, STORE_GONE
from ft_service.rundir.attempt_outcome import exit_of
from ft_service.rundir.directory import RunDir, UnreadableDocumentError
from ft_service.rundir.documents import ExitReason, Outcome, OutcomeKind, Start
from ft_service.rundir.failure_origin import COLLECTIVE_TIMEOUT, Cause, cause_of
from tests.support.ranks import run_on_ranks
from tests.support.reconciling import spec_of
from workers.ranks.runtime import (
    _reproducible,
    quiet_libraries,
    report_failure,
    start_thread,
    surroundings,
)

OUTCOME = "attempts/1/outcome.json"


@pytest.mark.parametrize(
    "text",
    [
        "Connection closed by peer [10.0.0.1]:1",
        "Broken pipe",
        "NCCL error: remote process exited or there was a network error",
    ],
)
def test_a_lost_connection_is_no_outcome_and_no_cause(text: str, tmp_path: Path) -> None:
    """What a rank leaves out, because another one's error is the cause, an exit record that says it
    is not taken for the cause."""
    run = new_run(tmp_path)
    report_failure(run, 1, RuntimeError(text))
    assert not run.path(OUTCOME).exists()
    ended = exit_of(ExitReason.WORKER_ERROR, f"Rank 0 failed: RuntimeError: {text}")
    assert cause_of(ended) is Cause.LOST_PEER
    report_failure(run, 1, RuntimeError("Timed out waiting 10000ms"))
    left = run.read(OUTCOME, Outcome)
    assert left is not None
    assert left.error is not None
    assert left.error.code == COLLECTIVE_TIMEOUT, "of a rank that hangs no one else says anything"


def new_run(folder: Path, **distributed: object) -> RunDir:
    run = RunDir(folder)
    run.write("spec.json", spec_of("ftjob-1", distributed={"nproc_per_node": 2, **distributed}))
    run.write(
        "attempts/1/start.json",
        Start(job_id="ftjob-1", attempt=1, world_size=2, generation=1, checkpoint=None),
    )
    return run


def all_reduce_without_rank_1(rank: int, world: int, root: str) -> None:
    run = RunDir(root)
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    # Once all are in it: the second would be one for finding each other, too.
    _set_pg_timeout(timedelta(seconds=1), group)
    if rank == 1:
        deadline = time.monotonic() + 60
        while run.read(OUTCOME, Outcome) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        report_failure(run, 1, error)


def test_a_stuck_collective_ends_with_an_error_that_says_so(tmp_path: Path) -> None:
    run = new_run(tmp_path, collective_timeout_seconds=77)
    run_on_ranks(all_reduce_without_rank_1, 2, str(tmp_path))
    outcome = run.read(OUTCOME, Outcome)
    assert outcome is not None
    assert outcome.error is not None
    assert (outcome.permanent, outcome.error.code) == (False, "collective_timeout")
    assert "A rank is stuck" in outcome.error.message
    assert "waited 77 seconds (distributed.collective_timeout_seconds)" in outcome.error.message
    assert "all_reduce" in (outcome.error.traceback or "")


def test_an_import_that_fails_later_is_permanent_too(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    try:
        import ft_no_such_package  # noqa: F401 # pyright: ignore[reportMissingImports]
    except ImportError as error:
        report_failure(run, 1, error)
    outcome = run.read(OUTCOME, Outcome)
    assert outcome is not None
    assert outcome.error is not None
    assert (outcome.permanent, outcome.error.code) == (True, "missing_package")
    assert outcome.error.message.startswith("The package ft_no_such_package is not installed")


@pytest.mark.parametrize(
    ("error", "permanent"),
    [
        (ExaminerLost("killed by signal 9"), False),
        (DataError("a line"), True),
        (UnreadableDocumentError("attempts/1/start.json", "it is not JSON"), False),
        (UnreadableDocumentError("origins.json", "it is not JSON"), True),
    ],
)
def test_a_job_ends_with_what_its_next_attempt_would_find_again(
    error: Exception, permanent: bool, tmp_path: Path
) -> None:
    report_failure(RunDir(tmp_path), 1, error)
    outcome = RunDir(tmp_path).read(OUTCOME, Outcome)
    assert outcome is not None
    assert (outcome.kind, outcome.permanent) == (OutcomeKind.FAILED, permanent)


def limits(rank: int, world: int, root: str) -> list[float]:
    """Of every group that a worker makes, in seconds."""
    made = surroundings(RunDir(root), 1, torch.device("cpu"))
    groups = [*made.mesh.get_all_groups(), made.groups.stop, made.groups.save]
    assert all(isinstance(group, dist.ProcessGroup) for group in groups)
    backends = [
        group._get_backend(torch.device("cpu"))
        for group in groups
        if isinstance(group, dist.ProcessGroup)
    ]
    return [backend.options._timeout.total_seconds() for backend in backends]


def test_every_group_has_the_limit_of_the_job(tmp_path: Path) -> None:
    new_run(tmp_path, replicate=2, collective_timeout_seconds=77)
    assert run_on_ranks(limits, 2, str(tmp_path)) == [[77.0] * 4] * 2


def test_torchrun_calls_nodes_that_did_not_come_as_the_launcher_expects_it() -> None:
    from torch.distributed.elastic import rendezvous

    assert all(
        issubclass(getattr(rendezvous, name), rendezvous.RendezvousError)
        for name in (NEVER_CAME, STORE_GONE)
    )


def test_what_libraries_tell_their_callers_is_not_in_every_ranks_output() -> None:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        quiet_libraries()
        warnings.warn("`is_gradient_checkpointing` is deprecated", FutureWarning, stacklevel=1)
        warnings.warn("an operation is not deterministic", UserWarning, stacklevel=1)
    assert [warning.category for warning in heard] == [UserWarning]


def test_a_thread_sets_the_ranks_device_before_it_does_anything() -> None:
    for device, expected in (("cuda:3", [torch.device("cuda:3"), "work"]), ("cpu", ["work"])):
        done: list[object] = []
        with patch("torch.cuda.set_device", done.append):
            start_thread("test", torch.device(device), done.append, "work").join()
        assert done == expected


def test_a_gpu_s_long_sums_are_in_fp32() -> None:
    settings: Any = torch.backends.cuda.matmul
    before = settings.allow_bf16_reduced_precision_reduction
    try:
        for device, reduced in (("cpu", True), ("cuda", False)):
            settings.allow_bf16_reduced_precision_reduction = True
            with (
                patch.object(torch, "use_deterministic_algorithms"),
                patch.object(torch, "manual_seed"),
            ):
                _reproducible(torch.device(device))
            assert settings.allow_bf16_reduced_precision_reduction is reduced
            split = getattr(settings, "allow_bf16_reduced_precision_reduction_split_k", True)
            assert split, (
                "PyTorch's products in bf16 fail without it, unless they go through cuBLASLt"
            )
    finally:
        settings.allow_bf16_reduced_precision_reduction = before
