"""Engines on real gloo ranks: every job of one leaves, bit for bit, what it leaves when it has its
ranks to itself.
"""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch.distributed.distributed_c10d import _world

from ft_service.rundir.attempt import Attempt
from ft_service.rundir.attempt_outcome import killed_exit
from ft_service.rundir.checkpoints import newest_checkpoint
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Control, Desired, ExitReason, Start
from ft_service.rundir.engine import ENGINE, SeatOrder, arriving_key, left_key, seat_key
from ft_service.rundir.engine_spec import EngineSpec
from ft_service.rundir.evaluations import read_forgetting
from ft_service.rundir.events import Metrics
from ft_service.rundir.file_digest import FileDigest
from ft_service.spec import JobSpec
from tests.support.attempts import wait_for
from tests.support.ranks import run_on_ranks
from tests.support.training.attempts import attempt_on_rank, run_attempt
from tests.support.training.engine_runs import (
    assert_same,
    changed,
    engine_on_rank,
    exit_of,
    follow,
    has_reported,
    new_engine,
    prepare,
    ran_alone,
    run_together,
)
from tests.support.training.kept_tokens import give_tokens
from tests.support.training.models import (
    save_chat_base,
    save_chats,
    save_labelled,
    save_pairs,
    spec_for,
)
from workers.base.frozen_weights import initial_adapter
from workers.engine import seat_thread
from workers.engine.engine import RoundOrders, TrainingEngine
from workers.output.report import Reporter
from workers.ranks.runtime import Groups
from workers.training import forgetting
from workers.training.context import StopRequest

STEPS = 6
NAN_SEED = 1_000
PAUSED = "ftjob-3"
CANCELLED = "ftjob-cancelled"
ADAM = {"adam_beta1": 0.5, "adam_beta2": 0.9, "adam_epsilon": 0.01}
DPO: dict[str, Any] = {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.5}}}


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> list[JobSpec]:
    """Jobs with mixed ranks, targets, batches, lengths, rates, betas and objectives; one validates,
    one answers prompts.
    """
    folder = tmp_path_factory.mktemp("jobs")
    base = save_chat_base(folder / "base")
    chats = save_chats(folder / "chats.jsonl", 11)
    pairs = save_pairs(folder / "pairs.jsonl", 9)
    valid = save_chats(folder / "valid.jsonl", 5)
    shared: dict[str, Any] = {
        "precision": {"default": "nf4", "compute": "fp32", "compare_served": "off"},
        "checkpoint": {"save_steps": 3},
    }

    def job(
        number: int,
        *,
        data: Any = chats,
        valid: Any = None,
        training: dict[str, Any],
        **options: Any,
    ) -> JobSpec:
        training = {
            "max_steps": STEPS,
            "per_device_train_batch_size": 2,
            "learning_rate": 5e-3,
            **training,
        }
        spec = spec_for(base, data, valid=valid, ranks=2, training=training, **shared, **options)
        return spec.model_copy(update={"job_id": f"ftjob-{number}", "seed": number})

    return [
        job(0, valid=valid, training={"batch_size": 5}, lora={"r": 4, "lora_dropout": 0.1}),
        job(
            1,
            training={"batch_size": 3, "lr_scheduler_type": "cosine", **ADAM},
            lora={"r": 8, "target_modules": ["q_proj", "v_proj"]},
        ),
        job(
            2,
            data=pairs,
            training={"batch_size": 4},
            lora={"r": 16, "use_rslora": True},
            method=DPO,
        ),
        job(
            3,
            training={"batch_size": 8, "max_steps": STEPS - 2},
            lora={"r": 32},
            evaluation={"prompts": 2, "max_new_tokens": 4},
        ),
    ]


@pytest.fixture(scope="module")
def alone(
    specs: list[JobSpec], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], RunDir]:
    """What a job leaves that has two ranks to itself, by its number."""
    return cache(lambda number: ran_alone(specs[number], tmp_path_factory.mktemp("alone"), 2))


