"""The reconcilers of a process: one for each place where jobs run, such as each pod profile of a
cluster.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from ft_service.control.jobs.reconciler import Reconciler, ReconcilerOptions
from ft_service.launcher.protocol import Launcher
from ft_service.storage.locations import Places
from ft_service.store.sql import Store


def run_all(
    store: Store,
    launchers: Sequence[Launcher],
    places: Places,
    options: ReconcilerOptions,
    stop: threading.Event,
) -> None:
    """Move the jobs of all places until `stop` is set.

    If a reconciler fails, end the others and raise its error.
    """
    reconcilers = [Reconciler(store, launcher, places, options) for launcher in launchers]
    if len(reconcilers) == 1:
        reconcilers[0].run(stop)
        return
    with ThreadPoolExecutor(len(reconcilers), "reconciler") as threads:
        running = [threads.submit(reconciler.run, stop) for reconciler in reconcilers]
        ended, _ = wait(running, return_when=FIRST_EXCEPTION)
        stop.set()
        for one in ended:
            one.result()
