"""Operators that one decoder layer of an 8B model, and one of Qwen3-30B-A3B, launches on a GPU, and
the bytes that they move.

Nothing is timed.

    python benchmarks/step_bytes.py [--formats bf16,nf4,fp8]

The workers' own modules run forward and backward on fake CUDA tensors (tests/support/fake_cuda.py),
with one layer and with two; the difference is one layer. Bytes are those of every tensor that an
operator reads or writes, whatever a cache keeps.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the repository's root, for benchmarks started by path
    sys.path.insert(0, str(Path(__file__).parent.parent))

TOKENS = 8192
LENGTH = 2048
"""Of a micro-batch, and of each of its samples."""
RANK = 16
RANKS = (RANK, 2 * RANK, 3 * RANK)
"""Ranks of the adapters of one layer, of gate and up, and of q, k and v."""
CATEGORIES = (
    "frozen products",
    "LoRA",
    "dequantise",
    "rounding to FP8, transposing",
    "attention",
    "norms, RoPE, SwiGLU",
    "experts' rows",
)
"""Of a layer's operators: what they are for."""


OF_MIXTURES = ("bf16", "nf4", "fp8", "fp8_blocks", "nvfp4", "mxfp4")
"""Formats of Qwen3-30B-A3B's layers."""
SERVED = ("int4_g32", "fp8", "nvfp4", "mxfp4", "int8", "8da4w")
"""Forms of precision.served_as."""


@dataclass(frozen=True)
class Moved:
    """Launches of one kind in one layer."""

    forward: int
    backward: int
    bytes: int
    flops: int


def main() -> None:
    from benchmarks.machine import save

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", default="bf16,nf4,fp8")
    found = {name: layer(name) for name in parser.parse_args().formats.split(",")}
    mixtures = {name: layer(name, mixture=True) for name in OF_MIXTURES}
    for title, layers in (("Llama-3.1-8B", found), ("Qwen3-30B-A3B", mixtures)):
        print(f"\n| {title} | {' | '.join(CATEGORIES)} | sum | launches |")
        print("| --- |" + " ---: |" * (len(CATEGORIES) + 2))
        for name, kinds in layers.items():
            cells = [
                f"{kinds[kind].bytes / 1e9:.2f} GB, {kinds[kind].forward} + {kinds[kind].backward}"
                for kind in CATEGORIES
            ]
            print(
                f"| {name} | {' | '.join(cells)} | "
                f"{sum(kind.bytes for kind in kinds.values()) / 1e9:.2f} GB | "
                f"{sum(kind.forward + kind.backward for kind in kinds.values())} |"
            )
    rounding = {form: rounded(form) for form in SERVED}
    print("\n| precision.served_as | rounding one layer once | launches |")
    print("| --- | ---: | ---: |")
    for form, moved in rounding.items():
        print(f"| {form} | {moved.bytes / 1e9:.1f} GB | {moved.forward} |")
    cases, of_mixtures = (
        {name: {kind: vars(moved) for kind, moved in kinds.items()} for name, kinds in own.items()}
        for own in (found, mixtures)
    )
    served = {form: vars(moved) for form, moved in rounding.items()}
    shape = {"tokens": TOKENS, "length": LENGTH, "rank": RANK}
    counted = {"layer": cases, "layer_of_mixture": of_mixtures, "rounding": served}
    save("step_bytes", {"measured": False, **shape, **counted})


def layer(weight_format: str, *, mixture: bool = False) -> dict[str, Moved]:
    """One layer's launches by category: those of two layers less those of one."""
    two, one = (_counted(operations(weight_format, layers, mixture)) for layers in (2, 1))
    return {
        kind: Moved(
            *(
                more - less
                for more, less in zip(
                    vars(two[kind]).values(), vars(one[kind]).values(), strict=True
                )
            )
        )
        for kind in CATEGORIES
    }


