"""Pictures of a chat in a separate process, with limits on time, memory and bytes
(ft_service/data/tokens/image_worker.py): fetched, decoded, and made into what the base's tower
takes.

Pixels do not go through the pipe: the process writes them into a file without a name.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ft_service.data.image_part import as_json
from ft_service.data.limited_process import LimitedProcess, RenderLimits, Wording
from ft_service.data.sample_kinds import Picture
from ft_service.data.token_options import NO_BOUNDS, PixelBounds
from ft_service.data.tokens.image_fetch import ALLOW_PRIVATE
from ft_service.host.helper_process import Program

WORKER = (sys.executable, "-P", "-m", "ft_service.data.tokens.image_worker")
LIMITS = RenderLimits(seconds=30.0, memory_bytes=2 * 1024**3)
"""Limits of the pictures of one chat."""
MOST_MADE_BYTES = 1024**3
"""Bytes of what the base's processor makes of the pictures of one chat, at most."""
_WORDS = Wording("reading images", "reading them", "these images")


@dataclass(frozen=True)
class SeenPicture:
    """A picture as a base's tower takes it."""

    key: str
    """`Picture.key` of what was fetched."""
    text: str
    """What stands for it in a prompt: the base's placeholders, and marks around and between
    them.
    """
    inputs: Mapping[str, np.ndarray]
    """As of `ImageProcessor.inputs`."""


@dataclass(frozen=True)
class SeenPictures:
    """The pictures of a chat, in their order."""

    image_token: str
    """What the base's chat template writes for a picture."""
    pictures: Sequence[SeenPicture]


class ImageProcess(LimitedProcess):
    """A process that looks at pictures for one base."""

    def __init__(self, path: str, limits: RenderLimits = LIMITS) -> None:
        """`path`: the base's folder."""
        self._file = -1
        """Descriptor; below 0: there is none yet."""
        super().__init__(self._made_program, {"path": path}, limits, _WORDS)

    def _made_program(self) -> Program:
        if self._file < 0:
            self._file, name = tempfile.mkstemp(prefix="ft-images-")
            os.unlink(name)
            weakref.finalize(self, os.close, self._file)
        return Program(
            command=(*WORKER, str(self._file)),
            expendable=True,
            limits_itself=True,
            needs=(ALLOW_PRIVATE,),
            variables={"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
            descriptors=(self._file,),
        )

    def look(
        self, pictures: Sequence[Picture], places: Sequence[str], bounds: PixelBounds = NO_BOUNDS
    ) -> SeenPictures:
        """What the tower takes of pictures. `places`: of each in its request, for errors.
        `bounds`: of those on which the answering adapter was trained.

        Raises LineError with the place of a picture that cannot be used, and for a limit;
        HelperFailed if the host lets no process work on it.
        """
        request = [
            {**as_json(picture), "place": place}
            for picture, place in zip(pictures, places, strict=True)
        ]
        found: list[dict[str, np.ndarray]] = []
        reply = self.ask(
            {"pictures": request, "most_bytes": MOST_MADE_BYTES, "bounds": asdict(bounds)},
            lambda said: found.extend(self._arrays(own) for own in said.get("pictures", ())),
        )
        return SeenPictures(
            reply["image_token"],
            [
                SeenPicture(said["key"], said["text"], inputs)
                for said, inputs in zip(reply["pictures"], found, strict=True)
            ],
        )

    def _arrays(self, said: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return {name: self._array(**own) for name, own in said["inputs"].items()}

    def _array(self, dtype: str, shape: Sequence[int], offset: int) -> np.ndarray:
        kind = np.dtype(dtype)
        wanted = kind.itemsize * math.prod(shape)
        data = bytearray()
        while len(data) < wanted:
            part = os.pread(self._file, wanted - len(data), offset + len(data))
            if not part:
                raise OSError("what the process wrote of an image is shorter than it said")
            data += part
        return np.frombuffer(data, kind).reshape(shape)
