"""The checks of tests/conftest.py, on runs that leave something behind; and what holds of the
tests' own modules.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.attempts import HANG_SECONDS, wait_for
from tests.support.cpu_budgets import (
    ABOVE,
    ALLOWED,
    BUDGET,
    HELD,
    MOST_LOAD,
    can_hold,
    over_budget,
)

TESTS = Path(__file__).parent
PYTEST = (sys.executable, "-m", "pytest", "-q")
PARALLEL = ("--processes", "2")
UNTIDY = {
    "process": "import subprocess\ndef test_it(): subprocess.Popen(['sleep', '600'])",
    "port": "import socket\nKEPT = socket.socket()\ndef test_it(): KEPT.listen(1)",
    "file": "from pathlib import Path\ndef test_it(): Path('left.txt').touch()",
}
TIDY = "import subprocess\ndef test_it(): subprocess.run(['true'], check=True)"

DEAR = "import time\ndef test_it():\n    begun = time.process_time()\n    while time.process_time() < begun + 0.2: pass"
"""The system counts in hundredths of a second."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A working tree with this project's conftest and no tests."""
    support = ("__init__", "cpu_budgets", "cpu_seconds", "environment", "ports", "side_by_side")
    for name in ("__init__.py", "conftest.py", *(f"support/{module}.py" for module in support)):
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TESTS / name, tmp_path / "tests" / name)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\ntestpaths = ['tests']\n")
    (tmp_path / ".gitignore").write_text("__pycache__/\n.pytest_cache/\n")
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    return tmp_path


def run(
    project: Path, modules: dict[str, str], options: tuple[str, ...]
) -> subprocess.CompletedProcess[str]:
    for name, body in modules.items():
        (project / f"tests/test_{name}.py").write_text(body)
    return subprocess.run(
        [*PYTEST, *options],
        cwd=project,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )


