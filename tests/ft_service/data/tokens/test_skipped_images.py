"""Lines with images that cannot be used are skipped, named and counted, or refused."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ft_service.bases.cache_folder import INDEX
from ft_service.data.data_file import DataReport, ExamineRequest, check_lines
from ft_service.data.fault_groups import may_skip
from ft_service.data.formats.columns import Columns
from ft_service.data.formats.reading import open_data
from ft_service.data.image_limits import BYTES
from ft_service.data.sample_request import RecordRange
from ft_service.data.token_options import TokenOptions
from ft_service.data.tokens.examine import Examination, ProgressReporter, TokenDestination
from ft_service.data.tokens.sample_view import page_of
from ft_service.data.tokens.token_set import line_numbers
from ft_service.data.tokens.token_set_files import open_token_set
from ft_service.data.tokens.tokenize import load_dataset, load_tokenizer
from ft_service.data.tokens.training_set.token_statistics import RecordGroup
from ft_service.errors import DataError
from ft_service.rundir.directory import sha256_of
from ft_service.spec import DataFileRef
from tests.support.image_bases import drawn, encoded, image_part, save_image_base, text_part
from tests.support.image_servers import public_images

SKIP, STRICT = TokenOptions(), TokenOptions(columns=Columns(strict_images=True))


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _claims(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it is of this size."""
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + _chunk(b"IDAT", zlib.compress(b"\0" * 64))


def _animated() -> bytes:
    frames = [drawn(seed=seed) for seed in (1, 2, 3)]
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])


def _turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(drawn(56, 28), "JPEG", exif=exif)


SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
HOSTILE: dict[str, tuple[bytes | str, str | None]] = {
    "bomb": (_claims(60_000, 60_000), "may have 64,000,000"),
    "1 x 100,000 pixels": (_claims(1, 100_000), "at most 200 times"),
    "truncated": (encoded(drawn(200, 200), "JPEG")[:600], "cannot be decoded"),
    "SVG": (SVG, "no PNG, JPEG, WEBP or GIF"),
    "animated": (_animated(), None),
    "CMYK": (encoded(drawn().convert("CMYK"), "JPEG"), None),
    "16-bit": (encoded(Image.fromarray(np.full((28, 28), 40_000, np.uint16))), None),
    "turned": (_turned(), None),
    "private address": ("https://127.0.0.1:9/a.png", "public"),
    "redirect to a private address": ("{server}/inside", "public"),
    "never-ending": ("{server}/flood", "more than"),
    "HTML as PNG": (b"<!DOCTYPE html><html></html>", "no PNG, JPEG, WEBP or GIF"),
    "0 bytes": (b"", "is empty"),
}
"""Name → the picture or its URL, and what is said of it; None: it is learned from."""
BAD = [name for name, (_, why) in HOSTILE.items() if why is not None]


def line(*images: dict[str, Any], answer: str = "A gauge.") -> dict[str, Any]:
    content = [text_part("Read "), *images]
    return {
        "messages": [
            {"role": "user", "content": content},
            {"role": "assistant", "content": answer},
        ]
    }


def part(given: bytes | str) -> dict[str, Any]:
    if isinstance(given, bytes):
        return image_part(given)
    return {"type": "image_url", "image_url": {"url": given}}


GOOD, CUT = part(encoded(drawn(28, 28))), part(encoded(drawn(200, 200), "JPEG")[:600])


def saved(folder: Path, lines: list[dict[str, Any]]) -> DataFileRef:
    path = folder / "images.jsonl"
    path.write_text("".join(json.dumps(own) + "\n" for own in lines))
    return DataFileRef(name=path.name, path=str(path), sha256=sha256_of(path))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_image_base(tmp_path_factory.mktemp("base"), "qwen 2.5 vl")


def examined(
    base: Path | None,
    file: DataFileRef,
    folder: Path | None = None,
    options: TokenOptions = SKIP,
    *,
    pairs: bool = False,
) -> DataReport:
    request = ExamineRequest(file.path, file.sha256, "", "", 500, options=options, pairs=pairs)
    tokenizer: Any = None if base is None else load_tokenizer(str(base))
    examination = Examination(tokenizer, request, ProgressReporter(3600.0, print))
    return examination.report(None if folder is None else TokenDestination(folder, "ab.cd"))


