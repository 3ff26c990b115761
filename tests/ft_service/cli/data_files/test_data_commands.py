"""`ft data`: a file's records as OpenAI's lines, and options that a file or command has no use
for.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from ft_service.cli.data_files import data_commands
from ft_service.cli.data_files.data_commands import show_page
from ft_service.cli.root_command import app
from ft_service.data.sample_request import SamplePage
from ft_service.errors import DataError, SpecError
from ft_service.installation import SAMPLE_MODELS
from ft_service.plan.machines import MACHINES
from tests.support.image_bases import drawn, encoded, image_part

TEXTS = ("four in all", "four in all", " ", "it is five")


def test_each_answer_becomes_the_end_of_a_line_of_its_own_and_is_learned_alone(
    tmp_path: Path,
) -> None:
    """What a template that writes earlier answers otherwise than their prompts say needs
    (docs/data.md).
    """
    said = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "weight": 0},
        {"role": "user", "content": "e"},
        {"role": "assistant", "content": "f"},
    ]
    (tmp_path / "in.jsonl").write_text(json.dumps({"messages": said}) + "\n")
    out = tmp_path / "out.jsonl"
    done = CliRunner().invoke(
        app, ["data", "convert", "--each-answer", str(tmp_path / "in.jsonl"), str(out)]
    )
    assert done.exit_code == 0, done.output
    assert "2 lines in" in done.output
    lines: list[Any] = [json.loads(line)["messages"] for line in out.read_text().splitlines()]
    assert [[message["content"] for message in line] for line in lines] == [
        ["a", "b"],
        ["a", "b", "c", "d", "e", "f"],
    ]
    learned = [
        [m["content"] for m in line if m["role"] == "assistant" and m.get("weight", 1)]
        for line in lines
    ]
    assert learned == [["b"], ["f"]]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--split", "test"], "--split = 'test': in.jsonl is a single file"),
        (["--chat-template", "llama3"], "Give --model too"),
    ],
)
def test_an_option_without_effect_is_refused(options: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    done = CliRunner().invoke(
        app, ["data", "check", str(tmp_path / "in.jsonl"), *options], standalone_mode=False
    )
    assert isinstance(done.exception, SpecError)
    assert said in str(done.exception)


def test_nothing_is_printed_of_a_file_with_a_line_at_fault(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n{"text": 1}\n')
    done = CliRunner().invoke(
        app, ["data", "convert", str(tmp_path / "in.jsonl"), "-"], standalone_mode=False
    )
    assert isinstance(done.exception, DataError)
    assert done.output == ""


def test_a_check_warns_of_copies_and_of_empty_answers(tmp_path: Path) -> None:
    def chat(question: str, **answer: Any) -> dict[str, Any]:
        return {
            "messages": [{"role": "user", "content": question}, {"role": "assistant", **answer}]
        }

    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answers = [{"content": "4"}, {"content": "4"}, {"content": " \n"}, {"tool_calls": [call]}]
    lines = [chat("2+2?", **answer) for answer in answers]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = CliRunner().invoke(
        app, ["data", "check", str(tmp_path / "in.jsonl")], standalone_mode=False
    )
    copies, empty = [line for line in done.output.splitlines() if line.startswith("Warning: ")]
    assert copies.startswith(
        "Warning: in.jsonl: 1 sample (line 2) with the same tokens as an earlier one"
    )
    assert empty.startswith(
        "Warning: in.jsonl: 1 sample (line 3) with an answer of at most 1 token."
    )
    as_json = CliRunner().invoke(
        app, ["data", "check", str(tmp_path / "in.jsonl"), "--json"], standalone_mode=False
    )
    assert [f"Warning: {warning}" for warning in json.loads(as_json.output)["warnings"]] == [
        copies,
        empty,
    ]


def test_with_a_base_a_check_reads_a_file_once_and_warns_by_its_tokens(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_commands, "check_lines", pytest.fail)
    chats = [
        [{"role": "user", "content": "2+2?", "name": "Ann"}, {"role": "assistant", "content": text}]
        for text in TEXTS
    ]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    asked = ["data", "check", str(path), "--model", str(SAMPLE_MODELS / "tiny-llama"), "--json"]
    done = CliRunner().invoke(app, asked, standalone_mode=False)
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    assert report["counts"]["samples"] == 4
    names, copies, empty = report["warnings"]
    assert "4 samples (lines 1, 2, 3, 4) with a name in messages of the role user" in names
    assert copies.startswith("in.jsonl: 1 sample (line 2) with the same tokens as an earlier one")
    assert empty.startswith("in.jsonl: 1 sample (line 3) with an answer of at most 1 token.")


def test_a_record_beyond_any_file_is_refused(tmp_path: Path) -> None:
    """Of hundreds of digits, it could not be sent to the process that reads."""
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    done = CliRunner().invoke(
        app, ["data", "show", str(tmp_path / "in.jsonl"), "--model", "m", "--after", "9" * 400]
    )
    assert done.exit_code == 2
    assert "Input should be less than or equal to 1000000000000" in " ".join(
        done.output.split()
    ).replace("│ │ ", "")


def test_a_file_without_samples_is_said_to_have_none(capsys: pytest.CaptureFixture[str]) -> None:
    show_page(
        Console(),
        SamplePage(samples=(), has_more=False, word="line", shape="JSON lines"),
        ids=False,
    )
    assert "There are no samples here" in capsys.readouterr().out


def test_converting_writes_the_pictures_into_the_lines(tmp_path: Path) -> None:
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats/1.png").write_bytes(picture := encoded(drawn()))
    turns = [{"from": "human", "value": "<image>Who?"}, {"from": "gpt", "value": "Ann."}]
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"conversations": turns, "images": ["cats/1.png"]}) + "\n")
    out = tmp_path / "out.jsonl"
    refused = CliRunner().invoke(app, ["data", "check", str(source)], standalone_mode=False)
    assert isinstance(refused.exception, DataError)
    assert "`ft data convert FILE OUT.jsonl`" in refused.exception.message
    done = CliRunner().invoke(app, ["data", "convert", str(source), str(out)])
    assert done.exit_code == 0, done.output
    (line,) = out.read_text().splitlines()
    assert json.loads(line)["messages"][0]["content"] == [
        image_part(picture),
        {"type": "text", "text": "Who?"},
    ]
    checked = CliRunner().invoke(app, ["data", "check", str(out)])
    assert (checked.exit_code, "1 image" in checked.output) == (0, True)
    (tmp_path / "cats/1.png").unlink()
    missing = CliRunner().invoke(
        app, ["data", "convert", str(source), str(tmp_path / "b.jsonl")], standalone_mode=False
    )
    assert isinstance(missing.exception, DataError)
    assert "line 1: images.0 is 'cats/1.png', and " in missing.exception.message
    assert not (tmp_path / "b.jsonl").exists()


def test_a_line_that_grows_too_long_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "1.png").write_bytes(encoded(drawn()))
    said = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ann."}]
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"messages": said, "image": "1.png"}) + "\n")
    monkeypatch.setattr(data_commands, "MAX_LINE_BYTES", 200)
    done = CliRunner().invoke(app, ["data", "convert", str(source), "-"], standalone_mode=False)
    assert isinstance(done.exception, DataError)
    assert "bytes, and one may have 200" in done.exception.message


def test_a_check_names_copies_and_overlaps_and_drops_them(tmp_path: Path) -> None:
    def words(seed: int) -> str:
        return " ".join(f"w{seed}x{number}" for number in range(40))

    def chat(asked: str, answer: str) -> str:
        turns = (("user", asked), ("assistant", answer))
        messages = [{"role": role, "content": content} for role, content in turns]
        return json.dumps({"messages": messages}) + "\n"

    lines = [
        *(chat(words(1), words(2)), chat(words(3), words(4)), chat(words(1), words(2))),
        *(chat(words(3), words(4) + "."), chat("The capital of France is", "Paris.")),
        *(chat(f"so {words(5)}", "b"), chat("Who counts the grey boats?", "I.")),
    ]
    path, held_out, asked = (tmp_path / f"{name}.jsonl" for name in ("in", "held", "asked"))
    path.write_text("".join(lines))
    held_out.write_text(chat("Say: " + words(5), "a"))
    asked.write_text(json.dumps({"prompt": "who counts the grey boats?"}) + "\n")
    out = tmp_path / "out.jsonl"

    def checked(*options: str) -> Any:
        return CliRunner().invoke(
            app, ["data", "check", str(path), *options], standalone_mode=False
        )

    done = checked(
        *("--validation", str(held_out), "--prompts", str(asked), "--drop", str(out), "--json")
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    comparison = found["comparison"]
    assert found["duplicates"]["first"] == [3]
    assert comparison["near_copies"]["first"] == [4]
    assert {name: own["first"] for name, own in comparison["overlaps"].items()} == {
        "held.jsonl": [6],
        "asked.jsonl": [7],
        "the suite facts": [5],
    }
    assert (found["lines"], found["path"]) == (2, str(out))
    assert out.read_text() == "".join(lines[:2])

    refused = checked("--drop", str(out))
    assert isinstance(refused.exception, SpecError)
    assert refused.exception.param == "drop"
    missing = checked("--prompts", str(tmp_path / "none.jsonl"))
    assert isinstance(missing.exception, SpecError)
    assert missing.exception.param == "prompts"
    said = checked("--drop", str(tmp_path / "more.jsonl")).output
    assert "4 lines in" in said
    assert "without 3 records" in said


def test_stats_say_which_samples_need_several_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the plan of a GPU on which the sample base has room for some 200 tokens."""
    monkeypatch.setenv("FT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FT_MODELS", str(SAMPLE_MODELS))
    monkeypatch.setitem(MACHINES, "T4", replace(MACHINES["T4"], memory=8 * 2**20))
    data = tmp_path / "in.jsonl"
    turn = {"role": "user", "content": "hello"}
    lines = [
        {"messages": [turn, {"role": "assistant", "content": answer}]}
        for answer in ("yes", " ".join(map(str, range(80))), " ".join(map(str, range(120))))
    ]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def said(*options: str) -> str:
        given = ["data", "stats", str(data), "--model", "tiny-llama", "--hardware", "T4"]
        done = CliRunner().invoke(app, [*given, *options])
        assert done.exit_code == 0, done.output
        return done.output

    found = json.loads(said("--json"))
    lengths, one_rank = found["training"]["lengths"], found["one_rank"]
    assert lengths["least"] < one_rank["tokens"] < lengths["median"] < lengths["most"]
    assert one_rank["ranks"] == 2
    assert found["training"]["beyond_one_rank"] == {"count": 2, "first": [2, 3]}
    text = " ".join(said().split())
    assert "need several ranks 2 samples (lines 2, 3)" in text
    assert f"One rank of T4 has room for samples of up to {one_rank['tokens']} tokens." in text
    assert "distributed.nproc_per_node: 2" in text
    short = json.loads(said("--json", "--max-length", "64"))
    assert short["one_rank"] is None
    assert short["training"]["beyond_one_rank"]["count"] == 0
