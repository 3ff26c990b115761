"""Plans of published bases, for tests of the arithmetic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ft_service.bases.description import Description, Dimensions, Weight
from ft_service.bases.module_rules import OuterModules
from ft_service.plan.job import Plan
from ft_service.plan.machines import GIB, MACHINES, Machine, host_cpu
from ft_service.plan.sample_lengths import SampleLengths
from ft_service.plan.weight_storage import ShardedJob
from ft_service.spec import JobSpec, PrecisionOptions
from ft_service.spec.options import DistributedOptions, LoraOptions, TrainingOptions
from tests.support.bases import LLAMA_8B, TINY, plan_of, save_base, spec_on

H100 = MACHINES["H100"]


def plan_8b(tmp_path: Path, ranks: int = 1, machine: Machine = H100, **options: Any) -> Plan:
    return plan_of(spec_on(save_base(tmp_path / "8b", LLAMA_8B), ranks, **options), machine)


AUTO: dict[str, Any] = {"replicate": "auto", "activation_checkpointing": "auto", "compile": "auto"}
CHATS = SampleLengths(20_000_000, 40_000, 2048)
"""Samples of 500 tokens on average."""
LLAMA_70B = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
SMALL = {
    **LLAMA_8B,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
BASES = {"70b": LLAMA_70B, "8b": LLAMA_8B, "0.5b": SMALL, "tiny": TINY}
HOST = replace(host_cpu(), memory=16 * GIB, heap_factor=1.0)
MACHINE = {**MACHINES, "cpu": HOST}


def open_spec(folder: Path, base: str, ranks: int = 1, **options: Any) -> JobSpec:
    distributed = {**AUTO, **options.pop("distributed", {})}
    training = {"batch_size": 16 * ranks, "max_length": 2048, **options.pop("training", {})}
    return spec_on(
        save_base(folder / base, BASES[base]),
        ranks,
        distributed=distributed,
        training=training,
        **options,
    )


def made_base(
    *,
    layers: int = 3,
    hidden: int = 64,
    heads: int = 4,
    groups: int = 2,
    width: int = 32,
    inner: int = 512,
    vocabulary: int = 1000,
    experts: int = 0,
    expert_inner: int = 0,
    dimensions: dict[str, Any] | None = None,
    **changes: Any,
) -> Description:
    """A decoder of any size that no files hold and nothing of torch describes: seven linear layers
    in a layer, four beside two stacks of experts of which a token meets two.

    `dimensions`, `changes`: other values of `Dimensions` and of `Description`.
    """
    q, kv = heads * width, groups * width
    attention = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden)}
    attention["o_proj"] = (hidden, q)
    feed_forward = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden)}
    feed_forward["down_proj"] = (hidden, inner)
    stacks = {"experts.gate_up_proj": (2 * experts * expert_inner, hidden)}
    stacks["experts.down_proj"] = (experts * hidden, expert_inner)
    weights = [
        Weight("model.embed_tokens", "weight", (vocabulary, hidden), "embedding", None),
        Weight("model.norm", "weight", (hidden,), "norm", None),
        Weight("lm_head", "weight", (vocabulary, hidden), "head", None),
    ]
    for layer in range(layers):
        before = f"model.layers.{layer}"
        linears = {f"self_attn.{name}": shape for name, shape in attention.items()}
        linears |= {} if experts else {f"mlp.{name}": shape for name, shape in feed_forward.items()}
        weights += [
            Weight(f"{before}.{name}", "weight", shape, "linear", layer)
            for name, shape in linears.items()
        ]
        weights += [
            Weight(f"{before}.mlp.{name}", "weight", shape, "experts", layer)
            for name, shape in (stacks if experts else {}).items()
        ]
    sizes = Dimensions(
        layers=layers,
        hidden=hidden,
        heads=heads,
        q=q,
        kv=kv,
        intermediate=inner,
        vocabulary=vocabulary,
        norms=2,
        head_norms=False,
        gated=True,
        experts=experts,
        experts_per_token=2 if experts else 0,
        expert_intermediate=expert_inner,
        max_positions=None,
    )
    return replace(
        Description(
            "made",
            "Made",
            replace(sizes, **(dimensions or {})),
            tuple(weights),
            "bf16",
            OuterModules("model.embed_tokens", "lm_head", tied=False),
            loss_in_chunks=True,
        ),
        **changes,
    )


def made_job(base: Description, ranks: int = 1, **options: Any) -> ShardedJob:
    """A job on a made base; `options` as in a create body."""
    return ShardedJob.of(base, spec_on(Path("/made"), ranks, **options))


def sections(**values: Any) -> dict[str, Any]:
    """Options of a create body in their sections, by the names that they have there."""
    places = {
        "training": TrainingOptions,
        "distributed": DistributedOptions,
        "precision": PrecisionOptions,
        "lora": LoraOptions,
    }
    body: dict[str, Any] = {}
    for name, value in values.items():
        section = next(own for own, options in places.items() if name in options.model_fields)
        body.setdefault(section, {})[name] = value
    return body
