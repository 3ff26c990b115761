from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ft_service.errors import SpecError
from ft_service.host import processes
from ft_service.host.helper_process import Failure, HelperFailed, HelperProcess, Program, run_once
from tests.support.attempts import wait_for

ECHO = """
import json, sys
for line in sys.stdin:
    print(json.dumps({"echo": json.loads(line)}), flush=True)
"""


def program(code: str, **options: object) -> Program:
    return Program(command=(sys.executable, "-c", code), **options)  # pyright: ignore[reportArgumentType]


def failure_of(
    code: str, request: object = None, seconds: float | None = 30.0, **options: object
) -> HelperFailed:
    with pytest.raises(HelperFailed) as error:
        run_once(program(code, **options), request, seconds=seconds)
    return error.value


def test_one_request_and_one_reply() -> None:
    assert run_once(program(ECHO), {"a": 1}, seconds=30) == {"echo": {"a": 1}}


def test_the_last_line_is_the_reply_even_without_its_end() -> None:
    assert run_once(program("print('loading'); print('[1, 2]', end='')"), seconds=30) == [1, 2]


def test_a_request_larger_than_a_pipe_arrives_whole_and_so_does_the_reply() -> None:
    text = "x" * 3_000_000
    assert run_once(program(ECHO), text, seconds=60) == {"echo": text}


def test_many_requests_one_after_the_other_in_one_process() -> None:
    with HelperProcess(program(ECHO)) as helper:
        assert [helper.ask(number, seconds=30)["echo"] for number in range(50)] == list(range(50))
        assert helper.exit_code is None
    assert helper.exit_code == -signal.SIGKILL


def test_a_helper_that_hangs_is_ended_within_its_time() -> None:
    begun = time.monotonic()
    error = failure_of("import time; time.sleep(600)", seconds=1.0)
    assert time.monotonic() - begun < 300, "it would take 600 seconds"
    assert error.failure is Failure.TIME
    assert "took longer than 1 seconds" in error.message


def test_a_helper_that_does_not_read_its_request_is_ended_within_its_time() -> None:
    assert (
        failure_of("import time; time.sleep(600)", "x" * 3_000_000, seconds=1.0).failure
        is Failure.TIME
    )


def test_a_helper_that_prints_for_ever_is_ended_within_its_time() -> None:
    assert failure_of("while True: print('a line')", seconds=1.0).failure is Failure.TIME


def test_a_helper_that_takes_too_much_memory_is_refused_it_and_says_so() -> None:
    error = failure_of("held = bytearray(2**30); print('{}')", memory_bytes=256 * 2**20)
    assert error.failure is Failure.MEMORY
    assert "needed more than 256 MiB of memory: MemoryError" in error.message


@pytest.mark.parametrize(
    ("code", "options", "is_lost"),
    [
        ("import os; os.kill(os.getpid(), 9)", {}, True),
        ("import os; os.kill(os.getpid(), 15)", {}, True),
        ("import os; os.kill(os.getpid(), 11)", {}, False),
        ("while True: pass", {"cpu_seconds": 1}, False),
        ("held = bytearray(2**30)", {"memory_bytes": 256 * 2**20}, False),
        ("raise MemoryError", {}, True),
        ("raise MemoryError", {"limits_itself": True}, False),
        ("raise ValueError", {}, False),
        ("print('no JSON')", {}, False),
    ],
)
def test_only_the_host_loses_a_helper(code: str, options: dict[str, Any], is_lost: bool) -> None:
    assert failure_of(code, **options).is_lost is is_lost


def test_a_helper_that_takes_too_much_processor_time_is_ended_and_says_so() -> None:
    error = failure_of("while True: pass", cpu_seconds=1)
    assert error.failure is Failure.CPU
    assert "needed more than 1 seconds of a processor" in error.message


def test_what_is_below_the_limit_on_memory_is_not_refused() -> None:
    assert (
        run_once(
            program("held = bytearray(2**27); print('{}')", memory_bytes=256 * 2**20), seconds=30
        )
        == {}
    )


