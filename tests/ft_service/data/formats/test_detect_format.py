"""Containers and formats, detected from contents."""

from __future__ import annotations

from ft_service.data.formats.detect_format import Container, Format, container_of, recognise


def test_containers_and_formats_are_detected_from_contents() -> None:
    for text in (
        b"Hello, world\nThis is a text, which has commas, and more\n",
        b"one\ntwo\n",
        b'"a","b"\n',
        b"x\n",
    ):
        assert container_of(text) is Container.LINES, text
    assert container_of(b"instruction;output\na;b\n") is Container.CSV
    for cell in (
        "line\u2028separator",
        "next\x85line",
        "form\x0cfeed",
    ):  # ends of lines to str.splitlines, and to no CSV file
        assert container_of(f"question;answer\n{cell};b\nc;d\n".encode()) is Container.CSV, cell
    assert recognise(["input", "preferred_output", "messages"]) is Format.OPENAI_PAIRS
    assert recognise(["prompt", "chosen", "rejected", "messages"]) is Format.TRL_PAIRS
    assert recognise(["prompt", "prompt_id", "messages"]) is Format.CHAT
