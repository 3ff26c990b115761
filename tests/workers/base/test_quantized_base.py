"""The index of a cache entry: what is on the disk stays as earlier versions wrote and read it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from workers.base.quantized_base import (
    CacheFile,
    QuantizedIndex,
    faults,
    read_entry_index,
    write_entry_index,
)

WRITTEN = {
    "files": [
        {
            "name": "rows-0",
            "bytes": 3,
            "sha256": hashlib.sha256(b"abc").hexdigest(),
            "rows": {"w": [0, 2]},
        }
    ],
    "changed": {"w": 0.25},
    "requantized": {"w": "gptq"},
    "converted": {},
    "kept": {},
}
FILE = CacheFile(
    name="rows-0", bytes=3, sha256=hashlib.sha256(b"abc").hexdigest(), rows={"w": (0, 2)}
)


def test_an_index_is_written_and_read_as_ever(tmp_path: Path) -> None:
    index = QuantizedIndex([FILE], {"w": 0.25}, {"w": "gptq"})
    write_entry_index(tmp_path, index)
    assert (tmp_path / "index.json").read_text() == json.dumps(WRITTEN)
    assert read_entry_index(tmp_path) == index


@pytest.mark.parametrize(
    "files", [[{"name": "rows-0"}], [{**WRITTEN["files"][0], "bytes": "many"}], 5]
)
def test_an_index_that_is_not_ours_is_refused_in_one_line(tmp_path: Path, files: object) -> None:
    (tmp_path / "index.json").write_text(json.dumps({**WRITTEN, "files": files}))
    with pytest.raises((ValueError, TypeError)) as caught:
        read_entry_index(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows-0").write_bytes(b"abc")
    assert faults(tmp_path, [FILE]) == []
    (tmp_path / "rows-0").write_bytes(b"abd")
    assert faults(tmp_path, [FILE]) == ["rows-0 has other contents than when it was written"]
    (tmp_path / "rows-0").write_bytes(b"ab")
    assert faults(tmp_path, [FILE]) == ["rows-0 has 2 bytes instead of 3"]
    (tmp_path / "rows-0").unlink()
    assert faults(tmp_path, [FILE]) == ["rows-0: No such file or directory"]
