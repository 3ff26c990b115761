"""Weights that the client of a training loop has saved by name, in the job's run directory.

saved_weights/<name>.json      points to a checkpoint: adapter and optimizer, to go on from
sampler_weights/<name>/        the adapter in PEFT's layout, to sample from, and PROBES
weights_options/<kind>/<name>.json   who may read them and until when, which the client may change
later; none: the defaults
"""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict

from ft_service.rundir.checkpoints import (
    CHECKPOINT_NAME,
    checkpoint_key,
    complete_checkpoints,
    remove_marker,
)
from ft_service.rundir.directory import RunDir
from ft_service.rundir.evaluations import Probe

SAVED = "saved_weights"
FOR_SAMPLER = "sampler_weights"
OPTIONS = "weights_options"
Kind = Literal["weights", "sampler_weights"]
PROBES = "probes.json"
"""File beside a sampler's adapter: some sequences with the trainer's log-probabilities of their
tokens, to compare the sampler's with.
"""
_RESUMED_FROM = 2
"""Newest checkpoints that stay whatever is saved: if the last one is damaged, an attempt goes on
from the one before.
"""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Names of saved weights."""


class SavedWeights(BaseModel):
    """`saved_weights/<name>.json`."""

    model_config = ConfigDict(frozen=True)

    name: str
    checkpoint: str
    """Folder below `checkpoints/`."""
    step: int
    """Changes of the adapter before."""
    command: int
    """Number of the command that saved them."""
    created_at: float
    """Seconds since the epoch."""
    bytes: int


class WeightsOptions(BaseModel):
    """`weights_options/<kind>/<name>.json`."""

    model_config = ConfigDict(frozen=True)

    public: bool = False
    """Whether other projects of the organization may load them."""
    expires_at: float | None = None
    """Seconds since the epoch; None: they stay."""
    user_metadata: dict[str, str] | None = None


class SamplerProbes(BaseModel):
    """`sampler_weights/<name>/probes.json`."""

    model_config = ConfigDict(frozen=True)

    command: int
    """Number of the command that saved the weights."""
    probes: list[Probe]


def saved_key(name: str) -> str:
    return f"{SAVED}/{name}.json"


def sampler_key(name: str) -> str:
    """Key of the folder of a sampler's weights."""
    return f"{FOR_SAMPLER}/{name}"


def options_of(run: RunDir, checkpoint_id: str) -> WeightsOptions:
    """`checkpoint_id`: weights/<name> or sampler_weights/<name>."""
    return run.readable(_options_key(checkpoint_id), WeightsOptions) or WeightsOptions()


def set_options(run: RunDir, checkpoint_id: str, options: WeightsOptions) -> None:
    run.write(_options_key(checkpoint_id), options)


def begin_options(run: RunDir, checkpoint_id: str, command: Mapping[str, Any]) -> None:
    """Give weights that are saved now the options of the command that saves them.

    Those of earlier weights of the name go.
    """
    ttl = command.get("ttl_seconds")
    metadata = command.get("user_metadata")
    if ttl is None and not metadata:
        forget_options(run, checkpoint_id)
    else:
        expires_at = None if ttl is None else time.time() + ttl
        set_options(
            run, checkpoint_id, WeightsOptions(expires_at=expires_at, user_metadata=metadata)
        )


def with_options(run: RunDir) -> list[tuple[Kind, str]]:
    """Kinds and names of the saved weights that have options."""
    found: list[tuple[Kind, str]] = []
    for kind in get_args(Kind):
        found += [
            (kind, key.rpartition("/")[2].removesuffix(".json"))
            for key in run.list(f"{OPTIONS}/{kind}")
        ]
    return found


def forget_options(run: RunDir, checkpoint_id: str) -> None:
    run.path(_options_key(checkpoint_id)).unlink(missing_ok=True)


def _options_key(checkpoint_id: str) -> str:
    return f"{OPTIONS}/{checkpoint_id}.json"


def saved_weights(run: RunDir) -> list[SavedWeights]:
    """Everything that is saved to go on from, the oldest first."""
    found = [run.readable(key, SavedWeights) for key in run.list(SAVED) if key.endswith(".json")]
    return sorted(
        (saved for saved in found if saved is not None),
        key=lambda saved: (saved.created_at, saved.name),
    )


def saved_checkpoints(run: RunDir) -> set[str]:
    """Checkpoints that stay because something saved points to them."""
    return {saved.checkpoint for saved in saved_weights(run)}


def samplers_of(run: RunDir) -> list[str]:
    """Names of the weights that were saved to sample from, in the order of their names."""
    folder = run.path(FOR_SAMPLER)
    return (
        sorted(path.name for path in folder.iterdir() if NAME.fullmatch(path.name))
        if folder.is_dir()
        else []
    )


def count_saved(run: RunDir) -> int:
    """Number of all saved weights of a model, with those that have no name."""
    return len(run.list(SAVED)) + len(samplers_of(run))


def sampler_bytes(run: RunDir, name: str) -> int:
    """Bytes of weights that were saved to sample from; 0 if they are removed meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        return sum(file.stat().st_size for file in run.path(sampler_key(name)).iterdir())
    return 0


def saved_bytes(run: RunDir) -> int:
    """Bytes of all saved weights of a model."""
    return sum(saved.bytes for saved in saved_weights(run)) + sum(
        sampler_bytes(run, name) for name in samplers_of(run)
    )


def delete_saved(run: RunDir, name: str) -> None:
    """Remove saved weights: their pointer, and their checkpoint unless something else points to it,
    or an attempt may go back to it; that one goes after later ones.
    """
    saved = run.readable(saved_key(name), SavedWeights)
    run.path(saved_key(name)).unlink(missing_ok=True)
    kept = saved_checkpoints(run) | set(complete_checkpoints(run)[-_RESUMED_FROM:])
    if (
        saved is not None
        and CHECKPOINT_NAME.fullmatch(saved.checkpoint)
        and saved.checkpoint not in kept
    ):
        folder = run.path(checkpoint_key(saved.checkpoint))
        remove_marker(folder)
        shutil.rmtree(folder, ignore_errors=True)


def delete_sampler(run: RunDir, name: str) -> None:
    """Remove the weights of a sampler."""
    shutil.rmtree(run.path(sampler_key(name)), ignore_errors=True)
