"""Calls of forward and forward_backward: what a client sends, checked, and what it gets back.

The wire's forms are those of the `tinker` package (its modules request_conv and response_conv in
0.38); token arrays are numpy arrays here, so that a server without torch can check them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError

from ft_service.data.image_limits import most_images
from ft_service.data.line_errors import OF_FILES, LineError
from ft_service.data.tokens.sample import ImageUse, Picture
from ft_service.errors import SpecError
from ft_service.tinker import tinker_messages_pb2 as pb
from ft_service.tinker.loss_wire import MOST_DATUMS, NO_CALL, refuse_parts_beyond

MOST_TARGETS_OF_TOKEN = 32
"""Limit of target tokens at one position."""
MOST_TARGETS = 8 * 1024**2
"""Limit of target tokens of all data of one call.

Sparse arrays may have more than the call has bytes.
"""

_WEIGHTED = ("weights",)
_RATIO = ("logprobs", "advantages")
LOSS_INPUTS: Mapping[str, tuple[str, ...]] = {
    "cross_entropy": _WEIGHTED,
    "importance_sampling": _RATIO,
    "ppo": _RATIO,
    "cispo": _RATIO,
    "dro": _RATIO,
    "gspo": _RATIO,
}
"""Loss function → the arrays that it takes beside target_tokens, each as long as these. weights are
1 where they are left out.
"""
CLIP_LOW = "clip_low_threshold"
CLIP_HIGH = "clip_high_threshold"
LOSS_CONFIG: Mapping[str, Mapping[str, float | None]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {CLIP_LOW: 0.8, CLIP_HIGH: 1.2},
    "cispo": {CLIP_LOW: 0.8, CLIP_HIGH: 1.2},
    "dro": {"beta": None},
    "gspo": {CLIP_LOW: 1 - 3e-4, CLIP_HIGH: 1 + 4e-4},
}
"""Loss function → its options with their defaults; None: it must be given."""

_NUMPY = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
}


ReadPicture = Callable[[bytes], tuple[np.ndarray, Picture]]
"""Function of an encoded picture: the tokens that stand for it, int64, and the picture. Raises
LineError, SpecError.
"""


@dataclass(frozen=True)
class Datum:
    """One sequence with what its loss is taken of."""

    ids: np.ndarray
    """int64 [tokens]."""
    targets: np.ndarray
    """int64 [tokens] or [tokens, k]: the tokens whose log-probabilities are taken behind each
    token.
    """
    inputs: Mapping[str, np.ndarray]
    """The loss function's arrays (LOSS_INPUTS), fp32 of the shape of `targets`."""
    images: tuple[ImageUse, ...] = ()
    """Its pictures, whose tokens are among `ids`."""


@dataclass(frozen=True)
class LossCall:
    """A call of forward or forward_backward."""

    loss_fn: str
    config: Mapping[str, float]
    data: Sequence[Datum]
    forward_only: bool


@dataclass(frozen=True)
class LossRequest:
    """A call as it arrives."""

    message: pb.ForwardBackwardRequest

    @classmethod
    def parse(cls, body: bytes | bytearray) -> LossRequest:
        """Raises SpecError for bytes that are no such message, and for one with too many parts."""
        refuse_parts_beyond(body)
        message = pb.ForwardBackwardRequest()
        try:
            message.ParseFromString(bytes(body))
        except DecodeError:
            raise SpecError(NO_CALL) from None
        return cls(message)

    def call(self, *, vocabulary: int, longest: int, read: ReadPicture | None = None) -> LossCall:
        """The call, checked. `vocabulary`: rows of the base's embedding; `longest`: most tokens of
        a sequence; `read`: None: there are no pictures here.

        Raises SpecError naming the datum and the field with its value and limit.
        """
        message = self.message
        if message.loss_fn not in LOSS_INPUTS:
            given = ", ".join(LOSS_INPUTS)
            raise SpecError(
                f"loss_fn = {message.loss_fn[:80]!r}: this service computes {given}. With "
                "forward_backward_custom the client "
                "computes any other loss of the log-probabilities.",
                param="loss_fn",
            )
        if not message.data:
            raise SpecError(
                f"data: 0 sequences in one call; 1 to {MOST_DATUMS:,} are possible.", param="data"
            )
        _check_targets(message)
        data = [
            _datum(datum, f"data.{number}", message.loss_fn, vocabulary, longest, read)
            for number, datum in enumerate(message.data)
        ]
        return LossCall(message.loss_fn, _config(message), data, message.forward_only)


def _config(message: pb.ForwardBackwardRequest) -> dict[str, float]:
    known = LOSS_CONFIG[message.loss_fn]
    given: dict[str, float] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") == "text":
            raise SpecError(
                f"loss_fn_config.{name[:80]} = {value.text[:80]!r}: a number is expected.",
                param="loss_fn_config",
            )
        given[name] = value.number
    for name, value in given.items():
        if name not in known:
            options = ", ".join(known) or "no options"
            text = f"loss_fn_config.{name[:80]}: {message.loss_fn} has {options}. Leave it out."
            raise SpecError(text, param="loss_fn_config")
        if not math.isfinite(value):
            raise SpecError(
                f"loss_fn_config.{name} = {value}: a finite number is expected.",
                param="loss_fn_config",
            )
    config = {name: given.get(name, default) for name, default in known.items()}
    for name, value in config.items():
        if value is None:
            raise SpecError(
                f"loss_fn_config.{name}: {message.loss_fn} needs it. Give a number.",
                param="loss_fn_config",
            )
    return {name: value for name, value in config.items() if value is not None}


