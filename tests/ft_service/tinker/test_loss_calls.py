from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ft_service.errors import SpecError
from ft_service.tinker import loss_calls
from ft_service.tinker import tinker_messages_pb2 as pb
from ft_service.tinker.loss_calls import LossCall, LossRequest, write_output
from tests.support.training.loss_messages import loss_message

IDS = np.array([5, 6, 7])
NEXT = {"target_tokens": np.array([6, 7, 8]), "weights": np.array([1.0, 0.0, -2.0], np.float32)}


def checked(message: pb.ForwardBackwardRequest) -> LossCall:
    return LossRequest.parse(message.SerializeToString()).call(vocabulary=100, longest=8)


def test_a_call_as_it_is_sent() -> None:
    call = checked(
        loss_message(
            4, [(IDS, NEXT), (IDS[:1], {"target_tokens": np.array([[1, 2]])})], forward_only=True
        )
    )
    assert (call.loss_fn, call.forward_only, len(call.data)) == ("cross_entropy", True, 2)
    assert call.data[0].ids.tolist() == [5, 6, 7]
    assert call.data[0].inputs["weights"].tolist() == [1.0, 0.0, -2.0]
    assert call.data[1].inputs["weights"].tolist() == [[1.0, 1.0]], (
        "without weights, each target counts"
    )


def test_a_sparse_array_is_one_with_zeros() -> None:
    message = loss_message(1, [(IDS, {"target_tokens": np.array([[6, 9], [7, 9], [8, 9]])})])
    tensor = message.data[0].loss_fn_inputs["weights"]
    tensor.dtype, tensor.sparse_csr.values = (
        pb.DTYPE_FLOAT32,
        np.array([0.5, 0.25], "<f4").tobytes(),
    )
    tensor.sparse_csr.crow_indices = np.array([0, 1, 1, 2], "<i8").tobytes()
    tensor.sparse_csr.col_indices = np.array([1, 0], "<i8").tobytes()
    tensor.shape.extend([3, 2])
    assert checked(message).data[0].inputs["weights"].tolist() == [
        [0.0, 0.5],
        [0.0, 0.0],
        [0.25, 0.0],
    ]
    tensor.shape[1] = 2**40
    with pytest.raises(SpecError, match=r"weights: it is no sparse array"):
        checked(message)
    tensor.shape[:], tensor.sparse_csr.crow_indices = [-1, 2], b""
    with pytest.raises(SpecError, match=r"weights: it is no sparse array"):
        checked(message)


