"""Features of pictures: what a base's frozen tower makes of each, once for all steps of a job.

The tower is not trained, so its answer is a constant. It is computed before training, kept in the
run directory as a file for each picture, and mapped by every rank. Where a disk has no room for the
files, every rank has the tower, which computes the same numbers for each micro-batch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ft_service.data.tokens.sample import ImageUse, Tokens
from workers.layers.segments import ImageInputs

_LAYOUT = "layout."
"""Prefix of the names of layout tensors in a file."""


@dataclass(frozen=True)
class Features:
    """What a tower gives a decoder of one picture."""

    rows: Tensor
    """[placeholders, hidden]: in place of their embeddings."""
    early: Tensor
    """[layers, placeholders, hidden]: added to the results of the first decoder layers."""
    layout: dict[str, Tensor]
    """The integers of the image processor from which positions follow, such as `image_grid_thw`:
    int64 [1, ..] each.
    """

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + self.early.nbytes

    def stored_in(self, dtype: torch.dtype) -> Features:
        """The same, rounded to a dtype."""
        return replace(self, rows=self.rows.to(dtype), early=self.early.to(dtype))

    def save(self, file: Path) -> None:
        """Write a file, which is there whole or not at all. Raises OSError."""
        file.parent.mkdir(parents=True, exist_ok=True)
        tensors = {"rows": self.rows, "early": self.early}
        tensors |= {f"{_LAYOUT}{name}": own for name, own in self.layout.items()}
        unfinished = file.with_suffix(".part")
        save_file({name: own.contiguous().cpu() for name, own in tensors.items()}, unfinished)
        unfinished.replace(file)

    @classmethod
    def load(cls, file: Path) -> Features:
        """Those of a file, mapped. Raises OSError, SafetensorError."""
        held = load_file(file)
        layout = {
            name.removeprefix(_LAYOUT): own
            for name, own in held.items()
            if name.startswith(_LAYOUT)
        }
        return cls(held["rows"], held["early"], layout)


def file_of(folder: Path, key: str) -> Path:
    """The file of a picture's features. `folder`: that of a job; `key`: the picture's."""
    return folder / key[:2] / f"{key}.safetensors"


FeaturesOf = Callable[[Tokens, ImageUse], Features]
"""Function that gives the features of a picture where a sample shows it."""


def by_key(features: Mapping[str, Features]) -> FeaturesOf:
    """Function that looks up those of a picture by its key."""
    return lambda _, use: features[use.picture.key]


def kept_in(folders: Sequence[Path], otherwise: FeaturesOf | None = None) -> FeaturesOf:
    """Function that reads the features of a picture from the first of the folders that has them,
    else has them computed; it raises RuntimeError where nothing does.
    """

    def find(sample: Tokens, use: ImageUse) -> Features:
        key = use.picture.key
        found = next((file for own in folders if (file := file_of(own, key)).is_file()), None)
        if found is not None:
            return Features.load(found)
        if otherwise is None:
            raise RuntimeError(f"the features of picture {key} are gone")
        return otherwise(sample, use)

    return find


def newest_of(features: FeaturesOf, most_bytes: int) -> FeaturesOf:
    """The same function, which keeps the newest answers up to so many bytes: a micro-batch asks
    for positions and for rows, and a pair shows a picture twice.
    """
    kept: OrderedDict[str, Features] = OrderedDict()

    def find(sample: Tokens, use: ImageUse) -> Features:
        key = use.picture.key
        kept[key] = kept.pop(key, None) or features(sample, use)
        while len(kept) > 1 and sum(own.nbytes for own in kept.values()) > most_bytes:
            kept.popitem(last=False)
        return kept[key]

    return find


Positions = Callable[[Tensor, Tensor, Sequence[dict[str, Tensor]]], Tensor]
"""Function of a sample's ids, int64 [length], of which of them are placeholders, bool [length],
and of the layouts of its pictures; returns int64 [axes, length].
"""


Later = Callable[[Sequence[tuple[Tokens, ImageUse]]], Callable[[], tuple[Tensor, Tensor]]]
"""Function of the pictures of a micro-batch, in the samples that show them; returns what computes
their rows and early features within its forward.
"""


class LooksLater(Protocol):
    """A tower that is trained (workers/images/trained_tower.py)."""

    model: nn.Module

    def layout(self, sample: Tokens, use: ImageUse, /) -> Features: ...

    def later(
        self, shown: Sequence[tuple[Tokens, ImageUse]]
    ) -> Callable[[], tuple[Tensor, Tensor]]: ...


class SampleImages:
    """Reads what micro-batches hold of their samples' pictures."""

    def __init__(
        self,
        find: FeaturesOf,
        token_id: int,
        positions: Positions | None,
        later: Later | None = None,
    ) -> None:
        """`find`: the features of a picture. `token_id`: of placeholders. `positions`: None: tokens
        are numbered one by one, as in text. `later`: of a tower that is trained, where `find` gives
        layouts alone.
        """
        self._find = find
        self._token_id = token_id
        self._positions = positions
        self._later = later

    def inputs(
        self, samples: Sequence[Tokens], begins: Sequence[int], device: torch.device
    ) -> ImageInputs | None:
        """The features of samples whose first tokens have these places, counted through all rows.

        None: there are no pictures. Raises RuntimeError for a picture without features.
        """
        shown = [(sample, use) for sample in samples for use in sample.images]
        if not shown:
            return None
        each = [
            (begin, self._placeholders(sample, sample.images))
            for sample, begin in zip(samples, begins, strict=True)
        ]
        places = torch.cat([begin + torch.from_numpy(held).nonzero()[:, 0] for begin, held in each])
        spans = torch.cat([begin + _runs(held) for begin, held in each]).int()
        if self._later is not None:
            none = torch.empty(0, device=device)
            return ImageInputs(_moved(places, device), none, none, spans, self._later(shown))
        found = [self._found(sample, use) for sample, use in shown]
        rows = torch.cat([own.rows for own in found])
        early = torch.cat([own.early for own in found], dim=1)
        return ImageInputs(
            _moved(places, device), _moved(rows, device), _moved(early, device), spans
        )

    def _found(self, sample: Tokens, use: ImageUse) -> Features:
        features = self._find(sample, use)
        wanted = int(self._placeholders(sample, [use]).sum())
        if len(features.rows) != wanted:
            raise RuntimeError(
                f"a picture has {wanted} placeholders and {len(features.rows)} features"
            )
        return features

    def positions(self, samples: Sequence[Tokens], length: int | None = None) -> Tensor | None:
        """Positions of tokens, int64 [axes, 1, length] of the samples one after the other, or with
        `length` [axes, samples, length] of padded rows.

        None: they are those of text.
        """
        if self._positions is None or not any(sample.images for sample in samples):
            return None
        axes = [self._of_sample(sample) for sample in samples]
        if length is None:
            return torch.cat(axes, dim=1)[:, None]
        return torch.stack([_padded(own, length) for own in axes], dim=1)

    def _of_sample(self, sample: Tokens) -> Tensor:
        assert self._positions is not None
        ids = torch.from_numpy(sample.ids.astype(np.int64))
        held = torch.from_numpy(self._placeholders(sample, sample.images))
        return self._positions(ids, held, [self._find(sample, use).layout for use in sample.images])

    def _placeholders(self, sample: Tokens, uses: Iterable[ImageUse]) -> np.ndarray:
        """bool [length]: which tokens stand for these pictures."""
        within = np.zeros(len(sample.ids), dtype=np.bool_)
        for use in uses:
            within[use.begin : use.end] = True
        return within & (sample.ids == self._token_id)


