from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ft_service.cli.chat_command import ChatSession, ChatTarget, _image_part, find_chat_targets
from ft_service.errors import NotFoundError, SpecError
from tests.support.rest.stub_server import StubServer, job_body

TUNED = "ft:tiny:local:mine:1"


def test_a_conversation_tells_what_can_be_typed_and_sends_no_slip_to_the_model(
    server: StubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = iter(["/help", "/hlep", " /etc is a folder", "/etc/hosts", "/bye"])
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    monkeypatch.setattr(ChatSession, "ask", lambda self, message: asked.append(message))
    ChatSession(server.client(), [ChatTarget("tuned", TUNED)], {}, []).hold()
    said = capsys.readouterr().out
    assert all(
        word in said
        for word in ("/new", "/exit, /quit, /bye", "Ctrl-C", "/help lists all commands")
    )
    assert "There is no /hlep. /help lists the commands" in said
    assert [message.strip() for message in asked] == ["/etc is a folder", "/etc/hosts"]


class Answers:
    """In the place of a client: what is given to it, or a Ctrl-C in the middle."""

    def __init__(self) -> None:
        self.asked: list[list[Any]] = []

    def chat(self, body: dict[str, Any]) -> Iterator[str]:
        self.asked.append([said["content"] for said in body["messages"]])
        yield "[/b]"
        if body["messages"][-1]["content"] == "stop":
            raise KeyboardInterrupt
        yield " well"


def test_a_conversation_bears_ctrl_c_and_brackets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = iter(["hello", "stop", "again"])

    def read(_: str) -> str:
        for line in typed:
            return line
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", read)
    client: Any = Answers()
    ChatSession(client, [ChatTarget("tuned", TUNED)], {}, []).hold()
    assert client.asked[2] == ["hello", "[/b] well", "again"], (
        "what was broken off is not remembered"
    )
    assert "(ended; it is not remembered)" in capsys.readouterr().out
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    ChatSession(client, [ChatTarget("tuned", TUNED), ChatTarget("base", "tiny")], {}, []).ask(
        "hello"
    )
    shown = capsys.readouterr().out
    assert (shown.count("[/b] well"), shown.count("╭")) == (2, 2)


def test_images_are_shown_with_the_first_message_of_each_conversation(tmp_path: Path) -> None:
    png = b"\x89PNG\r\n\x1a\n"
    (tmp_path / "a.png").write_bytes(png)
    images = [_image_part(str(tmp_path / "a.png")), _image_part("https://a.example/b.png")]
    urls = [f"data:image/png;base64,{b64encode(png).decode()}", "https://a.example/b.png"]
    shown = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    client: Any = Answers()
    talk = ChatSession(client, [ChatTarget("tuned", TUNED)], {}, [], images)
    for message in ("what?", "more"):
        talk.ask(message)
    talk.forget()
    talk.ask("again")
    first = [*shown, {"type": "text", "text": "what?"}]
    assert client.asked[:2] == [[first], [first, "[/b] well", "more"]]
    assert client.asked[2] == [[*shown, {"type": "text", "text": "again"}]]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read: No such file"),
        (b"", "is empty"),
        (b"<html>", "is no PNG, JPEG, WEBP or GIF"),
        (b"\x89PNG\r\n\x1a\n" + bytes(10 * 2**20), "one may have 10,485,760: make it smaller."),
    ],
)
def test_what_is_no_image_is_refused_before_it_is_sent(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    if content is not None:
        (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(SpecError) as refused:
        _image_part(str(tmp_path / "a.png"))
    assert refused.value.param == "image"
    assert refused.value.message.startswith(f"--image {tmp_path / 'a.png'}: ")
    assert reason in refused.value.message


def test_chat_takes_the_words_for_jobs_that_other_commands_take() -> None:
    server = StubServer()
    server.jobs["ftjob-1"] = job_body(status="succeeded", fine_tuned_model=TUNED, suffix="mine")
    for word in ("last", "mine", "ftjob-1"):
        tuned, base = find_chat_targets(server.client(), word)
        assert (tuned.model, base.model) == (TUNED, "tiny")
    with pytest.raises(NotFoundError, match="There is no job 'ftjob-gone'"):
        find_chat_targets(server.client(), "ft:tiny:local::gone")


def test_bytes_that_are_no_utf8_are_refused_before_they_are_sent(server: StubServer) -> None:
    with pytest.raises(SpecError, match="not UTF-8"):
        ChatSession(server.client(), [ChatTarget("tuned", TUNED)], {}, []).ask("\udcff")