def poisoned_on_rank(rank: int, world: int, root: str) -> None:
    """An engine in which the adapters of one seed are not numbers."""

    def values(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
        return (
            torch.full(shape, float("nan"))
            if seed == NAN_SEED
            else initial_adapter(name, shape, seed)
        )

    read: list[str] = []
    digest_of = FileDigest.of
    FileDigest.of = lambda path: read.append(path.name) or digest_of(path)
    seat_thread.initial_adapter = values
    destroyed: list[Groups] = []
    destroy = Groups.destroy
    Groups.destroy = lambda self: destroyed.append(self) or destroy(self)
    build = seat_thread.build
    modules = WeakSet[torch.nn.Module]()

    def built(*given: Any) -> Any:
        made = build(*given)
        for module in made.peft_model.modules():
            if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
                modules.add(module)
        return made

    seat_thread.build = built
    requested_by_file = StopRequest._requested_by_file
    report = Reporter.metrics

    def at_once(self: Reporter, metrics: Metrics) -> None:
        report(self, metrics)
        self.flush()

    def waited_for(self: StopRequest) -> bool:
        """Else a job would be over before it is asked to pause, and one that is cancelled might
        stop by itself before the engine drops it.
        """
        run = self._runtime.run
        if run.root.name == CANCELLED:
            return False
        if run.root.name == PAUSED and has_reported(run, 1):
            wait_for(lambda: Attempt(run, 1).read_control() is not None)
            self._read_at = float("-inf")
        return requested_by_file(self)

    Reporter.metrics = at_once
    StopRequest._requested_by_file = waited_for
    engine_on_rank(rank, world, root)
    # An engine that ends at once has not collected what it let go, or its last thread still has it.
    wait_for(lambda: gc.collect() >= 0 and not modules, every=0.5)
    assert not modules, "an engine without jobs holds no adapter"
    assert len(destroyed) == 3, (
        "of those that failed or were cancelled: an engine would come to have too many open files"
    )
    assert not any(
        groups.save in _world.pg_map or groups.stop in _world.pg_map for groups in destroyed
    )
    assert len([name for name in read if name == "config.json"]) <= 1, (
        "the base's files are read for the engine, not for each job"
    )


# below they do so beside jobs that diverge, are cancelled or paused, and come late
@pytest.mark.slow
def test_jobs_of_one_engine_leave_what_they_leave_alone(
    specs: list[JobSpec], alone: Callable[[int], RunDir], tmp_path: Path
) -> None:
    for number, run in enumerate(run_together(specs, tmp_path)):
        assert exit_of(run).reason is ExitReason.SUCCEEDED
        assert_same(run, alone(number))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["kto", "distillation"])
