"""Features of all pictures of a job's samples, computed before its model is built.

Ranks share the pictures out. What an earlier attempt has computed is read, so that a resumed job
goes on with the same numbers.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from ft_service.bases.description import Description, facts_of_images
from ft_service.data.token_options import NO_BOUNDS, PixelBounds
from ft_service.data.tokens.image_processor import ImageProcessor
from ft_service.data.tokens.sample import ImageUse, Tokens
from ft_service.data.tokens.token_set import TokenSet
from ft_service.plan.image_features import features_bytes
from ft_service.rundir.directory import RunDir
from workers.base.rank_objects import alone, by_first, from_all, from_first, together
from workers.images.features import (
    CURRENT_IMAGES,
    Features,
    SampleImages,
    file_of,
    kept_in,
    newest_of,
)
from workers.images.placing import take_images, takes_images
from workers.images.tower import Tower, positions_of
from workers.images.trained_tower import TrainedTower
from workers.model.multimodal import causal_model
from workers.ranks.runtime import COMPUTE_DTYPE, OutsideError

FOLDER = "image-features"
"""Folder of a run directory."""
_NEWEST_BYTES = 2**28
"""Most bytes of features that a tower on every rank has just computed, and keeps."""


def has_images(*sets: TokenSet) -> bool:
    """Whether samples of these sets have pictures."""
    return any(len(own) > 0 and own.pictures is not None for own in sets)


@dataclass(frozen=True)
class Storage:
    """Where the features of a job's pictures are kept, and how."""

    folder: Path
    compute: Literal["bf16", "fp32"]
    """`precision.compute`, in which they are kept."""

    def has_room(self, tokens: int, base: Description) -> bool:
        """Whether the features of so many placeholders fit on the disk: they take half of what is
        free at most, as others write to it too.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.folder).free
        return features_bytes(base, tokens, self.compute) <= free // 2


def compute_features(
    run: RunDir,
    path: str,
    described: Description,
    sets: Sequence[TokenSet],
    device: torch.device,
    compute: Literal["bf16", "fp32"],
    bounds: PixelBounds = NO_BOUNDS,
    load_tower: Callable[[str, int, torch.device], Tower] = Tower.loaded,
) -> int | None:
    """Write the features of all pictures that are not written yet; returns how many these were.
    None: the disk has no room for them, and nothing is written.

    Called by all ranks together. `path`: the base's. `compute`: `precision.compute`. `bounds`: of
    the job's pictures. `load_tower`: as Tower.loaded. Raises SpecError on all of them for a base
    whose pictures cannot be learned from, OutsideError where the ranks do not see each other's
    files.
    """
    facts = facts_of_images(described)
    folder = run.path(FOLDER)
    uses = _uses(sets)
    left = from_first(sorted(key for key in uses if not file_of(folder, key).is_file()))
    rank, world = (0, 1) if alone() else (dist.get_rank(), dist.get_world_size())
    own = {key: uses[key] for key in left[rank::world]}
    storage = Storage(folder, compute)
    tokens = sum(uses[key].end - uses[key].begin for key in left)
    if not by_first(lambda: storage.has_room(tokens, described)):
        return None
    load = partial(ImageProcessor.of, path, bounds)
    load_own = partial(load_tower, path, facts.token_id, device)
    together(_computed(storage, load, load_own, own))
    if not all(from_all(all(file_of(folder, key).is_file() for key in uses))):
        raise OutsideError(f"The features of pictures are not on all ranks: they are in {folder}.")
    return len(left)


def read_images(
    run: RunDir,
    described: Description,
    model: nn.Module,
    *,
    shared: bool = False,
    live: LiveTower | TrainedTower | None = None,
) -> None:
    """Let a model take the pictures of a job's samples, whose features are written, or are
    computed by `live`.

    `shared`: its base is that of other jobs too, which takes pictures since it was built. Raises
    OutsideError if it does not.
    """
    facts = facts_of_images(described)
    causal = causal_model(model)
    if not shared:
        take_images(causal, facts)
    elif not takes_images(causal):
        raise OutsideError("The engine's base was not described when it was built.")
    folder = run.path(FOLDER)
    if folder not in CURRENT_IMAGES.folders:
        CURRENT_IMAGES.folders.append(folder)
    if isinstance(live, TrainedTower):
        CURRENT_IMAGES.trained = live
    elif live is not None:
        CURRENT_IMAGES.live = newest_of(live.features, _NEWEST_BYTES)
    trained = CURRENT_IMAGES.trained
    if trained is not None:
        found = positions_of(causal)
        CURRENT_IMAGES.images = SampleImages(trained.layout, facts.token_id, found, trained.later)
        return
    find = kept_in(CURRENT_IMAGES.folders, CURRENT_IMAGES.live)
    CURRENT_IMAGES.images = SampleImages(find, facts.token_id, positions_of(causal))


def remove_features(run: RunDir) -> None:
    """Remove the features of a job that needs them no more."""
    shutil.rmtree(run.path(FOLDER), ignore_errors=True)


class LiveTower:
    """The towers of a base, whole on a rank, and without gradients."""

    def __init__(
        self,
        path: str,
        described: Description,
        device: torch.device,
        compute: str,
        bounds: PixelBounds = NO_BOUNDS,
    ) -> None:
        """`compute`: `precision.compute`. `bounds`: of the job's pictures. Raises SpecError as
        `Tower.loaded`, OSError.
        """
        self._processor = ImageProcessor.of(path, bounds)
        self._tower = Tower.loaded(path, facts_of_images(described).token_id, device)
        self._dtype = COMPUTE_DTYPE[compute]

    def features(self, sample: Tokens, use: ImageUse) -> Features:
        """Those that would be kept of a picture (`FeaturesOf`)."""
        ids = sample.ids[use.begin : use.end].tolist()
        return self._tower.features(ids, self._processor.inputs(use.picture)).stored_in(self._dtype)


@dataclass(frozen=True)
class _Use:
    """A picture of a set, and where tokens stand for it."""

    samples: TokenSet
    begin: int
    end: int

    @property
    def tokens(self) -> list[int]:
        return self.samples.ids[self.begin : self.end].tolist()


def _uses(sets: Sequence[TokenSet]) -> dict[str, _Use]:
    """One use of every picture that samples of these sets show, by the picture's key."""
    found: dict[str, _Use] = {}
    for own in sets:
        if own.pictures is None:
            continue
        keys = own.pictures.keys
        for begin, length in zip(own.begins.tolist(), own.lengths.tolist(), strict=True):
            for first, end, number in own.uses_within(begin, begin + length):
                found.setdefault(keys[number], _Use(own, first, end))
    return found


def _computed(
    storage: Storage,
    load_processor: Callable[[], ImageProcessor],
    load_tower: Callable[[], Tower],
    own: dict[str, _Use],
) -> Iterator[None]:
    """Compute and write features, coming back after each picture."""
    if not own:
        return
    processor = load_processor()
    tower = load_tower()
    for key, use in own.items():
        assert use.samples.pictures is not None
        inputs = processor.inputs(use.samples.pictures[key])
        features = tower.features(use.tokens, inputs)
        features.stored_in(COMPUTE_DTYPE[storage.compute]).save(file_of(storage.folder, key))
        yield
