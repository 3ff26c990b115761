"""Texts are graded by real processes, which are slow, killed, and shared by projects."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from ft_service.errors import UnavailableError
from ft_service.graders import text_processes
from ft_service.graders.grades import Case, GradingError, Sample
from ft_service.graders.grading import GraderContext, grade_all
from ft_service.graders.similarities import MOST_COMPARED, SIMILARITIES
from ft_service.graders.text_processes import TextProcesses, Work
from ft_service.graders.text_tasks import WRITE, compare, fill
from ft_service.graders.texts import grade_text
from ft_service.host.helper_process import Program
from ft_service.shared_work.places import Kind, Outcome
from tests.support.attempts import wait_for
from tests.support.graders import case, grader, multi

ANSWER = "{{sample.output_text}}"
ITEM = "{{item.a}}"
LONG = " ".join(f"{number:x}" for number in range(14_000))[:MOST_COMPARED]
SLOW: Work = (compare(ANSWER, ITEM, "fuzzy_match"), case(LONG, {"a": LONG[::-1]}))
"""A comparison that takes about a tenth of a second in one piece of C code."""
QUICK: Work = (compare(ANSWER, ITEM, "eq"), case("4", {"a": "4"}))


@pytest.fixture
def processes() -> Iterator[TextProcesses]:
    text_processes.TEXT_PROCESSES.close()  # those of other tests
    own = TextProcesses(Kind(name="grading texts of a test", places=1, of_project=1))
    yield own
    own.close()


def pids() -> list[int]:
    """The processes of this one that grade texts."""
    found = subprocess.run(
        ["ps", "--ppid", str(os.getpid()), "-o", "pid=,args="],
        capture_output=True,
        text=True,
        check=True,
    )
    return [int(line.split()[0]) for line in found.stdout.splitlines() if "text_program" in line]


def values(results: Any) -> list[Any]:
    return [result.value for result in results]


def test_rewards_are_those_of_the_same_functions_here(processes: TextProcesses) -> None:
    templates = {"input": f"{ANSWER} {ITEM}", "reference": "a well-known cat — {{item.b}}"}
    items = [
        {"a": 1.0, "b": [None, {"é": 1e-320}]},
        {"a": "\ud83d", "b": float("nan")},
        {"b": 2**70},
        {"a": "x", "b": LONG[:999]},
    ]
    tools = ({"id": "c", "function": {"name": "f"}},)
    cases = [
        Case(Sample(answer, tools), item) for item in items for answer in ("the cat", "四十二")
    ]
    near = [
        grader(type="text_similarity", **templates, evaluation_metric=metric)
        for metric in SIMILARITIES
    ]
    checks = [
        grader(**templates, operation=operation) for operation in ("eq", "ne", "like", "ilike")
    ]
    formulas = [
        multi(formula) for formula in ("same + near / 3", "1 / same", "10 ^ 13 * near", "log(near)")
    ]
    for own in (*near, *checks, *formulas):
        found = grade_all(own, cases, GraderContext(project="a", texts=processes))
        here = [grade_text(own, one) for one in cases]
        assert [replace(one, seconds=0.0) for one in found] == here


def test_the_worst_grader_takes_no_time_of_this_process(processes: TextProcesses) -> None:
    metrics = ["rouge_l", "fuzzy_match", "bleu", "gleu"]
    own = {"type": "text_similarity", "name": "x", "input": ANSWER, "reference": ITEM}
    graders = {
        f"g{number}": {**own, "evaluation_metric": metrics[number % 4]} for number in range(16)
    }
    worst = grader(type="multi", graders=graders, calculate_output=" + ".join(graders))
    context = GraderContext(project="a", texts=processes)
    grade_all(multi("same"), [case("four")], context)  # the process is there
    began = time.process_time()
    [graded] = grade_all(worst, [case(LONG[:30_000], {"a": LONG[30_000:]})], context)
    assert time.process_time() - began < 0.05
    assert graded.seconds > 0.2, "it took the time of a processor elsewhere"
    assert len(graded.sub_rewards) == 16


def test_another_process_imports_what_compares() -> None:
    program = """
import os, sys
from ft_service.graders.grading import GraderContext, Sample, grade, parse_grader
from ft_service.graders.limits import GraderLimits
from ft_service.graders.text_processes import TEXT_PROCESSES
near = {"type": "text_similarity", "name": "n", "input": "{{sample.output_text}}", "reference": "abxd"}
for metric in ("fuzzy_match", "rouge_l", "bleu"):
    grader = parse_grader({**near, "evaluation_metric": metric}, GraderLimits())
    print(grade(grader, Sample("abcd"), {}, GraderContext(project="p")).reward)
print([name for name in ("rapidfuzz", "sacrebleu") if name in sys.modules])
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stdout.split("\n")[:4] == ["0.75", "0.0", "0.0", "[]"]