def environment() -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return {**own, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # those of third parties take seconds


@pytest.mark.parametrize(
    "options", [(), pytest.param(PARALLEL, marks=pytest.mark.slow)], ids=["alone", "side-by-side"]
)
def test_a_run_that_leaves_something_behind_has_failed(
    project: Path, options: tuple[str, ...]
) -> None:
    ended = run(project, UNTIDY, options)
    process = re.search(r"^  process (\d+): sleep 600$", ended.stdout, re.MULTILINE)
    assert process, ended.stdout + ended.stderr
    os.kill(int(process[1]), signal.SIGKILL)
    assert re.search(r"^  port \d+, on which a test still listens$", ended.stdout, re.MULTILINE), (
        ended.stdout
    )
    assert "\n  file left.txt\n" in ended.stdout
    assert (ended.returncode, ended.stdout.splitlines()[-1][:8]) == (1, "3 passed")


@pytest.mark.parametrize("kind", UNTIDY)
def test_each_kind_is_enough(project: Path, kind: str) -> None:
    ended = run(project, {kind: UNTIDY[kind], "tidy": TIDY}, PARALLEL)
    if process := re.search(r"^  process (\d+): ", ended.stdout, re.MULTILINE):
        os.kill(int(process[1]), signal.SIGKILL)
    assert len(re.findall(rf"^  {kind} ", ended.stdout, re.MULTILINE)) == 1, (
        ended.stdout + ended.stderr
    )
    assert (ended.returncode, "2 passed" in ended.stdout) == (1, True)


@pytest.mark.parametrize("tidy", [True, False])
def test_a_failed_test_is_run_once_more_unless_something_was_left(
    project: Path, tidy: bool
) -> None:
    """What `make test-failed` does after `make test`."""
    failing = (
        "from pathlib import Path\ndef test_it(): Path('.pytest_cache/once').touch(exist_ok=False)"
    )
    (project / ".pytest_cache").mkdir()
    (project / ".pytest_cache/once").touch()
    first = run(project, {"failing": failing, "other": TIDY if tidy else UNTIDY["file"]}, PARALLEL)
    assert (first.returncode, "1 failed, 1 passed" in first.stdout) == (1, True), (
        first.stdout + first.stderr
    )
    (project / ".pytest_cache/once").unlink()
    again = run(project, {}, ("--last-failed", "--last-failed-no-failures", "none"))
    assert (again.returncode, "1 passed" in again.stdout) == ((0, True) if tidy else (5, False)), (
        again.stdout + again.stderr
    )


def test_a_tidy_run_has_passed(project: Path) -> None:
    ended = run(project, {"one": TIDY, "other": TIDY}, PARALLEL)
    assert (ended.returncode, ended.stdout.splitlines()[-1][:8]) == (0, "2 passed"), (
        ended.stdout + ended.stderr
    )


def test_tests_whose_process_died_have_failed_and_others_are_run(project: Path) -> None:
    dying = "import os\ndef test_before(): pass\ndef test_it(): os._exit(3)\ndef test_after(): pass"
    ended = run(project, {"dying": dying, **dict.fromkeys(("one", "two", "three"), TIDY)}, PARALLEL)
    last = ended.stdout.splitlines()[-1]
    assert (ended.returncode, last[:18]) == (1, "2 failed, 4 passed"), ended.stdout + ended.stderr
    assert "died in tests/test_dying.py::test_it (exit code 3)" in ended.stdout


@pytest.mark.parametrize(
    ("options", "most_load", "code"),
    [
        (PARALLEL, 1e9, 0),
        ((*PARALLEL, "--hold-budgets"), 1e9, 1),
        ((*PARALLEL, "--hold-budgets"), -1.0, 0),
    ],
    ids=["shown", "held", "crowded"],
)
def test_a_run_with_a_file_above_its_budget_has_failed_if_budgets_are_held(
    project: Path, options: tuple[str, ...], most_load: float, code: int
) -> None:
    """`most_load`: below it budgets are held, whatever this machine does now."""
    with (project / "tests/support/cpu_budgets.py").open("a") as budgets:
        budgets.write(f'\nABOVE["tests/test_dear.py"] = 0.001\nMOST_LOAD = {most_load}\n')
    ended = run(project, {"dear": DEAR, "other": TIDY}, options)
    named = re.findall(r"^(tests/\S+) took .* times its budget", ended.stdout, re.MULTILINE)
    held = "--hold-budgets" in options
    assert (ended.returncode, named) == (code, ["tests/test_dear.py"] * held), ended.stderr
    assert ("Budgets are not held" in ended.stdout) == (most_load < 0)
    assert "2 passed" in ended.stdout
    assert "left behind" not in ended.stdout
    again = run(project, {}, ("--last-failed", "--last-failed-no-failures", "none"))
    assert again.returncode == 5, "`make test-failed` has nothing that could pass instead"


def test_a_run_that_is_held_fails_by_what_is_far_above_alone() -> None:
    just = HELD * BUDGET
    assert over_budget({"tests/one.py": just}, 1.0, HELD) == {}
    assert list(over_budget({"tests/one.py": just + 0.1}, 1.0, HELD)) == ["tests/one.py"]
    assert (can_hold(MOST_LOAD), can_hold(MOST_LOAD + 0.1)) == (True, False)


def test_files_above_the_budget_are_there_and_no_row_is_for_nothing() -> None:
    for file, seconds in ABOVE.items():
        assert (TESTS.parent / file).is_file(), file
        assert seconds > BUDGET, file


def test_a_slow_processor_makes_no_file_dearer() -> None:
    just = ALLOWED * BUDGET
    seconds = {"tests/one.py": just + 0.1, "tests/other.py": just - 0.1}
    assert list(over_budget(seconds, 1.0)) == ["tests/one.py"]
    assert over_budget(seconds, 1.1) == {}


def test_processes_end_with_the_one_that_forked_them(project: Path) -> None:
    body = """
        import time, pathlib, pytest
        @pytest.fixture(scope="session")
        def kept():
            yield
            pathlib.Path(".pytest_cache/ended").touch()
        def test_it(kept):
            pathlib.Path(".pytest_cache/begun").touch()
            time.sleep(600)
    """
    (project / "tests/test_long.py").write_text(textwrap.dedent(body))
    cache = project / ".pytest_cache"
    cache.mkdir()
    with subprocess.Popen(
        [*PYTEST, *PARALLEL],
        cwd=project,
        env=environment(),
        # As a shell starts what is to run in the background.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    ) as parent:
        wait_for(lambda: (cache / "begun").exists())
        parent.kill()
        wait_for(lambda: (cache / "ended").exists())


def test_a_folder_whose_tests_share_something_is_one_process(project: Path) -> None:
    note = (
        "import os\nfrom pathlib import Path\ndef test_it(): "
        "Path(f'.pytest_cache/{os.getpid()}').touch()"
    )
    store = project / "tests/ft_service/store"
    store.mkdir(parents=True)
    (project / ".pytest_cache").mkdir()
    for name in "abcdef":
        (store / f"test_{name}.py").write_text(note)
    ended = run(project, {"tidy": TIDY}, PARALLEL)
    assert (ended.returncode, "7 passed" in ended.stdout) == (0, True), ended.stdout + ended.stderr
    assert len([path for path in (project / ".pytest_cache").iterdir() if path.name.isdigit()]) == 1


def test_what_tests_share_is_no_test_module() -> None:
    """A helper in a test module is not found, and brings its module's fixtures and imports
    along.
    """
    for path in TESTS.rglob("*.py"):
        source = path.read_text()
        for node in (
            ast.walk(ast.parse(source))
            if re.search(r"\btests\.[\w.]*(test_|conftest)", source)
            else ()
        ):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import | ast.ImportFrom)
                else []
            )
            shared = [name for name in names if name.startswith("tests.")]
            assert not any(re.search(r"\.(test_\w+|conftest)$", name) for name in shared), (
                f"{path}: {shared}"
            )
