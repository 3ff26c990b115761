"""Records, and files of every format and container that hold them."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import zstandard

from ft_service.data.formats.detect_format import Container, Format
from ft_service.data.formats.reading import open_data
from ft_service.data.line_errors import Fault
from ft_service.data.sample_kinds import Conversation, Pair, PromptCompletion, Record, Text

ROOT = Path(__file__).parents[2]


EXAMPLES = ROOT / "examples/data/formats"


SYSTEM = {"role": "system", "content": "Be brief."}


USER = {"role": "user", "content": 'Two plus "two"?\nSay, [é] {'}


ANSWER = {"role": "assistant", "content": "Four."}


WORSE = {"role": "assistant", "content": "Five."}


CHAT = Conversation((USER, ANSWER), (0, 1))


PAIR = Pair(CHAT, Conversation((USER, WORSE), (0, 1)))


SAME: dict[str, tuple[Format, dict[str, Any], Record]] = {
    "chat": (Format.CHAT, {"messages": [USER, ANSWER]}, CHAT),
    "bare": (
        Format.PROMPT_COMPLETION,
        {"prompt": "a", "completion": "b"},
        PromptCompletion("a", "b"),
    ),
    "completed messages": (
        *(Format.PROMPT_COMPLETION, {"prompt": [USER, ANSWER, USER], "completion": [WORSE]}),
        Conversation((USER, ANSWER, USER, WORSE), (0, 0, 0, 1)),
    ),
    "text": (Format.TEXT, {"text": "Once."}, Text("Once.")),
    "sharegpt": (
        Format.SHAREGPT,
        {
            "conversations": [
                {"from": "human", "value": USER["content"]},
                {"from": "gpt", "value": "Four."},
            ]
        },
        CHAT,
    ),
    "sharegpt with roles": (
        Format.SHAREGPT,
        {"conversations": [USER, ANSWER], "system": " "},
        CHAT,
    ),
    "alpaca": (
        *(
            Format.ALPACA,
            {"instruction": "Add.", "input": "2, 2", "output": "4", "system": "Be brief."},
        ),
        Conversation(
            (
                SYSTEM,
                {"role": "user", "content": "Add.\n\n2, 2"},
                {"role": "assistant", "content": "4"},
            ),
            (0, 0, 1),
        ),
    ),
    "alpaca alone": (
        *(Format.ALPACA, {"instruction": "Add.", "input": "", "output": "4"}),
        Conversation(
            ({"role": "user", "content": "Add."}, {"role": "assistant", "content": "4"}), (0, 1)
        ),
    ),
    "openai pairs": (
        Format.OPENAI_PAIRS,
        {
            "input": {"messages": [USER]},
            "preferred_output": [ANSWER],
            "non_preferred_output": [WORSE],
        },
        PAIR,
    ),
    "older openai pairs": (
        Format.OPENAI_PAIRS,
        {
            "input": {"messages": [USER]},
            "preferred_completion": [ANSWER],
            "non_preferred_completion": [WORSE],
        },
        PAIR,
    ),
    "trl pairs": (
        Format.TRL_PAIRS,
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [WORSE]},
        PAIR,
    ),
    "whole trl pairs": (
        Format.TRL_PAIRS,
        {"chosen": [USER, ANSWER], "rejected": [USER, WORSE]},
        PAIR,
    ),
    "prompt written twice": (
        Format.TRL_PAIRS,
        {"prompt": "x", "chosen": [USER, ANSWER], "rejected": [USER, WORSE]},
        PAIR,
    ),
}


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def array(rows: list[dict[str, Any]]) -> bytes:
    return b"\n " + json.dumps(rows, indent=2, ensure_ascii=False).encode() + b"\n"


def in_parquet(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist([*rows]), file, row_group_size=2)
    return file.getvalue()


def in_arrow(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    table = pa.Table.from_pylist([*rows])
    with pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    return file.getvalue()


def in_csv(rows: list[dict[str, Any]], delimiter: str = ",") -> bytes:
    file = io.StringIO()
    writer = csv.writer(file, delimiter=delimiter)
    writer.writerow(rows[0])
    for row in rows:
        writer.writerow(
            [value if isinstance(value, str) else json.dumps(value) for value in row.values()]
        )
    return b"\xef\xbb\xbf" + file.getvalue().encode()


CONTAINERS: dict[str, tuple[Container, Callable[[list[dict[str, Any]]], bytes]]] = {
    "lines": (Container.LINES, lines),
    "array": (Container.ARRAY, array),
    "parquet": (Container.PARQUET, in_parquet),
    "arrow": (Container.ARROW, in_arrow),
    "gzip": (Container.LINES, lambda rows: gzip.compress(lines(rows))),
    "zstd": (Container.ARRAY, lambda rows: zstandard.compress(array(rows))),
}


TABLES = {
    "csv": (Container.CSV, in_csv),
    "semicolons": (Container.CSV, lambda rows: in_csv(rows, ";")),
    "tabs, gzip": (Container.CSV, lambda rows: gzip.compress(in_csv(rows, "\t"))),
}


FLAT = ("chat", "bare", "text", "alpaca", "alpaca alone", "sharegpt with roles")


def records(path: Path) -> list[Record | Fault]:
    with open_data(path) as reader:
        return [record for _, record in reader]


def write(folder: Path, content: bytes) -> Path:
    path = folder / "data"
    path.write_bytes(content)
    return path


def good(count: int = 2) -> list[dict[str, Any]]:
    return [{"messages": [USER, ANSWER]}] * count
