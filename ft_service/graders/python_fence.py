"""The process in which a python grader runs: bubblewrap with namespaces of its own, a filter of
system calls, and hard limits.

Within it there is no network, no other process, no /proc, and no file but those of the folders of
libraries, read-only; nothing can be written anywhere. The grader can start neither a process nor a
thread, so that it has one processor. It has 2 GB of memory and two minutes for a case. Where such a
fence cannot be made, or would show what is private to the service, python graders are refused by
name.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from ft_service.errors import UnavailableError
from ft_service.graders import fenced_program, system_calls
from ft_service.graders.grades import GradingError, Score, as_reward
from ft_service.host.helper_process import Failure, HelperFailed, HelperProcess, Program
from ft_service.shared_work.losses import persist

SECONDS = 120.0
"""Time for a case, and for loading the source."""
MEMORY_BYTES = 2 * 1024**3
MOST_ANSWERED = 64 * 1024
"""Bytes of an answer, at most: a number, or the end of a traceback."""
_SYSTEM = (
    "/usr/lib",
    "/usr/lib32",
    "/usr/lib64",
    "/usr/local/lib",
    "/usr/local/lib64",
    "/usr/share/zoneinfo",
)
"""Folders of the system's libraries.

All of /usr would be more than Python reads: people keep state below it.
"""
_ROOT = ("/lib", "/lib64")
"""Folders of libraries that most systems have below /usr, with links to there."""
FIRST_PAUSE_SECONDS = 0.5
"""Pause before a case whose process was killed is graded again."""
_KILLED = 128 + signal.SIGKILL
"""Exit code of bubblewrap if the grader within was killed."""
_Result = TypeVar("_Result")
_PROGRAM = "/grader/python_grader.py"
_PROBE_SECONDS = 20.0
_INSTEAD = (
    "Use string_check, text_similarity, or an endpoint grader, which runs your code on "
    "your own server"
)


def refusal(private: Mapping[str, Path]) -> str | None:
    """Why python graders are refused on this host, and what to do; None: they run.

    It is found out by running one. `private`: as for `shown`.
    """
    why = _missing() or _told(shown(private))
    if why is None:
        try:
            _prove()
            return None
        except (GradingError, OSError) as error:
            detail = error.detail if isinstance(error, GradingError) else str(error)
            why = (
                f"bubblewrap cannot make the fence: {detail}. The operator must allow this "
                "service user namespaces, as "
                "containers often do not"
            )
    return f"there is no fence to run code of requests in: {why}. {_INSTEAD}"


def shown(private: Mapping[str, Path]) -> dict[str, str]:
    """Return what python graders would see of the service's own: name → the folder of libraries
    that it lies in, links followed. `private`: name → a file or folder with state or secrets.
    """
    return within(private, [path for path in (*_read_only(), *_ROOT) if Path(path).is_dir()])


def within(private: Mapping[str, Path], folders: Iterable[str]) -> dict[str, str]:
    """Return which of these paths lie in one of these folders, or are one: name → the folder.

    Links are followed.
    """
    real = {folder: os.path.realpath(folder) for folder in folders}
    places = {name: Path(os.path.realpath(path)) for name, path in private.items()}
    return {
        name: folder
        for folder, at in real.items()
        for name, path in places.items()
        if path.is_relative_to(at)
    }


def _told(found: Mapping[str, str]) -> str | None:
    """`shown` in words for whoever sends a grader, to whom no path of this host is told; None:
    nothing is shown.
    """
    if not found:
        return None
    return (
        f"it would show {', '.join(found)}. The operator must move that out of the folders of "
        "Python's and of other libraries"
    )


@cache  # of success: what raises is tried again
def _prove() -> None:
    """Run a grader. Raises GradingError, OSError."""
    with FencedGrader(
        "def grade(sample, item): return 1.0", private={}, seconds=_PROBE_SECONDS
    ) as grader:
        grader.start()


def _missing() -> str | None:
    if sys.platform != "linux":
        return f"it needs Linux, and this is {sys.platform}"
    if shutil.which("bwrap") is None:
        return "the operator must install bubblewrap (apt install bubblewrap)"
    try:
        system_calls.filter_program()
    except OSError as error:
        return f"the operator must install libseccomp (apt install libseccomp2): {error}"
    return None


class FencedGrader:
    """A python grader's process, which is started by `start` or the first case, and again after it
    died. For one thread; another one may `kill` it.
    """

    def __init__(
        self, source: str, *, private: Mapping[str, Path], seconds: float = SECONDS
    ) -> None:
        """`private`: as for `shown`; none is started while something is.

        `seconds`: limit for a case, and for loading the source.
        """
        self._source = source
        self._private = private
        self._seconds = seconds
        self._process: HelperProcess | None = None
        self._killed = False

    def __enter__(self) -> FencedGrader:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def start(self) -> None:
        """Load the source. Raises GradingError if it cannot be loaded, UnavailableError if the host
        lets no process load it.
        """
        self._persist(self._load)

    def score(self, message: bytes) -> Score:
        """Grade a case, which is JSON.

        If the host kills the process, the case is graded by another one. Raises UnavailableError if
        it kills each: that is no grade.
        """
        try:
            reply = self._persist(partial(self._graded, message))
            reward = as_reward(reply.get("reward"))
            if reward is None:
                raise GradingError(
                    "python_grader_runtime_error",
                    f"grade returned {reply.get('reward')}: no finite number",
                )
            return Score(reward)
        except GradingError as error:
            return Score.failed(error)

    def _load(self) -> None:
        self._end()
        if why := _told(
            shown(self._private)
        ):  # a job that was accepted may outlive a move of FT_HOME
            raise GradingError(
                "python_grader_server_error", f"python graders cannot run now: {why}"
            )
        self._process = process = _started()
        if self._killed:
            process.kill()
        begin = {"source": self._source, "packages": _packages(), "memory_bytes": MEMORY_BYTES}
        self._ask(process, begin)

    def kill(self) -> None:
        """End the process, and start none again."""
        self._killed = True
        if (process := self._process) is not None:
            process.kill()

    def _persist(self, call: Callable[[], _Result]) -> _Result:
        return persist(
            "a python grader", call, first=FIRST_PAUSE_SECONDS, stop=lambda: self._killed
        )

    def _graded(self, message: Any) -> dict[str, Any]:
        """The reply to a case. Raises GradingError, and UnavailableError if the process was
        killed.
        """
        if self._process is None:
            self._load()
        assert self._process is not None
        return self._ask(self._process, message)

    def _ask(self, process: HelperProcess, message: Any) -> dict[str, Any]:
        try:
            process.send(message)
            line = process.receive(self._seconds)
            if line is None:
                raise process.took_too_long(self._seconds)
            reply = json.loads(line) if len(line) <= MOST_ANSWERED else None
        except HelperFailed as error:
            self._end()
            if error.failure is Failure.KILLED or error.exit_code == _KILLED:
                raise UnavailableError(error.message) from None
            raise GradingError(
                "python_grader_server_error", f"{error.failure.value}: {error.message}"
            ) from None
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict):
            self._end()
            raise GradingError(
                "python_grader_server_error",
                f"{Failure.GARBAGE.value}: the grader wrote over its answer",
            )
        if "error" in reply:
            raise GradingError("python_grader_runtime_error", str(reply["error"]))
        return reply

    def _end(self) -> None:
        if self._process is not None:
            self._process.close()
        self._process = None


def _started() -> HelperProcess:
    descriptor = os.memfd_create("filter")
    try:
        os.write(descriptor, system_calls.filter_program())
        os.lseek(descriptor, 0, os.SEEK_SET)
        command = _command(descriptor)
        return HelperProcess(
            Program(
                command=command,
                expendable=True,
                niceness=10,
                descriptors=(descriptor,),
                most_bytes=MOST_ANSWERED,
            )
        )
    finally:
        os.close(descriptor)


def _command(filter_descriptor: int) -> list[str]:
    python = os.path.realpath(sys.executable)
    bound = [word for path in (*_read_only(), python) for word in ("--ro-bind", path, path)]
    links = [word for path in _ROOT for word in _as_here(path)]
    return [
        *(
            "bwrap",
            "--unshare-all",
            "--unshare-user",
            "--die-with-parent",
            "--new-session",
            "--cap-drop",
            "ALL",
        ),
        *("--uid", "65534", "--gid", "65534", "--hostname", "grader", "--clearenv"),
        *("--setenv", "OPENBLAS_NUM_THREADS", "1", "--setenv", "LANG", "C.UTF-8"),
        *bound,
        *links,
        *("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"),
        *("--ro-bind", os.path.realpath(fenced_program.__file__), _PROGRAM),
        *("--remount-ro", "/", "--chdir", "/", "--seccomp", str(filter_descriptor)),
        *("--", python, "-I", "-S", "-B", _PROGRAM),
    ]


def _read_only() -> list[str]:
    """Folders of this host that a grader sees: the system's libraries, Python's, and the packages
    beside it. Of Python's prefix its libraries alone: a prefix may be anybody's folder, with all
    that they keep in it.
    """
    prefixes = (os.path.realpath(sys.base_prefix), os.path.realpath(sys.base_exec_prefix))
    own = [os.path.join(prefix, name) for prefix in prefixes for name in ("lib", sys.platlibdir)]  # noqa: PTH118
    wanted = [path for path in (*_SYSTEM, *own, *_packages()) if Path(path).is_dir()]
    return [
        path
        for path in dict.fromkeys(wanted)
        if not any(_is_below(path, other) for other in wanted)
    ]


def _packages() -> Sequence[str]:
    """Folders of installed packages, which a grader may import."""
    paths = {os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    return sorted(path for path in paths if Path(path).is_dir())


def _is_below(path: str, folder: str) -> bool:
    return path != folder and Path(path).is_relative_to(folder)


def _as_here(path: str) -> Sequence[str]:
    """Where a folder of the root leads here: mostly below /usr."""
    if not os.path.exists(path):  # noqa: PTH110
        return ()
    return (
        ("--symlink", str(Path(path).readlink()), path)
        if Path(path).is_symlink()
        else ("--ro-bind", path, path)
    )
