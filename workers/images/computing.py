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
from ft_service.data.tokens.token_set import TokenSet
from ft_service.errors import DataError
from ft_service.plan.image_features import features_bytes
from ft_service.rundir.directory import RunDir
from ft_service.wording import bytes_text
from workers.base.rank_objects import alone, by_first, from_all, from_first, together
from workers.images.features import CURRENT_IMAGES, SampleImages, file_of, kept_in
from workers.images.placing import take_images, takes_images
from workers.images.tower import Tower, positions_of
from workers.model.multimodal import causal_model
from workers.ranks.runtime import COMPUTE_DTYPE, OutsideError

FOLDER = "image-features"
"""Folder of a run directory."""


def has_images(*sets: TokenSet) -> bool:
    """Whether samples of these sets have pictures."""
    return any(len(own) > 0 and own.pictures is not None for own in sets)


@dataclass(frozen=True)
class Storage:
    """Where the features of a job's pictures are kept, and how."""

    folder: Path
    compute: Literal["bf16", "fp32"]
    """`precision.compute`, in which they are kept."""

    def require_room(self, tokens: int, base: Description) -> None:
        """Raise DataError if the features of so many placeholders do not fit.

        They take half of what is free at most, as others write to the same disk.
        """
        needed = features_bytes(base, tokens, self.compute)
        self.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.folder).free
        if needed <= free // 2:
            return
        raise DataError(
            f"The features of the images would take {bytes_text(needed)} (of {tokens:,} "
            f"tokens), and half of the free disk of the run directory is "
            f"{bytes_text(free // 2)}. Give smaller or fewer images, or detail: low.",
            param="training_file",
            code="images_too_large",
        )


def compute_features(
    run: RunDir,
    path: str,
    described: Description,
    sets: Sequence[TokenSet],
    device: torch.device,
    compute: Literal["bf16", "fp32"],
    bounds: PixelBounds = NO_BOUNDS,
    load_tower: Callable[[str, int, torch.device], Tower] = Tower.loaded,
) -> int:
    """Write the features of all pictures that are not written yet; returns how many these were.

    Called by all ranks together. `path`: the base's. `compute`: `precision.compute`. `bounds`: of
    the job's pictures. `load_tower`: as Tower.loaded. Raises
    SpecError on all of them for a base whose pictures cannot be learned from, DataError for more
    than the disk takes, OutsideError where the ranks do not see each other's files.
    """
    facts = facts_of_images(described)
    folder = run.path(FOLDER)
    uses = _uses(sets)
    left = from_first(sorted(key for key in uses if not file_of(folder, key).is_file()))
    rank, world = (0, 1) if alone() else (dist.get_rank(), dist.get_world_size())
    own = {key: uses[key] for key in left[rank::world]}
    storage = Storage(folder, compute)
    by_first(
        lambda: storage.require_room(
            sum(uses[key].end - uses[key].begin for key in left), described
        )
    )
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
) -> None:
    """Let a model take the pictures of a job's samples, whose features are written.

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
    find = kept_in(CURRENT_IMAGES.folders)
    CURRENT_IMAGES.images = SampleImages(find, facts.token_id, positions_of(causal))


def remove_features(run: RunDir) -> None:
    """Remove the features of a job that needs them no more."""
    shutil.rmtree(run.path(FOLDER), ignore_errors=True)


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
