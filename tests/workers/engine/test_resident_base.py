"""What an engine's base may not have, and what it is built with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ft_service.errors import SpecError
from ft_service.spec import JobSpec
from ft_service.spec.options import FOR_LONG_SAMPLES
from tests.support.ranks import run_on_ranks
from tests.support.training.models import save_tiny_llama, spec_for
from workers.engine import resident_base
from workers.engine.resident_base import load_resident_base
from workers.ranks.sharding import make_mesh

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("base"))


def with_option(spec: JobSpec, name: str, value: Any) -> JobSpec:
    distributed = spec.distributed.model_copy(update={name: value})
    return spec.model_copy(update={"distributed": distributed})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("wrap", "model"),
        ("compile", True),
        ("keep_unsharded", ["model.embed_tokens"]),
        ("prefetch", SimpleNamespace(forward=1, backward=1)),
        ("offload", True),
        *(("activation_checkpointing", mode) for mode in FOR_LONG_SAMPLES),
    ],
)
def test_what_jobs_on_one_base_cannot_have_is_refused_by_name(
    name: str, value: Any, base: Path
) -> None:
    with pytest.raises(SpecError) as refused:
        load_resident_base(with_option(spec_for(base), name, value), None, CPU)  # type: ignore[arg-type]
    assert refused.value.param == f"distributed.{name}"


def built_on_rank(rank: int, world: int, specs: list[JobSpec]) -> list[Any]:
    """Of each base: whether layers are computed again, how many there are and modules outside of
    them, and what was taken.
    """
    found: list[Any] = []
    taken: list[Any] = []

    def lanes(base: Any, layers: Any, outer: Any, *, checkpointed: bool) -> Any:
        inside = sum(module in layers for module in outer)
        found.append((checkpointed, len(layers), len(outer), inside, base.training, len(taken)))
        return None

    resident_base.LaneModel = lanes  # type: ignore[assignment]
    resident_base.take_images = lambda model, images: taken.append(images)
    mesh = make_mesh("cpu", world, 1)
    for number, spec in enumerate(specs):
        images: Any = "towers" if number else None
        made = load_resident_base(spec, mesh, CPU, images=images)
        assert made.padded_because is None
        assert made.identified is not None
    return found


def test_layers_are_computed_again_unless_nothing_is_and_pictures_are_taken_where_they_may_come(
    base: Path,
) -> None:
    specs = [
        with_option(spec_for(base), "activation_checkpointing", mode) for mode in ("full", "none")
    ]
    (found,) = run_on_ranks(built_on_rank, 1, specs)
    layers, outer = found[0][1:3]
    assert layers > 0
    assert outer > 0
    assert found == [
        (True, layers, outer, 0, True, 0),
        (False, layers, outer, 0, True, 1),
    ]
