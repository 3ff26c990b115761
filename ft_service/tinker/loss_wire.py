"""Calls of forward and forward_backward as bytes: for which model a call is, and how many parts it
has.

protobuf makes an object of about 70 bytes of a part that may take two on the wire. So the parts are
counted first, by a walk over the tags that makes none, and stops at the limit; the service parses
no call at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ft_service.errors import SpecError
from ft_service.tinker import tinker_messages_pb2 as pb

NO_CALL = "The body is no ForwardBackwardRequest of the tinker package (application/x-protobuf)."
HEAD_BYTES = 256
"""Model and number, with which calls begin, take less."""
MOST_DATUMS = 1024
"""Limit of data in one call; the client cuts longer lists into several calls."""
MOST_PARTS = 64 * MOST_DATUMS
"""Limit of fields in one call, and of bytes of its arrays' shapes.

A datum of one chunk with three arrays has about 32.
"""

_Parts: TypeAlias = "Mapping[int, _Parts] | None"
"""Fields of a message that have parts of their own → theirs; None: a list of numbers, each of which
counts.
"""
_TENSOR: _Parts = {pb.Tensor.SHAPE_FIELD_NUMBER: None}
_DATUM: _Parts = {
    pb.Datum.MODEL_INPUT_FIELD_NUMBER: {},
    pb.Datum.LOSS_FN_INPUTS_FIELD_NUMBER: {2: _TENSOR},
}
_DATA = pb.ForwardBackwardRequest.DATA_FIELD_NUMBER
_CALL: Mapping[int, _Parts] = {_DATA: _DATUM}
_BYTES = 2
"""Wire type of texts, bytes, messages and lists of numbers."""
_MOST_VARINT_BYTES = 10


@dataclass(frozen=True)
class LossHead:
    """Model and number of a call."""

    model_id: str = ""
    seq_id: int = 0

    @classmethod
    def of(cls, beginning: bytes) -> LossHead:
        """Return what the first HEAD_BYTES of a call, or all of a shorter one, say.

        Raises SpecError for bytes that are no such message, or do not begin with both.
        """
        model = ""
        seq = 0
        for number, start, end in _fields(beginning, 0, len(beginning)):
            if number == pb.ForwardBackwardRequest.MODEL_ID_FIELD_NUMBER:
                model = beginning[start:end].decode(errors="replace")
            elif number == pb.ForwardBackwardRequest.SEQ_ID_FIELD_NUMBER:
                seq, _ = _varint(beginning, start, end)
            else:
                break
            if model and seq:
                return cls(model, seq)
        raise SpecError(
            f"{NO_CALL} It does not begin with model_id and seq_id.",
            param="seq_id" if model else "model_id",
        )


def refuse_parts_beyond(body: bytes | bytearray) -> None:
    """Raise SpecError for a call with more data, or more parts, than one may have, and for bytes
    that are no such message.
    """
    data = 0
    left = MOST_PARTS
    for number, start, end in _fields(body, 0, len(body)):
        left -= 1
        data += number == _DATA
        if data > MOST_DATUMS:
            text = (
                f"data: more than {MOST_DATUMS:,} sequences in one call; 1 to {MOST_DATUMS:,} "
                "are possible."
            )
            raise SpecError(text, param="data")
        if number in _CALL:
            left = _left(body, start, end, _CALL[number], left)
        if left < 0:
            raise _too_many()


def _left(body: bytes | bytearray, at: int, end: int, parts: _Parts, left: int) -> int:
    """Return what is left of the limit behind a part."""
    if parts is None:
        return left - (end - at)  # a number takes a byte or more
    while at < end and left >= 0:  # `_fields`, which takes twice the time for so many
        left -= 1
        tag, at = (body[at], at + 1) if body[at] < 128 else _varint(body, at, end)
        if tag & 7 == _BYTES:
            size, at = (body[at], at + 1) if at < end and body[at] < 128 else _varint(body, at, end)
            stop = at + size
            if tag >> 3 in parts and size and stop <= end:
                left = _left(body, at, stop, parts[tag >> 3], left)
        else:
            stop = _behind(body, tag & 7, at, end)
        if stop > end:
            raise SpecError(NO_CALL)
        at = stop
    return left


def _too_many() -> SpecError:
    text = (
        f"data: the call has more than {MOST_PARTS:,} chunks, arrays and other parts. Send "
        "fewer data at once."
    )
    return SpecError(text, param="data")


def _fields(body: bytes | bytearray, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield each field of a message: its number, and where its value begins and ends.

    Raises SpecError if one reaches beyond the end.
    """
    while at < end:
        tag, at = _varint(body, at, end)
        if tag & 7 == _BYTES:
            size, at = _varint(body, at, end)
            stop = at + size
        else:
            stop = _behind(body, tag & 7, at, end)
        if stop > end:
            raise SpecError(NO_CALL)
        yield tag >> 3, at, stop
        at = stop


def _behind(body: bytes | bytearray, wire_type: int, at: int, end: int) -> int:
    """Return where a number ends."""
    match wire_type:
        case 0:
            return _varint(body, at, end)[1]
        case 1:
            return at + 8
        case 5:
            return at + 4
        case _:
            raise SpecError(NO_CALL)


def _varint(body: bytes | bytearray, at: int, end: int) -> tuple[int, int]:
    """Return a number, and where it ends."""
    value = 0
    for shift in range(0, 7 * _MOST_VARINT_BYTES, 7):
        if at >= end:
            break
        byte = body[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise SpecError(NO_CALL)
