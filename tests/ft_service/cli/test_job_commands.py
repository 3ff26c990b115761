"""Commands that look into jobs, compare them and remove what is theirs; and what errors look like."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ft_service.cli.chat_command import Partner, Talk, find_partners
from ft_service.cli.output import shrunk
from ft_service.client.answers import RemoteJob
from ft_service.client.client import Client
from ft_service.errors import NotFoundError
from tests.support.command_line import Ft
from tests.support.rest.stub_server import StubServer, event_body, job_body, metrics_event

TUNED = "ft:tiny:local:mine:1"


def test_a_conversation_tells_what_can_be_typed_and_sends_no_slip_to_the_model(
    server: StubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = iter(["/help", "/hlep", " /etc is a folder", "/etc/hosts", "/bye"])
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    monkeypatch.setattr(Talk, "ask", lambda self, message: asked.append(message))
    Talk(server.client(), [Partner("tuned", TUNED)], {}, []).hold()
    said = capsys.readouterr().out
    assert all(word in said for word in ("/new", "/exit, /quit, /bye", "Ctrl-C", "/help tells more"))
    assert "There is no /hlep. /help tells what there is" in said
    assert [message.strip() for message in asked] == ["/etc is a folder", "/etc/hosts"]


def test_events_and_checkpoints_are_listed(ft: Ft, server: StubServer) -> None:
    server.jobs["ftjob-1"] = job_body()
    assert ft("checkpoints", "last").out == "No checkpoints yet.\n"
    server.events = [event_body(number, f"event {number}") for number in range(4)] + [event_body(4, "careful", level="warn")]
    assert [line[21:] for line in ft("events", "last", "-n", "2").out.splitlines()] == ["event 3", "warn: careful"]
    point = {"fine_tuning_job_id": "ftjob-1", "created_at": 0, "metrics": {"train_loss": 1.5, "valid_loss": None}}
    server.checkpoints = [
        {**point, "id": f"ftckpt-{step}", "step_number": step, "fine_tuned_model_checkpoint": f"{TUNED}:ckpt-step-{step}"}
        for step in (20, 10)
    ]
    _, newest, _ = ft("checkpoints", "ftjob-1").out.splitlines()
    assert newest.split()[:2] == ["20", "1.500"]
    assert newest.split()[-1] == f"{TUNED}:ckpt-step-20"
    assert "at steps 10, 20" in ft("get", "last").out


def test_answers_are_shown_side_by_side_in_eighty_columns(ft: Ft, server: StubServer) -> None:
    server.jobs["ftjob-1"] = job_body(evaluation={"prompts": 2})
    assert "prompts: 8" in ft("eval", "last").err
    sample = {"prompt": "user\nsay [0]", "reference": "it is 0", "base": "no " * 40, "base_scores": {"exact_match": 0.0}}
    after = {**sample, "tuned": "it is [bold]0", "scores": {"exact_match": 1.0}}
    server.evaluations = [
        {"id": "30", "step": 30, "metrics": {"exact_match": 0.5}, "base_metrics": {"exact_match": 0.0}, "samples": [after] * 2},
        {"id": "0", "step": 0, "metrics": {"exact_match": 0.0}, "samples": [{**sample, "tuned": None, "scores": {}}] * 2},
    ]
    for own in server.evaluations:
        own["created_at"] = 0
    said = ft("eval", "last", "-n", "1").out
    lines = said.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split() for line in lines[:3]] == [["STEP", "exact_match"], ["before", "0.000"], ["30", "0.500"]]
    assert "say [0]" in said
    assert "it is [bold]0" in said, "an answer is no markup"
    assert said.count("expected") == 1, "one prompt was asked for"
    row = next(line for line in lines if "[bold]" in line)
    assert row.index("no no") < row.index("it is"), "side by side"
    assert "After" not in ft("eval", "last", "--step", "0").out
    assert "it was at: 0, 30" in ft("eval", "last", "--step", "7").err
    assert [own["step"] for own in json.loads(ft("eval", "last", "--json").out)] == [30, 0]
    assert "exact_match 0.00 → 0.50, at step 30; the answers: ft eval" in ft("get", "last").out
    said = [
        {"role": "system", "content": "Sort."},
        {"role": "user", "content": "say [1]"},
        {"role": "assistant", "tool_calls": []},
    ]
    server.evaluations[0]["samples"] = [{**after, "messages": said, "tuned": ""}]
    shown = ft("eval", "last").out
    assert ["system", "Sort."] in [line.split() for line in shown.splitlines()]
    assert "say [1]" in shown
    assert "say [0]" not in shown, "the prompt holds what the template writes"
    assert "(nothing)" in shown


def test_get_shows_what_was_asked_for_and_not_every_default(ft: Ft, server: StubServer) -> None:
    server.jobs["ftjob-1"] = job_body(lora={"r": 8, "lora_dropout": 0.0}, training={"packing": False}, suffix="mine")
    server.files = [{"id": "file-0", "filename": "train.jsonl", "bytes": 5}]
    shown = dict(line.split("  ", 1) for line in ft("get", "mine").out.splitlines())
    assert (shown["lora.r"].strip(), shown["training.packing"].strip()) == ("8", "false")
    assert "lora.lora_dropout" not in shown
    assert shown["training file"].strip() == "train.jsonl (file-0)"
    server.files = []
    assert "file-0 (removed)" in ft("get", "mine").out


@pytest.mark.parametrize(
    ("queue", "said"),
    [
        ({"queue": {"position": 1, "reason": "It is next.", "estimated_start": None}}, "number 1. It is next."),
        (
            {"queue": {"position": 3, "reason": "2 of this project.", "estimated_start": 86_400 * 365}},
            "number 3, starts about 197",
        ),
        ({"queue": {"position": 1}, "pending_reason": "It needs 9 slots."}, "It needs 9 slots."),
    ],
)
def test_a_queued_job_says_what_it_waits_for(ft: Ft, server: StubServer, queue: dict[str, Any], said: str) -> None:
    server.jobs["ftjob-1"] = job_body(**queue)
    assert (RemoteJob.model_validate(server.jobs["ftjob-1"]).state_text or "").startswith(f"queued: {said}")
    assert said in ft("jobs").out
    assert f"queued: {said}" in ft("get", "last").out


def test_compare_shows_what_differs_and_both_curves_on_one_scale(ft: Ft, server: StubServer) -> None:
    server.jobs["ftjob-1"] = job_body(lora={"r": 8}, training={"learning_rate": 1e-3}, seed=1)
    server.jobs["ftjob-2"] = job_body(
        "ftjob-2", lora={"r": 16}, training={"learning_rate": 1e-3}, seed=1, suffix="mine", training_file="file-1"
    )
    server.files = [{"id": "file-1", "filename": "train.jsonl", "bytes": 5}]
    server.events = [metrics_event(step, step, valid_loss=3.0 - step / 10) for step in range(1, 11)]
    title, *rows = ft("compare", "ftjob-1", "last").out.splitlines()
    assert title.split() == ["1", "mine", "(2)"]
    assert rows[0].split() == ["training_file", "file-0", "train.jsonl", "(1)"]
    assert rows.pop(1).split() == ["lora.r", "8", "16"]
    assert not [row for row in rows if row.startswith(("training.learning_rate", "seed"))]
    assert rows[5].split()[:7] == ["lowest", "validation", "loss", "2.0000", "at", "step", "10"]
    curves = [row for row in rows if "→" in row]
    assert [curve.split()[0] for curve in curves] == ["1", "mine"] * 2
    assert [curve.split()[-3:] for curve in curves] == [["1.900", "→", "1.000"]] * 2 + [["2.900", "→", "2.000"]] * 2
    shown = json.loads(ft("compare", "ftjob-1", "ftjob-2", "--json").out)
    assert shown["options"] == {"training_file": ["file-0", "file-1"], "lora.r": [8, 16]}
    assert len(shown["metrics"][1]) == 10


def test_rm_removes_a_file_or_a_tuned_model_and_asks_first(ft: Ft, server: StubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.files = [{"id": "file-1", "filename": "train.jsonl", "bytes": 5}]
    server.jobs["ftjob-1"] = job_body(status="succeeded", fine_tuned_model=TUNED)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    refused = ft("rm", "file-1")
    assert (refused.code, len(server.files)) == (64, 1)
    assert "would remove the file train.jsonl (file-1). Say so with --yes" in refused.err
    assert ft("files").out.splitlines()[1].split()[:2] == ["file-1", "train.jsonl"]
    assert ft("rm", "file-", "--yes").out == "Removed the file train.jsonl (file-1).\n"
    assert server.files == []
    assert json.loads(ft("rm", "last", "--yes", "--json").out) == {"id": TUNED, "deleted": True}
    assert server.requests[-1].method == "DELETE"
    server.jobs["ftjob-1"].update(status="running", fine_tuned_model=None)
    assert "Job ftjob-1 has no tuned model to remove (running)." in ft("rm", "last", "--yes").err


def test_errors_are_json_where_output_is(ft: Ft, server: StubServer, tmp_path: Path) -> None:
    ended = ft("get", "nobody", "--json")
    body = json.loads(ended.err)["error"]
    assert (ended.code, ended.out, body["exit_code"], body["code"]) == (1, "", 1, "not_found")
    usage = json.loads(ft("get", "--json").err)["error"]
    assert (usage["code"], usage["exit_code"]) == ("usage", 64)
    missing = json.loads(ft("submit", tmp_path / "no.yaml", "--json").err)["error"]
    assert "cannot be read" in missing["message"]


def test_short_help_and_completion(
    ft: Ft, server: StubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "Usage: ft" in ft("jobs", "-h").out
    server.jobs["ftjob-1"] = job_body(suffix="mine")
    for name, value in {"_FT_COMPLETE": "complete_bash", "COMP_WORDS": "ft get mi", "COMP_CWORD": "2"}.items():
        monkeypatch.setitem(os.environ, name, value)
    with pytest.raises(SystemExit):
        ft("get", "mi")
    assert capsys.readouterr().out.split() == ["mine"]


def test_a_terminal_shows_short_ids_and_the_reason_below(ft: Ft, server: StubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = "ftjob-" + "abcdefgh" * 3
    server.jobs[whole] = job_body(whole, "failed", suffix="a-rather-long-suffix", error={"message": "The disk is full. " * 9})
    monkeypatch.setattr("ft_service.cli.output.is_terminal", lambda: True)
    monkeypatch.setattr("ft_service.cli.jobs.listing.is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    _, row, reason = ft("jobs").out.splitlines()
    assert row.split()[0] == "abcdefgh"
    assert (len(reason), reason[:21], reason[-1]) == (80, "    The disk is full.", "…")


def test_a_narrow_screen_takes_from_the_widest_columns() -> None:
    assert shrunk([2, 5, 60, 40], 107) == [2, 5, 60, 40]
    assert shrunk([2, 5, 60, 40], 67) == [2, 5, 30, 30]
    assert shrunk([29, 16, 16], 41, [False, True, True]) == [9, 16, 16]
    assert shrunk([29, 16, 16], 30, [False, True, True]) == [4, 13, 13]


def test_answers_without_scores_are_shown_without_tables_of_them(ft: Ft, server: StubServer) -> None:
    server.jobs["ftjob-1"] = job_body(evaluation={"prompts": 1})
    sample = {"prompt": "user\nsay", "base": "no", "tuned": "yes", "base_scores": {}, "scores": {}}
    server.evaluations = [{"id": "6", "step": 6, "created_at": 0, "samples": [sample]}]
    said = ft("eval", "last").out
    assert "STEP" not in said
    assert "├" not in said, "no row of scores"
    assert "evaluation   at step 6; the answers: ft eval" in re.sub("  +", "   ", ft("get", "last").out)


def test_the_page_is_opened_at_the_job_that_a_word_means(ft: Ft, server: StubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.jobs["ftjob-1"] = job_body(suffix="mine")
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: bool(opened.append(url)))
    ended = ft("open", "mine")
    assert (ended.out.split(), opened) == (opened, ["http://service.test/sign-in?link=once&to=/jobs/ftjob-1"])
    assert ended.err.startswith("There is no browser here. Open this link in one")
    assert ft("open", "other", "--print").err.startswith("ft: There is no job 'other'.")


def test_without_a_base_it_is_said_how_to_get_one(ft: Ft, server: StubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Client, "models", lambda self: [])
    assert ft("models").out.startswith("The server knows no bases: fetch one (ft pull ORG/NAME), or put ")


class Answers:
    """In the place of a client: what is given to it, or a Ctrl-C in the middle."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def chat(self, body: dict[str, Any]) -> Iterator[str]:
        self.asked.append([said["content"] for said in body["messages"]])
        yield "[/b]"
        if body["messages"][-1]["content"] == "stop":
            raise KeyboardInterrupt
        yield " well"


def test_a_conversation_bears_ctrl_c_and_brackets(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    typed = iter(["hello", "stop", "again"])

    def read(_: str) -> str:
        for line in typed:
            return line
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", read)
    client: Any = Answers()
    Talk(client, [Partner("tuned", TUNED)], {}, []).hold()
    assert client.asked[2] == ["hello", "[/b] well", "again"], "what was broken off is not remembered"
    assert "(ended; it is not remembered)" in capsys.readouterr().out
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    Talk(client, [Partner("tuned", TUNED), Partner("base", "tiny")], {}, []).ask("hello")
    shown = capsys.readouterr().out
    assert (shown.count("[/b] well"), shown.count("╭")) == (2, 2)


def test_chat_takes_the_words_for_jobs_that_other_commands_take() -> None:
    server = StubServer()
    server.jobs["ftjob-1"] = job_body(status="succeeded", fine_tuned_model=TUNED, suffix="mine")
    for word in ("last", "mine", "ftjob-1"):
        tuned, base = find_partners(server.client(), word)
        assert (tuned.model, base.model) == (TUNED, "tiny")
    with pytest.raises(NotFoundError, match="There is no job 'ftjob-gone'"):
        find_partners(server.client(), "ft:tiny:local::gone")