def _runs(held: np.ndarray) -> Tensor:
    """The first place and the end of every run of placeholders, int64 [runs, 2]. `held`: bool."""
    edges = np.diff(held.astype(np.int8), prepend=0, append=0)
    return torch.from_numpy(np.stack([np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)], 1))


def _padded(positions: Tensor, length: int) -> Tensor:
    """[axes, length]: positions of a sample, and further ones where no token is looked at."""
    more = torch.arange(length - positions.shape[1]) + 1 + positions.max()
    return torch.cat([positions, more.expand(len(positions), -1)], dim=1)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class _Current:
    """The pictures of the jobs that this process trains, of one base."""

    def __init__(self) -> None:
        self.folders: list[Path] = []
        """Of the jobs' features. Equal keys are equal pictures, whatever job they are of."""
        self.live: FeaturesOf | None = None
        """Computes those that no folder has. None: nothing does."""
        self.trained: LooksLater | None = None
        """The towers with adapters that the job trains. None: they are frozen."""
        self.images: SampleImages | None = None

    def of(self, samples: Sequence[Tokens]) -> SampleImages | None:
        """Those that samples need. None: they need none.

        Raises RuntimeError for samples with pictures where there are no features.
        """
        if not any(sample.images for sample in samples):
            return None
        if self.images is None:
            raise RuntimeError("samples have pictures, and their features were not computed")
        return self.images


CURRENT_IMAGES = _Current()