def test_a_process_that_is_killed_gives_the_right_reward_after_all(
    processes: TextProcesses,
) -> None:
    work = [SLOW] * 6
    right = values(processes.carry_out("a", work[:1])) * 6
    [first] = pids()
    killed: list[int] = []

    def kill() -> None:
        wait_for(lambda: processes.places.projects() != {})
        os.kill(first, signal.SIGKILL)
        killed.append(first)

    thread = threading.Thread(target=kill)
    thread.start()
    assert values(processes.carry_out("a", work)) == right
    thread.join()
    assert killed == [first]
    assert first not in pids()


def test_a_task_whose_process_is_always_killed_is_later_and_never_a_grade(
    processes: TextProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = text_processes._started
    tries: list[int] = []

    def killed() -> Any:
        process = started()
        tries.append(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        return process

    monkeypatch.setattr(text_processes, "_started", killed)
    with pytest.raises(UnavailableError) as lost:
        processes.carry_out("a", [QUICK])
    assert len(tries) == text_processes.TRIES
    assert lost.value.retry_after
    assert processes.places.ended == {Outcome.LOST: text_processes.TRIES}
    monkeypatch.undo()
    assert values(processes.carry_out("a", [QUICK])) == [1.0]


def test_a_program_that_cannot_start_is_later(
    processes: TextProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = replace(text_processes.PROGRAM, command=(sys.executable, "-c", "raise SystemExit(1)"))
    monkeypatch.setattr(text_processes, "PROGRAM", broken)
    with pytest.raises(UnavailableError):
        processes.carry_out("a", [QUICK])


HOSTILE = """
def hostile(answer, expected):
    match answer:
        case "cpu":
            while True: pass
        case "memory": return len(bytearray(2**40))
        case "crash":
            import ctypes
            ctypes.string_at(0)
        case "exit":
            import os
            os._exit(3)
    return 0.5
similarities.SIMILARITIES["hostile"] = hostile
text_program.CPU_SECONDS = 1
"""


def with_changes(source: str) -> Program:
    """The program, after lines of Python."""
    imports = "import sys\nfrom ft_service.graders import similarities, text_program"
    main = "text_program.main"
    command = f"{imports}\n{source}\n{main}(sys.stdin.buffer, sys.stdout.buffer)"
    return replace(text_processes.PROGRAM, command=(sys.executable, "-c", command))


def test_texts_beyond_a_limit_are_an_error_of_their_case_alone(
    processes: TextProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_processes, "PROGRAM", with_changes(HOSTILE))
    answers = ["fine", "cpu", "fine", "memory", "crash", "exit", "fine"]
    results = processes.carry_out(
        "a", [(compare(ANSWER, "", "hostile"), case(answer)) for answer in answers]
    )
    kinds = [result.error.kind if result.error else result.value for result in results]
    assert kinds == [
        0.5,
        "unresponsive_reward_error",
        0.5,
        "other_error",
        "other_error",
        "other_error",
        0.5,
    ]
    assert processes.losses.total == 0


def test_projects_alternate(processes: TextProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_processes, "PROGRAM", with_changes("text_program.TURN_SECONDS = 0.1"))
    took: list[str] = []
    turn = TextProcesses._take_turn

    def note(self: TextProcesses, project: str, work: Any, left: Any, results: Any) -> None:
        turn(self, project, work, left, results)
        took.append(project)

    monkeypatch.setattr(TextProcesses, "_take_turn", note)
    quick = threading.Thread(target=lambda: [processes.carry_out("b", [QUICK]) for _ in range(3)])

    def begin() -> None:
        wait_for(lambda: processes.places.projects() != {})
        quick.start()

    starter = threading.Thread(target=begin)
    starter.start()
    processes.carry_out("a", [SLOW] * 8)
    starter.join()
    quick.join()
    assert took.count("b") == 3
    assert took.count("a") >= 3, "a turn ends before the work does"
    assert max(at for at, project in enumerate(took) if project == "b") < len(took) - 1, took
    assert processes.places.cpu_seconds["a"] > processes.places.cpu_seconds["b"]


def test_what_is_filled_in_or_written_is_limited_and_comes_back_as_it_is(
    processes: TextProcesses,
) -> None:
    odd = case('{"a": "\\ud83d"}', {"x": {"y": [1.0, None]}, "b": "\ud83d\n\0 é"})
    written, filled, long = processes.carry_out(
        "a",
        [
            (WRITE, odd),
            (fill([["{{item.x}}", "{{item.b}}"], ["{{sample.output_json.a}}"]]), odd),
            (fill([[ANSWER] * 3] * 2), case("a" * 2**18)),
        ],
    )
    assert json.loads(written.value) == {"sample": odd.sample.as_dict(), "item": odd.item}
    assert filled.value == [['{"y": [1.0, null]}', "\ud83d\n\0 é"], ["\ud83d"]]
    assert isinstance(long.error, GradingError)
    assert long.error.kind == "other_error"
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    [nested] = processes.carry_out("a", [(WRITE, case("", {"deep": deep}))])
    assert nested.error is not None
    assert nested.error.kind == "sample_parse_error"


def test_a_process_without_work_ends(
    processes: TextProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_processes, "IDLE_SECONDS", 0.01)
    processes.carry_out("a", [QUICK])
    wait_for(lambda: not pids())
