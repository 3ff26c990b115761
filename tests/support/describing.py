"""Descriptions for tests: of folders that `save_base` makes, without a process, and by processes
that misbehave.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

from ft_service.bases.describing import (
    DESCRIPTIONS,
    Descriptions,
    Make,
    describe_in_process,
    versions_name,
)
from ft_service.bases.description import (
    Described,
    Description,
    Dimensions,
    Refusal,
    Versions,
    Weight,
    description_key,
)
from ft_service.bases.module_rules import OuterModules
from ft_service.errors import SpecError
from ft_service.rundir.directory import RunDir

PROGRAM = (sys.executable, str(Path(__file__).parent / "programs" / "describe_oddly.py"))
"""Describes a folder as its config.json asks for with `test`: `hang`, `spin`, `eat`, `crash`,
`killed`, `garbage`, `slow`.
"""
VERSIONS = Versions("1", "2", "3", "4")


def small_description(model_type: str = "llama") -> Description:
    """A description of one linear layer and an embedding."""
    weights = (
        Weight(
            "model.embed_tokens",
            "weight",
            (1024, 64),
            "embedding",
            None,
            files="model.embed_tokens.weight",
            dtype="BF16",
        ),
        Weight(
            "model.layers.0.self_attn.q_proj",
            "weight",
            (64, 64),
            "linear",
            0,
            files="",
            dtype="BF16",
            adapted=True,
        ),
    )
    dimensions = Dimensions(
        layers=1,
        hidden=64,
        heads=4,
        q=64,
        kv=32,
        intermediate=192,
        vocabulary=1024,
        norms=2,
        head_norms=False,
        gated=True,
        experts=0,
        experts_per_token=0,
        expert_intermediate=0,
        max_positions=128,
    )
    outer = OuterModules("model.embed_tokens", "lm_head", tied=False)
    return Description(
        model_type,
        "LlamaForCausalLM",
        dimensions,
        weights,
        "bf16",
        outer=outer,
        loss_in_chunks=True,
    )


def small_document(folder: Path, versions: Versions = VERSIONS) -> Described:
    """The document of a folder whose base is said to be `small_description`."""
    return Described(description_key(folder, versions), versions, base=small_description())


def oddly(seconds: float = 60.0, cpu_seconds: int = 60, memory_bytes: int = 512 * 1024**2) -> Make:
    """Describe by PROGRAM, under these limits."""
    limits = {"seconds": seconds, "cpu_seconds": cpu_seconds, "memory_bytes": memory_bytes}
    return lambda folder, stop: describe_in_process(folder, stop, command=PROGRAM, **limits)


_ONE = threading.Lock()
"""torch's context for a default device is the process's, and two threads would leave each other's
behind.
"""


def described_here(folder: Path, stop: Callable[[], bool] = lambda: False) -> Described:
    """Describe a base in this process, as `python -m workers.describe` does in one of its own."""
    from workers.describe import describe  # torch, for tests that need it
    from workers.model.products import products

    versions = Versions.installed()
    key = description_key(folder, versions)
    try:
        with _ONE:
            return Described(
                key, versions, base=replace(describe(str(folder)), products=products())
            )
    except SpecError as error:
        return Described(key, versions, refused=Refusal(error.message, error.param, error.code))


class DescribedAtOnce(Descriptions):
    """Descriptions that are there whenever somebody looks, as those of bases that a server has seen
    before.
    """

    def known(self, folder: Path) -> Described | None:
        found = super().known(folder)
        if found is None and (future := self._begin(folder, first=True)) is not None:
            return future.result()
        return found


@cache
def at_once() -> Descriptions:
    """The descriptions of all tests of this process, by `described_here`."""
    return DescribedAtOnce(None, "tests", described_here)


def put_descriptions(home: Path, models: Path) -> None:
    """Write the descriptions of all bases in `models` to a server's cache.

    The server then starts no process for them, each of which imports torch and transformers.
    """
    cache = Descriptions(RunDir(home / "cache" / DESCRIPTIONS), versions_name(Versions.installed()))
    for config in models.glob("*/config.json"):
        cache.add(config.parent, at_once().describe(config.parent))
