"""Our messages against those of the installed `tinker` package: the same fields by number and
type.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from ft_service.tinker import tinker_messages_pb2 as ours

THEIRS = """
import json
from tinker.proto import tinker_public_pb2 as theirs
def fields(message):
    return {f.name: [f.number, f.type, bool(f.is_repeated)] for f in message.fields}
def below(message):
    yield message
    for inner in message.nested_types:
        yield from below(inner)
print(json.dumps({m.name: fields(m) for top in theirs.DESCRIPTOR.message_types_by_name.values() for m in below(top)}))
"""


def fields_of(message: Any) -> dict[str, list[Any]]:
    return {field.name: [field.number, field.type, field.is_repeated] for field in message.fields}


def test_fields() -> None:
    found = subprocess.run(
        [sys.executable, "-c", THEIRS], capture_output=True, text=True, check=True, timeout=120
    )
    theirs: dict[str, dict[str, list[Any]]] = json.loads(found.stdout)
    numbers = [{tuple(field) for field in fields.values()} for fields in theirs.values()]
    for name, message in ours.DESCRIPTOR.message_types_by_name.items():
        mine = fields_of(message)
        if name in theirs:
            assert {tuple(field) for field in mine.values()} <= {
                tuple(field) for field in theirs[name].values()
            }, name
        else:
            assert any({tuple(field) for field in mine.values()} <= other for other in numbers), (
                name,
                mine,
            )
        assert FieldDescriptor.TYPE_GROUP not in {field[1] for field in mine.values()}
