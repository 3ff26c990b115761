from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from ft_service.cli.root_command import run
from ft_service.data.data_file import check_lines
from ft_service.data.formats.columns import Columns
from ft_service.data.formats.reading import open_data
from ft_service.data.line_errors import Fault
from ft_service.data.sample_kinds import Conversation, PromptCompletion, Record, Text
from ft_service.data.token_options import DEFAULT, TokenOptions
from ft_service.data.tokens.tokenize import file_samples, load_tokenizer
from ft_service.errors import SpecError
from ft_service.rundir.directory import sha256_of
from ft_service.spec import DataFileRef, parse_request
from ft_service.spec.options import DataOptions
from tests.support.bases import SAMPLE

TURNS = [{"speaker": "human", "said": "Hi"}, {"speaker": "gpt", "said": "Hello"}]


def write(folder: Path, kind: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / f"data.{kind}"
    if kind == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    elif kind == "csv":
        cells = [
            [value if isinstance(value, str) else json.dumps(value) for value in row.values()]
            for row in rows
        ]
        quoted = [
            ",".join('"' + cell.replace('"', '""') + '"' for cell in line)
            for line in [list(rows[0]), *cells]
        ]
        path.write_text("\n".join(quoted) + "\n")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def records(path: Path, **named: str) -> list[Record | Fault]:
    with open_data(path, (), Columns.of(DataOptions.model_validate(named))) as reader:
        return [record for _, record in reader]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_columns_of_other_names_are_read_as_the_formats_own(tmp_path: Path, kind: str) -> None:
    rows = [
        {"id": "1", "question": "Why?", "answer": "So."},
        {"id": "2", "question": "How?", "answer": "Thus."},
    ]
    path = write(tmp_path, kind, rows)
    assert records(path, prompt="question", completion="answer")[0] == PromptCompletion(
        "Why?", "So."
    )
    (first, _) = records(path, instruction="question", output="answer")
    assert isinstance(first, Conversation)
    assert [message["content"] for message in first.messages] == ["Why?", "So."]
    assert records(path, text="answer")[1] == Text("Thus.")
    report = check_lines(path, columns=Columns((("text", "answer"),)))
    assert report.unused == ("id", "question")


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_messages_with_keys_of_their_own_are_read(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, kind, [{"dialogue": TURNS}])
    (found,) = records(path, messages="dialogue", role="speaker", content="said")
    assert isinstance(found, Conversation)
    assert [(message["role"], message["content"]) for message in found.messages] == [
        ("user", "Hi"),
        ("assistant", "Hello"),
    ]


def test_a_column_that_has_the_name_of_another_is_left_out(tmp_path: Path) -> None:
    path = write(
        tmp_path, "jsonl", [{"prompt": "not this", "question": "Why?", "completion": "So."}]
    )
    assert records(path, prompt="question") == [PromptCompletion("Why?", "So.")]
    swapped = write(tmp_path, "jsonl", [{"prompt": "a", "completion": "b"}])
    assert records(swapped, prompt="completion", completion="prompt") == [
        PromptCompletion("b", "a")
    ]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path: Path, kind: str) -> None:
    (fault,) = records(
        write(tmp_path, kind, [{"question": "Why?", "answer": "So."}]),
        prompt="querstion",
        completion="answer",
    )
    assert isinstance(fault, Fault)
    assert (
        "querstion is not there, and data.prompt names it: its columns are 'question', 'answer'"
        in str(fault)
    )


def test_a_mapping_is_checked_where_it_is_given() -> None:
    body = {"model": "m", "training_file": "f"}
    with pytest.raises(SpecError, match=r"data\.completion and data\.prompt both name 'a'"):
        parse_request({**body, "data": {"prompt": "a", "completion": "a"}})
    with pytest.raises(SpecError, match=r"data\.promt"):
        parse_request({**body, "data": {"promt": "a"}})
    with pytest.raises(SpecError, match=r"data\.prompt"):
        parse_request({**body, "data": {"prompt": ""}})


def test_other_columns_are_another_token_set() -> None:
    given = TokenOptions(columns=Columns((("prompt", "question"),))).given()
    assert given == {
        "columns": {
            "pairs": (("prompt", "question"),),
            "of_prompts": False,
            "apply_chat_template": False,
        }
    }
    assert DEFAULT.given() == {}


def test_the_command_line_takes_a_mapping(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, "csv", [{"question": "Why?", "answer": "So."}])
    assert run(["data", "check", str(path)]) == 64
    assert "--column instruction=question --column output=answer" in capsys.readouterr().err
    named = ["--column", "instruction=question", "--column", "output=answer"]
    assert run(["data", "check", str(path), *named]) == 0
    assert "Alpaca" in capsys.readouterr().out
    assert run(["data", "convert", str(path), "-", *named]) == 0
    assert json.loads(capsys.readouterr().out)["messages"][1] == {
        "role": "assistant",
        "content": "So.",
    }
    assert run(["data", "check", str(path), "--column", "promt=question"]) == 64
    assert "promt" in capsys.readouterr().err


def test_a_job_trains_on_mapped_columns_as_on_the_formats_own(tmp_path: Path) -> None:
    plain = [{"prompt": "Why? ", "completion": f"Since {n}."} for n in range(3)]
    mapped = [
        {"question": row["prompt"], "answer": row["completion"], "prompt": "not this"}
        for row in plain
    ]
    files = [
        write(tmp_path / name, "jsonl", rows)
        for name, rows in made(tmp_path, plain=plain, mapped=mapped).items()
    ]
    tokenizer = load_tokenizer(str(SAMPLE))
    asked = (
        DEFAULT,
        TokenOptions(columns=Columns((("completion", "answer"), ("prompt", "question")))),
    )
    refs = [DataFileRef(name=file.name, path=str(file), sha256=sha256_of(file)) for file in files]
    first, second = (
        list(file_samples(tokenizer, ref, options))
        for ref, options in zip(refs, asked, strict=True)
    )
    assert [sample.ids.tolist() for sample in first] == [sample.ids.tolist() for sample in second]
    assert len(first) == 3


def made(folder: Path, **rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    for name in rows:
        (folder / name).mkdir()
    return rows


def test_prompts_joined_as_bare_text_are_told_with_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, "csv", [{"prompt": "Why?", "completion": "So."}])
    assert run(["data", "check", str(path)]) == 0
    assert "--column instruction=prompt --column output=completion" in capsys.readouterr().out
    named = ["--column", "instruction=prompt", "--column", "output=completion"]
    assert run(["data", "check", str(path), *named]) == 0
    assert "bare text" not in capsys.readouterr().out
    assert run(["data", "check", str(path), "--column", "apply_chat_template=auto"]) == 0
    assert "conversations for a base with a chat template" in capsys.readouterr().out
    other = write(tmp_path, "csv", [{"ask": "Why?", "say": "So."}])
    report = check_lines(other, columns=Columns((("prompt", "ask"), ("completion", "say"))))
    assert report.joined == ("ask", "say")
