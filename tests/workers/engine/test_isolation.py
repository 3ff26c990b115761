"""Isolation of the jobs of an engine: what fails beside a job changes none of its bits, and breaks
of isolation are noticed.

All runs share the two ranks of one process group, since starting ranks takes longest.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from ft_service.data import token_folder
from ft_service.data.examiner import Examiner
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.checkpoints import complete_checkpoints
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import ExitReason, Start
from ft_service.rundir.manifest import ORIGINS
from ft_service.spec import JobSpec
from tests.support.attempts import wait_for
from tests.support.ranks import run_on_ranks
from tests.support.training.attempts import attempt_on_rank
from tests.support.training.engine_runs import (
    assert_same,
    engine_on_rank,
    exit_of,
    new_engine,
    prepare,
)
from tests.support.training.models import save_chat_base, save_chats, spec_for
from workers.base.frozen_weights import initial_adapter
from workers.data.token_sets import tokenise
from workers.engine import seat_thread
from workers.engine.lanes import Lane, LaneModel
from workers.engine.seat import Seat
from workers.job.adamw import AdamW
from workers.job.training_state import learning_rate_at
from workers.layers.dropout import key_of
from workers.output import checkpoint, outcome
from workers.training import loop
from workers.training.loop import Trainer

# test_engine.py has jobs that end otherwise beside others; here are the causes, and the breaks.
pytestmark = pytest.mark.slow

WORLD = 2
INFINITE = 0.5
"""Learning rate in a spec for which the ranks take an infinite one."""
HEALTHY = ("healthy-0", "healthy-1")
ENDS = {
    "nan": ExitReason.PERMANENT_ERROR,
    "infinite": ExitReason.PERMANENT_ERROR,
    "export": ExitReason.DISK_FULL,
    "outcome": ExitReason.DISK_FULL,
    "origins": ExitReason.WORKER_ERROR,
    "data": ExitReason.WORKER_ERROR,
}
"""Job that fails → how it ends. The last four fail on one rank alone."""
BREAKS: dict[str, tuple[str, ...]] = {
    "shared dropout keys": HEALTHY,
    "a mask in place of a slice": ("healthy-0", "nan"),
    "gradients of a neighbour": HEALTHY,
    "shared optimizer state": HEALTHY,
}
"""Break of isolation → the jobs that are trained with it."""


def specs_in(folder: Path) -> dict[str, JobSpec]:
    base = save_chat_base(folder / "base")
    chats = save_chats(folder / "chats.jsonl", 8)
    training = {
        "max_steps": 3,
        "batch_size": 4,
        "per_device_train_batch_size": 1,
        "learning_rate": 5e-3,
    }
    options: dict[str, Any] = {
        "precision": {"default": "nf4", "compute": "fp32"},
        "checkpoint": {"save_steps": 3},
    }
    specs = {}
    for number, name in enumerate((*HEALTHY, *ENDS)):
        rate = {"learning_rate": INFINITE} if name == "infinite" else {}
        lora = {"r": 4, "lora_dropout": 0.1 if name == HEALTHY[0] else 0.0}
        spec = spec_for(
            base, chats, ranks=WORLD, training={**training, **rate}, lora=lora, **options
        )
        distributed = spec.distributed.model_copy(
            update={"replicate": 1, "collective_timeout_seconds": 30}
        )
        specs[name] = spec.model_copy(
            update={"job_id": name, "seed": number + 1, "distributed": distributed}
        )
    return specs


@contextmanager
def failures(rank: int) -> Iterator[None]:
    """While it is entered, the jobs of ENDS fail as their names say, the last checkpoint of one
    healthy job takes until the other one has its own, and the adapter of that one until the first
    has ended: neither keeps the other waiting.
    """

    def no_room(*args: Any) -> OSError:
        return OSError(errno.ENOSPC, "No space left on device", *args)

    def value(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
        return initial_adapter(name, shape, seed) * (
            float("nan") if seed == 1 + len(HEALTHY) else 1.0
        )

    def rate(step: int, total: int, options: Any) -> float:
        return (
            float("inf")
            if options.learning_rate == INFINITE
            else learning_rate_at(step, total, options)
        )

    def refused(
        own: Callable[..., Any], jobs: Sequence[str], error: OSError, key: str | None = None
    ) -> Callable[..., Any]:
        """The method of a run directory or an attempt, which the disk refuses to some jobs."""

        def act(self: Any, *args: Any) -> Any:
            root = (self if isinstance(self, RunDir) else self.run).root
            if root.name in jobs and key in (None, args[0]):
                raise error
            return own(self, *args)

        return act

    def adapter(own: Callable[..., Any], folder: Path, *args: Any) -> None:
        job = folder.parent
        if job.name in ("export", "outcome"):
            raise no_room()
        if job.name == HEALTHY[1]:
            wait_for((job.with_name(HEALTHY[0]) / "result.json").exists)
        own(folder, *args)

    def complete(own: Callable[..., Any], snapshot: Any, run: RunDir, *args: Any) -> None:
        if rank == 0 and run.root.name == HEALTHY[0]:
            wait_for(lambda: bool(complete_checkpoints(RunDir(run.root.with_name(HEALTHY[1])))))
        own(snapshot, run, *args)

    def mine(
        own: Callable[..., Any], self: Trainer, objective: Any, items: Any, step: int | None = None
    ) -> Iterator[Any]:
        if self.runtime.spec.job_id == "data" and rank == 1 and step == 1:
            raise OSError(errno.EIO, "its data")
        return own(self, objective, items, step)

    write = RunDir.write_if_absent
    of_outcome = Attempt.write_outcome
    own_mine = Trainer._mine

    with ExitStack() as stack:
        for owner, name, replacement in (
            (seat_thread, "initial_adapter", value),
            (loop, "learning_rate_at", rate),
            (
                RunDir,
                "write_if_absent",
                refused(write, ["origins"], OSError(errno.EIO, "Input/output error"), ORIGINS),
            ),
            (Attempt, "write_outcome", refused(of_outcome, ["outcome"], no_room())),
            (outcome, "write_adapter", partial(adapter, outcome.write_adapter)),
            (checkpoint, "_complete", partial(complete, checkpoint._complete)),
            (Trainer, "_mine", lambda self, *args: mine(own_mine, self, *args)),
        ):
            stack.enter_context(patch.object(owner, name, replacement))
        yield


@contextmanager
def broken(what: str) -> Iterator[None]:
    """While it is entered, isolation is broken in one way."""
    shared: dict[str, Any] = {}
    linear = LaneModel._linear
    seat = Seat.__init__
    adamw = AdamW.__init__

    def of_all_lanes(self: LaneModel, module: nn.Module, own: Any, x: torch.Tensor) -> torch.Tensor:
        others: list[Lane] = [
            lane for lane, _ in self._calls if lane is not self._lane and module in lane.linears
        ]
        plain: list[Any] = [lane.linears[module] for lane in others]
        masked = [0.0 * adapted(x) for adapted in plain if adapted.args[0].dropping is None]
        return linear(self, module, own, x) + sum(masked)

    def with_shared_sums(self: Seat, *args: Any) -> None:
        seat(self, *args)
        self._sums = shared

    def with_shared_moments(self: AdamW, *args: Any) -> None:
        adamw(self, *args)
        self.exp_avg, self.exp_avg_sq = shared.setdefault(
            "moments", (self.exp_avg, self.exp_avg_sq)
        )

    owner, name, replacement = {
        "shared dropout keys": (loop, "key_of", lambda kind, seed, *rest: key_of(kind, 0, *rest)),
        "a mask in place of a slice": (LaneModel, "_linear", of_all_lanes),
        "gradients of a neighbour": (Seat, "__init__", with_shared_sums),
        "shared optimizer state": (AdamW, "__init__", with_shared_moments),
    }[what]
    with patch.object(owner, name, replacement):
        yield


def on_rank(rank: int, world: int, folder: str) -> None:
    os.environ[token_folder.FOLDER] = str(Path(folder, "tokens"))
    for name in HEALTHY:
        attempt_on_rank(rank, world, str(Path(folder, "alone", name)), 1)
    with failures(rank):
        engine_on_rank(rank, world, str(Path(folder, "together", "engine")))
        for what in BREAKS:
            with broken(what):
                engine_on_rank(rank, world, str(Path(folder, what, "engine")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("isolation")
    specs = specs_in(folder)
    with closing(Examiner(tokens=folder / "tokens")) as examiner:  # once, for all jobs
        tokenise(specs[HEALTHY[0]], specs[HEALTHY[0]].data_files[0], examiner)
    for name in HEALTHY:
        run = RunDir(folder / "alone" / name)
        run.write("spec.json", specs[name])
        Attempt(run, 1).write_start(
            Start(job_id=name, attempt=1, world_size=WORLD, generation=1, checkpoint=None)
        )
    for what, names in {"together": tuple(specs), **BREAKS}.items():
        engine = new_engine(folder / what / "engine", specs[HEALTHY[0]])
        for name in names:
            prepare(specs[name], RunDir(folder / what / name), engine)
    run_on_ranks(on_rank, WORLD, str(folder))
    return folder


def test_eight_jobs_of_which_six_fail_leave_the_others_as_alone(folder: Path) -> None:
    assert {name: exit_of(RunDir(folder / "together" / name)).reason for name in ENDS} == ENDS
    for name in HEALTHY:
        assert_same(RunDir(folder / "together" / name), RunDir(folder / "alone" / name))


@pytest.mark.parametrize("what", BREAKS)
def test_a_break_of_isolation_is_noticed(what: str, folder: Path) -> None:
    run = RunDir(folder / what / HEALTHY[0])
    if "nan" in BREAKS[what]:
        assert exit_of(run).reason is ExitReason.PERMANENT_ERROR
        return
    assert exit_of(run).reason is ExitReason.SUCCEEDED
    with pytest.raises(AssertionError):
        assert_same(run, RunDir(folder / "alone" / HEALTHY[0]))
