"""Output on a terminal of 80 columns, in a pipe, and where letters have no place."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ft_service.cli.output import fit_widths, json_text, load_settings, print_table, print_text
from ft_service.cli.root_command import run
from tests.support.bases import LLAMA_8B, save_base
from tests.support.command_line import Ft
from tests.support.rest.stub_server import StubServer, event_body, job_body
from tests.support.run_directories import CHAT

COLUMNS = 80


LONG = (
    "usable per rank and many more words about what has happened here, so that it passes the "
    "end of a line of eighty"
)


class Screen(io.StringIO):
    """A terminal in memory."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@contextmanager
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    seen = Screen()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", seen)
        patch.setenv("COLUMNS", str(COLUMNS))
        patch.setenv("TERM", "dumb")
        yield seen


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_base(tmp_path / "models/llama-8b", LLAMA_8B)
    monkeypatch.setenv("FT_MODELS", str(tmp_path / "models"))
    (tmp_path / "train.jsonl").write_text(CHAT * 20)
    path = tmp_path / "job.yaml"
    path.write_text("model: llama-8b\ntraining_file: train.jsonl\nsuffix: mine\n")
    return path


COMMANDS = [
    ("plan", "SPEC", "--hardware", "H100"),
    ("plan", "SPEC", "--hardware", "H100", "--verbose"),
    ("plan", "SPEC", "--hardware", "RTX-4090", "--memory", "3GiB"),
    ("data", "check", "DATA"),
    ("data", "stats", "DATA", "--model", "llama-8b"),
    ("events", "last"),
    ("logs", "last"),
    ("get", "last"),
    ("models",),
    (),
]


@pytest.mark.usefixtures("no_tokens")
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_at_eighty_columns_no_word_is_broken(
    ft: Ft,
    server: StubServer,
    spec: Path,
    command: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server.jobs["ftjob-1"] = job_body(chosen={"training.packing": LONG}, training={"packing": True})
    server.events = [event_body(1, f"{LONG}. {LONG}\n{LONG}")]
    server.logs = f"rank 0: {LONG} {LONG}\n    indented {LONG}\n"
    server.bases = [
        {
            "id": "bad",
            "created": 0,
            "owned_by": "base",
            "base": {"trainable": False, "why_not": f"{LONG} {LONG}"},
        }
    ]
    words = [
        {"SPEC": str(spec), "DATA": str(spec.with_name("train.jsonl"))}.get(word, word)
        for word in command
    ]
    with screen(monkeypatch) as seen:
        assert run(words) == 0
    lines = seen.getvalue().splitlines()
    assert lines
    too_long = [line for line in lines if len(line) > COLUMNS and " " in line.strip()]
    assert too_long == [], "the terminal breaks them wherever they are"
    shown = " ".join(seen.getvalue().split())
    piped = " ".join(ft(*words).out.split())
    assert LONG in shown or LONG not in piped, "nothing is cut"


def test_tables_in_a_pipe_have_tabs_and_no_padding(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(
        ("A", "B"), [("x", ""), ("a very long cell indeed", "z\nz")], notes=("WHY", [None, "so"])
    )
    assert capsys.readouterr().out == "A\tB\tWHY\nx\t\t\na very long cell indeed\tz z\tso\n"


def test_letters_that_an_encoding_has_not_are_question_marks_and_json_loses_none(
    tmp_path: Path,
) -> None:
    environment = {
        **os.environ,
        "LC_ALL": "POSIX",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "FT_HOME": str(tmp_path),
    }
    code = (
        "from ft_service.cli.root_command import run; run(['version']); "
        "from ft_service.cli.output import print_text; print_text(chr(246) + chr(8594) + ' 1')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert ended.stdout.splitlines()[-1].endswith(b"?? 1")
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert json_text({"a": "ß"}, narrow) == '{"a": "\\u00df"}'


def test_lines_keep_their_breaks(capsys: pytest.CaptureFixture[str]) -> None:
    print_text("a\n  b")
    print_text()
    assert capsys.readouterr().out == "a\n  b\n\n"


def test_a_narrow_screen_takes_from_the_widest_columns() -> None:
    assert fit_widths([2, 5, 60, 40], 107) == [2, 5, 60, 40]
    assert fit_widths([2, 5, 60, 40], 67) == [2, 5, 30, 30]
    assert fit_widths([29, 16, 16], 41, [False, True, True]) == [9, 16, 16]
    assert fit_widths([29, 16, 16], 30, [False, True, True]) == [4, 13, 13]


def test_an_empty_setting_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a path it would be the current folder, and as FT_BIND every address of the host."""
    for name in (
        "FT_HOME",
        "FT_BIND",
        "FT_ADAPTERS",
        "FT_POD_PROFILE",
        "FT_SLOTS",
        "FT_TRACKIO_URL",
    ):
        monkeypatch.setenv(name, "")
    settings = load_settings()
    assert (settings.home, settings.bind) == (Path.home() / ".ft", "127.0.0.1")
    assert [settings.adapters, settings.pod_profile, settings.slots, settings.trackio_url] == [
        None
    ] * 4
