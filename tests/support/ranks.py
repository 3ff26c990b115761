"""Run a function on N ranks that talk by gloo: real processes, forked from a server that has
imported torch once.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Collection, Mapping
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from ft_service.spec import JobSpec
from workers.model import probes

Result = TypeVar("Result")
Work = tuple[Callable[[int, int, JobSpec], Any], dict[str, JobSpec]]
"""A function, and the jobs that it is called with, by their cases."""

CHECK_BY_DRIVER = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""With it, whether there is a GPU is asked of its driver: to ask CUDA begins it, and no fork of
that process can use it.
"""
PRELOAD = ["tests.support.without_torchao", "workers", "tests.support.preloaded"]

_probed: dict[str, probes.Probed] = {}
"""What ranks have found out about bases.

Later ranks begin with it, as jobs begin with the description of their base.
"""


def run_on_ranks(
    function: Callable[..., Any], world: int, *args: Any, timeout: float = 600.0
) -> list[Any]:
    """`function(rank, world, *args)` on every rank of a gloo group; what each returned, in rank
    order.

    The function must be importable. Raises AssertionError with the tracebacks of the ranks that
    failed, or TimeoutError.
    """
    # Before the server begins: what it imports asks whether there is a GPU.
    os.environ.setdefault(CHECK_BY_DRIVER, "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")  # noqa: PTH118
        started = [_start(context, function, rank, world, store, args) for rank in range(world)]
        try:
            return _collect(started, timeout)
        finally:
            for process, _ in started:
                process.kill()
                process.join()
                process.close()


class Cases(Generic[Result]):
    """What a function returns on the ranks of each case.

    Cases of one world size are computed one after the other on ranks that are started once: what a
    rank does for the first time takes longer than all that it does again.
    """

    def __init__(
        self,
        function: Callable[[int, int, JobSpec], Result],
        specs: Mapping[str, JobSpec],
        slow: Collection[str] = (),
        together: list[Cases[Any]] | None = None,
        timeout: float = 600.0,
    ) -> None:
        """`function` and `timeout`, of all cases of one world size: as for `run_on_ranks`.

        `specs`: jobs by the names of their cases. `slow`: those whose tests are marked so, without
        which the others are computed. `together`: cases of other functions that are computed on the
        same ranks; these are added to it. All are to be added before the first is asked for.
        """
        self._function = function
        self._specs = specs
        self._slow = frozenset(slow)
        self._timeout = timeout
        self._found: dict[str, list[Result]] = {}
        self._together: list[Cases[Any]] = [] if together is None else together
        self._together.append(self)

    def of(self, case: str) -> tuple[JobSpec, list[Result]]:
        """The job of a case, and what the function returned on each of its ranks.

        Raises what `run_on_ranks` raises.
        """
        spec = self._specs[case]
        if case not in self._found:
            alike = [own._alike(spec.world_size, case in self._slow) for own in self._together]
            by_rank = run_on_ranks(_each, spec.world_size, alike, timeout=self._timeout)
            for number, own in enumerate(self._together):
                for other in alike[number][1]:
                    own._found[other] = [found[number][other] for found in by_rank]
        return spec, self._found[case]

    def _alike(self, world: int, slow: bool) -> Work:
        """Return the function, and its jobs of so many ranks whose tests are slow, or not."""
        specs = {
            case: spec
            for case, spec in self._specs.items()
            if spec.world_size == world and (case in self._slow) == slow
        }
        return self._function, specs


def often_and_slow(cases: Collection[str], slow: Collection[str]) -> list[Any]:
    """Parameters of a test: all cases, of which these are marked slow."""
    import pytest  # here: the GPU report uses this module where there is none

    assert set(slow) <= set(cases)
    return [pytest.param(case, marks=pytest.mark.slow) if case in slow else case for case in cases]


def _each(rank: int, world: int, work: list[Work]) -> list[dict[str, Any]]:
    return [
        {case: function(rank, world, spec) for case, spec in specs.items()}
        for function, specs in work
    ]


def _start(
    context: Any, function: Any, rank: int, world: int, store: str, args: Any
) -> tuple[Any, Connection]:
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=_rank_main, args=(theirs, function, rank, world, store, args, _probed), daemon=True
    )
    process.start()
    theirs.close()
    return process, ours


def _collect(started: list[tuple[Any, Connection]], timeout: float) -> list[Any]:
    results = []
    failures = []
    for rank, (process, pipe) in enumerate(started):
        if not pipe.poll(timeout):
            raise TimeoutError(
                f"rank {rank} did not answer within {timeout} s; failures so far: {failures}"
            )
        try:
            kind, value, probed = pickle.loads(pipe.recv_bytes())
        except EOFError:
            process.join(1.0)
            kind = "error"
            value = f"ended without a result, with exit code {process.exitcode}"
            probed = {}
        _probed.update(probed)
        (results if kind == "result" else failures).append(
            value if kind == "result" else f"rank {rank}: {value}"
        )
        pipe.close()
    assert not failures, "\n".join(failures)
    return results


def _rank_main(
    pipe: Connection,
    function: Any,
    rank: int,
    world: int,
    store: str,
    args: Any,
    probed: dict[str, probes.Probed],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    faulthandler.enable()
    probes.PROBED.update(probed)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        result = function(rank, world, *args)
        # Plain pickle: tensors by value, not by shared memory.
        pipe.send_bytes(pickle.dumps(("result", result, probes.PROBED)))
        dist.barrier()
    except BaseException:
        pipe.send_bytes(pickle.dumps(("error", traceback.format_exc(), {})))
    pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's destructor can hang while the interpreter shuts down
