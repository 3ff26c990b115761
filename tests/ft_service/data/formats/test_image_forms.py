"""Pictures in the forms that people have become the conversation that OpenAI's form of the same
chat becomes.
"""

from __future__ import annotations

import base64
import io
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from ft_service.data import image_part as limits
from ft_service.data.formats.detect_format import recognise
from ft_service.data.formats.normalize import as_record
from ft_service.data.formats.reading import open_data
from ft_service.data.formats.writing import line_of
from ft_service.data.image_limits import BYTES
from ft_service.data.line_errors import Fault, LineError
from ft_service.data.sample_kinds import IMAGE, Conversation, Pair, Picture, Record
from tests.support.data_formats import CONTAINERS, lines, records, write
from tests.support.image_bases import drawn, encoded, image_part, text_part

PNG, OTHER = encoded(drawn()), encoded(drawn(seed=2), "JPEG")
WEB = "https://example.org/a.png"
DATA, DATA_OTHER = (
    f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in (PNG, OTHER)
)
SAY = {"role": "assistant", "content": "A gauge."}
WORSE = {"role": "assistant", "content": "A clock."}
HERE = {"type": "image"}
SPOKEN = {"from": "gpt", "value": "A gauge."}


def ask(*parts: dict[str, Any] | str) -> dict[str, Any]:
    """A user's message of these parts; of one text, as a string."""
    if len(parts) == 1 and isinstance(parts[0], str):
        return {"role": "user", "content": parts[0]}
    return {
        "role": "user",
        "content": [text_part(part) if isinstance(part, str) else part for part in parts],
    }


def human(text: str) -> dict[str, str]:
    return {"from": "human", "value": text}


def read(fields: dict[str, Any]) -> Record:
    format = recognise(fields)
    assert format is not None
    return as_record(format, fields)


def refused(fields: dict[str, Any]) -> tuple[str, str]:
    with pytest.raises(LineError) as refusal:
        read(fields)
    return refusal.value.field, refusal.value.reason


TWICE = read(
    {
        "messages": [
            ask(image_part(PNG), "Read it."),
            SAY,
            ask("And ", image_part(OTHER), "?"),
            SAY,
        ]
    }
)
ONCE = read({"messages": [ask(image_part(PNG), "Read it."), SAY]})
COLUMN = ("images.0", "images.1")


@pytest.mark.parametrize(
    ("fields", "places"),
    [
        (
            {
                "messages": [ask(HERE, "Read it."), SAY, ask("And ", HERE, "?"), SAY],
                "images": [DATA, DATA_OTHER],
            },
            COLUMN,
        ),
        (
            {
                "messages": [ask("<image>Read it."), SAY, ask("And ", "<image>?"), SAY],
                "images": json.dumps([DATA, DATA_OTHER]),
            },
            COLUMN,
        ),
        (
            {
                "messages": [ask(HERE, "Read it."), SAY, ask("And <image>?"), SAY],
                "images": [{"bytes": PNG, "path": "a.png"}, OTHER],
            },
            COLUMN,
        ),
        (
            {
                "messages": [
                    ask(HERE | {"index": 0}, "Read it."),
                    SAY,
                    ask("And ", HERE | {"index": 1}, "?"),
                    SAY,
                ],
                "images": [{"path": DATA}, DATA_OTHER],
            },
            COLUMN,
        ),
        (
            {
                "messages": [
                    ask(HERE | {"image": DATA}, "Read it."),
                    SAY,
                    ask("And ", HERE | {"url": DATA_OTHER}, "?"),
                    SAY,
                ]
            },
            ("messages.0.content.0.image", "messages.2.content.1.url"),
        ),
        (
            {
                "messages": [ask(image_part(PNG), "Read it."), SAY, ask("And <image>?"), SAY],
                "image": DATA_OTHER,
            },
            ("messages.0.content.0.image_url", "image"),
        ),
        (
            {
                "prompt": [ask(HERE, "Read it."), SAY | {"weight": 1}, ask("And ", HERE, "?")],
                "completion": [SAY],
                "images": [DATA, DATA_OTHER],
            },
            COLUMN,
        ),
        (
            {
                "conversations": [
                    human("<image>Read it."),
                    SPOKEN,
                    human("And <image>?"),
                    SPOKEN,
                ],
                "images": [DATA, DATA_OTHER],
            },
            COLUMN,
        ),
        (
            {
                "conversations": [
                    ask("<image>Read it."),
                    SAY,
                    ask("And ", image_part(OTHER), "?"),
                    SAY,
                ],
                "image": [DATA],
            },
            ("image.0", "conversations.2.content.1.image_url"),
        ),
    ],
)
def test_a_form_is_the_same_conversation_as_openai_s(
    fields: dict[str, Any], places: tuple[str, ...]
) -> None:
    chat = read(fields)
    assert isinstance(chat, Conversation)
    assert isinstance(TWICE, Conversation)
    assert (chat.messages, chat.images) == (TWICE.messages, TWICE.images)
    assert chat.weights == ((0, 0, 0, 1) if "prompt" in fields else TWICE.weights)
    assert chat.image_places == places


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [ask("Read it."), SAY], "image": DATA},
        {"messages": [ask("Read it."), SAY], "images": [DATA]},
        {"prompt": [ask("Read it.")], "completion": [SAY], "images": [DATA]},
    ],
)
def test_without_places_pictures_lead_the_first_question_as_in_trl(fields: dict[str, Any]) -> None:
    assert read(fields) == ONCE
    system = {"role": "system", "content": "Be brief."}
    asked = read(
        {"messages": [system, ask("Read it."), SAY, ask("Again?"), SAY], "images": [DATA, WEB]}
    )
    assert isinstance(asked, Conversation)
    assert [message["content"] for message in asked.messages[:4:3]] == ["Be brief.", "Again?"]
    assert asked.messages[1]["content"] == f"{IMAGE}{IMAGE}Read it."
    assert asked.images == (Picture.of(PNG), Picture.on_web(WEB))