def _check_targets(message: pb.ForwardBackwardRequest) -> None:
    """Raise SpecError for more targets than a call may have, before there are arrays of them."""
    shapes = [
        list(datum.loss_fn_inputs["target_tokens"].shape)
        for datum in message.data
        if "target_tokens" in datum.loss_fn_inputs
    ]
    count = sum(math.prod(shape) for shape in shapes if min(shape, default=0) > 0)
    if count > MOST_TARGETS:
        text = (
            f"data: {count:,} target tokens in one call; at most {MOST_TARGETS:,} are "
            "possible: send fewer data at once."
        )
        raise SpecError(text, param="data")


def _model_input(
    datum: pb.Datum, place: str, read: ReadPicture | None
) -> tuple[np.ndarray, tuple[ImageUse, ...]]:
    """The tokens of a datum, int64, and its pictures."""
    chunks: list[np.ndarray] = []
    images: list[ImageUse] = []
    length = 0
    for number, chunk in enumerate(datum.model_input):
        own = f"{place}.model_input"
        kind = chunk.WhichOneof("kind")
        if kind == "encoded_text":
            chunks.append(_numbers(chunk.encoded_text.tokens, np.dtype("<i4"), own))
        elif kind == "image" and read is not None:
            ids, picture = _picture(chunk.image, f"{own}.{number}", read)
            chunks.append(ids)
            images.append(ImageUse(length, length + len(ids), picture))
        else:
            named = kind or "an empty chunk"
            raise SpecError(
                f"{own}: {named}: this service trains on tokens and images only.", param=place
            )
        length += len(chunks[-1])
    if len(images) > (most := most_images()):
        raise SpecError(
            f"{place}.model_input: {len(images)} images; at most {most} are possible.",
            param=place,
        )
    ids = np.concatenate(chunks).astype(np.int64) if chunks else np.zeros(0, np.int64)
    return ids, tuple(images)


def _picture(image: pb.ImageChunk, place: str, read: ReadPicture) -> tuple[np.ndarray, Picture]:
    """The tokens of a picture, int64, and the picture. Raises SpecError."""
    try:
        ids, picture = read(image.data)
    except LineError as error:
        reason = error.reason.removesuffix(OF_FILES)
        raise SpecError(f"{place}: the image {reason}.", param=place) from None
    if image.HasField("expected_tokens"):
        refuse_unexpected(image.expected_tokens, len(ids), place)
    return ids, picture


def refuse_unexpected(expected: int | None, found: int, place: str) -> None:
    """Raise SpecError for a picture for which another number of tokens stands than its client
    expects.
    """
    if expected is not None and expected != found:
        raise SpecError(
            f"{place}: expected_tokens = {expected}, and the base's image processor makes {found}. "
            "Give that.",
            param=place,
        )


def _datum(
    datum: pb.Datum,
    place: str,
    loss_fn: str,
    vocabulary: int,
    longest: int,
    read: ReadPicture | None,
) -> Datum:
    ids, images = _model_input(datum, place, read)
    if not 1 <= len(ids) <= longest:
        raise SpecError(
            f"{place}.model_input: {len(ids)} tokens; 1 to {longest:,} are possible on this base.",
            param=place,
        )
    arrays = {
        name: _array(tensor, f"{place}.loss_fn_inputs.{name[:80]}")
        for name, tensor in datum.loss_fn_inputs.items()
    }
    targets = arrays.pop("target_tokens", None)
    if targets is None:
        raise SpecError(f"{place}.loss_fn_inputs.target_tokens: it is missing.", param=place)
    if not (np.isfinite(targets) & (targets == np.floor(targets))).all():
        raise SpecError(
            f"{place}.loss_fn_inputs.target_tokens: a value is not a whole number.", param=place
        )
    if (
        targets.ndim not in (1, 2)
        or len(targets) != len(ids)
        or (targets.ndim == 2 and targets.shape[1] < 1)
    ):
        shape = list(targets.shape)
        raise SpecError(
            f"{place}.loss_fn_inputs.target_tokens: its shape is {shape} for {len(ids)} tokens.",
            param=place,
        )
    if targets.ndim == 2 and targets.shape[1] > MOST_TARGETS_OF_TOKEN:
        text = (
            f"{targets.shape[1]} targets of a token; at most {MOST_TARGETS_OF_TOKEN} are possible."
        )
        raise SpecError(f"{place}.loss_fn_inputs.target_tokens: {text}", param=place)
    _check_ids(ids, f"{place}.model_input", vocabulary)
    _check_ids(targets, f"{place}.loss_fn_inputs.target_tokens", vocabulary)
    takes = LOSS_INPUTS[loss_fn]
    if unknown := sorted(arrays.keys() - set(takes)):
        text = (
            f"{place}.loss_fn_inputs.{unknown[0][:80]}: {loss_fn} takes target_tokens, "
            f"{', '.join(takes)}. Leave it out."
        )
        raise SpecError(text, param=place)
    inputs: dict[str, np.ndarray] = {}
    for name in takes:
        values = arrays.get(name)
        if values is None and name == "weights":
            values = np.ones(targets.shape, np.float32)
        if values is None:
            raise SpecError(f"{place}.loss_fn_inputs.{name}: {loss_fn} needs it.", param=place)
        if values.shape != targets.shape:
            text = (
                f"its shape is {list(values.shape)}, and that of target_tokens "
                f"{list(targets.shape)}."
            )
            raise SpecError(f"{place}.loss_fn_inputs.{name}: {text}", param=place)
        inputs[name] = values.astype(np.float32)
        if not np.isfinite(inputs[name]).all():
            raise SpecError(
                f"{place}.loss_fn_inputs.{name}: a value is not a finite number.", param=place
            )
    return Datum(ids, targets.astype(np.int64), inputs, images)


