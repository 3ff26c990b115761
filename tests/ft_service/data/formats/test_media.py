"""Pictures, films and sound are refused wherever files have them; what only speaks of them is
not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ft_service.data.formats.columns import AS_THEY_ARE, Columns
from ft_service.data.formats.reading import open_data
from ft_service.data.line_errors import Fault
from tests.support.data_formats import CONTAINERS, array, write

ASK = {"role": "user", "content": "Who?"}
SAY = {"role": "assistant", "content": "Ann."}


def turns(question: str, answer: str = "Ann.") -> list[dict[str, str]]:
    return [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]


def faults(
    row: dict[str, Any], folder: Path, columns: Columns = AS_THEY_ARE
) -> list[tuple[int, str]]:
    with open_data(write(folder, array([row])), columns=columns) as reader:
        return [(number, record.field) for number, record in reader if isinstance(record, Fault)]


@pytest.mark.parametrize(
    ("row", "place"),
    [
        ({"conversations": turns("Who?"), "image": "a.jpg"}, "image"),
        ({"messages": [ASK, SAY], "images": ["a.jpg"]}, "images.0"),
        ({"instruction": "Who?", "output": "Ann.", "images": ["a.jpg"]}, "images"),
        ({"prompt": "Who?", "completion": "Ann.", "images": ["a.jpg"]}, "images"),
        ({"messages": [ASK, SAY], "videos": ["a.mp4"]}, "videos"),
        ({"messages": [ASK, SAY], "audios": ["a.wav"]}, "audios"),
        ({"instruction": "Who?", "output": "Ann.", "audio": {"path": "a.wav"}}, "audio"),
        ({"prompt": "Who?", "chosen": "Ann.", "rejected": "Bob.", "images": ["a.jpg"]}, "images.0"),
        ({"conversations": turns("<image>\nWho are they?")}, "conversations.0.value"),
        (
            {"messages": [{"role": "user", "content": "Compare <image> and <image>."}, SAY]},
            "messages.0.content",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "Who?<image>"}]},
                    SAY,
                ]
            },
            "messages.0.content.0.text",
        ),
        ({"instruction": "<video>What happens?", "output": "Much."}, "instruction"),
        ({"prompt": "What is said?\n<audio>", "completion": "Much."}, "prompt"),
        (
            {"prompt": [{"role": "user", "content": "<|image|>Who?"}], "completion": [SAY]},
            "prompt.0.content",
        ),
    ],
)
def test_what_is_not_text_is_refused_by_its_place(
    row: dict[str, Any], place: str, tmp_path: Path
) -> None:
    assert faults(row, tmp_path) == [(1, place)]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASK, SAY], "images": []},
        {"messages": [ASK, SAY], "image": None},
        {"conversations": turns("What does `<image>` mean?")},
        {"conversations": turns("Read <rss><image><url>a</url></image></rss>")},
        {"conversations": turns("When is <video> better than a link?")},
        {"conversations": turns("How is SVG drawn?", "With <image> and <path>.")},
        {"text": "<image> is a tag."},
    ],
)
def test_what_only_speaks_of_pictures_is_learned(row: dict[str, Any], tmp_path: Path) -> None:
    assert faults(row, tmp_path) == []


def test_a_column_that_the_job_maps_is_text(tmp_path: Path) -> None:
    row = {"image": "Describe a house.", "words": "It is red."}
    assert faults(row, tmp_path, Columns((("instruction", "image"), ("output", "words")))) == []


@pytest.mark.parametrize("container", ["parquet", "arrow"])
def test_a_table_is_looked_at_like_lines(container: str, tmp_path: Path) -> None:
    _, make = CONTAINERS[container]
    rows = [
        {"messages": [ASK, SAY], "image": {"bytes": b"x", "path": "a"}},
        {"messages": [ASK, SAY], "image": None},
    ]
    with open_data(write(tmp_path, make(rows))) as reader:
        assert [
            (number, record.field) for number, record in reader if isinstance(record, Fault)
        ] == [(1, "image")]


def test_an_image_of_a_prompts_item_is_the_graders(tmp_path: Path) -> None:
    prompts = Columns(of_prompts=True)
    assert faults({"messages": [ASK], "image": "python:3.12"}, tmp_path, prompts) == []
    pictured = {"messages": [{"role": "user", "content": "<image>Who?"}]}
    assert faults(pictured, tmp_path, prompts) == [(1, "messages.0.content")]
