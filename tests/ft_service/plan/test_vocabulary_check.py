from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ft_service.bases import base_files
from ft_service.bases.description import Weight
from ft_service.errors import SpecError
from ft_service.plan import vocabulary_check
from ft_service.plan.admit import admit
from ft_service.plan.job import plan_job
from ft_service.plan.machines import MACHINES
from ft_service.plan.vocabulary_check import largest_token_id, refuse_ids_without_row
from ft_service.spec import JobSpec
from tests.support.bases import describe, save_base, spec_on
from tests.support.plans import made_base

H100 = MACHINES["H100"]


def save_tokenizer(folder: Path, vocab: Any, added: Any = ()) -> None:
    path = folder / "tokenizer.json"
    path.unlink(missing_ok=True)  # a link to the sample's
    path.write_text(
        json.dumps({"version": "1.0", "model": {"vocab": vocab}, "added_tokens": added})
    )


def base_with(folder: Path, rows: int, vocab: Any, added: Any = ()) -> JobSpec:
    save_base(folder, vocab_size=rows)
    save_tokenizer(folder, vocab, added)
    return spec_on(folder)


VOCAB = {"a": 0, "b": 1, "c": 9}
PIECES = [["a", 0.0], ["b", -1.5]]


@pytest.mark.parametrize(
    ("vocab", "added", "largest"),
    [
        (VOCAB, [], 9),
        (VOCAB, [{"id": 12, "content": "<x>", "special": True}, {"id": 1, "content": "b"}], 12),
        (PIECES, [], 1),
        (PIECES, [{"id": 2, "content": "<x>"}], 2),
        ({}, [], None),
        (None, None, None),
    ],
)
def test_the_largest_id_is_that_of_vocabulary_and_added_tokens(
    tmp_path: Path, vocab: Any, added: Any, largest: Any
) -> None:
    save_tokenizer(tmp_path, vocab, added)
    assert largest_token_id(tmp_path) == largest


def test_a_base_without_this_file_is_judged_elsewhere(tmp_path: Path) -> None:
    assert largest_token_id(tmp_path) is None


@pytest.mark.parametrize("rows", [10, 11, 64])
def test_rows_beyond_the_tokens_are_padding(tmp_path: Path, rows: int) -> None:
    spec = base_with(tmp_path / "base", rows, VOCAB)
    assert admit(describe(spec.model.path), spec, H100)


@pytest.mark.parametrize(
    ("rows", "added", "largest"),
    [(9, [], 9), (1, [], 9), (10, [{"id": 10, "content": "<x>", "special": True}], 10)],
)
@pytest.mark.parametrize("look", [admit, plan_job])
def test_a_token_without_a_row_is_refused_with_both_numbers(
    tmp_path: Path, look: Any, rows: int, added: Any, largest: int
) -> None:
    spec = base_with(tmp_path / "base", rows, VOCAB, added)
    with pytest.raises(
        SpecError, match="Use the tokenizer that the base was trained with"
    ) as caught:
        look(describe(spec.model.path), spec, H100)
    message = caught.value.message
    assert (
        f"token ids up to {largest}, the embedding model.embed_tokens.weight has {rows} rows"
        in message
    )
    assert f"at least {largest + 1} rows" in message
    assert (caught.value.param, caught.value.code) == ("model", "vocabulary_too_small")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{",
        b'{"model": {"vocab": {"a": "x"}}}',
        b"{}",
        b"[" * 200_000,
        b"\xff\xfe",
        b'{"a": NaN',
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(text)
    with pytest.raises(SpecError, match=r"tokenizer\.json in .*: it is no tokenizer \(") as caught:
        largest_token_id(tmp_path)
    assert (caught.value.param, len(caught.value.message) < 500) == ("model", True)


@pytest.mark.parametrize(("most", "refused"), [(8, False), (7, True)])
def test_a_tokenizer_of_more_values_than_any_published_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, refused: bool
) -> None:
    monkeypatch.setattr(vocabulary_check, "LIMIT", replace(vocabulary_check.LIMIT, values=most))
    save_tokenizer(tmp_path, VOCAB)
    if not refused:
        assert largest_token_id(tmp_path) == 9
        return
    with pytest.raises(SpecError) as caught:
        largest_token_id(tmp_path)
    assert (caught.value.param, caught.value.code) == ("model", "model_unreadable")


def test_it_is_read_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = base_with(tmp_path / "base", 64, VOCAB)
    read: list[str] = []
    whole = base_files.open_base_file
    monkeypatch.setattr(
        base_files, "open_base_file", lambda path: read.append(path.name) or whole(path)
    )
    base = describe(spec.model.path)
    for _ in range(5):
        admit(base, spec, H100)
    assert read.count("tokenizer.json") == 1

    path = tmp_path / "base" / "tokenizer.json"
    before = path.stat()
    other = path.with_name("other.json")
    other.write_bytes(path.read_bytes().replace(b'"c": 9', b'"c":99'))
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    with pytest.raises(SpecError, match="token ids up to 99"):
        admit(base, spec, H100)


def test_of_several_embeddings_the_largest_is_that_of_tokens(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, VOCAB)
    positions = Weight("model.positions", "weight", (4, 64), "embedding", None)
    for rows in (10, 9):
        made = made_base(vocabulary=rows)
        base = replace(made, weights=(positions, *made.weights))
        if rows == 10:
            refuse_ids_without_row(base, tmp_path)
            continue
        with pytest.raises(SpecError, match=r"embed_tokens\.weight has 9 rows, for ids up to 8\."):
            refuse_ids_without_row(base, tmp_path)
