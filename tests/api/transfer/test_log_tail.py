"""Log files of an attempt: their names, their ends, and what they grow by."""

from __future__ import annotations

from pathlib import Path

import pytest

from api.transfer import log_tail


def test_a_line_without_an_end_is_sent_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_tail, "_MAX_BYTES", 10)
    path = tmp_path / "log"
    path.write_bytes(b"x" * 25 + b"\nend")
    file = log_tail.LogFile("s", path, 29)
    place = 0
    found = []
    for _ in range(4):
        lines, place = log_tail.read_lines(file, place, last=False)
        found += lines
    assert (found, place) == (["x" * 10, "x" * 10, "x" * 5], 26)
    assert log_tail.read_lines(file, place, last=True) == (["end"], 29)


def test_files_are_named_by_rank_and_links_are_left_out(tmp_path: Path) -> None:
    for name in ("supervisor.log", "x/attempt_0/0/stdout.log", "node-1/x/attempt_0/1/stderr.log"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "link.log").symlink_to("/etc/hostname")
    assert set(log_tail.log_files(tmp_path)) == {
        "supervisor.log",
        "rank 0 stdout",
        "node-1 rank 1 stderr",
    }
    assert set(log_tail.log_files(tmp_path, 1)) == {"node-1 rank 1 stderr"}
    assert log_tail.log_files(None) == {}


def test_the_last_lines_of_a_file_and_where_they_begin(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntw\xff\nthree\n")
    assert log_tail.tail(path, 2) == "tw\N{REPLACEMENT CHARACTER}\nthree\n"
    assert log_tail.tail(tmp_path / "gone", 2) == ""
    listed = log_tail.sized({"s": path, "gone": tmp_path / "gone"})
    assert log_tail.beginnings(listed, 2) == {"s": 4}
    with path.open("a") as more:
        more.write("four\nfive\nsix\n")
    removed = log_tail.LogFile("removed", tmp_path / "removed", 9)
    assert log_tail.beginnings([*listed, removed], 2) == {"s": 4}, (
        "of what was there when it was listed"
    )
