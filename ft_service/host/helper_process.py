"""Helper processes: programs that this process starts with limits, sends requests to, and ends.

    run_once(program, request, seconds=60)     one request, one reply; then the process is gone
    HelperProcess(program)                     lines in both directions until it is closed

A helper dies with this process, whatever the cause, together with its own child processes. Its
environment is an allow-list (environment.py). Requests and replies are lines, usually of JSON. The
end of its stderr becomes part of the error if it fails. A helper that refuses a request prints
`{"error": …, "code": …, "param": …}` and exits with REFUSED.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Self

from ft_service import installation
from ft_service.errors import SpecError, UnavailableError
from ft_service.host import helper_start
from ft_service.host.environment import child_environment
from ft_service.host.lifetime import require_linux
from ft_service.host.processes import CRASHES, has_ended

REFUSED = 64
"""Exit code of a helper that refused the request; its last line says why."""
MOST_BYTES = 256 * 1024**2
"""Longest line of a reply, unless a program has a limit of its own."""
LAST_WORDS_BYTES = 16 * 1024
"""Bytes of stderr that are kept."""
END_SECONDS = 5.0
"""Time that a helper may take to end after closing its output."""
LATER_SECONDS = 10
"""Seconds after which what the host did not let end may be asked for again."""
SLICE_SECONDS = 0.5
"""Length of one wait: another thread may have something to send meanwhile."""
_CPUCLOCK_SCHED = 2
"""Kind of a clock of a process, in the low bits of its id, as clock_getcpuclockid(3) makes it."""
_OUT_OF_MEMORY = (
    "MemoryError",
    "memory allocation of",
    "std::bad_alloc",
    "can't allocate memory",
    "Cannot allocate memory",
)
"""Messages of a failed allocation: Python's, Rust's, C++'s, torch's, and the system's."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """Program with the limits under which it runs as a helper."""

    command: Sequence[str]
    memory_bytes: int | None = None
    """Limit on its private memory; None: the host's."""
    limits_itself: bool = False
    """Whether it sets a limit on its own memory, so that its input is at fault where that is too
    little.
    """
    cpu_seconds: int | None = None
    """Limit on its processor time; None: there is none, as for one that answers many requests."""
    niceness: int = 0
    """Added to this process's niceness; 19 is the lowest priority."""
    expendable: bool = False
    """Whether the kernel kills it first when the host runs out of memory."""
    needs: tuple[str, ...] = ()
    """Names of environment variables in addition to the allow-list, as in environment.NETWORK."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables with their values."""
    folder: Path | None = None
    """Its working directory; None: this process's."""
    descriptors: tuple[int, ...] = ()
    """Open files that it inherits."""
    most_bytes: int = MOST_BYTES
    """Longest line of a reply."""
    own_errors: bool = True
    """Whether stderr is kept for the error; False: it goes to this process's stderr, as for a
    log.
    """

    @property
    def name(self) -> str:
        """Module after `-m`, or the file's name."""
        words = list(self.command)
        if "-m" in words:
            return words[words.index("-m") + 1]
        return Path(next((word for word in words if word.endswith(".py")), words[0])).name


class Failure(Enum):
    """Reasons why a helper gave no reply."""

    TIME = "time"
    MEMORY = "memory"
    CPU = "cpu"
    KILLED = "killed"
    EXITED = "exited"
    GARBAGE = "garbage"


class HelperFailed(UnavailableError):
    """A helper process gave no reply; the message says why, with the last line of its stderr."""

    code = "helper_failed"

    def __init__(
        self,
        program: Program,
        failure: Failure,
        why: str,
        *,
        exit_code: int | None = None,
        last_words: Sequence[str] = (),
    ) -> None:
        """`exit_code`: as of subprocess, negative for a signal; None: this process killed it."""
        detail = f": {last_words[-1][:500]}" if last_words and failure is not Failure.TIME else ""
        is_lost = _is_lost(program, failure, exit_code)
        super().__init__(
            f"{program.name} {why}{detail}", retry_after=LATER_SECONDS if is_lost else None
        )
        self.failure, self.exit_code, self.last_words, self.is_lost = (
            failure,
            exit_code,
            tuple(last_words),
            is_lost,
        )


