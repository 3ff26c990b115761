"""One job in an engine: its training as it is when the job has its ranks to itself, in a greenlet
that waits for the others.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from greenlet import getcurrent, greenlet

from ft_service.errors import FtError
from ft_service.host.disk import is_no_room, no_room
from ft_service.plan.fitting_settings import CONTEXT, with_options
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.attempt_outcome import Evidence, decide_exit
from ft_service.rundir.attempt_seal import Fence, SealedError
from ft_service.rundir.directory import RunDir, UnreadableDocumentError
from ft_service.rundir.documents import Desired
from ft_service.rundir.engine import SeatOrder, SeatSize, seat_key
from ft_service.spec import JobSpec
from workers.attempt.attempt import run_attempt
from workers.attempt.prepared_model import PreparedModel, report_built
from workers.base.frozen_weights import initial_adapter
from workers.base.load import adapters
from workers.engine.lanes import Forward, Lane
from workers.engine.resident_base import ResidentBase
from workers.engine.seat import Seat
from workers.model.build import BuiltModel, build
from workers.model.probes import Probed
from workers.output.report import Reporter
from workers.ranks.runtime import Groups, Runtime, read_spec, report_failure
from workers.training.context import StopRequest


class SeatState(IntEnum):
    """State of a seat on one rank."""

    WAITS = 0
    """It waits for its client, or for a thread of rank 0 that writes."""
    TRAINS = 1
    """It waits for a micro-batch whose backward follows."""
    ANSWERS = 2
    """It waits for a forward without gradients."""
    ENDED = 3
    FAILED = 4


class SeatDropped(Exception):
    """Raised in a seat that the engine ends: the job is cancelled, its attempt is over, or the seat
    failed on another rank.
    """


class SeatThread:
    """One attempt of a job on one rank.

    All ranks call its methods together, and in the same order for all seats.
    """

    def __init__(self, order: SeatOrder, base: ResidentBase, host: Runtime, groups: Groups) -> None:
        """`host`: the runtime of the engine on this rank. `groups`: of this seat alone."""
        self.order = order
        self.groups = groups
        self.used = 0
        """Tokens that were computed for it."""
        self.waited = 0
        """Rounds since it computed last."""
        self.priority = 0
        """Of the job, once the seat has begun."""
        self.size: SeatSize | None = None
        """As planned; None: it was not, or the seat has not begun."""
        self._base = base
        self._host = host
        self._run = RunDir(Path(order.run_dir))
        self._attempt = Attempt(self._run, order.attempt)
        self._fence = Fence(self._run, order.attempt)
        self._stop: StopRequest | None = None
        self._reporter: Reporter | None = None
        self._stops = self._failed = False
        self._room: str | None = None
        """Sentence for the user if the disk did not take the record of its failure."""
        self._lane = Lane({})
        self._thread = greenlet(self._train)
        self._waiting: tuple[Forward, Any] | None = None
        self._due: Callable[[], bool] | None = None
        """What tells, on rank 0, whether it can go on; None: it does not wait for its client."""

    @property
    def key(self) -> str:
        """Key of its order, which names job and attempt."""
        return seat_key(self.order.job_id, self.order.attempt)

    @property
    def state(self) -> SeatState:
        if self._thread.dead:
            return SeatState.FAILED if self._failed else SeatState.ENDED
        if self._due is not None:
            return SeatState.WAITS
        return SeatState.TRAINS if self._lane.left["grad"] else SeatState.ANSWERS

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch that it waits for, padding included."""
        if self._waiting is None:
            return 0
        _, (_, named) = self._waiting
        return int(named["input_ids"].numel())

    @property
    def call(self) -> tuple[Forward, tuple[Lane, Any]] | None:
        """The call that it waits for, and the arguments; None: it has ended, or waits for its
        client.
        """
        return None if self._waiting is None else (self._waiting[0], (self._lane, self._waiting[1]))

    def is_due(self) -> bool:
        """Whether it has waited for its client and can go on.

        Asked on rank 0, outside of the seat: what it cannot read or write ends no other one.
        `is_over` tells whether it ends itself.
        """
        with suppress(FtError, OSError, SealedError):
            return self._due is not None and self._due()
        return False

    def resume(self, *given: Any) -> None:
        """Let it go on until it waits or ends, and report that it does: its next step may take long
        beside others. `given`: the result of the call that it has waited for.
        """
        self._due = None
        if self._reporter is not None:
            with suppress(OSError, SealedError):
                self._reporter.heartbeat()
        self._wait_for(lambda: self._base.model.resume(self._lane, self._thread, *given))

    def drop(self) -> None:
        """End it where it waits."""
        if not self._thread.dead:
            self._wait_for(lambda: self._base.model.end(self._lane, self._thread, SeatDropped()))

    def _wait_for(self, go_on: Callable[[], Any]) -> None:
        reached = go_on()
        self._waiting = None if self._thread.dead else reached

    def _wait_for_client(self, due: Callable[[], bool]) -> None:
        """`Wait`: let the engine go on with other seats meanwhile."""
        parent = getcurrent().parent
        assert parent is not None, "a seat's thread has the engine's as its parent"
        self._due = due
        parent.switch(None)

    def request_stop(self) -> None:
        """Let it write a checkpoint and end."""
        self._stops = True
        if self._stop is not None:
            self._stop.request()

    def is_over(self) -> bool:
        """Whether it is to be dropped: its user has cancelled it, or its attempt is sealed.

        Read by rank 0; False while the disk does not answer.
        """
        with suppress(OSError):
            return self._fence.seal() is not None or self._is_cancelled()
        return False

    def conclude(self) -> None:
        """Write the exit record of a seat that has ended. Called on rank 0."""
        outcome = self._attempt.read_outcome()
        result = self._attempt.read_result()
        forced = "cancelled" if self._is_cancelled() else None
        seen = Evidence(
            outcome=outcome, result=result, returncode=1, forced=forced, room=self._room
        )
        self._attempt.write_exit(decide_exit(seen))

    def _is_cancelled(self) -> bool:
        """Whether its user has cancelled it; what asks for it may be unreadable, and then it cannot
        go on either.
        """
        try:
            control = self._attempt.read_control()
        except UnreadableDocumentError:
            return True
        return control is not None and control.desired is Desired.CANCEL

    def _train(self) -> None:
        try:
            runtime = self._runtime()
            self._stop = StopRequest(runtime)
            if self._stops:
                self._stop.request()
            run_attempt(runtime, self._stop, self._prepare)
        except SeatDropped:
            pass
        except (
            BaseException
        ) as error:  # every error is reported to the job's user, and ends this seat alone
            self._failed = True
            if isinstance(error, SealedError):
                traceback.print_exc(file=sys.stderr)
            try:
                report_failure(self._run, self.order.attempt, error)
            except OSError as refused:  # or it would end the engine
                self._room = no_room(self._run.root, refused) if is_no_room(refused) else None

    def _runtime(self) -> Runtime:
        start = self._attempt.read_start()
        host = self._host
        assert start is not None, f"attempt {self.order.attempt} has no start.json"
        self.size = start.seat
        self.priority = start.priority
        spec = _with_whole_samples(read_spec(self._run))
        fence = self._fence
        return Runtime(
            self._run,
            spec,
            start,
            host.rank,
            host.world,
            host.device,
            host.mesh,
            self.groups,
            fence,
        )

    def _prepare(
        self, runtime: Runtime, reporter: Reporter, probed: Probed | None
    ) -> PreparedModel:
        """The model of a job that shares a base (`Prepare`)."""
        spec = runtime.spec
        base = self._base
        self._reporter = reporter
        built = build(spec, runtime.device, base.built.probed)
        first = {
            name: initial_adapter(name, tuple(parameter.shape), spec.seed).to(runtime.device)
            for name, parameter in adapters(built.peft_model)
        }
        seat = Seat(built.peft_model, base.model, self._host.mesh, first, runtime.compute_dtype)
        self._lane.linears = seat.linears
        seat.model.train()
        shared = BuiltModel(
            seat.model, base.built.layers, base.built.formats, base.built.arithmetic, base.loaded
        )
        report_built(spec, shared, runtime.device, reporter)
        return PreparedModel(
            shared,
            seat.masters,
            base.padded_because,
            seat,
            seat.gather,
            base.identified,
            self._wait_for_client,
        )


def over_ranks(values: list[int], group: dist.ProcessGroup) -> list[list[int]]:
    """Every rank's values, in rank order; as many on each. Called by all together."""
    mine = torch.tensor(values, dtype=torch.int64)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return [one.tolist() for one in everyone]


def _with_whole_samples(spec: JobSpec) -> JobSpec:
    """The spec without a choice that its own ranks would have: those of an engine share no
    samples.
    """
    chosen = {option: why for option, why in spec.chosen.items() if option != CONTEXT}
    return with_options(spec.model_copy(update={"chosen": chosen}), {CONTEXT: 1})