def _check_ids(ids: np.ndarray, place: str, vocabulary: int) -> None:
    wrong = ids[(ids < 0) | (ids >= vocabulary)]
    if wrong.size:
        raise SpecError(
            f"{place}: token {int(wrong.flat[0])}; the base has tokens 0 to {vocabulary - 1}.",
            param=place,
        )


def _array(tensor: pb.Tensor, place: str) -> np.ndarray:
    dtype = _NUMPY.get(tensor.dtype)
    if dtype is None:
        raise SpecError(
            f"{place}: its dtype is {tensor.dtype}; float32, int64 and int32 are possible.",
            param=place,
        )
    shape = tuple(tensor.shape)
    if tensor.WhichOneof("layout") == "sparse_csr":
        return _dense(tensor.sparse_csr, dtype, shape, place)
    values = _numbers(tensor.dense, dtype, place)
    if not shape:
        return values
    if (
        math.prod(shape) != len(values)
        or len(shape) > 2
        or not all(0 <= size <= len(values) for size in shape)
    ):
        raise SpecError(
            f"{place}: {len(values)} numbers for the shape {list(shape)[:8]}.", param=place
        )
    return values.reshape(shape)


def _dense(sparse: pb.SparseCsr, dtype: np.dtype, shape: tuple[int, ...], place: str) -> np.ndarray:
    """The whole array of one in compressed sparse rows, with zeros between."""
    values = _numbers(sparse.values, dtype, place)
    starts = _numbers(sparse.crow_indices, np.dtype("<i8"), place)
    columns = _numbers(sparse.col_indices, np.dtype("<i8"), place)
    rectangular = (
        len(shape) == 2
        and 0 < len(starts) == shape[0] + 1
        and 0 < shape[1] <= MOST_TARGETS_OF_TOKEN
    )
    in_order = (
        rectangular
        and starts[0] == 0
        and starts[-1] == len(values)
        and bool((np.diff(starts) >= 0).all())
    )
    if (
        not in_order
        or len(columns) != len(values)
        or bool(((columns < 0) | (columns >= shape[1])).any())
    ):
        text = (
            f"it is no sparse array of shape [tokens, k] with k up to {MOST_TARGETS_OF_TOKEN} "
            f"(shape {list(shape)[:8]})."
        )
        raise SpecError(f"{place}: {text}", param=place)
    whole = np.zeros(shape, dtype)
    whole[np.repeat(np.arange(shape[0]), np.diff(starts)), columns] = values
    return whole


def _numbers(body: bytes, dtype: np.dtype, place: str) -> np.ndarray:
    if len(body) % dtype.itemsize:
        raise SpecError(f"{place}: {len(body)} bytes are no {dtype.name} numbers.", param=place)
    return np.frombuffer(body, dtype)


def write_output(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """The answer to a call: `ForwardBackwardOutput`.

    `logprobs`: fp32 of the shape of each datum's targets.
    """
    message = pb.ForwardBackwardOutput(loss_fn_output_type="TensorOutput")
    for name, value in metrics.items():
        message.metrics[name] = value
    begin = 0
    while begin < len(logprobs):  # a record holds arrays whose shapes differ in their length only
        trailing = logprobs[begin].shape[1:]
        end = begin
        while end < len(logprobs) and logprobs[end].shape[1:] == trailing:
            end += 1
        arrays = [np.ascontiguousarray(array, dtype="<f4") for array in logprobs[begin:end]]
        offsets = np.cumsum([0, *(array.nbytes for array in arrays)]).astype("<i8")
        record = message.loss_fn_outputs.add(num_datums=len(arrays))
        field = record.fields["logprobs"]
        field.data = b"".join(array.tobytes() for array in arrays)
        field.offsets = offsets.tobytes()
        field.dtype = pb.DTYPE_FLOAT32
        field.trailing_shape.extend(trailing)
        begin = end
    return message.SerializeToString()
