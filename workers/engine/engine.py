"""The ranks of an engine: they hold one base, take the jobs that are ordered, and compute round
after round for all of them.

    agree ─▶ take new seats, drop those that are over ─▶ choose (rounds.py) ─▶ forwards ─▶ backwards
    ─▶ agree …

Between two forwards a seat does all that its job does alone: it reads data, reduces gradients,
steps, validates, saves. All ranks let the seats go on in the same order, so that the collectives of
a seat meet each other.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ft_service.bases.cache_folder import Cache
from ft_service.data.tokenizer_files import IMAGE_FILES
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.attempt_seal import Fence
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Outcome, OutcomeKind
from ft_service.rundir.engine import ARRIVING, ENGINE, SEATS, SeatOrder, left_key
from ft_service.rundir.engine_spec import EngineSpec
from ft_service.spec import JobSpec
from workers.attempt.prepared_model import cached_description
from workers.describe import describe
from workers.engine.resident_base import ResidentBase, load_resident_base
from workers.engine.rounds import Turn, next_round
from workers.engine.seat_thread import SeatState, SeatThread, over_ranks
from workers.model.probes import Probed
from workers.ranks.runtime import Groups, Runtime, enter, report_failure, surroundings, watch_seal
from workers.ranks.sharding import reshard
from workers.tinker.attendance import pause_after
from workers.training.context import POLL_SECONDS, StopRequest
from workers.training.packing import TOKENS


def main(run: RunDir, attempt: int) -> int:
    """Run an engine on this rank until it is idle or asked to stop, and return the process's exit
    code.
    """
    try:
        fence = Fence(run, attempt)
        watch_seal(fence)  # first: a rank may wait for the others for ever
        engine_spec = run.read(ENGINE, EngineSpec)
        assert engine_spec is not None, f"{run.root} holds no {ENGINE}"
        device = enter(engine_spec.spec)
        runtime = surroundings(run, attempt, device, fence, engine_spec.spec)
        stop = StopRequest(runtime)
        signal.signal(signal.SIGTERM, stop.request)
        cache = Cache.from_environment(os.environ)
        base = load_described_base(engine_spec.spec, runtime.mesh, device, cache)
        TrainingEngine(engine_spec, runtime, base, stop).run()
        if runtime.rank == 0:
            Attempt(run, attempt).write_outcome(Outcome(kind=OutcomeKind.STOPPED))
        dist.barrier()
    except (
        BaseException
    ) as error:  # what ends the engine is reported, and its seats go on elsewhere
        report_failure(run, attempt, error)
        return 1
    return 0


def load_described_base(
    spec: JobSpec, mesh: DeviceMesh, device: torch.device, cache: Cache | None = None
) -> ResidentBase:
    """`load_resident_base` with what is known of the base, and of its towers if it has some: jobs
    that come may have pictures.
    """
    path = spec.model.path
    described = cached_description(path)
    if described is None and any((Path(path) / name).is_file() for name in IMAGE_FILES):
        described = describe(path)
    if described is None:
        return load_resident_base(spec, mesh, device, cache)
    return load_resident_base(spec, mesh, device, cache, Probed.of(described), described.images)


@dataclass(frozen=True)
class RoundOrders:
    """What rank 0 has found since the last round."""

    orders: tuple[SeatOrder, ...] = ()
    """New seats."""
    dropped: tuple[str, ...] = ()
    """Keys of the orders whose seats end at once."""
    due: tuple[str, ...] = ()
    """Keys of the orders whose seats have waited and go on."""
    stops: bool = False
    """The engine is asked to stop: its seats write checkpoints and end."""
    ends: bool = False
    """The engine ends: it was idle for long enough, or its last seat has stopped."""


@dataclass
class TrainingEngine:
    """The seats of an engine on one rank."""

    spec: EngineSpec
    runtime: Runtime
    base: ResidentBase
    stop: StopRequest
    seats: list[SeatThread] = field(default_factory=list[SeatThread])
    """In the order in which they joined, the same on all ranks."""

    def __post_init__(self) -> None:
        options = self.spec.spec.training
        self._budget = (
            TOKENS if options.tokens_per_micro_batch == "auto" else options.tokens_per_micro_batch
        )
        self._free_groups: list[Groups] = []
        self._taken: set[str] = set()
        self._looked_at = self._idle_since = self._busy_at = time.monotonic()
        self._stopping = False
        self._left: list[SeatThread] = []
        """Seats that have ended and have no exit record yet, on rank 0."""

    def run(self) -> None:
        """Train until the engine is idle for `idle_seconds`, or is asked to stop and has no seat
        any more.
        """
        while True:
            decision, seen = self._agree()
            ended = [any(state > SeatState.ANSWERS for state, _ in of_seat) for of_seat in seen]
            if decision is None and self.seats and not any(ended):
                self._compute(
                    [(of_seat[0][0], max(tokens for _, tokens in of_seat)) for of_seat in seen]
                )
                continue
            decision = decision or RoundOrders()
            if self._leave(seen, decision.dropped):
                # their modules and threads refer to each other, and their memory is the others'
                gc.collect()
            if decision.ends:
                return
            if decision.stops:
                self._stopping = True
                for seat in self.seats:
                    seat.request_stop()
            for order in decision.orders:
                self._join(order)
            self._take_back(decision.due)

    def _agree(self) -> tuple[RoundOrders | None, list[list[tuple[int, int]]]]:
        """What rank 0 has decided, None: nothing, and (state, tokens) of each seat on all ranks.
        Called by all ranks together."""
        runtime = self.runtime
        mine = self._decide() if runtime.rank == 0 else None
        known = [int(mine is not None)]
        for seat in self.seats:
            known += [int(seat.state), seat.tokens]
        everyone = over_ranks(known, runtime.groups.save)
        box = [mine]
        if everyone[0][0]:
            dist.broadcast_object_list(box, src=0, group=runtime.groups.save)
        seats = range(1, len(known), 2)
        return box[0], [[(one[at], one[at + 1]) for one in everyone] for at in seats]

    def _decide(self) -> RoundOrders | None:
        """What is asked of the engine since the last look, None: nothing. Called on rank 0."""
        due = self._due_seats()
        now = time.monotonic()
        if self.seats:
            self._idle_since = now
        if now < self._looked_at + POLL_SECONDS:
            return RoundOrders(due=due) if due else None
        self._looked_at = now
        self._conclude()
        stops = not self._stopping and self.stop.is_requested
        arriving = self.runtime.run.list(ARRIVING)  # first: an order goes from there to the others
        orders = () if stops or self._stopping else self._new_orders()
        dropped = tuple(seat.key for seat in self.seats if seat.is_over())
        idle = (
            not self.seats
            and not orders
            and not arriving
            and not self._left
            and now >= self._idle_since + self.spec.idle_seconds
        )
        ends = idle or (self._stopping and not self.seats and not self._left)
        decision = RoundOrders(orders, dropped, due, stops=stops, ends=ends)
        return None if decision == RoundOrders() else decision

    def _due_seats(self) -> tuple[str, ...]:
        """The seats that have waited and can go on; waits for one, up to the next look, if no other
        seat computes, and ever more patiently.
        """
        while True:
            due = tuple(seat.key for seat in self.seats if seat.is_due())
            computes = any(seat.state is not SeatState.WAITS for seat in self.seats)
            now = time.monotonic()
            if due or computes:
                self._busy_at = now
            if due or computes or now >= self._looked_at + POLL_SECONDS:
                return due
            time.sleep(pause_after(now - self._busy_at))

    def _new_orders(self) -> tuple[SeatOrder, ...]:
        run = self.runtime.run
        found = []
        names = (
            sorted(path.name for path in run.path(SEATS).glob("*.json"))
            if run.path(SEATS).is_dir()
            else []
        )
        for name in names:
            order = None if name in self._taken else run.readable(f"{SEATS}/{name}", SeatOrder)
            if order is None:
                continue
            if len(self.seats) + len(found) >= self.spec.most_seats:
                break
            self._taken.add(name)
            if not Attempt(RunDir(Path(order.run_dir)), order.attempt).has_exit():
                found.append(order)
                continue
            with contextlib.suppress(OSError):  # a full disk must not end the other seats
                run.put(left_key(f"{SEATS}/{name}"), b"")
        return tuple(found)

    def _join(self, order: SeatOrder) -> None:
        groups = (
            self._free_groups.pop()
            if self._free_groups
            else Groups.made(self.spec.spec, self.runtime.world)
        )
        seat = SeatThread(order, self.base, self.runtime, groups)
        seat.used = self._least_used()
        self.seats.append(seat)
        self._go_on({seat: ()})

    def _take_back(self, due: Sequence[str]) -> None:
        """Let seats go on that have waited."""
        back = [seat for seat in self.seats if seat.key in due and seat.state is SeatState.WAITS]
        for seat in back:
            seat.used = max(seat.used, self._least_used())
        self._go_on(dict.fromkeys(back, ()))

    def _least_used(self) -> int:
        """The fewest tokens of the jobs that compute: what a job begins with that joins them, or
        has waited.
        """
        computing = [seat for seat in self.seats if seat.state is not SeatState.WAITS] or self.seats
        return min((seat.used for seat in computing), default=0)

    def _leave(self, seen: Sequence[Sequence[tuple[int, int]]], dropped: Sequence[str]) -> bool:
        """Drop the seats that are over, or have failed on a rank, and let go of those that have
        ended. Returns whether there was one.
        """
        before = len(self.seats)
        for seat, of_ranks in zip(list(self.seats), seen, strict=True):
            states = [state for state, _ in of_ranks]
            if max(states) <= SeatState.ANSWERS and seat.key not in dropped:
                continue
            seat.drop()
            self.seats.remove(seat)
            if set(states) == {SeatState.ENDED}:
                self._free_groups.append(seat.groups)  # nothing of it is on its way
            else:
                seat.groups.destroy()
            if self.runtime.rank == 0:
                self._left.append(seat)
        self._conclude()
        return len(self.seats) < before

    def _conclude(self) -> None:
        """Write the exit records of seats that have ended, and that they have left; what the disk
        refuses is tried again.
        """
        for seat in list(self._left):
            with contextlib.suppress(OSError):
                seat.conclude()
                self.runtime.run.put(left_key(seat.key), b"")
                self._left.remove(seat)

    def _compute(self, seen: Sequence[tuple[int, int]]) -> None:
        """One round: the next micro-batches of some seats.

        `seen`: (state, tokens) of every seat, the same on all ranks.
        """
        ready = [
            (seat, *of_seat)
            for seat, of_seat in zip(self.seats, seen, strict=True)
            if of_seat[0] != SeatState.WAITS
        ]
        if not ready:
            return
        turns = [
            Turn(
                seat.used,
                tokens,
                state == SeatState.TRAINS,
                *(seat.size.batch_bytes(tokens) if seat.size else (0, 0)),
                seat.priority,
                seat.waited,
            )
            for seat, state, tokens in ready
        ]
        held = sum(seat.size.held for seat in self.seats if seat.size)
        chosen = next_round(
            turns, self._budget, None if self.spec.room is None else self.spec.room - held
        )
        for position, (seat, _, tokens) in enumerate(ready):
            seat.used += tokens if position in chosen else 0
            seat.waited = 0 if position in chosen else seat.waited + 1
        self._go_on(
            self._forwards(
                [ready[position][0] for position in chosen], trains=turns[chosen[0]].trains
            )
        )

    def _forwards(
        self, seats: Sequence[SeatThread], *, trains: bool
    ) -> dict[SeatThread, tuple[Any]]:
        """The forwards that seats wait for, by the base in the mode that they need."""
        base = self.base.model.base
        base.train(trains)
        with torch.set_grad_enabled(trains):
            outputs = self._answers(seats)
        if not trains:
            reshard(base)
            base.train()
        return outputs

    def _go_on(self, given: Mapping[SeatThread, tuple[Any, ...]]) -> None:
        """Let seats go on with the results of their calls, through a backward of all of them, until
        each waits for a forward."""
        while given:
            for seat, results in given.items():
                seat.resume(*results)
            backward = self.base.model.backward_of_lanes
            given = self._answers(
                [seat for seat in given if (call := seat.call) is not None and call[0] == backward]
            )

    def _answers(self, seats: Sequence[SeatThread]) -> dict[SeatThread, tuple[Any]]:
        """The results of the one call that these seats wait for."""
        calls = [call for seat in seats if (call := seat.call) is not None]
        if not calls:
            return {}
        outputs = self.base.model.compute(calls[0][0], [arguments for _, arguments in calls])
        return {seat: (output,) for seat, output in zip(seats, outputs, strict=True)}
