"""Data files that cannot be trained on, over the wire: told with their place, never a 500."""

from __future__ import annotations

import gzip
import json

import pytest

from tests.support.rest.service import Service

FINE = (
    json.dumps(
        {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}
    ).encode()
    + b"\n"
)
FILES = {
    "half.jsonl": (FINE + FINE[:-9], "line 2: is not JSON"),
    "cut.jsonl.gz": (gzip.compress(FINE * 9)[:-9], "its gzip data is damaged"),
    "none.parquet": (b"PAR1", "Parquet cannot be read after row 0"),
    "ragged.csv": (
        b"prompt,completion\na,b\nc\n",
        "row 2: has 1 cells, and the header has 2 columns",
    ),
    "twice.jsonl": (
        b'{"text": "a", "text": "b"}\n',
        "line 1: has the key 'text' twice in an object",
    ),
    "utf-16.jsonl": (FINE.decode().encode("utf-16"), "it is encoded as UTF-16: save it as UTF-8"),
    "empty.jsonl": (b"", "the file holds no examples"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_malformed_file_is_told_with_its_place(service: Service, name: str) -> None:
    content, reason = FILES[name]
    file = service.client().files.create(file=(name, content or b"\n"), purpose="fine-tune")
    shown = service.http("GET", f"/v1/files/{file.id}/samples", params={"model": "tiny"})
    assert shown.status_code == 200
    assert all(
        sample["error"] is None or "Traceback" not in sample["error"]
        for sample in shown.json()["data"]
    )
    measured = service.http("GET", f"/v1/files/{file.id}/statistics", params={"model": "tiny"})
    assert measured.status_code == 400
    error = measured.json()["error"]
    assert (error["param"], error["code"]) == ("training_file", "invalid_training_file")
    assert reason in error["message"]