def test_a_job_with_forwards_without_gradients_leaves_what_it_leaves_alone(
    method: str, specs: list[JobSpec], alone: Callable[[int], RunDir], tmp_path: Path
) -> None:
    """Before each step KTO computes z0, and in each micro-batch a teacher its hidden states, while
    the other job goes on.
    """
    own_options: dict[str, Any] = {"hyperparameters": {"batch_size": 4}}
    if method == "kto":
        own_options["hyperparameters"]["beta"] = 0.5
        data = save_labelled(tmp_path / "labelled.jsonl", 9)
    else:
        own_options["with_context"] = "Say it. "
        data = save_chats(tmp_path / "taught.jsonl", 9)
    spec = spec_for(
        Path(specs[0].model.path),
        data,
        ranks=2,
        precision={"default": "nf4", "compute": "fp32", "compare_served": "off"},
        checkpoint={"save_steps": 3},
        training={"max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 5e-3},
        method={"type": method, method: own_options},
    ).model_copy(update={"job_id": "ftjob-labelled", "seed": 5})
    by_itself = ran_alone(spec, tmp_path / "by-itself", 2)
    other, own = run_together([specs[1], spec], tmp_path)
    assert exit_of(own).reason is ExitReason.SUCCEEDED
    assert_same(own, by_itself)
    assert_same(other, alone(1))


def with_time_on_rank(rank: int, world: int, root: str, engine: bool) -> None:
    forgetting.SHARE = 1e6
    if engine:
        engine_on_rank(rank, world, root)
    else:
        attempt_on_rank(rank, world, root, 1)


@pytest.mark.slow
def test_jobs_of_one_engine_forget_what_they_forget_alone(
    specs: list[JobSpec], tmp_path: Path
) -> None:
    engine = new_engine(tmp_path / "engine", specs[0])
    alone = RunDir(tmp_path / "alone")
    alone.write("spec.json", specs[0])
    give_tokens(alone, specs[0])
    alone.write(
        "attempts/1/start.json",
        Start(job_id="ftjob-0", attempt=1, world_size=2, generation=1, checkpoint=None),
    )
    runs = [RunDir(tmp_path / spec.job_id) for spec in specs[:2]]
    for spec, run in zip(specs, runs, strict=False):
        prepare(spec, run, engine)
    run_on_ranks(with_time_on_rank, 2, str(engine.root), True)
    run_on_ranks(with_time_on_rank, 2, str(alone.root), False)
    expected, found, other = (read_forgetting(run) for run in (alone, *runs))
    assert expected is not None
    assert found is not None
    assert expected.divergence
    assert found.model_copy(update={"seconds": expected.seconds}) == expected
    assert other is not None
    assert other.perplexity != expected.perplexity
    assert other.base_perplexity == pytest.approx(expected.base_perplexity)


def test_a_job_that_ends_otherwise_changes_nothing_of_the_others(
    specs: list[JobSpec], alone: Callable[[int], RunDir], tmp_path: Path
) -> None:
    """One diverges, one is cancelled, one is paused, one comes late, one cannot begin; the paused
    one goes on alone.
    """
    engine = new_engine(tmp_path / "engine", specs[0])
    diverges = specs[1].model_copy(update={"job_id": "ftjob-diverges", "seed": NAN_SEED})
    cancelled = changed(specs[1], max_steps=500).model_copy(update={"job_id": CANCELLED})
    unreadable = specs[1].model_copy(
        update={"job_id": "ftjob-without-data", "training_data": missing(specs[1])}
    )
    first = [specs[0], diverges, cancelled, unreadable, specs[3]]
    runs = {spec.job_id: RunDir(tmp_path / spec.job_id) for spec in [*first, specs[2]]}
    for spec in first:
        prepare(spec, runs[spec.job_id], engine)
    stopped = runs[cancelled.job_id]
    follow(
        stopped,
        3,
        lambda: Attempt(stopped, 1).write_control(Control(generation=2, desired=Desired.CANCEL)),
    )
    paused = runs[PAUSED]
    late = runs[specs[2].job_id]
    follow(
        paused,
        1,
        lambda: Attempt(paused, 1).write_control(Control(generation=2, desired=Desired.PAUSE)),
    )
    follow(runs[specs[0].job_id], 1, lambda: prepare(specs[2], late, engine))
    run_on_ranks(poisoned_on_rank, 2, str(engine.root))
    reasons = {job_id: exit_of(run).reason for job_id, run in runs.items()}
    assert reasons == {
        specs[0].job_id: ExitReason.SUCCEEDED,
        diverges.job_id: ExitReason.PERMANENT_ERROR,
        cancelled.job_id: ExitReason.CANCELLED,
        unreadable.job_id: ExitReason.PERMANENT_ERROR,
        PAUSED: ExitReason.STOPPED,
        late.root.name: ExitReason.SUCCEEDED,
    }
    seats = [left_key(seat_key(job_id, 1)) for job_id in runs]
    assert engine.list("left") == sorted(seats), "no rank uses their files any more"
    assert_same(runs[specs[0].job_id], alone(0))
    assert_same(late, alone(2))
    assert run_attempt(paused, 2, 2, newest_checkpoint(paused)).kind == "succeeded"
    assert_same(paused, alone(3))


def test_an_engine_is_not_idle_while_files_of_a_job_are_fetched(
    specs: list[JobSpec], tmp_path: Path
) -> None:
    run = new_engine(tmp_path / "engine", specs[0])
    spec = run.read(ENGINE, EngineSpec)
    assert spec is not None
    rank: Any = SimpleNamespace(run=run, rank=0)
    stop: Any = SimpleNamespace(is_requested=False)
    base: Any = None
    engine = TrainingEngine(spec, rank, base, stop)

    def decided() -> RoundOrders | None:
        engine._looked_at = engine._idle_since = float("-inf")  # long ago
        return engine._decide()

    key = seat_key("ftjob-9", 1)
    seat = RunDir(tmp_path / "ftjob-9")
    run.write(arriving_key(key), SeatOrder(job_id="ftjob-9", attempt=1, run_dir=str(seat.root)))
    assert decided() is None
    Attempt(seat, 1).write_exit(killed_exit("user_cancelled"))
    run.path(key).parent.mkdir()
    run.path(arriving_key(key)).rename(run.path(key))
    assert decided() == RoundOrders(ends=True)
    assert run.has(left_key(key)), "it was over before a rank took it"


@pytest.mark.slow
def test_eight_jobs_in_another_order(
    specs: list[JobSpec],
    alone: Callable[[int], RunDir],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    more = [
        spec.model_copy(update={"job_id": f"{spec.job_id}-again", "seed": spec.seed + 10})
        for spec in specs
    ]
    expected = {spec.job_id: alone(number) for number, spec in enumerate(specs)}
    expected |= {spec.job_id: ran_alone(spec, tmp_path_factory.mktemp("alone"), 2) for spec in more}
    eight = [*reversed(more), *specs]
    for spec, run in zip(eight, run_together(eight, tmp_path), strict=True):
        assert_same(run, expected[spec.job_id])


def missing(spec: JobSpec) -> Any:
    return spec.data_files[0].model_copy(update={"path": "/nowhere.jsonl"})


def killed_on_rank(rank: int, world: int, root: str, rounds: int) -> None:
    """An engine whose second rank is killed in the middle of a round."""
    compute = TrainingEngine._compute
    done = 0

    def compute_and_die(self: TrainingEngine, seen: Any) -> None:
        nonlocal done
        done += 1
        if rank == 1 and done == rounds:
            os.kill(os.getpid(), signal.SIGKILL)
        compute(self, seen)

    TrainingEngine._compute = compute_and_die
    engine_on_rank(rank, world, root)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("together", [True, False])
def test_jobs_of_a_killed_engine_go_on_as_if_nothing_had_happened(
    together: bool, seed: int, specs: list[JobSpec], alone: Callable[[int], RunDir], tmp_path: Path
) -> None:
    engine = new_engine(tmp_path / "engine", specs[0])
    runs = [RunDir(tmp_path / spec.job_id) for spec in specs]
    for spec, run in zip(specs, runs, strict=True):
        prepare(spec, run, engine)
    with pytest.raises(AssertionError):
        run_on_ranks(killed_on_rank, 2, str(engine.root), random.Random(seed).randint(6, 24))
    assert not any(Attempt(run, 1).has_exit() for run in runs)
    again = new_engine(tmp_path / "again", specs[0])
    for spec, run in zip(specs, runs, strict=True):
        if together:
            prepare(spec, run, again, 2, newest_checkpoint(run))
        else:
            assert run_attempt(run, 2, 2, newest_checkpoint(run)).kind == "succeeded"
    if together:
        run_on_ranks(engine_on_rank, 2, str(again.root))
        assert {exit_of(run, 2).reason for run in runs} == {ExitReason.SUCCEEDED}
    for number, run in enumerate(runs):
        assert_same(run, alone(number))


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["bf16", "fp8", "mixed"])
@pytest.mark.parametrize(("world", "copies"), [(1, 1), (2, 1), (2, 2), (3, 1)])
def test_every_storage_format_and_the_other_order(
    storage: str,
    world: int,
    copies: int,
    specs: list[JobSpec],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    formats = {"overrides": {".*mlp.*": "fp8", ".*q_proj": "bf16"}} if storage == "mixed" else {}
    default = "nf4" if storage == "mixed" else storage
    precision = specs[0].precision.model_copy(update={"default": default, **formats})
    distributed = specs[0].distributed.model_copy(
        update={"replicate": copies, "nproc_per_node": world}
    )
    held = {"precision": precision, "distributed": distributed}
    stored = [spec.model_copy(update=held) for spec in reversed(specs)]
    for spec, run in zip(stored, run_together(stored, tmp_path, world), strict=True):
        assert_same(run, ran_alone(spec, tmp_path_factory.mktemp("alone"), world))