def test_sparse_targets_are_counted_before_they_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their result would be larger than one may be, and the ranks would end with it."""
    ids = np.arange(8)
    array = np.zeros((8, 2), np.int64)
    message = loss_message(1, [(ids, {"target_tokens": array})] * 3)
    for datum in message.data:
        tensor = datum.loss_fn_inputs["target_tokens"]
        tensor.sparse_csr.crow_indices = np.zeros(9, "<i8").tobytes()
    monkeypatch.setattr(loss_calls, "MOST_TARGETS", 48)
    assert len(checked(message).data) == 3
    monkeypatch.setattr(loss_calls, "MOST_TARGETS", 47)
    with pytest.raises(
        SpecError, match=r"data: 48 target tokens in one call; at most 47 are possible"
    ):
        checked(message)


Change = Callable[[pb.ForwardBackwardRequest], object]


def _array(message: pb.ForwardBackwardRequest, name: str, values: list[float]) -> None:
    tensor = message.data[0].loss_fn_inputs[name]
    tensor.dense = np.array(values, "<f4").tobytes()
    tensor.dtype = pb.DTYPE_FLOAT32


def _shape(message: pb.ForwardBackwardRequest, shape: list[int], body: bytes) -> None:
    tensor = message.data[0].loss_fn_inputs["weights"]
    tensor.dense = body
    tensor.shape[:] = shape


WRONG: dict[str, Change] = {
    r"loss_fn = 'mean': this service computes cross_entropy": lambda m: setattr(
        m, "loss_fn", "mean"
    ),
    r"data: 0 sequences": lambda m: m.ClearField("data"),
    r"data\.0\.model_input: 0 tokens": lambda m: m.data[0].ClearField("model_input"),
    r"data\.0\.model_input: dmel: this service trains on tokens and images only": lambda m: (
        m.data[0].model_input.add().dmel.SetInParent()
    ),
    r"data\.0\.model_input: 9 tokens; 1 to 8": lambda m: setattr(
        m.data[0].model_input[0].encoded_text, "tokens", np.zeros(9, "<i4").tobytes()
    ),
    r"data\.0\.model_input: token 100; the base has tokens 0 to 99": lambda m: setattr(
        m.data[0].model_input[0].encoded_text, "tokens", np.full(3, 100, "<i4").tobytes()
    ),
    r"data\.0\.model_input: 5 bytes are no int32": lambda m: setattr(
        m.data[0].model_input[0].encoded_text, "tokens", b"12345"
    ),
    r"target_tokens: it is missing": lambda m: m.data[0].loss_fn_inputs.pop("target_tokens"),
    r"target_tokens: a value is not a whole number": lambda m: _array(
        m, "target_tokens", [6.0, float("nan"), 8.0]
    ),
    r"0\.loss_fn_inputs\.target_tokens: a value is not a whole number": lambda m: _array(
        m, "target_tokens", [6.0, float("inf"), 8.0]
    ),
    r"weights: 0 numbers for the shape \[0, 4611686018427387904\]": lambda m: _shape(
        m, [0, 2**62], b""
    ),
    r"weights: 1 numbers for the shape \[1, 1, 1, 1, 1, 1, 1, 1\]": lambda m: _shape(
        m, [1] * 70, b"four"
    ),
    r"weights: its shape is \[2\]": lambda m: (
        _array(m, "weights", [1.0, 2.0]) or m.data[0].loss_fn_inputs["weights"].ClearField("shape")
    ),
    r"advantages: cross_entropy takes target_tokens, weights": lambda m: _array(
        m, "advantages", [1.0, 2.0, 3.0]
    ),
    r"weights: a value is not a finite number": lambda m: _array(
        m, "weights", [1.0, float("nan"), 0.0]
    ),
    r"loss_fn_config\.beta: cross_entropy has no options": lambda m: m.loss_fn_config.update(
        {"beta": 1.0}
    ),
    r"ppo needs it": lambda m: (
        setattr(m, "loss_fn", "ppo") or m.data[0].loss_fn_inputs.pop("weights")
    ),
}


@pytest.mark.parametrize("text", list(WRONG))
def test_what_is_wrong_is_named(text: str) -> None:
    message = loss_message(1, [(IDS, NEXT)])
    WRONG[text](message)
    with pytest.raises(SpecError, match=text):
        checked(message)


def test_dro_has_no_beta_of_its_own() -> None:
    arrays = {
        "target_tokens": NEXT["target_tokens"],
        "logprobs": np.zeros(3, np.float32),
        "advantages": np.ones(3, np.float32),
    }
    with pytest.raises(SpecError, match=r"loss_fn_config\.beta: dro needs it"):
        checked(loss_message(1, [(IDS, arrays)], "dro"))
    assert checked(loss_message(1, [(IDS, arrays)], "dro", {"beta": 0.5})).config == {"beta": 0.5}


def test_bytes_that_are_no_message() -> None:
    with pytest.raises(SpecError, match=r"no ForwardBackwardRequest"):
        LossRequest.parse(b"\xff\xff\xff")


def test_an_output_of_arrays_of_several_shapes() -> None:
    arrays = [np.array([1.0, 2.0]), np.array([3.0]), np.array([[4.0, 5.0]])]
    message = pb.ForwardBackwardOutput.FromString(write_output(arrays, {"loss:sum": 1.5}))
    assert message.metrics["loss:sum"] == 1.5
    assert [record.num_datums for record in message.loss_fn_outputs] == [2, 1]
    field = message.loss_fn_outputs[0].fields["logprobs"]
    assert np.frombuffer(field.data, "<f4").tolist() == [1.0, 2.0, 3.0]
    assert np.frombuffer(field.offsets, "<i8").tolist() == [0, 8, 12]
    assert list(message.loss_fn_outputs[1].fields["logprobs"].trailing_shape) == [2]
