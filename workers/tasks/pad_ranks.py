"""An adapter without patterns of rank and alpha: `python -m workers.tasks.pad_ranks ADAPTER OUT`.

vLLM and others read one rank and one alpha and ignore patterns without a word. Here every matrix is padded with zeros to the
largest rank and each module's own scale is folded into B, so that one scale of 1 has the same effect.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ft_service.errors import FtError, SpecError
from workers.model.peft_adapter import PeftAdapter
from workers.tasks import print_result

CONFIG = "adapter_config.json"


def pad_ranks(source: Path, out: Path) -> int:
    """Write the adapter to the folder `out`; returns its one rank. Raises SpecError for an adapter with more than A and B."""
    adapter = PeftAdapter(source)
    if adapter.replaced:
        raise SpecError(f"The adapter replaces whole weights ({next(iter(adapter.replaced))}), which no padding covers.")
    rank = max(adapter.shape(f"{module}.lora_A.weight")[0] for module in adapter.modules)
    tensors: dict[str, Tensor] = {}
    for module in adapter.modules:
        update = adapter.update(module)
        if update.magnitude is not None:
            raise SpecError(f"The adapter has a magnitude for {module} (DoRA), which no padding covers.")
        missing = rank - update.a.shape[0]
        tensors[f"{module}.lora_A.weight"] = torch.cat([update.a, update.a.new_zeros(missing, update.a.shape[1])])
        b = update.b * update.scaling
        tensors[f"{module}.lora_B.weight"] = torch.cat([b, b.new_zeros(b.shape[0], missing)], dim=1)
    in_file = {adapter.names.in_file(name): tensor for name, tensor in tensors.items()}
    save_file(in_file, out / "adapter_model.safetensors", metadata={"format": "pt", **adapter.names.metadata})
    config = json.loads((source / CONFIG).read_text())
    config |= {"r": rank, "lora_alpha": rank, "rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False}
    (out / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    _compare(adapter, PeftAdapter(out))
    return rank


def _compare(before: PeftAdapter, after: PeftAdapter) -> None:
    """Raises FtError if what was written, read again, changes a weight otherwise than the adapter did."""
    for module in before.modules:
        one, other = before.update(module), after.update(module)
        exact, written = one.scaling * (one.b @ one.a), other.scaling * (other.b @ other.a)
        if not torch.allclose(exact, written, rtol=1e-4, atol=1e-6 * float(exact.abs().max())):
            raise FtError(f"The padded adapter changes {module} otherwise than the adapter does: it is not written.")


def main(arguments: list[str]) -> int:
    """Print one line of JSON: the rank, or the error. Exit code 0 or 64."""
    source, out = map(Path, arguments)
    return print_result(lambda: {"r": pad_ranks(source, out)})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