def _is_lost(program: Program, failure: Failure, exit_code: int | None) -> bool:
    """Whether a failure is the host's: no processor for long, no memory although the program has no
    limit, or a signal that is no crash.
    """
    match failure:
        case Failure.TIME:
            return True
        case Failure.MEMORY:
            return program.memory_bytes is None and not program.limits_itself
        case Failure.KILLED:
            return exit_code is None or -exit_code not in CRASHES
        case Failure.CPU | Failure.EXITED | Failure.GARBAGE:
            return False


class HelperProcess:
    """Running helper. Any thread may call `send` and `kill`; `receive`, `ask` and `close` belong to
    one thread at a time.
    """

    def __init__(self, program: Program) -> None:
        """Start the program. Raises OSError, and UnavailableError off Linux."""
        require_linux()
        self.program = program
        self._popen = _start(program)
        self._guard = threading.Lock()
        self._handle = os.pidfd_open(self._popen.pid)
        self._finish = weakref.finalize(self, _release, self._popen, self._handle)
        self._finish.atexit = False  # threads may still read the pipes then
        weakref.finalize(self, _end, self._popen)
        self._unsent = bytearray()
        self._no_more = False
        self._output, self._searched, self._errors = bytearray(), 0, bytearray()
        self._output_ended_at: float | None = None
        self._cpu_seconds = 0.0
        self._ready = select.poll()
        self._ready.register(self._handle, select.POLLIN)
        for pipe in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                if pipe is not self._popen.stdin:
                    self._ready.register(pipe, select.POLLIN)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative for a signal; None: it still runs."""
        if self._popen.returncode is None and has_ended(self._handle):
            self.kill()  # what is left of its session
        return self._popen.returncode

    @property
    def cpu_seconds(self) -> float:
        """Processor time of the helper's own threads, without its child processes; as it was last
        read, once it has ended.
        """
        if self._popen.returncode is None:
            with contextlib.suppress(OSError):
                self._cpu_seconds = time.clock_gettime(~self.pid << 3 | _CPUCLOCK_SCHED)
        return self._cpu_seconds

    @property
    def last_words(self) -> list[str]:
        """Last lines of its stderr, as far as they were read."""
        return self._errors.decode(errors="replace").strip().splitlines()

    def send(self, message: Any) -> None:
        """Send a line: bytes unchanged, anything else as JSON.

        Never blocks; `receive` reports a helper that has ended.
        """
        with self._guard:
            self._unsent += message if isinstance(message, bytes) else json.dumps(message).encode()
            self._unsent += b"\n"
        self._write()

    def receive(self, seconds: float | None = None) -> bytes | None:
        """Return the next line of its output, without the newline; None: there was none within
        `seconds` (None: no limit).

        Raises HelperFailed if it has ended, or prints a line of more than the program's
        `most_bytes`.
        """
        due = None if seconds is None else time.monotonic() + seconds
        while (end := self._output.find(b"\n", self._searched)) < 0:
            self._searched = len(self._output)
            if self._output_ended_at is not None and self._popen.returncode is not None:
                if not self._output or self._popen.returncode not in (0, REFUSED):
                    raise self._failed()
                end = len(self._output)  # its last line has no newline
                break
            if self._searched > (most := self.program.most_bytes):
                self.kill()
                raise self._failed(Failure.GARBAGE, f"printed a line of more than {most:,} bytes")
            left = SLICE_SECONDS if due is None else due - time.monotonic()
            if left <= 0:
                return None
            self._exchange(min(left, SLICE_SECONDS))
        line = bytes(self._output[:end])
        del self._output[: end + 1]
        self._searched = 0
        return line

    def ask(self, message: Any, seconds: float) -> Any:
        """Send a request and return the parsed reply.

        A helper that does not answer within `seconds` is killed. Raises HelperFailed.
        """
        self.send(message)
        line = self.receive(seconds)
        if line is None:
            raise self.took_too_long(seconds)
        return self.parsed(line)

    def took_too_long(self, seconds: float) -> HelperFailed:
        """Kill the helper, and return the error that says so."""
        self.kill()
        return self._failed(Failure.TIME, f"took longer than {seconds:g} seconds and was ended")

    def kill(self) -> None:
        """Kill the helper and all processes of its session. Repeating it does nothing."""
        _end(self._popen)

    def close(self) -> None:
        """Kill the helper, and close its pipes."""
        self._finish()

    def end(self, seconds: float) -> None:
        """Close its input, give it `seconds` to end by itself, and close its pipes."""
        self.close_input()
        due = time.monotonic() + seconds
        with contextlib.suppress(HelperFailed):
            while self.receive(due - time.monotonic()) is not None:
                pass
        self.close()

    def close_input(self) -> None:
        """Close its input after what was sent before."""
        with self._guard:
            self._no_more = True
        self._write()

    def _write(self) -> None:
        """Write what fits into the pipe; the rest is written while a caller waits for the reply."""
        stdin = self._popen.stdin
        assert stdin is not None
        with self._guard:
            if stdin.closed:
                return
            try:
                while self._unsent:
                    del self._unsent[: os.write(stdin.fileno(), self._unsent[: 2**20])]
            except BlockingIOError:
                return
            except OSError:  # it has closed its input
                self._unsent.clear()
            if self._no_more:
                stdin.close()

    def _exchange(self, seconds: float) -> None:
        """Wait until something can be read or written, and read or write it."""
        stdin = self._popen.stdin
        stdout = self._popen.stdout
        stderr = self._popen.stderr
        assert stdin is not None
        assert stdout is not None
        number = stdin.fileno() if not stdin.closed else -1
        waiting = bool(self._unsent)
        if waiting and number >= 0:
            self._ready.register(number, select.POLLOUT)
        events = {descriptor for descriptor, _ in self._ready.poll(max(1, seconds * 1000))}
        if waiting and number >= 0:
            self._ready.unregister(number)
            self._write()
        if stdout.fileno() in events and _drain(stdout.fileno(), self._output):
            self._ready.unregister(stdout)
            self._output_ended_at = time.monotonic()
        if (
            stderr is not None
            and stderr.fileno() in events
            and _drain(stderr.fileno(), self._errors, LAST_WORDS_BYTES)
        ):
            self._ready.unregister(stderr)
        late = (
            self._output_ended_at is not None
            and time.monotonic() - self._output_ended_at > END_SECONDS
        )
        if self._handle in events or late:
            self.kill()  # what is left of its session, if it has ended itself
            for pipe, kept in ((stdout, self._output), (stderr, self._errors)):
                if pipe is not None:
                    _drain(pipe.fileno(), kept, MOST_BYTES if pipe is stdout else LAST_WORDS_BYTES)
            self._output_ended_at = self._output_ended_at or time.monotonic()

    def parsed(self, line: bytes) -> Any:
        """Parse a line of JSON.

        A helper that prints anything else is killed. Raises HelperFailed.
        """
        try:
            return json.loads(line)
        except ValueError:
            self.kill()
            shown = line[:200].decode(errors="replace")
            raise self._failed(Failure.GARBAGE, f"printed what is not JSON: {shown!r}") from None

    def _failed(self, failure: Failure | None = None, why: str = "") -> HelperFailed:
        """Return the error for a missing reply: `failure`, or else what its exit code and stderr
        say.
        """
        code = self.exit_code
        last_words = self.last_words
        limit = self.program.memory_bytes
        if failure is None and ran_out_of_memory(last_words):
            failure = Failure.MEMORY
            why = (
                "got no more memory from the host"
                if limit is None
                else f"needed more than {limit // 2**20:,} MiB of memory"
            )
        elif failure is None and code == -signal.SIGXCPU:
            spent = self.program.cpu_seconds
            failure = Failure.CPU
            why = (
                f"needed more than {spent:,} seconds of a processor"
                if spent
                else "used its processor time up"
            )
        elif failure is None and code is not None and code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
            often = "; often the host ran out of memory" if -code == signal.SIGKILL else ""
            failure = Failure.KILLED
            why = f"was killed by signal {-code} ({name}){often}"
        elif failure is None:
            failure = Failure.EXITED
            why = f"ended with code {code} without an answer"
        return HelperFailed(self.program, failure, why, exit_code=code, last_words=last_words)


def ran_out_of_memory(last_words: Sequence[str]) -> bool:
    """Return whether the last lines of a process report a failed allocation."""
    return any(message in line for line in last_words[-5:] for message in _OUT_OF_MEMORY)


def run_once(
    program: Program,
    request: Any = None,
    *,
    seconds: float | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Any:
    """Start a helper, send `request` unless it is None, and return the JSON of its last line after
    it has ended. Blocks.

    `seconds`: limit on the whole call; None: no limit. `stop`: polled twice a second; True kills
    the helper. Raises SpecError for a request that the helper refuses, HelperFailed if it hangs,
    dies, is killed or prints no JSON.
    """
    due = None if seconds is None else time.monotonic() + seconds
    with HelperProcess(program) as helper:
        if request is not None:
            helper.send(request)
        helper.close_input()
        last = b""
        while True:
            left = SLICE_SECONDS if due is None else min(SLICE_SECONDS, due - time.monotonic())
            if seconds is not None and left <= 0:
                raise helper.took_too_long(seconds)
            if stop():
                helper.kill()
            try:
                last = helper.receive(left) or last
            except HelperFailed as ended:
                if not last or ended.exit_code not in (0, REFUSED):
                    raise
                reply = helper.parsed(last)
                if ended.exit_code == 0:
                    return reply
                if not isinstance(reply, dict) or not isinstance(reply.get("error"), str):
                    raise
                raise SpecError(
                    reply["error"], param=reply.get("param"), code=reply.get("code")
                ) from None


def _start(program: Program) -> subprocess.Popen[bytes]:
    if threading.current_thread() is threading.main_thread():
        return _popen(program)
    return _starter(os.getpid()).submit(_popen, program).result()


@cache
def _starter(_pid: int) -> ThreadPoolExecutor:
    """Return a thread that lives as long as this process: the kernel kills a tied child when the
    *thread* that started it ends.
    """
    return ThreadPoolExecutor(1, "helper-starter")


def _popen(program: Program) -> subprocess.Popen[bytes]:
    limits = (
        os.getpid(),
        program.memory_bytes or 0,
        program.cpu_seconds or 0,
        program.niceness,
        int(program.expendable),
    )
    variables = {installation.PYTHONPATH: installation.python_path(os.environ), **program.variables}
    return subprocess.Popen(
        [sys.executable, "-I", "-S", helper_start.__file__, *map(str, limits), *program.command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if program.own_errors else None,
        bufsize=0,
        cwd=program.folder,
        env=child_environment(os.environ, *program.needs, **variables),
        pass_fds=program.descriptors,
        # Ctrl-C reaches only this process, and the whole session can be killed
        start_new_session=True,
    )


def _end(popen: subprocess.Popen[bytes]) -> None:
    if popen.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(popen.pid, signal.SIGKILL)
        popen.wait()


def _release(popen: subprocess.Popen[bytes], handle: int) -> None:
    _end(popen)
    os.close(handle)
    for pipe in (popen.stdin, popen.stdout, popen.stderr):
        if pipe is not None:
            pipe.close()


def _drain(descriptor: int, kept: bytearray, most: int = MOST_BYTES) -> bool:
    """Read what is available, and keep at least the last `most` bytes (all of the output).

    True: the stream has ended.
    """
    for _ in range(16):  # it may write as fast as this loop reads
        try:
            part = os.read(descriptor, 2**16)
        except BlockingIOError:
            return False
        kept += part
        if most < MOST_BYTES and len(kept) > 2 * most:
            del kept[:-most]
        if not part:
            return True
    return False
