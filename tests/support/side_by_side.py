"""Test processes side by side, forked from the one that has imported and collected everything once.

Each takes the next files off one list until it is empty, and tells its parent how each test ended;
the parent reports. With pytest-xdist every process imports and collects by itself: as much as two
hundred test files cost.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import struct
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, cast

import pytest

from ft_service.host.helper_start import tie

_POLL_SECONDS = 1.0
"""How often the parent looks whether a process has died that has told nothing."""
_INDEX = struct.Struct("I")


class SideBySide:
    """Plugin that runs collected tests in several processes.

    Args:
        processes: How many, at least 1.
        together: Beginnings of test IDs, as folders: tests of one are never side by side. Nor are
        those of a file. begin: Called in each process before its first test.
        end: Called in each process after its last test; what it returns can be pickled, and goes to
        `take`.
        take: Called in the parent with what each process returned.
    """

    def __init__(
        self,
        processes: int,
        together: Sequence[str],
        begin: Callable[[], None],
        end: Callable[[], object],
        take: Callable[[Any], None],
    ) -> None:
        self.processes = processes
        self.together = together
        self.begin = begin
        self.end = end
        self.take = take

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.config.option.collectonly or session.testsfailed:
            return None  # pytest's own loop says so
        groups = grouped(session.items, self.together)
        listed = _list_of(len(groups))
        children = [
            self._forked(session, groups, listed) for _ in range(min(self.processes, len(groups)))
        ]
        try:
            self._report(session, dict(children), listed)
        finally:
            os.close(listed)
            for _, process in children:
                process.join()
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        return True

    def _forked(
        self, session: pytest.Session, groups: list[list[pytest.Item]], listed: int
    ) -> tuple[Connection, BaseProcess]:
        told, telling = multiprocessing.Pipe(duplex=False)
        arguments = (session, groups, listed, telling)
        process = multiprocessing.get_context("fork").Process(target=self._run, args=arguments)
        process.start()
        telling.close()
        return told, process

    def _run(
        self,
        session: pytest.Session,
        groups: list[list[pytest.Item]],
        listed: int,
        telling: Connection,
    ) -> None:
        """Run the tests of one process, in that process. It is interrupted if its parent dies."""
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` has it ignored
        tie(signal.SIGINT)
        # Of this process's own children: the default, not fork.
        multiprocessing.set_start_method(None, force=True)
        config = session.config
        _own_files(config)
        config.pluginmanager.unregister(name="terminalreporter")
        config.pluginmanager.register(_Teller(config, telling))
        self.begin()
        tests = (item for group in taken(groups, listed) for item in group)
        item = next(tests, None)
        try:
            while item is not None:
                following = next(tests, None)
                telling.send(("begun", item.nodeid))
                item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
                item = None if session.shouldfail or session.shouldstop else following
        finally:
            # Where it was stopped, fixtures of the session are left.
            session._setupstate.teardown_exact(None)
        telling.send(("ended", self.end()))

    def _report(
        self, session: pytest.Session, processes: dict[Connection, BaseProcess], listed: int
    ) -> None:
        """Report what the processes tell until each has ended.

        Tests whose process died have failed.
        """
        hook = session.config.hook
        left = {item.nodeid: item for item in session.items}
        running = dict.fromkeys(processes, "nothing yet")
        died: list[str] = []
        while processes:
            ready = cast(list[Connection], wait(list(processes), _POLL_SECONDS))
            for told in ready or [
                told for told, process in processes.items() if process.exitcode is not None
            ]:
                kind, content = _heard(told)
                if kind == "begun":
                    running[told] = content
                elif kind == "ended":
                    del running[told]
                    self.take(content)
                elif kind == "report":
                    report = hook.pytest_report_from_serializable(
                        config=session.config, data=content
                    )
                    hook.pytest_runtest_logreport(report=report)
                    if report.when == "teardown":
                        del left[report.nodeid]
                        hook.pytest_runtest_logfinish(
                            nodeid=report.nodeid, location=report.location
                        )
                else:
                    process = processes.pop(told)
                    process.join()
                    if told in running:
                        died.append(f"{running[told]} (exit code {process.exitcode})")
                if session.shouldfail or session.shouldstop:
                    _empty(listed)
        for item in left.values() if died else ():
            error = f"It was not run: a test process died in {', '.join(died)}"
            failed = pytest.TestReport(item.nodeid, item.location, {}, "failed", error, "call")
            hook.pytest_runtest_logreport(report=failed)


class _Teller:
    """Plugin of a forked process: tells the parent how its tests went."""

    def __init__(self, config: pytest.Config, telling: Connection) -> None:
        self.config = config
        self.telling = telling

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        told = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.telling.send(("report", told))


def grouped(items: Sequence[pytest.Item], together: Sequence[str]) -> list[list[pytest.Item]]:
    """Return tests by file, or by the folder that holds the file, each in the order of its first
    test.
    """
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        folder = next(
            (folder for folder in together if item.nodeid.startswith(folder)), item.location[0]
        )
        groups.setdefault(folder, []).append(item)
    return list(groups.values())


def taken(groups: list[list[pytest.Item]], listed: int) -> Iterator[list[pytest.Item]]:
    """Take the next group off the list that several processes share, until none is left."""
    while index := os.read(listed, _INDEX.size):
        yield groups[_INDEX.unpack(index)[0]]


def _heard(told: Connection) -> tuple[str, Any]:
    """Return what a process tells next: of which kind it is, and the content; "died" after the
    last.
    """
    try:
        # A process of its own may hold the other end.
        return told.recv() if told.poll() else ("died", None)
    except EOFError:
        return "died", None


def _list_of(count: int) -> int:
    """Return a pipe's end that 0, 1, 2 … `count` - 1 can be read from: each number is read by one
    process alone.
    """
    reading, writing = os.pipe()
    numbers = b"".join(map(_INDEX.pack, range(count)))
    os.write(writing, numbers)  # the kernel holds 64 KiB: 16,000 files
    os.close(writing)
    return reading


def _empty(listed: int) -> None:
    while os.read(listed, 1 << 16):
        pass


def _own_files(config: pytest.Config) -> None:
    """Give a forked process its own files for what tests print, and its own folder for theirs."""
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    factory: Any = config._tmp_path_factory  # type: ignore[attr-defined]  # pytest-xdist sets the same
    factory._basetemp = factory.getbasetemp() / f"process-{os.getpid()}"
    factory._basetemp.mkdir()