def test_a_helper_that_prints_no_json_is_told_by_what_it_printed() -> None:
    error = failure_of("print('hello')")
    assert error.failure is Failure.GARBAGE
    assert "'hello'" in error.message


def test_garbage_for_a_reply_ends_the_process() -> None:
    with HelperProcess(program("input(); print('nonsense', flush=True); input()")) as helper:
        with pytest.raises(HelperFailed, match="not JSON: 'nonsense'"):
            helper.ask({}, seconds=30)
        assert helper.exit_code == -signal.SIGKILL


def test_a_line_without_end_is_not_collected_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ft_service.host.helper_process.MOST_BYTES", 2**20)
    error = failure_of("import sys\nwhile True: sys.stdout.write('x' * 65536)")
    assert error.failure is Failure.GARBAGE


def test_the_last_line_of_stderr_is_in_the_error() -> None:
    error = failure_of("import sys; print('first', file=sys.stderr); sys.exit('what went wrong')")
    assert error.failure is Failure.EXITED
    assert error.exit_code == 1
    assert error.message.endswith("ended with code 1 without an answer: what went wrong")
    assert error.last_words == ("first", "what went wrong")


def test_a_reply_of_a_process_that_failed_afterwards_is_none() -> None:
    assert failure_of("import os; print('{}', flush=True); os._exit(3)").exit_code == 3


def test_a_helper_that_is_killed_is_told_by_the_signal() -> None:
    error = failure_of("import os; os.kill(os.getpid(), 11)")
    assert error.failure is Failure.KILLED
    assert "signal 11 (SIGSEGV)" in error.message


def test_a_flood_on_stderr_holds_nothing_up_and_only_its_end_is_kept() -> None:
    code = """
import sys
sys.stderr.write("noise " * 2_000_000 + "\\nthe end\\n")
sys.stderr.flush()
input()
print("{}", flush=True)
sys.exit(5)
"""
    error = failure_of(code, {})
    assert error.last_words[-1] == "the end"
    assert sum(map(len, error.last_words)) <= 2 * 16 * 1024


def test_a_refusal_is_raised_as_the_request_s_fault() -> None:
    code = (
        'import sys; print(\'{"error": "no such base", "code": "missing", "param": '
        '"model"}\'); sys.exit(64)'
    )
    with pytest.raises(SpecError, match="no such base") as error:
        run_once(program(code), seconds=30)
    assert (error.value.code, error.value.param) == ("missing", "model")


@pytest.mark.parametrize("said", ["", "[]", "{}", '{"error": 5}'])
def test_a_refusal_that_does_not_say_why_is_a_failure(said: str) -> None:
    assert failure_of(f"import sys; print({said!r}); sys.exit(64)").exit_code == 64


def test_stop_ends_it() -> None:
    asked = threading.Event()
    threading.Timer(0.3, asked.set).start()
    with pytest.raises(HelperFailed) as error:
        run_once(program("import time; time.sleep(600)"), stop=asked.is_set)
    assert error.value.failure is Failure.KILLED


def test_another_thread_can_kill_it_while_a_reply_is_awaited() -> None:
    with HelperProcess(program("import time; time.sleep(600)")) as helper:
        threading.Timer(0.3, helper.kill).start()
        with pytest.raises(HelperFailed, match="signal 9"):
            helper.receive()


def test_it_outlives_the_thread_that_started_it() -> None:
    started: list[HelperProcess] = []
    thread = threading.Thread(target=lambda: started.append(HelperProcess(program(ECHO))))
    thread.start()
    thread.join()
    with started[0] as helper:
        assert helper.ask(1, seconds=30) == {"echo": 1}
        time.sleep(0.2)
        assert helper.ask(2, seconds=30) == {"echo": 2}


