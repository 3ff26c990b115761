"""Features of all pictures of a job's samples, computed before its model is built.

Ranks share the pictures out. What an earlier attempt has computed is read, so that a resumed job
goes on with the same numbers.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from ft_service.data.tokens.image_processor import ImageProcessor
from peft import PeftModel

from ft_service.bases.description import Description, ImageFacts, no_images
from ft_service.data.sample_kinds import Picture
from ft_service.data.tokens.token_set import TokenSet
from ft_service.rundir.directory import RunDir
from workers.base.rank_objects import alone, from_all, from_first, together
from workers.images.features import CURRENT_IMAGES, SampleImages, file_of, kept_in
from workers.images.tower import Tower, positions_of
from workers.layers.images import take_images
from workers.model.multimodal import causal_model, decoder_layers, text_decoder
from workers.ranks.runtime import OutsideError

FOLDER = "image-features"
"""Folder of a run directory."""


def has_images(*sets: TokenSet) -> bool:
    """Whether samples of these sets have pictures."""
    return any(len(own) > 0 and own.pictures is not None for own in sets)


def compute_features(
    run: RunDir, path: str, described: Description, sets: Sequence[TokenSet], device: torch.device
) -> int:
    """Write the features of all pictures that are not written yet; returns how many these were.

    Called by all ranks together. `path`: the base's. Raises SpecError on all of them for a base
    whose pictures cannot be learned from, OutsideError where the ranks do not see each other's
    files.
    """
    facts = _facts(described)
    folder = run.path(FOLDER)
    uses = _uses(sets)
    left = from_first(sorted(key for key in uses if not file_of(folder, key).is_file()))
    rank, world = (0, 1) if alone() else (dist.get_rank(), dist.get_world_size())
    own = {key: uses[key] for key in left[rank::world]}
    together(_computed(folder, path, facts.token_id, own, device))
    if not all(from_all(all(file_of(folder, key).is_file() for key in uses))):
        raise OutsideError(f"The features of pictures are not on all ranks: they are in {folder}.")
    return len(left)


def read_images(run: RunDir, described: Description, model: PeftModel) -> None:
    """Let a model take the pictures of a job's samples, whose features are written."""
    facts = _facts(described)
    causal = causal_model(model)
    layers = decoder_layers(causal)[: facts.early_layers]
    take_images(text_decoder(causal).get_input_embeddings(), layers)
    folder = run.path(FOLDER)
    if folder not in CURRENT_IMAGES.folders:
        CURRENT_IMAGES.folders.append(folder)
    find = kept_in(CURRENT_IMAGES.folders)
    CURRENT_IMAGES.images = SampleImages(find, facts.token_id, positions_of(causal))


def remove_features(run: RunDir) -> None:
    """Remove the features of a job that needs them no more."""
    shutil.rmtree(run.path(FOLDER), ignore_errors=True)


def _facts(described: Description) -> ImageFacts:
    if described.images is None:
        raise no_images(described)
    return described.images


def _uses(sets: Sequence[TokenSet]) -> dict[str, tuple[list[int], Picture]]:
    """Every picture by its key, and the tokens that stand for it."""
    found: dict[str, tuple[list[int], Picture]] = {}
    for own in sets:
        if own.pictures is None:
            continue
        for sample in own:
            for use in sample.images:
                tokens = sample.ids[use.begin : use.end].tolist()
                found.setdefault(use.picture.key, (tokens, use.picture))
    return found


def _computed(
    folder: Path,
    path: str,
    token_id: int,
    own: dict[str, tuple[list[int], Picture]],
    device: torch.device,
) -> Iterator[None]:
    """Compute and write features, coming back after each picture."""
    if not own:
        return
    processor = ImageProcessor.of(path)
    tower = Tower.loaded(path, token_id, device)
    for key, (tokens, picture) in own.items():
        tower.features(tokens, processor.inputs(picture)).save(file_of(folder, key))
        yield