def test_pairs_show_pictures_of_a_column() -> None:
    expected = read(
        {"prompt": [ask(image_part(PNG), "Read it.")], "chosen": [SAY], "rejected": [WORSE]}
    )
    assert isinstance(expected, Pair)
    assert expected.rejected.images == (Picture.of(PNG),)
    answers = {"chosen": [SAY], "rejected": [WORSE]}
    texts = {"chosen": "A gauge.", "rejected": "A clock."}
    spoken = {"chosen": SPOKEN, "rejected": {"from": "gpt", "value": "A clock."}}
    for fields in (
        {"prompt": [ask(HERE, "Read it.")], **answers},
        {"prompt": "<image>Read it.", **texts},
        {"conversations": [human("<image>Read it.")], **spoken},
    ):
        assert read(fields | {"images": [DATA]}) == expected
    both = [ask(HERE, "Read it."), SAY], [ask(HERE, "Read it."), WORSE]
    assert refused({"chosen": both[0], "rejected": both[1], "images": [DATA]})[0] == "images"
    told = refused(
        {"prompt": "<image>Read it.", **texts, "chosen": "See <image>.", "images": [DATA]}
    )
    assert (told[0], limits.USERS_ONLY in told[1]) == ("chosen", True)


@pytest.mark.parametrize(
    ("fields", "place", "reason"),
    [
        (
            {"conversations": [human("<image><image>Read."), SPOKEN], "images": [DATA]},
            "images",
            "holds 1 picture, and the user's messages have 2 places",
        ),
        (
            {"conversations": [human("Read."), SPOKEN], "image": DATA},
            "image",
            "holds 1 picture, and the user's messages have 0 places",
        ),
        (
            {"messages": [ask(HERE, "Read."), SAY], "images": [DATA] * 3},
            "images",
            "holds 3 pictures, and the user's messages have 1 place",
        ),
        (
            {"messages": [ask(image_part(PNG), "Read."), SAY], "images": [DATA]},
            "images",
            "holds 1 picture, and the user's messages have 0 places",
        ),
        ({"messages": [ask(HERE, "Read."), SAY]}, "messages.0.content.0", "the line has none"),
        (
            {"messages": [ask(HERE | {"index": 1}, HERE), SAY], "images": [DATA] * 2},
            "messages.0.content.0.index",
            "is 1, and this part is the place of number 0",
        ),
        (
            {"messages": [ask(HERE), SAY], "images": [DATA], "image": DATA},
            "image",
            "images are both given",
        ),
        (
            {"messages": [ask(HERE | {"image": DATA, "url": WEB}), SAY]},
            "messages.0.content.0.image",
            "url are both given",
        ),
        (
            {"messages": [ask(HERE | {"source": {}}), SAY]},
            "messages.0.content.0.source",
            "not a known key",
        ),
        (
            {"messages": [{"role": "system", "content": "<image>"}, ask(HERE), SAY], "image": DATA},
            "messages.0.content",
            limits.USERS_ONLY,
        ),
        (
            {
                "conversations": [human("<image>"), {"from": "gpt", "value": "It is <image>."}],
                "image": DATA,
            },
            "conversations.1.content",
            limits.USERS_ONLY,
        ),
        (
            {"messages": [ask("Read."), {"role": "assistant", "content": [HERE]}], "image": DATA},
            "messages.1.content.0.type",
            "is 'image', and only messages of the role user take images",
        ),
        (
            {"prompt": [ask("Read.")], "completion": "It.", "images": [DATA]},
            "completion",
            "both are strings, or both messages",
        ),
        (
            {"messages": [ask(HERE), SAY], "images": [None]},
            "images.0",
            "must be a URL, data: or https:, or in Parquet the picture's bytes",
        ),
        (
            {"messages": [ask(HERE), SAY], "images": [{"bytes": "iVBO"}]},
            "images.0",
            "of an object, not a string",
        ),
        ({"messages": [ask(HERE), SAY], "image": [{"url": WEB}]}, "image.0.url", "not a known key"),
        ({"messages": [ask(HERE), SAY], "image": b"<svg/>"}, "image", "begins with b'<svg/>'"),
        (
            {"messages": [ask("<image>", f"a{IMAGE}"), SAY], "image": DATA},
            "messages.0.content.1.text",
            "U+FDD0",
        ),
        (
            {"messages": [ask(HERE), SAY], "image": "file:///etc/passwd"},
            "image",
            "neither an https: nor a data: URL",
        ),
        ({"messages": [ask(HERE), SAY], "image": "i" * 5000}, "image", "neither an https:"),
        (
            {"conversations": [human("<image>"), SPOKEN], "image": "cats/1.png"},
            "image",
            "is the path 'cats/1.png', and the service has no such file: `ft data convert FILE",
        ),
        (
            {"messages": [ask(HERE | {"path": "a.png"}), SAY]},
            "messages.0.content.0.path",
            "ft data convert",
        ),
        (
            {"messages": [ask({"type": "image_url", "image_url": {"url": "/a.png"}}), SAY]},
            "messages.0.content.0.image_url.url",
            "ft data convert",
        ),
        (
            {"prompt": "<image>?", "chosen": "a", "rejected": "b", "images": ["a.png"]},
            "images.0",
            "ft data convert",
        ),
        ({"messages": [ask("<video>What?"), SAY], "videos": ["a.mp4"]}, "videos", "holds a film"),
        (
            {"messages": [ask(HERE, "What is said?\n<audio>"), SAY], "image": DATA},
            "messages.0.content.1.text",
            "the place of sound",
        ),
        (
            {"messages": [ask({"type": "video", "video": WEB}), SAY]},
            "messages.0.content.0.type",
            "no audio, films or files",
        ),
    ],
)
def test_what_is_not_in_order_is_told(fields: dict[str, Any], place: str, reason: str) -> None:
    field, told = refused(fields)
    assert (field, reason in told) == (place, True), told