def test_one_that_is_no_longer_used_is_ended() -> None:
    helper = HelperProcess(program(ECHO))
    process = processes.of(helper.pid)
    del helper
    gc.collect()
    wait_for(lambda: not processes.is_alive(process))


def test_one_that_a_thread_waits_for_is_killed_at_exit_and_that_is_what_the_thread_is_told(
    tmp_path: Path,
) -> None:
    script = """
import atexit, os, sys, threading, time
from ft_service.host.helper_process import HelperFailed, Program, run_once

def wait():
    try:
        code = "import sys, time; open(sys.argv[1], 'w'); time.sleep(600)"
        run_once(Program(command=(sys.executable, "-c", code, sys.argv[1])))
    except HelperFailed as error:
        print(error.failure.value, flush=True)
    over.set()

over = threading.Event()
atexit.register(over.wait, 60)  # after what else runs at exit, as in a program that still has something to do then
threading.Thread(target=wait, daemon=True).start()
while not os.path.exists(sys.argv[1]):
    time.sleep(0.1)
"""
    ended = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "runs")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.stdout, ended.stderr) == ("killed\n", "")


def test_it_works_above_the_descriptors_that_select_takes() -> None:
    """As in a server with more than a thousand connections."""
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with HelperProcess(program(ECHO)) as helper:
            assert helper.exit_code is None
            assert helper.ask({"a": 1}, 30) == {"echo": {"a": 1}}
    finally:
        for descriptor in others:
            os.close(descriptor)


def test_its_own_processes_end_with_it() -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True); input()"
    with HelperProcess(program(code)) as helper:
        line = helper.receive(30)
        assert line is not None
        grandchild = processes.of(int(line))
    wait_for(lambda: not processes.is_alive(grandchild))
    with HelperProcess(program(code)) as helper:
        line = helper.receive(30)
        assert line is not None
        grandchild = processes.of(int(line))
        helper.send("")
        with pytest.raises(HelperFailed, match="ended with code 0"):
            helper.receive(30)
    wait_for(lambda: not processes.is_alive(grandchild))


def test_it_dies_with_its_parent_killed(tmp_path: Path) -> None:
    code = """
import sys, threading
from ft_service.host.helper_process import HelperProcess, Program
def start():
    helpers.append(HelperProcess(Program(command=("sleep", "600"))))
helpers = []
start()
thread = threading.Thread(target=start)
thread.start()
thread.join()
print(*(helper.pid for helper in helpers), flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        children = [processes.of(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(children) == 2
        assert all(map(processes.is_alive, children))
        parent.kill()
    wait_for(lambda: not any(map(processes.is_alive, children)))


def test_secrets_of_the_environment_do_not_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "secret")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy")
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    plain = run_once(program(code, variables={"OURS": "1"}), seconds=30)
    assert "SOME_API_KEY" not in plain
    assert "HTTPS_PROXY" not in plain
    assert plain["OURS"] == "1"
    assert (
        run_once(program(code, needs=("HTTPS_PROXY",)), seconds=30)["HTTPS_PROXY"] == "http://proxy"
    )


def test_it_gives_way_to_others() -> None:
    code = (
        "import json, os; print(json.dumps([os.nice(0), "
        "open('/proc/self/oom_score_adj').read().strip()]))"
    )
    nice, score = run_once(program(code, niceness=7, expendable=True), seconds=30)
    assert nice == min(19, os.nice(0) + 7)
    assert score == "1000"


def test_a_program_that_is_not_there_is_said() -> None:
    with pytest.raises(HelperFailed, match="No such file"):
        run_once(Program(command=("/nowhere/at-all",)), seconds=30)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ((sys.executable, "-P", "-m", "workers.tasks.merge", "--out", "x"), "workers.tasks.merge"),
        ((sys.executable, "/some/where/reread.py", "x"), "reread.py"),
        (("/bin/true",), "true"),
    ],
)
def test_a_program_is_called_by_its_module_or_its_file(command: tuple[str, ...], name: str) -> None:
    assert Program(command=command).name == name
