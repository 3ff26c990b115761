"""`ft data convert`: a file's records as OpenAI's lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from ft_service.cli.root_command import app


def test_each_answer_becomes_the_end_of_a_line_of_its_own_and_is_learned_alone(tmp_path: Path) -> None:
    """What a template that writes earlier answers otherwise than their prompts say needs (docs/data.md)."""
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
    done = CliRunner().invoke(app, ["data", "convert", "--each-answer", str(tmp_path / "in.jsonl"), str(out)])
    assert done.exit_code == 0, done.output
    assert "2 lines in" in done.output
    lines: list[Any] = [json.loads(line)["messages"] for line in out.read_text().splitlines()]
    assert [[message["content"] for message in line] for line in lines] == [["a", "b"], ["a", "b", "c", "d", "e", "f"]]
    learned = [[m["content"] for m in line if m["role"] == "assistant" and m.get("weight", 1)] for line in lines]
    assert learned == [["b"], ["f"]]
