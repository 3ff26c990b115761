from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from ft_service.cli.display import BarDisplay, LineDisplay, display_for
from ft_service.cli.output import print_error, print_table
from ft_service.rundir.events import Metrics


def terminal() -> Console:
    return Console(
        file=io.StringIO(), force_terminal=True, width=120, color_system=None, legacy_windows=False
    )


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_bar_is_for_terminals_only() -> None:
    assert isinstance(display_for(terminal()), BarDisplay)
    assert isinstance(display_for(Console(file=io.StringIO())), LineDisplay)


def test_the_bar_ends_with_the_last_numbers_and_messages_stand_above_it() -> None:
    console = terminal()
    with display_for(console) as display:
        display.status("training")
        display.metrics(
            Metrics(step=3, total_steps=4, train_loss=1.5, step_seconds=2.0, tokens=100), 0.0
        )
        display.message("warn", "[brackets] are no markup", 0.0)
        display.metrics(
            Metrics(step=4, total_steps=4, train_loss=1.25, step_seconds=2.0, tokens=100), 0.0
        )
        display.status("succeeded")
    shown = text_of(console)
    assert "[brackets] are no markup\n" in shown
    last, curve = shown.removesuffix("\x1b[?25h").rstrip().splitlines()[-2:]
    assert "loss █▁ 1.500 → 1.250" in curve
    assert "succeeded" in last
    assert "4/4" in last
    assert "loss 1.250 · 50 tokens/s" in last


def test_the_bar_leaves_the_terminal_as_it_was_after_an_error() -> None:
    console = terminal()
    try:
        with display_for(console):
            raise RuntimeError
    except RuntimeError:
        pass
    assert text_of(console).rstrip().endswith("\x1b[?25h")


def test_lines_repeat_neither_a_status_nor_a_step() -> None:
    console = Console(file=io.StringIO(), width=40)
    with display_for(console) as display:
        for _ in range(3):
            display.status("training")
            display.metrics(Metrics(step=1, total_steps=2, train_loss=1.0), 0.0)
        display.message(
            "info", "a message that is longer than the console is wide stays one line", 0.0
        )
    assert [line[10:] for line in text_of(console).splitlines()] == [
        "training",
        "step 1/2 · loss 1.000",
        "a message that is longer than the console is wide stays one line",
    ]


def test_names_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    name = "ft:tiny:local:two:abc [bold]"
    print_table(("MODEL",), [(name,)])
    with display_for(Console(file=sys.stdout, emoji=False, highlight=False)) as display:
        display.message("info", name, 0.0)
    table, line = capsys.readouterr().out.splitlines()[1:]
    assert table.strip() == name, "`:two:` is no picture"
    assert line.endswith(name)


def test_sentences_break_between_words_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "30")
    said = "Port 8000 is in use by another program. Stop that one."
    for stream, lines in ((Screen(), 3), (io.StringIO(), 1)):
        monkeypatch.setattr(sys, "stderr", stream)
        assert print_error(said, 64) == 64
        written = stream.getvalue()
        assert len(written.splitlines()) == lines
        assert " ".join(written.split()) == f"ft: {said}"