def test_tags_that_are_quoted_or_closed_are_no_places() -> None:
    for text in ("Is `<image>` a tag?", "<a><image><url>b</url></image></a>"):
        chat = read({"messages": [ask(f"{text} <image>"), SAY], "image": DATA})
        assert isinstance(chat, Conversation)
        assert chat.messages[0]["content"] == f"{text} {IMAGE}"


def test_the_limits_of_pictures_hold_in_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    eleven = {"messages": [ask("<image>" * 11), SAY], "images": [WEB] * 11}
    field, told = refused(eleven)
    assert (field, "one of 11 images, and a line may have 10" in told) == ("images.10", True)
    monkeypatch.setenv(BYTES, str(len(PNG)))
    given = {"messages": [ask(HERE, "Read it."), SAY]}
    assert read(given | {"image": {"bytes": PNG}}) == ONCE
    for longer in ({"bytes": PNG + b"0"}, PNG + b"0", f"{DATA}{base64.b64encode(b'000').decode()}"):
        field, told = refused(given | {"image": longer})
        assert (field, f"one may have {len(PNG):,}" in told) == ("image", True)


def test_parquet_holds_pictures_as_hugging_face_saves_them(tmp_path: Path) -> None:
    part = pa.struct({"type": pa.string(), "text": pa.string(), "index": pa.int64()})
    message = pa.struct({"role": pa.string(), "content": pa.list_(part)})
    picture = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    types = pa.schema({"messages": pa.list_(message), "images": pa.list_(picture)})
    answer = {"role": "assistant", "content": [text_part("A gauge.")]}
    rows = [
        {
            "messages": [
                ask(HERE | {"index": 0}, "Read it."),
                answer,
                ask("And ", HERE | {"index": 1}, "?"),
                answer,
            ],
            "images": [{"bytes": PNG, "path": "a.png"}, {"bytes": OTHER, "path": None}],
        },
        {"messages": [ask(HERE, "Read it."), answer], "images": [{"bytes": PNG}]},
        {"messages": [ask(HERE, "Read it."), answer], "images": [{"path": "cats/1.png"}]},
    ]
    file = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(rows, types), file)
    twice, once, fault = records(write(tmp_path, file.getvalue()))
    assert (twice, once) == (TWICE, ONCE)
    assert isinstance(fault, Fault)
    assert (fault.line, fault.field) == (3, "images.0")


