"""Display of a job's progress: a live bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
from rich.progress import Progress as Bars
from rich.text import Text

from ft_service.client.progress import Curve, JobProgress, numbers, progress_line
from ft_service.rundir.events import Metrics

CURVE_WIDTH = 60
"""Width of a loss curve, if the terminal is wide enough."""
LINES = 20
"""Progress lines of a whole job without a terminal."""


class Display(Protocol):
    """Display of progress, used in a `with`; it leaves the last state on the screen."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def status(self, text: str) -> None:
        """Show the job's state in a few words."""
        ...

    def message(self, level: str, text: str, when: float) -> None:
        """Show an event. `level`: info, warn or error; `when`: seconds since the epoch."""
        ...

    def metrics(self, metrics: Metrics, when: float) -> None: ...


def display_for(console: Console) -> Display:
    return BarDisplay(console) if console.is_terminal else LineDisplay(console)


@contextlib.contextmanager
def download_progress() -> Iterator[Callable[[int, int], object]]:
    """Yield a function that takes the received and the total bytes of a download, and shows them on
    a terminal; before the first call it says that the server prepares the download.
    """
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda done, total: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=28),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Bars(*columns, console=console, transient=True) as bars:
        task = bars.add_task("The server prepares it", total=None)
        yield lambda done, total: bars.update(
            task, description="Downloading", completed=done, total=total or None
        )


class _BarsOverCurves(Bars):
    """Progress bar with lines of text below it."""

    below: Sequence[Text] = ()

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield from self.below


class BarDisplay:
    """Progress bar with loss curves below it; messages scroll above them."""

    def __init__(self, console: Console) -> None:
        self._progress = JobProgress()
        self._curves = {"loss": Curve(), "valid": Curve()}
        self._bars = _BarsOverCurves(
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            TextColumn("{task.fields[steps]}"),
            TextColumn("{task.fields[numbers]}", style="dim"),
            console=console,
        )
        self._task = self._bars.add_task("starting", total=None, steps="", numbers="")

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def status(self, text: str) -> None:
        self._bars.update(self._task, description=text)

    def message(self, level: str, text: str, when: float) -> None:
        self._bars.console.print(
            Text(text, style={"warn": "yellow", "error": "red"}.get(level, "dim"))
        )

    def metrics(self, metrics: Metrics, when: float) -> None:
        self._progress = now = self._progress.after(metrics)
        self._bars.update(
            self._task,
            completed=now.step,
            total=now.total_steps,
            steps=f"{now.step}/{now.total_steps}",
            numbers=numbers(now),
        )
        self._curves["loss"].add(metrics.step, metrics.train_loss)
        self._curves["valid"].add(metrics.step, metrics.valid_loss)
        width = min(CURVE_WIDTH, self._bars.console.width - 30)
        lines = ((name, curve.sparkline(max(8, width))) for name, curve in self._curves.items())
        self._bars.below = [Text(f"{name:>5} {line}", style="cyan") for name, line in lines if line]


class LineDisplay:
    """Lines for messages and changes of status, and about LINES lines for the progress of a whole
    job.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = JobProgress()
        self._status = ""
        self._printed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def status(self, text: str) -> None:
        if text != self._status:
            self._status = text
            self._line(time.time(), text)

    def message(self, level: str, text: str, when: float) -> None:
        self._line(when, text if level == "info" else f"{level}: {text}")

    def metrics(self, metrics: Metrics, when: float) -> None:
        self._progress = now = self._progress.after(metrics)
        if now.step == self._printed:  # a checkpoint repeats its step's numbers
            return
        due = (
            now.step >= self._printed + max(1, now.total_steps // LINES) or now.step < self._printed
        )
        if due or now.step == now.total_steps or metrics.valid_loss is not None:
            self._printed = now.step
            self._line(when, progress_line(now))

    def _line(self, when: float, text: str) -> None:
        clock = time.strftime("%H:%M:%S", time.localtime(when))
        self._console.print(f"{clock}  {text}", markup=False, highlight=False, soft_wrap=True)
