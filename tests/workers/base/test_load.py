"""Loading a plain base: every byte read once over all ranks, memory bounded by what is kept, the
cache between jobs.
"""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM

from ft_service.bases import safetensors_folder
from ft_service.bases.cache_folder import Cache
from ft_service.spec import JobSpec
from tests.support.ranks import run_on_ranks
from tests.support.training.loading import (
    CPU,
    Outcome,
    built_and_sharded,
    load_on_rank,
    outcome_of,
    whole,
)
from tests.support.training.models import OF_EXPERTS, save_tiny, save_tiny_llama, spec_for
from workers.base.load import base_tensor_name, load
from workers.model.build import build
from workers.ranks.sharding import shard

MIXED = {"default": "nf4", "overrides": {r".*self_attn.*": "fp8", r".*down_proj": "bf16"}}


def split_in_files(folder: Path) -> Path:
    """The same base in three files with an index, as large ones are published."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    file_of = {name: f"model-{i % 3 + 1:05d}-of-00003.safetensors" for i, name in enumerate(names)}
    for file in set(file_of.values()):
        save_file({name: tensors[name] for name in names if file_of[name] == file}, folder / file)
    (folder / safetensors_folder.INDEX).write_text(
        json.dumps({"metadata": {}, "weight_map": file_of})
    )
    (folder / safetensors_folder.SINGLE).unlink()
    return folder


def total_bytes(folder: Path) -> int:
    return sum(t.nbytes for path in folder.glob("*.safetensors") for t in load_file(path).values())


@pytest.mark.parametrize("files", [1, 3])
def test_every_byte_of_the_base_is_read_by_one_rank(files: int, tmp_path: Path) -> None:
    save_tiny_llama(tmp_path, intermediate_size=256)
    tensors = load_file(tmp_path / "model.safetensors")
    folder = split_in_files(tmp_path) if files == 3 else tmp_path
    outcomes = run_on_ranks(load_on_rank, 2, spec_for(folder, ranks=2, precision=MIXED))
    read = [outcome.loaded.bytes_read for outcome in outcomes]
    assert read == [total_bytes(folder) // 2] * 2, "all heights are even"
    for name, tensor in tensors.items():
        if outcomes[0].kinds[name] == "plain":
            assert torch.equal(whole(outcomes, name), tensor.float()), name


def test_tied_embeddings_are_read_once(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    (outcome,) = run_on_ranks(load_on_rank, 1, spec_for(tmp_path))
    assert outcome.loaded.bytes_read == total_bytes(tmp_path)


KEPT = "model.layers.1.mlp.gate.weight", "model.layers.1.mlp.moe_statics.e_score_correction_bias"
"""In ERNIE's files, in which its routers are in fp32."""


def kept_in_fp32(
    rank: int, world: int, spec: JobSpec, cache: Cache
) -> dict[bool, dict[str, torch.Tensor]]:
    """The frozen parameters that a rank holds in fp32, after loading to compute in bf16: from the
    files, and from the cache.
    """
    found: dict[bool, dict[str, torch.Tensor]] = {}
    for _ in range(2):
        model = built_and_sharded(spec, world).peft_model
        loaded = load(
            model, spec.model.path, seed=0, compute_dtype=torch.bfloat16, device=CPU, cache=cache
        )
        frozen = {
            base_tensor_name(name): p.data
            for name, p in model.named_parameters()
            if not p.requires_grad
        }
        found[loaded.cached] = {
            name: weight for name, weight in frozen.items() if weight.dtype == torch.float32
        }
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_the_model_keeps_in_fp32_is_whole_and_exact_on_every_rank(
    ranks: int, tmp_path: Path
) -> None:
    """Rounded to bf16, a router would choose other experts than in the model that the adapter is
    served with.
    """
    path = save_tiny("ernie4_5_moe", tmp_path) / "model.safetensors"
    tensors = load_file(path)
    tensors |= {name: torch.randn_like(tensors[name].float()) for name in KEPT}
    save_file(tensors, path, {"format": "pt"})
    spec = spec_for(
        tmp_path, ranks=ranks, precision={"default": "nf4"}, lora={"target_modules": ["q_proj"]}
    )
    for found in run_on_ranks(kept_in_fp32, ranks, spec, Cache(tmp_path / "cache", limit=2**30)):
        assert found.keys() == {False, True}
        for held in found.values():
            gate, bias = (
                held[f"model.layers.1.mlp.gate.{name}"]
                for name in ("weight", "moe_statics.e_score_correction_bias")
            )
            assert torch.equal(gate, tensors[KEPT[0]])
            assert torch.equal(bias, tensors[KEPT[1]])


