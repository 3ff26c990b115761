"""Measures the energy of an attempt's ranks on this node while they run, and what its GPUs do
(energy.json).

In a thread of its own, since a driver may hang: the attempt goes on, and what was written last
stays.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from ft_service.host.energy import Counter, GpuCounter, ProcessorCounter
from ft_service.rundir.attempt import AttemptNode
from ft_service.rundir.documents import MOST_LOADS, Energy, GpuLoad

log = logging.getLogger(__name__)

EVERY_SECONDS = 10.0
"""Interval at which the record is rewritten: what a killed supervisor loses at most."""
END_SECONDS = 2.0
"""How long the end of an attempt waits for the last reading."""


class EnergyMeter:
    """Writes what the ranks take, until it is closed. Without a counter it writes nothing."""

    def __init__(
        self,
        files: AttemptNode,
        new_counter: Callable[[], Counter],
        every_seconds: float = EVERY_SECONDS,
    ) -> None:
        self._files = files
        self._new_counter = new_counter
        self._every_seconds = every_seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="energy", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Read the counter once more, if it answers in time."""
        self._over.set()
        self._thread.join(END_SECONDS)

    def _run(self) -> None:
        try:
            counter = self._new_counter()
            over = False
            kept: list[GpuLoad] = []
            looks = stride = 0
            while not over:
                over = self._over.wait(self._every_seconds)
                joules, load = counter.joules(), counter.load()
                if load is not None and not over and looks % 2**stride == 0:
                    kept.append(GpuLoad(time=time.time(), **vars(load)))
                looks += 1
                if len(kept) == MOST_LOADS:
                    kept, stride = kept[::2], stride + 1
                self._files.write_energy(Energy(joules=joules, source=counter.source, loads=kept))
        except Exception as error:  # a driver's own errors, a full disk: the attempt goes on
            log.info("the energy is not measured here: %s", error)


def counter_of(devices: Sequence[str], pid: int) -> Callable[[], Counter]:
    """What makes the counter of an attempt: of its GPUs, without any of its processors.

    `devices`: as in CUDA_VISIBLE_DEVICES; `pid`: torchrun, whose descendants the ranks are.
    """
    if devices:
        return lambda: GpuCounter(devices)
    return lambda: ProcessorCounter(pid)