@pytest.mark.parametrize("container", CONTAINERS)
def test_every_container_holds_pictures_by_url(container: str, tmp_path: Path) -> None:
    _, make = CONTAINERS[container]
    rows = [{"conversations": [human("<image>Read it."), SPOKEN], "images": [DATA]}]
    if container == "csv":
        rows = [{name: json.dumps(value) for name, value in row.items()} for row in rows]
    with open_data(write(tmp_path, make(rows))) as reader:
        assert [record for _, record in reader] == [ONCE]
        assert reader.shape.unused == ()


def local(folder: Path, *rows: dict[str, Any]) -> list[Record | Fault]:
    with open_data(write(folder, lines(list(rows))), reads_paths=True) as reader:
        return [record for _, record in reader]


def shown(name: str) -> dict[str, Any]:
    return {"messages": [ask(HERE, "Read it."), SAY], "image": name}


def test_paths_are_read_below_the_file_s_folder_or_where_they_are_absolute(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    (folder / "cats").mkdir(parents=True)
    (folder / "cats/1.png").write_bytes(PNG)
    outside = tmp_path / "2.png"
    outside.write_bytes(PNG)
    low = {"type": "image_url", "image_url": {"url": "cats/1.png", "detail": "low"}}
    pair = {"prompt": "<image>?", "chosen": "a", "rejected": "b", "images": ["cats/1.png"]}
    one, other, third = local(
        folder, shown("cats/1.png"), shown(str(outside)), {"messages": [ask(low), SAY]}
    )
    (both,) = local(folder, pair)
    assert (one, other) == (ONCE, ONCE)
    assert isinstance(third, Conversation)
    assert third.images == (Picture.of(PNG, "low"),)
    assert isinstance(both, Pair)
    assert both.preferred.images == both.rejected.images == (Picture.of(PNG),)
    for record in (third, both):
        assert records(write(tmp_path, lines([line_of(record)]))) == [record]


def test_a_path_that_is_no_picture_to_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    monkeypatch.setenv(BYTES, "100")
    (folder / "large.png").write_bytes(PNG * 2)
    (folder / "words.png").write_bytes(b"words")
    (tmp_path / "2.png").write_bytes(PNG)
    (folder / "link.png").symlink_to(tmp_path / "2.png")
    os.mkfifo(folder / "pipe.png")
    reasons = {
        "none.png": "does not exist",
        "large.png": "and one may have 100",
        "words.png": "begins with b'words'",
        "../2.png": "leads out of",
        "link.png": "leads out of",
        "pipe.png": "is no file",
        ".": "is no file",
        "a\0b": "cannot be read",
    }
    faults = local(folder, *(shown(name) for name in reasons))
    for number, (fault, reason) in enumerate(zip(faults, reasons.values(), strict=True), 1):
        assert isinstance(fault, Fault)
        assert (fault.line, fault.field, reason in fault.reason) == (number, "image", True), fault
