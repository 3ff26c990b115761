"""The cache of quantised bases: what a second job reads, on any number of ranks."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ft_service.bases.cache_folder import INDEX, Cache
from ft_service.spec import JobSpec
from tests.support.ranks import run_on_ranks
from tests.support.training.loading import CPU, Outcome, load_on_rank, outcome_of, whole
from tests.support.training.models import save_tiny_llama, spec_for
from workers.base import base_tensors
from workers.base.cached_base import BaseCache
from workers.base.frozen_weights import FrozenWeight
from workers.base.load import load
from workers.model.build import build
from workers.ranks.sharding import shard

MIXED = {"default": "nf4", "overrides": {r".*self_attn.*": "fp8", r".*down_proj": "bf16"}}


def total_bytes(folder: Path) -> int:
    return sum(t.nbytes for path in folder.glob("*.safetensors") for t in load_file(path).values())


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_tiny_llama(tmp_path / "base", intermediate_size=200)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def load_here(base: Path, cache: Cache | None, **options: Any) -> Outcome:
    """In this process, unsharded."""
    model = build(spec_for(base, **{"precision": MIXED, **options}), CPU).peft_model
    return load_unsharded(model, base, cache)


def load_unsharded(model: nn.Module, base: Path, cache: Cache | None) -> Outcome:
    """It tells that it goes on between weights, from files and from the cache, as a large base
    takes hours.
    """
    tell = Mock()
    loaded = load(
        model, base, seed=0, compute_dtype=torch.bfloat16, device=CPU, cache=cache, tell=tell
    )
    assert tell.call_count >= len(loaded.changed)
    return outcome_of(model, loaded)


def same_parts(one: Outcome, other: Outcome) -> bool:
    return one.parts.keys() == other.parts.keys() and all(
        torch.equal(a, b)
        for name in one.parts
        for a, b in zip(one.parts[name], other.parts[name], strict=True)
    )


def test_a_second_job_reads_the_cache_alone(
    base: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_here(base, cache)
    opened: list[Path] = []

    def recording(path: Path, **options: Any) -> Any:
        opened.append(Path(path))
        return safe_open(path, **options)

    model = build(spec_for(base, precision=MIXED), CPU).peft_model
    monkeypatch.setattr(base_tensors, "safe_open", recording)
    second = load_unsharded(model, base, cache)
    assert opened
    assert all(path.is_relative_to(cache.folder) for path in opened), (
        "the base's own weights are not even opened"
    )
    assert (first.loaded.cached, second.loaded.cached) == (False, True)
    assert first.loaded.bytes_read == total_bytes(base)
    assert second.loaded.bytes_read < 0.7 * first.loaded.bytes_read
    assert same_parts(first, second)
    assert second.loaded.changed == first.loaded.changed
    assert 0.05 < first.loaded.changed["model.layers.0.mlp.up_proj.weight"] < 0.12
    assert [
        "kept for other jobs" in first.messages[0][1],
        "read from the cache" in second.messages[0][1],
    ] == [True, True]


def load_twice(rank: int, world: int, spec: JobSpec, cache: Cache) -> list[Outcome]:
    return [load_on_rank(rank, world, spec, cache) for _ in range(2)]


def test_any_world_size_reads_what_another_wrote(base: Path, cache: Cache) -> None:
    alone = load_here(base, None)
    written, read = zip(
        *run_on_ranks(load_twice, 3, spec_for(base, ranks=3, precision=MIXED), cache), strict=True
    )
    assert not any(outcome.loaded.cached for outcome in written)
    assert len(list(cache.folder.glob("*/rows-*.safetensors"))) == 3, "every rank wrote its rows"
    assert all(
        outcome.loaded.cached and same_parts(outcome, first)
        for first, outcome in zip(written, read, strict=True)
    )
    two = run_on_ranks(load_on_rank, 2, spec_for(base, ranks=2, precision=MIXED), cache)
    for outcomes in ([load_here(base, cache)], two):
        assert all(outcome.loaded.cached for outcome in outcomes)
        assert all(
            torch.equal(whole(outcomes, name), value) for name, value in alone.values.items()
        )
    for outcome in (written[0], two[0]):
        assert outcome.loaded.changed == pytest.approx(alone.loaded.changed, rel=1e-6)


def load_replicated(rank: int, world: int, spec: JobSpec, cache: Cache) -> tuple[bool, int]:
    """On a mesh of replicas and shards, both of size 2."""
    built = build(spec, CPU)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    shard(built.peft_model, built.layers, mesh, spec.distributed, torch.bfloat16)
    loaded = load(
        built.peft_model,
        spec.model.path,
        seed=0,
        compute_dtype=torch.bfloat16,
        device=CPU,
        cache=cache,
    )
    return loaded.cached, loaded.bytes_read


def test_replicas_read_their_shard_and_one_of_them_writes_it(tmp_path: Path, cache: Cache) -> None:
    base = save_tiny_llama(tmp_path / "base", intermediate_size=256)
    found = run_on_ranks(load_replicated, 4, spec_for(base, ranks=4, precision=MIXED), cache)
    assert found == [(False, total_bytes(base) // 2)] * 4
    assert len(list(cache.folder.glob("*/rows-*.safetensors"))) == 2
    assert load_here(base, cache).loaded.cached


@pytest.mark.parametrize("change", ["precision", "weights", "nothing quantised"])
def test_another_base_or_storage_is_another_entry(change: str, base: Path, cache: Cache) -> None:
    load_here(base, cache)
    options: dict[str, Any] = {}
    if change == "precision":
        options = {"precision": {"default": "nf4"}}
    if change == "nothing quantised":
        options = {"precision": {"default": "bf16"}}
    if change == "weights":
        torch.manual_seed(1)
        tensors = {
            name: torch.randn_like(t.float()).to(t.dtype)
            for name, t in load_file(base / "model.safetensors").items()
        }
        save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    outcome = load_here(base, cache, **options)
    assert not outcome.loaded.cached
    assert len(cache.entries()) == (1 if change == "nothing quantised" else 2), (
        "what needs no work is not kept"
    )
    assert same_parts(outcome, load_here(base, None, **options))


def damage(entry: Path, how: str) -> None:
    (rows,) = entry.glob("rows-*.safetensors")
    if how == "a flipped byte":
        body = bytearray(rows.read_bytes())
        body[-5] ^= 1
        rows.write_bytes(body)
    if how == "a short file":
        rows.write_bytes(rows.read_bytes()[:-1])
    if how == "a missing file":
        rows.unlink()
    if how == "no index":
        (entry / INDEX).write_text('{"files": 3')
    if how == "rows that are in no file":
        index = json.loads((entry / INDEX).read_text())
        del index["files"][0]["rows"]["model.norm.weight"]
        (entry / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    "how",
    ["a flipped byte", "a short file", "a missing file", "no index", "rows that are in no file"],
)
def test_a_damaged_entry_is_noticed_and_made_anew(how: str, base: Path, cache: Cache) -> None:
    first = load_here(base, cache)
    (entry,) = cache.entries()
    damage(entry, how)
    again = load_here(base, cache)
    assert not again.loaded.cached
    assert same_parts(first, again)
    assert [level for level, _ in again.messages] == ["warn", "info"]
    assert "damaged" in again.messages[0][1]
    assert load_here(base, cache).loaded.cached


@pytest.mark.parametrize("trouble", ["too small", "cannot be written"])
def test_a_cache_that_cannot_take_the_base_is_no_fault_of_the_job(
    trouble: str, base: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    cache = (
        Cache(tmp_path / "cache", limit=1000)
        if trouble == "too small"
        else Cache(tmp_path / "file" / "cache")
    )
    outcome = load_here(base, cache)
    assert same_parts(outcome, load_here(base, None))
    ((level, text),) = outcome.messages
    assert level == "warn"
    assert ("do not fit" if trouble == "too small" else "cannot be written") in text


def test_jobs_that_write_one_base_at_the_same_time_leave_one_entry(
    base: Path, cache: Cache
) -> None:
    models = [build(spec_for(base, precision=MIXED), CPU).peft_model for _ in range(3)]
    barrier = threading.Barrier(3)

    def job(model: nn.Module) -> Outcome:
        barrier.wait()
        return load_unsharded(model, base, cache)

    with ThreadPoolExecutor(3) as jobs:
        outcomes = list(jobs.map(job, models))
    alone = load_here(base, None)
    assert all(same_parts(outcome, alone) for outcome in outcomes)
    assert len(cache.entries()) == 1
    assert sorted(p.name for p in cache.folder.iterdir()) == [
        entry.name for entry in cache.entries()
    ], "nothing half done is left"
    assert load_here(base, cache).loaded.cached


def test_entries_of_tied_weights_from_before_their_copies_were_compared_are_not_used(
    tmp_path: Path,
) -> None:
    """They hold one of two different ones, and the job was told nothing."""
    save_tiny_llama(tmp_path)
    parameter = nn.Parameter(torch.empty(2, 4))
    places = [(nn.Embedding(2, 4), "weight"), (nn.Linear(4, 2), "weight")]
    weights = [FrozenWeight(parameter, [*places[:count]], (0, 2)) for count in (1, 2)]
    cache = Cache(tmp_path / "cache", limit=1)
    alone, tied = (
        BaseCache(cache, tmp_path, {"model.embed_tokens.weight": weight})._key for weight in weights
    )
    assert alone != tied
