"""Python graders try to get out of their fence. Each attempt is a real process."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import sysconfig
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from ft_service.errors import UnavailableError
from ft_service.graders import python_fence, system_calls
from ft_service.graders.grades import GradingError, Score
from ft_service.graders.python_fence import FencedGrader
from ft_service.shared_work.losses import TRIES
from tests.support.attempts import HANG_SECONDS, family
from tests.support.graders import case
from tests.support.rest.service import wait_until

fenced_here = pytest.mark.skipif(
    python_fence.refusal({}) is not None,
    reason=f"no fence on this host: {python_fence.refusal({})}",
)


def graded(source: str, *, seconds: float = 60.0) -> Score:
    """The score of a grader whose body is `source`."""
    body = f"def grade(sample, item):\n{textwrap.indent(textwrap.dedent(source), '    ')}"
    with FencedGrader(body, private={}, seconds=seconds) as grader:
        return grader.score(case("4", {"n": 4}).as_json())


@fenced_here
def test_it_computes_and_prints() -> None:
    assert graded("print('x' * 10**6)\nreturn float(sample['output_text']) / item['n']") == Score(
        1.0
    )
    assert graded("import numpy\nreturn numpy.float32(0.5)") == Score(0.5), (
        "packages beside the service"
    )
    assert graded("import threading, json, random, datetime, re\nreturn True") == Score(1.0)


@fenced_here
@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import socket; socket.socket()", "PermissionError"),
        (
            "import urllib.request; urllib.request.urlopen('http://127.0.0.1:1')",
            "PermissionError|Operation not permitted",
        ),
        ("import os; os.fork()", "PermissionError"),
        ("import subprocess; subprocess.run(['/usr/bin/env'])", "PermissionError"),
        ("import threading; threading.Thread(target=print).start()", "can't start new thread"),
        ("import os; os.posix_spawn('/usr/bin/env', ['env'], {})", "PermissionError"),
        ("open('/etc/passwd').read()", "FileNotFoundError"),
        ("open('/proc/1/environ').read()", "FileNotFoundError"),
        ("open('/proc/self/mem').read()", "FileNotFoundError"),
        ("open('/sys/kernel/version').read()", "FileNotFoundError"),
        ("open('/dev/mem').read()", "FileNotFoundError"),
        ("open('/tmp/x', 'w')", "Read-only file system|FileNotFoundError"),
        ("open('/x', 'w')", "Read-only file system|PermissionError"),
        ("import os; os.mkdir('/x')", "PermissionError"),
        ("import os; os.memfd_create('x')", "PermissionError"),
        ("import os; os.mkfifo('/x')", "PermissionError"),
        ("import os; os.kill(1, 9)", "PermissionError"),
        ("import os; os.setuid(0)", "PermissionError"),
        ("import os; os.sched_setaffinity(0, {0})", "PermissionError"),
        ("import os; os.chroot('/usr')", "PermissionError"),
        (
            "import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))",
            "not allowed to raise maximum limit",
        ),
        ("x = bytearray(3 * 2**30)", "MemoryError"),
        ("x = [0]\nwhile True: x += x", "MemoryError"),
        ("raise SystemExit(0)", "SystemExit"),
        ("import json; return float('nan')", "no finite number"),
        ("return float('inf')", "no finite number"),
        ("return 'a lot'", "could not convert"),
        ("return 10 ** 400", "OverflowError"),
        ("return None", "TypeError"),
    ],
)
def test_it_gets_at_nothing(source: str, error: str) -> None:
    score = graded(source)
    assert score.error == "python_grader_runtime_error"
    assert any(part in score.detail for part in error.split("|")), score.detail
    assert str(Path(python_fence.__file__).parent) not in score.detail


@fenced_here
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers are x86-64's")
def test_raw_system_calls_are_refused_too() -> None:
    """Those that libraries hide: clone, clone3, io_uring, bpf, keyctl, unshare, mount, ptrace."""
    source = """
        import ctypes
        call = ctypes.CDLL(None, use_errno=True).syscall
        made = {number: (call(number, 0, 0, 0, 0, 0), ctypes.get_errno()) for number in (56, 435, 425, 321, 250, 272, 165, 101)}
        return float(all(answer == (-1, 1) for answer in made.values()))
    """
    assert graded(source) == Score(1.0)


@fenced_here
def test_it_sees_no_environment_and_no_file_of_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    monkeypatch.setenv("FT_API_KEY", "hidden")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    source = f"""
        import os
        def is_open(number):
            try: return bool(os.fstat(number))
            except OSError: return False
        assert set(os.environ) <= {{"OPENBLAS_NUM_THREADS", "LANG", "PWD", "LC_CTYPE"}}, os.environ
        assert not os.path.exists({str(secret)!r})
        assert os.listdir("/etc") in ([], ["ld.so.cache"]) and not os.path.exists("/root/.ssh") and not os.path.exists("/home")
        return float([number for number in range(64) if is_open(number)] == [0, 1, 2, 3])
    """
    assert graded(source) == Score(1.0)


@fenced_here
@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("while True: pass", "time: "),
        ("import time; time.sleep(99)", "time: "),
        ("import os; os._exit(0)", "exited: "),
        ("import os; os.abort()", "exited: "),
        ("import ctypes; ctypes.string_at(0)", "exited: "),
        ("import os\nwhile True: os.write(3, b'x' * 65536)", "garbage: "),
        ("import os; os.write(3, b'nonsense\\n'); return 1", "garbage: "),
        ("import os; os.write(3, b'[' * 50000 + b'\\n'); return 1", "garbage: "),
        (
            "import os, sys; os.execv(sys.executable, ['python', '-ISc', 'import time; "
            "time.sleep(99)'])",
            "time: ",
        ),
    ],
)
def test_one_that_hangs_or_dies_is_ended_and_the_next_case_graded(source: str, said: str) -> None:
    body = f"def grade(sample, item):\n    if item: return 1\n{textwrap.indent(source, '    ')}"
    with FencedGrader(body, private={}) as grader:
        grader.start()  # which takes its own time
        grader._seconds = 1.0
        failed = grader.score(case("4").as_json())
        assert (failed.error, failed.detail[: len(said)]) == ("python_grader_server_error", said), (
            failed
        )
        grader._seconds = HANG_SECONDS
        assert grader.score(case("4", {"n": 1}).as_json()) == Score(1.0)


@fenced_here
def test_a_case_whose_process_the_host_kills_is_graded_again() -> None:
    """The process within the fence, or the one around it, while a case is graded and while it is
    idle.
    """
    # Slow, so that no answer is on its way when the process is killed.
    source = "import time\ndef grade(sample, item):\n    time.sleep(1)\n    return 1"
    with FencedGrader(source, private={}) as grader:
        for kill_within in (True, False):
            grader.start()
            assert grader._process is not None
            pid = grader._process.pid
            os.kill(family(pid)[-1] if kill_within else pid, signal.SIGKILL)
            assert grader.score(case("4").as_json()) == Score(1.0)
            assert grader._process.pid != pid


@fenced_here
def test_a_case_whose_process_is_always_killed_is_later_and_never_a_grade(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(python_fence, "FIRST_PAUSE_SECONDS", 0.01)
    graded = FencedGrader._graded
    killed: list[int] = []

    def struck(grader: FencedGrader, message: bytes) -> Any:
        if grader._process is None:
            grader._load()
        assert grader._process is not None
        killed.append(grader._process.pid)
        os.kill(killed[-1], signal.SIGKILL)
        return graded(grader, message)

    # Slow, so that no answer is on its way when the process is killed.
    source = "import time\ndef grade(sample, item):\n    time.sleep(1)\n    return 1"
    with FencedGrader(source, private={}) as grader:
        monkeypatch.setattr(FencedGrader, "_graded", struck)
        with pytest.raises(UnavailableError, match="killed by signal 9") as lost:
            grader.score(case("4").as_json())
        assert (lost.value.is_lost, len(killed)) == (True, TRIES)
        monkeypatch.setattr(FencedGrader, "_graded", graded)
        assert grader.score(case("4").as_json()) == Score(1.0)


@fenced_here
def test_nothing_of_it_outlives_its_grader() -> None:
    with FencedGrader("def grade(sample, item):\n    while True: pass", private={}) as grader:
        grader.start()
        assert grader._process is not None
        pid = grader._process.pid
        below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        assert below
        lost: list[UnavailableError] = []

        def score() -> None:
            with pytest.raises(UnavailableError) as caught:
                grader.score(case("4").as_json())
            lost.append(caught.value)

        thread = threading.Thread(target=score)
        thread.start()
        grader.kill()
        thread.join()
        assert lost[0].is_lost
    wait_until(lambda: not any(Path(f"/proc/{one}").exists() for one in (pid, *below)))


@fenced_here
def test_a_source_that_does_not_load_says_why() -> None:
    for source, said in (
        ("def grade(", "SyntaxError"),
        ("grade = 1", "defines no function grade"),
        ("1/0", "ZeroDivisionError"),
    ):
        with FencedGrader(source, private={}) as grader, pytest.raises(GradingError) as error:
            grader.start()
        assert said in error.value.detail
        with FencedGrader(source, private={}) as grader:
            assert grader.score(case("4").as_json()).error == "python_grader_runtime_error"


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("no bwrap", "apt install bubblewrap"),
        ("no libseccomp", "libseccomp2"),
        ("no namespaces", "must allow this service user"),
    ],
)
def test_without_a_fence_python_is_refused_with_what_to_do(
    broken: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bwrap = tmp_path / "bwrap"
    bwrap.write_text(
        "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n"
    )
    bwrap.chmod(0o755)
    monkeypatch.setenv(
        "PATH",
        str(tmp_path) + os.pathsep + "/usr/bin:/bin"
        if broken != "no bwrap"
        else str(tmp_path / "none"),
    )
    if broken == "no libseccomp":
        monkeypatch.setattr(system_calls, "_LIBRARY", "libnone.so")
        system_calls.filter_program.cache_clear()
    python_fence._prove.cache_clear()
    refusal = python_fence.refusal({}) or ""
    python_fence._prove.cache_clear()
    system_calls.filter_program.cache_clear()
    assert said in refusal
    assert "Use string_check, text_similarity, or an endpoint grader" in refusal
    if broken == "no namespaces":
        assert "No permissions to create new namespace" in refusal


@fenced_here
@pytest.mark.parametrize("folder", ["/usr", sys.base_prefix])
def test_of_usr_and_of_the_prefix_only_libraries_are_seen(folder: str) -> None:
    """People keep state in both: /usr/local/ft, and the folder of a conda environment."""
    seen = f"""
        import os, sys
        seen = {{name for name in os.listdir({folder!r}) if os.path.isdir(os.path.join({folder!r}, name))}}
        assert seen <= {{"lib", "lib32", "lib64", "local", "share", "bin"}}, seen
        python = os.path.basename(sys.executable)
        for name, few in (("local", {{"lib", "lib64", "bin"}}), ("share", {{"zoneinfo"}}), ("bin", {{python}})):
            path = os.path.join({folder!r}, name)
            assert not os.path.isdir(path) or set(os.listdir(path)) <= few, (name, os.listdir(path))
        return 1
    """
    assert graded(seen) == Score(1.0)


@fenced_here
@pytest.mark.parametrize(
    ("below", "sees"), [("/usr/share", False), (f"{sysconfig.get_path('stdlib')}/wsgiref", True)]
)
def test_a_home_below_usr_is_not_seen_or_python_is_refused(
    below: str, sees: bool, tmp_path: Path
) -> None:
    """In a mount namespace of its own, with an empty file system over a folder that nothing here
    needs.
    """
    home = f"{below}/ft"
    source = (
        f"def grade(sample, item): return float(open('{home}/credentials').read() == 'the key')"
    )
    program = f"""
        import os, pathlib
        from ft_service.graders.grades import Sample
        from ft_service.graders.grading import GraderContext, grade, parse_grader
        from ft_service.graders.limits import GraderLimits
        from ft_service.settings import Settings
        os.makedirs("{home}")
        pathlib.Path("{home}/credentials").write_text("the key")
        limits = GraderLimits.from_settings(Settings(home="{home}"))
        given = {{"type": "python", "name": "p", "source": {source!r}}}
        try:
            grader = parse_grader(given, limits)
        except Exception as error:
            print(error.code, error.message)
            grader = parse_grader(given, GraderLimits())  # as a job has it that was accepted before the home was moved
        graded = grade(grader, Sample("4"), {{}}, GraderContext(project="p", limits=limits))
        print(graded.reward, *graded.errors)
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    mount = f'mount -t tmpfs none {below} && exec "$0" "$1"'
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FT_")}
    environment["PYTHONPATH"] = str(Path(python_fence.__file__).parents[2])
    command = [
        "unshare",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        mount,
        sys.executable,
        str(tmp_path / "program.py"),
    ]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    said = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    if sees:
        assert said[0].startswith(
            "not_available grader: a grader of type 'python' is not available: "
        )
        assert "it would show FT_HOME" in said[0]
        assert home not in said[0]
        assert said[1:] == ["0.0 python_grader_server_error"]
    else:
        assert said == ["0.0 python_grader_runtime_error"]


def test_what_lies_in_a_folder_that_graders_see_is_found_behind_links(tmp_path: Path) -> None:
    seen = tmp_path / "lib"
    elsewhere = tmp_path / "elsewhere"
    (seen / "state").mkdir(parents=True)
    elsewhere.mkdir()
    (elsewhere / "link").symlink_to(seen / "state")
    (tmp_path / "lib-too").symlink_to(seen)
    private = {
        "A": seen,
        "B": seen / "state" / "none",
        "C": elsewhere / "link",
        "D": elsewhere,
        "E": tmp_path,
        "F": tmp_path / "lib2",
    }
    assert python_fence.within(private, [str(seen)]) == dict.fromkeys("ABC", str(seen))
    assert python_fence.within(private, [str(tmp_path / "lib-too")]).keys() == set("ABC")