# Memory
# ------------------------------------------------------------------------------

HIDDEN = 1024
WIDTH = 2816
LAYERS = 8
MEGABYTE = 1_000_000


def save_large_llama(folder: Path) -> Path:
    """206 MB in bf16, without ever building the model: every layer gets other values by a shift of
    one random block.
    """
    save_tiny_llama(folder, hidden_size=64, num_hidden_layers=1)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
    }
    config |= {"num_key_value_heads": 8, "head_dim": HIDDEN // 8}
    (folder / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).state_dict()
    noise = torch.randn(WIDTH * HIDDEN + 64).bfloat16()
    tensors = {
        n: noise[i % 64 :][: math.prod(t.shape)].reshape(t.shape).clone()
        for i, (n, t) in enumerate(shapes.items())
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def anonymous_bytes() -> int:
    # Not of smaps_rollup, for which the kernel goes through all pages.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


class PeakAnonymous:
    """The most anonymous memory of this process while it is entered, looked at all the time by a
    thread.
    """

    def __enter__(self) -> PeakAnonymous:
        self.before = self.peak = anonymous_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            self.peak = max(self.peak, anonymous_bytes())


def growth_while_loading(
    rank: int, world: int, spec: JobSpec, cache: Cache
) -> tuple[bool, int, int]:
    """Whether the cache served this rank, by how much its memory grew at most, and the bytes that
    it stores.
    """
    model = built_and_sharded(spec, world).peft_model
    with PeakAnonymous() as memory:
        loaded = load(
            model, spec.model.path, seed=0, compute_dtype=torch.bfloat16, device=CPU, cache=cache
        )
    frozen: Any = [p for p in model.parameters() if not p.requires_grad]
    local = [p.to_local() if hasattr(p, "to_local") else p.data for p in frozen]
    return (
        loaded.cached,
        memory.peak - memory.before,
        sum(getattr(p, "stored_bytes", None) or p.nbytes for p in local),
    )


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_large_llama(tmp_path_factory.mktemp("large"))


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_memory_grows_by_what_is_kept_and_little_more(
    large: Path, world: int, tmp_path: Path
) -> None:
    spec = spec_for(
        large,
        ranks=world,
        precision={"default": "fp8", "overrides": {".*layers.0.*(gate|up)_proj": "nf4"}},
        lora={"r": 1},
    )
    largest = 2 * WIDTH * HIDDEN
    for cached in (False, True):
        for from_cache, growth, stored in run_on_ranks(
            growth_while_loading, world, spec, Cache(tmp_path)
        ):
            bound = stored + 2 * largest + 100 * MEGABYTE
            assert bound < total_bytes(large), "a rank that holds the base in bf16 would be seen"
            assert from_cache == cached
            assert 0.4 * stored < growth <= bound, (
                "some of it may take the place of what building left"
            )


# The cache
# ------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def loaded_for_gpus(rank: int, world: int, spec: JobSpec) -> tuple[Outcome, Outcome, set[str]]:
    """What a rank holds after loading for a CPU, and after loading with offload for a mesh of GPUs,
    of which there are none: to move a shard to one of them is an error. And the devices of the
    buffers in the base's files.
    """
    plain = load_on_rank(rank, world, spec)
    of_mesh = "torch.distributed.fsdp._fully_shard._fully_shard._get_device_from_mesh"
    with patch(of_mesh, return_value=CPU):
        mesh = DeviceMesh("cuda", list(range(world)), mesh_dim_names=("shard",))
        built = build(spec, CPU)
        options = spec.distributed.model_copy(update={"offload": True})
        shard(built.peft_model, built.layers, mesh, options, torch.bfloat16)
        model = built.peft_model
        path = spec.model.path
        there = torch.device("meta")
        loaded = load(model, path, seed=0, compute_dtype=torch.bfloat16, device=there, offload=True)
    buffers = {
        name: buffer
        for name, buffer in model.named_buffers()
        if name.endswith("e_score_correction_bias")
    }
    return plain, outcome_of(model, loaded), {buffer.device.type for buffer in buffers.values()}


def test_offloaded_shards_lie_in_the_hosts_memory_and_buffers_where_the_model_computes(
    tmp_path: Path,
) -> None:
    lora = {"target_modules": OF_EXPERTS["deepseek_v3"]}
    spec = spec_for(save_tiny("deepseek_v3", tmp_path), ranks=2, precision=MIXED, lora=lora)
    for plain, offloaded, devices in run_on_ranks(loaded_for_gpus, 2, spec):
        assert devices == {"meta"}
        assert plain.values.keys() == offloaded.values.keys()
        for name, values in plain.values.items():
            assert torch.equal(values, offloaded.values[name]), name