def test_of_twelve_hostile_images_each_is_learned_or_told(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BYTES, "20000")
    with public_images(monkeypatch) as server:
        lines = [line(GOOD) for _ in range(20)]
        for given, _ in HOSTILE.values():
            url = given.format(server=server) if isinstance(given, str) else given
            lines.append(line(part(url)))
        report = examined(base, saved(tmp_path, lines))
    assert report.faults_total == 0
    numbers = {name: 21 + at for at, name in enumerate(HOSTILE)}
    assert report.skipped.lines == tuple(numbers[name] for name in BAD)
    assert report.examples == 20 + len(HOSTILE) - len(BAD)
    said = "\n".join(group.text("line") for group in report.skipped.groups)
    for name in BAD:
        place = "messages.0.content.1.image_url"
        (group,) = [own for own in report.skipped.groups if numbers[name] in own.lines]
        assert group.first.field.startswith(place), name
        assert str(HOSTILE[name][1]) in group.first.reason, said


def test_a_strict_job_refuses_what_others_skip(base: Path, tmp_path: Path) -> None:
    file = saved(tmp_path, [line(GOOD), line(GOOD), line(CUT)])
    kept, strict = tmp_path / "kept", tmp_path / "strict"
    assert examined(base, file, kept).examples == 2
    report = examined(base, file, strict, STRICT)
    error = report.error("training_file", "f")
    assert error is not None
    assert error.code == "invalid_training_file"
    assert "f: 1 of 3 lines cannot be trained on" in error.message
    assert "line 3: messages.0.content.1.image_url cannot be decoded" in error.message
    assert open_token_set(strict / "ab.cd") is None
    assert open_token_set(kept / "ab.cd") is not None
    with pytest.raises(DataError, match="line 3"):
        load_dataset(load_tokenizer(str(base)), file, 500, STRICT)
    assert len(load_dataset(load_tokenizer(str(base)), file, 500)) == 2


def test_skipped_lines_are_told_with_their_numbers(base: Path, tmp_path: Path) -> None:
    """Of the file, of its kept tokens, and to whoever has no base."""
    empty = part(b"")
    file = saved(tmp_path, [line(GOOD), line(empty), line(CUT, GOOD), line(GOOD), line(GOOD)])
    first = examined(base, file, tmp_path)
    again = examined(None, file, tmp_path)
    assert replace(again, as_chats=first.as_chats) == first
    assert (first.examples, first.skipped.lines, first.images) == (3, (2, 3), 3)
    warned = [text for level, text in first.messages("f", 500) if level == "warn"]
    (told,) = [text for text in warned if "skipped" in text]
    assert told.startswith("f: 2 lines (lines 2, 3) of 5 lines skipped")
    assert "line 2: messages.0.content.1.image_url.url is no PNG" in told
    assert "line 3: messages.0.content.1.image_url cannot be decoded" in told
    assert first.fine_text("f").endswith("3 lines can be trained on, 2 lines are skipped.")
    without_base = check_lines(Path(file.path))
    assert (without_base.examples, without_base.skipped.lines) == (4, (2,))
    strict = check_lines(Path(file.path), columns=Columns(strict_images=True))
    assert (strict.faults_total, strict.faults[0].line) == (1, 2)
    found = open_token_set(tmp_path / "ab.cd")
    assert found is not None
    assert found.skipped == first.skipped
    page = page_of(
        load_tokenizer(str(base)), open_data(Path(file.path)), SKIP, 500, RecordRange(1, 3)
    )
    assert [sample.error is None for sample in page.samples] == [False, False, True]
    index = tmp_path / "ab.cd" / INDEX
    index.write_text(index.read_text().replace('"lines": [\n      2', '"lines": [\n      1'))
    assert open_token_set(tmp_path / "ab.cd") is None, "the seal is of the skipped lines too"