def rounded(form: Any) -> Moved:
    """What rounds the seven matrices of one layer with their adapters, once: with
    precision.served_as it is done in the forward, and again in the backward.
    """
    import torch

    from tests.support.bases import LLAMA_8B
    from tests.support.fake_cuda import fake_cuda, recording
    from workers.quant.served_forms import AdapterFactors, served_weight

    hidden = LLAMA_8B["hidden_size"]
    wide = LLAMA_8B["intermediate_size"]
    heads = LLAMA_8B["num_key_value_heads"] * hidden // LLAMA_8B["num_attention_heads"]
    matrices = [(hidden, hidden)] * 2 + [(heads, hidden)] * 2 + [(wide, hidden)] * 2
    with fake_cuda() as device, recording() as record:
        for rows, cols in (*matrices, (hidden, wide)):
            weight = torch.empty(rows, cols, dtype=torch.bfloat16, device=device)
            a = torch.empty(RANK, cols, dtype=torch.bfloat16, device=device)
            b = torch.empty(rows, RANK, dtype=torch.bfloat16, device=device)
            served_weight([weight], "", AdapterFactors(a, b, 2.0), form, torch.bfloat16)
    found = [operation for operation in record.operations if operation.moved]
    moved = sum(operation.moved for operation in found)
    return Moved(len(found), 0, moved, sum(operation.flops for operation in found))


def _counted(found: Iterable[Any]) -> dict[str, Moved]:
    kinds = {kind: [0, 0, 0, 0] for kind in CATEGORIES}
    for operation in found:
        if operation.where.startswith("model.head"):
            continue
        own = kinds[category(operation)]
        own[operation.backward] += 1
        own[2] += operation.moved
        own[3] += operation.flops
    return {kind: Moved(*values) for kind, values in kinds.items()}


def category(operation: Any) -> str:
    """What an operator of a layer is for: by the module of the workers that calls it, and the
    shapes of a product.
    """
    where = operation.where
    if operation.flops and where.startswith(("quant.", "layers.linear", "layers.low_rank")):
        of_adapter = any(size in RANKS for shape in operation.shapes for size in shape)
        return "LoRA" if of_adapter else "frozen products"
    if where.startswith("layers.expert"):
        return "experts' rows"
    if where.startswith("quant."):
        return (
            CATEGORIES[3]
            if where.startswith("quant.fp8") and not where.startswith("quant.fp8_blocks")
            else "dequantise"
        )
    if where.startswith(("layers.linear", "layers.low_rank")):
        return "LoRA"
    if where.startswith(("layers.segment_attention", "layers.packed_attention")):
        return "attention"
    return "norms, RoPE, SwiGLU"


def operations(weight_format: str, layers: int, mixture: bool = False) -> list[Any]:
    """What one micro-batch launches, forward and backward, in `layers` decoder layers of the 8B or
    of the mixture and what is around them.
    """
    import numpy as np

    from ft_service.data.tokens.sample import Tokens
    from tests.support.bases import LLAMA_8B, save_base, spec_on
    from tests.support.fake_cuda import backward, build_on, fake_cuda, recording
    from tests.support.training.models import ATTENTION
    from workers.data.batches import pack
    from workers.training.step import cross_entropies

    with tempfile.TemporaryDirectory() as folder:
        config = (mixture_config() if mixture else LLAMA_8B) | {"num_hidden_layers": layers}
        shapes = shapes_of(config) if mixture else None
        base = save_base(Path(folder) / "base", config, shapes)
        adapted = {"target_modules": ATTENTION} if mixture else {}
        spec = spec_on(base, precision={"default": weight_format}, lora={"r": RANK, **adapted})
        with fake_cuda() as device:
            model = build_on(device, spec)
            samples = [
                Tokens(np.ones(LENGTH, np.int32), np.ones(LENGTH, bool))
                for _ in range(TOKENS // LENGTH)
            ]
            batch = pack(samples, device)
            with recording() as record:
                loss, _ = cross_entropies(model, batch)
                record.backward = True
                backward(loss)
    return record.operations


def mixture_config() -> dict[str, Any]:
    from benchmarks.gpu_report.experts import QWEN3_30B_A3B

    return {"model_type": QWEN3_30B_A3B.family, **QWEN3_30B_A3B.sizes}


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a model of transformers, by its own names."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


if __name__ == "__main__":
    from workers.patches.absent_torchao import keep_torchao_out

    keep_torchao_out()
    main()
