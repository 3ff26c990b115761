"""The process that fetches and decodes the pictures of chats for one base, under limits
(ft_service/data/image_process.py).

`python -m ft_service.data.tokens.image_worker FILE` serves as limited_worker.py says. FILE is the
descriptor of the file into which it writes arrays.
"""

from __future__ import annotations

import os
import sys

from ft_service.host.quick_imports import begin_imports, end_imports

if __name__ == "__main__":  # transformers imports torch wherever it finds it, which takes seconds
    begin_imports()
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]

from functools import partial
from typing import Any

import numpy as np

from ft_service.data.image_part import of_json
from ft_service.data.line_errors import ImageError, LineError
from ft_service.data.sample_kinds import Conversation
from ft_service.data.token_options import PixelBounds
from ft_service.data.tokens.image_fetch import ImageFetcher
from ft_service.data.tokens.image_processor import ImageProcessor
from ft_service.data.tokens.limited_worker import Work, serve
from ft_service.errors import SpecError


def _begin(given: dict[str, Any]) -> Work:
    path = given["path"]
    try:
        ImageProcessor.of(path)
        return partial(_seen, path)
    except SpecError as error:
        return partial(_refused, error.message)


def _refused(reason: str, _: dict[str, Any]) -> dict[str, Any]:
    return {"refused": reason}


def _seen(path: str, request: dict[str, Any]) -> dict[str, Any]:
    """Raises LineError."""
    try:
        processor = ImageProcessor.of(path, PixelBounds(**request["bounds"]))
    except SpecError as error:
        return _refused(error.message, request)
    pictures = [of_json(own) for own in request["pictures"]]
    places = tuple(own["place"] for own in request["pictures"])
    chat = Conversation((), (), images=tuple(pictures), image_places=places)
    file = int(sys.argv[1])
    offset = 0
    told: list[dict[str, Any]] = []
    for picture, place in zip(ImageFetcher().fetched(chat).images, places, strict=True):
        try:
            inputs, text = processor.looked_at(picture)
        except ImageError as error:
            raise error.at(place) from None
        if offset + sum(own.nbytes for own in inputs.values()) > request["most_bytes"]:
            raise LineError(
                place,
                f"becomes, with those before it, more than {request['most_bytes'] // 2**20:,} MiB "
                "for the base's tower: give fewer or smaller images, or detail: low",
            )
        arrays: dict[str, dict[str, Any]] = {}
        for name, own in inputs.items():
            arrays[name] = {"dtype": own.dtype.str, "shape": own.shape, "offset": offset}
            offset += _written(file, own, offset)
        told.append({"key": picture.key, "text": text, "inputs": arrays})
    os.ftruncate(file, offset)
    return {"image_token": processor.image_token, "pictures": told}


def _written(file: int, array: np.ndarray, offset: int) -> int:
    """Write an array. Returns its bytes."""
    left = memoryview(array.tobytes())
    while left:
        count = os.pwrite(file, left, offset)
        left = left[count:]
        offset += count
    return array.nbytes


if __name__ == "__main__":
    end_imports()
    serve(_begin)
