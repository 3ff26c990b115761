from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ft_service.bases.description import (
    Described,
    Refusal,
    Versions,
    description_key,
    read_described,
    sources_digest,
    write_described,
)
from ft_service.errors import SpecError
from tests.support.bases import save_base
from tests.support.describing import VERSIONS, small_description, small_document


def test_a_change_of_the_code_that_describes_is_another_key(tmp_path: Path) -> None:
    digests = set[str]()
    for name, text in (
        ("workers/describe.py", "1"),
        ("workers/describe.py", "2"),
        ("workers/model/probes.py", ""),
        ("ft_service/bases/x.py", ""),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        digests.add(sources_digest.__wrapped__(tmp_path, tmp_path / "ft_service"))
    assert len(digests) == 4

    base = save_base(tmp_path / "base")
    assert (
        len({description_key(base, replace(VERSIONS, sources=digest)) for digest in digests}) == 4
    )
    root = Path(__file__).parents[3]
    assert Versions.installed().sources == sources_digest(root, root / "ft_service")


def test_a_document_is_read_as_it_was_written(tmp_path: Path) -> None:
    document = small_document(save_base(tmp_path))
    read = read_described(write_described(document))
    assert read.key == document.key
    assert read.description().weights == small_description().weights
    with pytest.raises(SpecError, match="It is no decoder"):
        Described("", VERSIONS, refused=Refusal("It is no decoder.")).description()
    for text in (b"{}", write_described(Described("", VERSIONS)), b"[" * 10_000):
        with pytest.raises(ValueError, match="not a description of a base"):
            read_described(text)
