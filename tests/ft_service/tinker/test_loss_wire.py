"""Calls are counted on the wire, before protobuf makes objects of their parts."""

from __future__ import annotations

import numpy as np
import pytest

from ft_service.errors import SpecError
from ft_service.tinker import tinker_messages_pb2 as pb
from ft_service.tinker.loss_calls import LossRequest
from ft_service.tinker.loss_wire import MOST_DATUMS, MOST_PARTS, LossHead, refuse_parts_beyond
from tests.support.training.loss_messages import loss_message

IDS = np.array([5, 6, 7])
CALL = loss_message(
    300, [(IDS, {"target_tokens": IDS, "weights": np.ones(3, np.float32)})], "ppo", {"a": 1.0}
)


def part(field: int, body: bytes) -> bytes:
    """A part as it is on the wire."""
    size = len(body)
    length = b""
    while size > 127:
        length = length + bytes([size & 127 | 128])
        size = size >> 7
    return bytes([field << 3 | 2]) + length + bytes([size]) + body


BOMBS = {
    "empty data": part(3, b"") * (MOST_DATUMS + 1),
    "empty chunks of a datum": part(3, part(1, b"") * (MOST_PARTS + 1)),
    "arrays without names": part(3, part(2, b"") * (MOST_PARTS + 1)),
    "sizes of an array": part(3, part(2, part(2, part(4, b"\1" * (MOST_PARTS + 1))))),
    "sizes one by one": part(3, part(2, part(2, b"\x20\1" * (MOST_PARTS + 1)))),
    "options": part(5, b"") * (MOST_PARTS + 1),
    "unknown fields": b"\x78\1" * (MOST_PARTS + 1),
}


@pytest.mark.parametrize("case", list(BOMBS))
def test_a_call_of_too_many_parts_is_refused_before_it_is_parsed(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pb.ForwardBackwardRequest.FromString(BOMBS[case])
    monkeypatch.setattr("ft_service.tinker.loss_calls.pb.ForwardBackwardRequest", None)
    with pytest.raises(SpecError) as refused:
        LossRequest.parse(BOMBS[case])
    assert refused.value.param == "data"


def test_the_largest_calls_that_clients_send_pass() -> None:
    ids = np.arange(50)
    arrays = {
        "target_tokens": ids,
        "logprobs": np.ones(50, np.float32),
        "advantages": np.ones(50, np.float32),
    }
    body = loss_message(1, [(ids, arrays)] * MOST_DATUMS, "ppo").SerializeToString()
    refuse_parts_beyond(body)
    assert len(LossRequest.parse(body).message.data) == MOST_DATUMS


def test_the_parts_are_those_of_the_messages_description() -> None:
    datum = pb.Datum.DESCRIPTOR.fields_by_name
    assert {name: datum[name].number for name in ("model_input", "loss_fn_inputs")} == {
        "model_input": 1,
        "loss_fn_inputs": 2,
    }
    entry = datum["loss_fn_inputs"].message_type
    assert entry is not None
    values = entry.fields_by_name
    assert (values["value"].number, values["value"].message_type) == (2, pb.Tensor.DESCRIPTOR)


def test_a_calls_beginning_tells_its_model_and_number() -> None:
    body = CALL.SerializeToString()
    assert LossHead.of(body) == LossHead("model", 300)
    assert LossHead.of(body[:20]) == LossHead("model", 300), "the rest has not arrived"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff" * 300,
        b"\x0a\x05model",
        part(3, b"") + CALL.SerializeToString(),
        b"\x0a\x7fmodel",
    ],
)
def test_a_call_without_them_is_refused(body: bytes) -> None:
    with pytest.raises(SpecError):
        LossHead.of(body)


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_a_call_that_is_cut_off_is_none(cut: int) -> None:
    with pytest.raises(SpecError, match=r"no ForwardBackwardRequest"):
        refuse_parts_beyond(CALL.SerializeToString()[:-cut])
