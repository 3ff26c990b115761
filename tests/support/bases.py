"""Base models made of a config and headers: everything that a plan reads, in files of holes."""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ft_service.bases.description import Description, Versions, description_key
from ft_service.plan.auto_options import Ranks, Settled, settle
from ft_service.plan.job import Plan, plan_job
from ft_service.plan.machines import Machine
from ft_service.plan.sample_lengths import SampleLengths
from ft_service.spec import BaseModelRef, DataFileRef, JobContext, JobSpec, parse_request, resolve

SAMPLE = Path(__file__).parents[2] / "examples/models/tiny-llama"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}

AS_IT_IS: dict[str, Any] = {
    "replicate": 1,
    "context_parallel": 1,
    "activation_checkpointing": "none",
    "compile": False,
}
"""Options of distribution with which nothing is chosen for a machine."""


def llama_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a Llama."""
    hidden = config["hidden_size"]
    inner = config["intermediate_size"]
    head = config.get("head_dim", hidden // config["num_attention_heads"])
    q = config["num_attention_heads"] * head
    kv = config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden)
    }
    for layer in range(config["num_hidden_layers"]):
        before = f"model.layers.{layer}"
        for name, shape in {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }.items():
            shapes[f"{before}.{name}.weight"] = shape
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def save_headers(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str = "BF16") -> None:
    """A safetensors file of zeros that take no room on disk."""
    entries = {}
    end = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * (1 if dtype == "U8" else 2)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)


def save_fp8_index(folder: Path, config: Mapping[str, Any]) -> Path:
    """A Llama in FP8 by blocks of 128 of which config.json and the index are here: a plan needs no
    more.
    """
    folder.mkdir(parents=True, exist_ok=True)
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    names = list(llama_shapes(config))
    names += [name + "_scale_inv" for name in names if name.endswith("_proj.weight")]
    files = dict.fromkeys(names, "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def save_base(
    folder: Path,
    config: Mapping[str, Any] = TINY,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    **changes: Any,
) -> Path:
    """A base that the catalogue lists, a plan can be made for and tokens can be counted with.

    `changes`: to the config.
    """
    folder.mkdir(parents=True, exist_ok=True)
    described = {**config, **changes}
    (folder / "config.json").write_text(json.dumps(described))
    for name in TOKENIZER:
        if not (folder / name).exists():
            shutil.copyfile(SAMPLE / name, folder / name)
    save_headers(
        folder / "model.safetensors", llama_shapes(described) if shapes is None else shapes
    )
    return folder


_DESCRIBED: dict[str, Description] = {}
"""Digest of a base's files → its description."""


def describe(folder: str | Path) -> Description:
    """The description of a base as training builds it, made in this process and once for the same
    files.
    """
    from workers.describe import describe as describe_here  # torch takes seconds to import

    key = description_key(Path(folder), Versions.installed())
    if key not in _DESCRIBED:
        _DESCRIBED[key] = describe_here(str(folder))
    return _DESCRIBED[key]


def plan_of(spec: JobSpec, machine: Machine, lengths: SampleLengths | None = None) -> Plan:
    """The plan of a job on its base's description."""
    return plan_job(describe(spec.model.path), spec, machine, lengths)


def settle_for(
    spec: JobSpec,
    machine: Machine,
    lengths: SampleLengths | None = None,
    ranks: Ranks | None = None,
) -> Settled:
    """What is chosen for a job on its base's description."""
    return settle(describe(spec.model.path), spec, machine, lengths, ranks)


def spec_on(folder: Path, ranks: int = 1, **options: Any) -> JobSpec:
    """A resolved spec on a base folder; `options` as in a create body."""
    distributed = {"nproc_per_node": ranks, **AS_IT_IS, **options.pop("distributed", {})}
    body = {"model": "m", "training_file": "f", **options, "distributed": distributed}
    return resolve(
        parse_request(body),
        JobContext(
            job_id="ftjob-1",
            organization="local",
            model=BaseModelRef(name="m", path=str(folder)),
            training_data=DataFileRef(name="f", path="f", sha256="0" * 64),
            validation_data=None,
            seed=0,
            gpus=ranks,
        ),
    )
