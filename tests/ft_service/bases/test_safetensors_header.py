from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError, safe_open

from ft_service.bases.safetensors_header import DTYPE_BITS, HeaderError, read_header
from tests.support.bases import save_base
from tests.support.malformed import CHANGES, join, split


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return (save_base(tmp_path_factory.mktemp("whole")) / "model.safetensors").read_bytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def refusal(path: Path) -> str:
    with pytest.raises(HeaderError) as caught:
        read_header(path)
    return caught.value.why


def opens(path: Path) -> bool:
    """Whether the library that reads the tensors takes the file."""
    try:
        with safe_open(path, framework="np"):
            return True
    except SafetensorError:
        return False


def entry(start: int, end: int, **fields: Any) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end], **fields}


def test_a_whole_file_is_told_by_name_dtype_shape_and_place(path: Path) -> None:
    path.write_bytes(
        join(
            {
                "__metadata__": {"format": "pt"},
                "b": entry(8, 12),
                "a": entry(0, 8, dtype="F32", shape=[2, 1]),
            },
            b"x" * 12,
        )
    )
    header = read_header(path)
    assert [(t.name, t.dtype, t.shape, t.path, t.bytes) for t in header.tensors.values()] == [
        ("b", "U8", (4,), path, 4),
        ("a", "F32", (2, 1), path, 8),
    ]
    assert (header.end, header.tensors["b"].end) == (path.stat().st_size - 12, path.stat().st_size)
    assert opens(path)


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"__metadata__": None, "a": entry(0, 8)},
        {
            "scalar": entry(0, 1, shape=[]),
            "none": entry(1, 1),
            "none too": entry(1, 1, shape=[3, 0, 5]),
            "a": entry(1, 8),
        },
        {"a": entry(0, 8) | {"comment": "of a writer that knows more"}},
        {"ü ∂": entry(0, 8)},
        *(
            {dtype: entry(0, bits, dtype=dtype, shape=[8])}
            for dtype, bits in DTYPE_BITS.items()
            if bits >= 8
        ),
    ],
)
def test_what_is_unusual_and_whole_is_read(path: Path, header: dict[str, Any]) -> None:
    size = max(
        (e["data_offsets"][1] for name, e in header.items() if name != "__metadata__"), default=0
    )
    path.write_bytes(join(header, bytes(size)))
    assert opens(path)
    assert list(read_header(path).tensors) == [name for name in header if name != "__metadata__"]


def test_there_are_a_hundred_ways_to_be_malformed() -> None:
    assert len(CHANGES) >= 100


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_malformed_is_refused_in_one_sentence(
    path: Path, content: bytes, change: str
) -> None:
    path.write_bytes(CHANGES[change](*split(content)))
    why = refusal(path)
    assert why.isprintable()
    assert len(why) < 500


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ({"a": entry(-8, 0, shape=[8])}, r"tensor 'a' has the data_offsets \[-8, 0\]"),
        (
            {"a": entry(0, 8), "b": entry(4, 8)},
            "tensor 'b' begins at byte 4 of the data, inside tensor 'a', which ends at byte 8",
        ),
        (
            {"a": entry(0, 2), "b": entry(4, 8)},
            "bytes 2 to 4 of the data, before tensor 'b', belong to no tensor",
        ),
        (
            {"a": entry(0, 8, dtype="F32")},
            r"'a' has 8 bytes \(data_offsets \[0, 8\]\), but F32 of shape \[8\] takes 32",
        ),
        ({"a": entry(0, 8, dtype="F4", shape=[15])}, r"F4 of shape \[15\] takes 7.5"),
        ({"a": entry(0, 9)}, r"bytes long and should be \d+: a copy or download was cut short"),
        ({"a": entry(0, 7)}, r"bytes long and should be \d+: what follows belongs to no tensor"),
        (b'{"a": 1, "a": 1}', "its header names 'a' twice"),
    ],
)
def test_tensor_and_fault_are_named(path: Path, header: Any, why: str) -> None:
    path.write_bytes(join(header, bytes(8)))
    with pytest.raises(HeaderError, match=f"^model.safetensors: .*{why}"):
        read_header(path)


def test_a_header_that_would_not_fit_into_memory_is_not_read(path: Path) -> None:
    """A file of holes: its length says that the header is all of it."""
    with path.open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(2**40)
    assert "that would be 100000001 bytes long" in refusal(path)


def test_a_pipe_is_not_waited_for(path: Path) -> None:
    os.mkfifo(path)
    assert refusal(path) == "it is not a regular file"


def test_whatever_is_accepted_the_library_opens(path: Path) -> None:
    """Headers with random bytes changed: one error each, or a file that can be trained on."""
    draw = random.Random(0)
    whole = join(
        {"a": entry(0, 8), "b.weight": entry(8, 24, dtype="BF16", shape=[2, 4])}, bytes(24)
    )
    accepted = 0
    for _ in range(1000):
        changed = bytearray(whole)
        for _ in range(draw.randint(1, 3)):
            changed[draw.randrange(len(whole) - 24)] = draw.choice(
                b'0123456789-.eE[]{}",: \\ut\x00\x80\xff'
            )
        path.write_bytes(changed)
        try:
            read_header(path)
        except HeaderError:
            continue
        accepted += 1
        assert opens(path), bytes(changed)
    assert 10 < accepted < 500, "some changes only rename a tensor"
