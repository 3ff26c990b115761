"""The pictures of a job whose client sends its data: read on every rank, and looked at by the
base's tower before the first forward that shows them.

What the tower makes of them is kept in the run directory, as that of a job with files is
(workers/images/computing.py): a client usually sends a picture in many calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from torch import nn

from ft_service.bases.description import Description, facts_of_images
from ft_service.data.image_part import refuse_large, refuse_other_types
from ft_service.data.tokens.image_processor import ImageProcessor
from ft_service.data.tokens.sample import Picture, Tokens
from ft_service.data.tokens.token_set import TokenSet
from ft_service.data.tokens.tokenize import load_tokenizer
from ft_service.errors import SpecError
from ft_service.tinker.loss_calls import Datum
from workers.base.rank_objects import by_first
from workers.images.computing import compute_features, read_images, remove_features
from workers.images.tower import Tower
from workers.ranks.runtime import OutsideError, Runtime

MOST_KEPT = 4096
"""Pictures whose features are kept. Beyond that all are computed anew as they come."""


class CallPictures:
    """Those of one attempt on one rank."""

    def __init__(
        self,
        runtime: Runtime,
        model: nn.Module,
        describe: Callable[[], Description],
        *,
        shared: bool = False,
    ) -> None:
        """`describe`: the base; asked for the first picture. `shared`: it is that of other jobs
        too.
        """
        self._describe = describe
        self._runtime = runtime
        self._model = model
        self._shared = shared
        self._kept: set[str] = set()
        self._is_taken = False
        self._towers = lru_cache(maxsize=1)(Tower.loaded)

    def read(self, data: bytes) -> tuple[np.ndarray, Picture]:
        """The tokens that stand for a picture, int64, and the picture.

        Raises LineError for one that cannot be used, SpecError for a base that sees none.
        """
        facts_of_images(self._base)
        refuse_large(len(data), "")
        refuse_other_types(data, "")
        picture = Picture.of(data)
        text = ImageProcessor.of(self._path).replacement(picture)
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return np.asarray(ids, np.int64), picture

    def look_at(self, data: Sequence[Datum]) -> None:
        """Compute the features of those pictures of a call that have none. Called by all ranks
        together. Raises as `compute_features`.
        """
        shown = [_sample(datum) for datum in data if datum.images]
        if not shown:
            return
        runtime = self._runtime
        keys = {use.picture.key for sample in shown for use in sample.images}
        if len(self._kept | keys) > MOST_KEPT:
            by_first(lambda: remove_features(runtime.run))
            self._kept.clear()
        if not keys <= self._kept:
            count = compute_features(
                runtime.run,
                self._path,
                self._base,
                [TokenSet.of(shown)],
                runtime.device,
                runtime.spec.precision.compute,
                load_tower=self._towers,
            )
            if count is None:
                raise SpecError(
                    "data: the features of these images would take more than half of the free "
                    "disk of the run directory. Give smaller or fewer images.",
                    code="images_too_large",
                )
            self._kept |= keys
        if not self._is_taken:
            try:
                read_images(runtime.run, self._base, self._model, shared=self._shared)
            except OutsideError as error:
                raise SpecError(f"data: images cannot be shown here: {error}") from None
            self._is_taken = True

    @property
    def _path(self) -> str:
        return self._runtime.spec.model.path

    @cached_property
    def _base(self) -> Description:
        return self._describe()

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._path)


def _sample(datum: Datum) -> Tokens:
    ids = datum.ids.astype(np.int32)
    return Tokens(ids, np.zeros(len(ids), np.bool_), images=datum.images)
