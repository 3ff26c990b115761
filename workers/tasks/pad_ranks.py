"""An adapter without patterns of rank and alpha: `python -m workers.tasks.pad_ranks ADAPTER OUT
[BASE]`.

vLLM and others read one rank and one alpha and ignore patterns without a word. Here every matrix is
padded with zeros to the largest rank and each module's own scale is folded into B, so that one
scale of 1 has the same effect.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ft_service.errors import FtError, SpecError
from workers.model.peft_adapter import PeftAdapter
from workers.tasks import print_result
from workers.tasks.served_experts import ServedExperts, served_experts

CONFIG = "adapter_config.json"
_NOT_READ = "which vLLM does not read: merge the tuned model (ft export --format merged)"


def pad_ranks(source: Path, out: Path, base: Path | None = None) -> int:
    """Write the adapter to the folder `out`; returns its one rank.

    `base`: the folder of its base, which adapters on stacks of experts need (`served_experts`).
    Raises SpecError for an adapter with more than A and B.
    """
    adapter = PeftAdapter(source)
    if adapter.replaced:
        raise SpecError(
            f"The adapter replaces whole weights ({next(iter(adapter.replaced))}), {_NOT_READ}."
        )
    experts = _experts(adapter, base)
    plain = (
        [module for module in adapter.modules if not _is_stack(module)]
        if experts
        else adapter.modules
    )
    rank = max(
        [
            *(adapter.shape(f"{module}.lora_A.weight")[0] for module in plain),
            *(own.a.shape[1] for own in experts),
        ]
    )
    tensors: dict[str, Tensor] = {}
    for module in plain:
        update = adapter.update(module)
        if update.magnitude is not None:
            raise SpecError(f"The adapter has a magnitude for {module} (DoRA), {_NOT_READ}.")
        missing = rank - update.a.shape[0]
        tensors[f"{module}.lora_A.weight"] = torch.cat(
            [update.a, update.a.new_zeros(missing, update.a.shape[1])]
        )
        b = update.b * update.scaling
        tensors[f"{module}.lora_B.weight"] = torch.cat([b, b.new_zeros(b.shape[0], missing)], dim=1)
    in_file = {adapter.names.in_file(name): tensor for name, tensor in tensors.items()}
    for own in experts:
        in_file |= own.tensors(rank)
    save_file(
        in_file,
        out / "adapter_model.safetensors",
        metadata={"format": "pt", **adapter.names.metadata},
    )
    config = json.loads((source / CONFIG).read_text(encoding="utf-8"))
    config |= {
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_rslora": False,
    }
    if experts and not experts[0].stacked:  # the base's class has no such modules in PEFT; vLLM has
        names = {
            name.removesuffix(".lora_A.weight")
            for name in in_file
            if name.endswith(".lora_A.weight")
        }
        config |= {
            "target_modules": sorted({name.rpartition(".")[2] for name in names}),
            "target_parameters": None,
        }
    (out / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _compare(plain, adapter, PeftAdapter(out))
    return rank


def _experts(adapter: PeftAdapter, base: Path | None) -> list[ServedExperts]:
    """The adapters on stacks of experts; empty: there are none."""
    if not any(map(_is_stack, adapter.modules)):
        return []
    if base is None:
        raise SpecError(
            "The adapter changes stacks of experts: `ft export --format vllm` writes it as vLLM "
            "reads it, `ft merge` merges it."
        )
    return list(served_experts(adapter, base))


def _is_stack(module: str) -> bool:
    return module.removesuffix(".base_layer").endswith(".experts")


def _compare(modules: Sequence[str], before: PeftAdapter, after: PeftAdapter) -> None:
    """Raises FtError if what was written, read again, changes a weight otherwise than the adapter
    did.
    """
    for module in modules:
        one = before.update(module)
        other = after.update(module)
        exact = one.scaling * (one.b @ one.a)
        written = other.scaling * (other.b @ other.a)
        if not torch.allclose(exact, written, rtol=1e-4, atol=1e-6 * float(exact.abs().max())):
            raise FtError(
                f"The padded adapter changes {module} otherwise than the adapter does: it is not "
                "written."
            )


def main(arguments: list[str]) -> int:
    """Print one line of JSON: the rank, or the error. Exit code 0 or 64."""
    source, out, *base = map(Path, arguments)
    return print_result(lambda: {"r": pad_ranks(source, out, *base)})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