def test_lines_behind_skipped_ones_keep_their_numbers(base: Path, tmp_path: Path) -> None:
    """In statistics, and among pairs."""
    lines = [line(CUT), line(GOOD), line(GOOD, answer=""), line(CUT), line(GOOD), line(GOOD)]
    file = saved(tmp_path, lines)
    assert examined(base, file, tmp_path).skipped.lines == (1, 4)
    found = open_token_set(tmp_path / "ab.cd")
    assert found is not None
    group = RecordGroup(found, "line", "f", pairs=False)
    measured = group.measured(np.ones(4, np.bool_), 500)
    assert (measured.near_empty.first, measured.duplicates.first) == ((3,), (5, 6))
    assert measured.skipped.first == (1, 4)

    def pair(image: dict[str, Any], other: str) -> dict[str, Any]:
        answers = {"preferred_output": "A gauge.", "non_preferred_output": other}
        given = {name: [{"role": "assistant", "content": text}] for name, text in answers.items()}
        return {"input": {"messages": line(image)["messages"][:1]}, **given}

    folder = tmp_path / "pairs"
    folder.mkdir()
    others = [pair(CUT, "No"), pair(GOOD, "No"), pair(GOOD, "Yes"), pair(GOOD, "A")]
    report = examined(base, saved(folder, others), folder, pairs=True)
    assert (report.skipped.lines, report.examples, report.images) == ((1,), 3, 3)
    assert report.counts is not None
    assert report.counts.pairs == 3


def test_numbers_of_records_among_skipped_lines() -> None:
    """Against counting."""
    generator = np.random.default_rng(0)
    for _ in range(50):
        chosen = generator.random(12) < 0.4
        skipped = (np.flatnonzero(chosen) + 1).tolist()
        kept = (np.flatnonzero(~chosen) + 1).tolist()
        assert line_numbers(range(len(kept)), skipped).tolist() == kept


@pytest.mark.parametrize(
    ("total", "most"), [(1, 0), (2, 1), (9, 4), (400, 200), (2000, 200), (50_000, 5000)]
)
def test_how_many_lines_may_be_skipped(total: int, most: int) -> None:
    assert may_skip(total) == most


@pytest.mark.parametrize(("bad", "refused"), [(2, False), (3, True), (4, True)])
def test_a_file_of_too_many_bad_images_is_refused(
    bad: int, refused: bool, base: Path, tmp_path: Path
) -> None:
    file = saved(tmp_path, [line(part(b""))] * bad + [line(GOOD)] * (4 - bad))
    for report in (examined(base, file, tmp_path), check_lines(Path(file.path))):
        assert report.faults_total == (bad if refused else 0)
        assert len(report.skipped.lines) == (0 if refused else bad)
        assert (report.may_skip == 2) is refused
    if refused:
        assert f"{bad} of 4 lines cannot be trained on, and at most 2" in report.fault_text("f")
        assert open_token_set(tmp_path / "ab.cd") is None


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [part(b"")]}],
        [{"role": "user", "content": [{**GOOD, "image_url": {"url": "a", "size": 3}}]}],
        [{"role": "user", "content": [GOOD] * 11}],
        [{"role": "assistant", "content": [GOOD]}],
    ],
)
def test_what_is_wrong_with_a_line_s_form_is_never_skipped(
    messages: list[dict[str, Any]], tmp_path: Path
) -> None:
    lines: list[dict[str, Any]] = [line(GOOD), line(GOOD), {"messages": messages}]
    report = check_lines(Path(saved(tmp_path, lines).path))
    is_image = messages[0]["content"] == [part(b"")]  # the first fault of the line
    assert (report.faults_total, len(report.skipped.lines)) == ((0, 1) if is_image else (1, 0))


def test_a_picture_that_was_not_to_be_had_may_be_there_later(base: Path, tmp_path: Path) -> None:
    away = part("https://127.0.0.1:9/a.png")
    report = examined(base, saved(tmp_path, [line(GOOD), line(GOOD), line(away)]))
    assert report.skipped.lines == (3,)
    assert not report.is_lasting
    damaged = examined(base, saved(tmp_path, [line(GOOD), line(GOOD), line(CUT)]))
    assert damaged.is_lasting


def test_keys_of_stored_sets_stay(tmp_path: Path) -> None:
    assert SKIP.given() == {}
    columns = Columns((("prompt", "ask"),))
    assert "strict_images" not in TokenOptions(columns=columns).given()["columns"]
    assert STRICT.given()["columns"]["strict_images"] is True
