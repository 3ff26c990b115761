"""Calls of forward_backward as the `tinker` package sends them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ft_service.tinker import tinker_messages_pb2 as pb

Arrays = Mapping[str, np.ndarray]


def loss_message(
    seq: int,
    data: Sequence[tuple[np.ndarray, Arrays]],
    loss_fn: str = "cross_entropy",
    config: Mapping[str, float] | None = None,
    *,
    forward_only: bool = False,
) -> pb.ForwardBackwardRequest:
    message = pb.ForwardBackwardRequest(
        model_id="model", seq_id=seq, loss_fn=loss_fn, forward_only=forward_only
    )
    for name, value in (config or {}).items():
        message.loss_fn_config[name] = value
    for ids, arrays in data:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = ids.astype("<i4").tobytes()
        for name, array in arrays.items():
            whole = array.dtype.kind == "i"
            tensor = datum.loss_fn_inputs[name]
            tensor.dense = array.astype("<i8" if whole else "<f4").tobytes()
            tensor.dtype = pb.DTYPE_INT64 if whole else pb.DTYPE_FLOAT32
            tensor.shape.extend(array.shape)
    return message
