"""An adapter as another process reads it: `python reread_adapter.py FOLDER`, in a process that has
trained none.

Reads the SHA-256 of every tensor, by name, as JSON from its input, and prints the differences as a
JSON list. Run as a file and without torch, so that it starts at once: as a module it would import
its package, which imports torch.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open

WEIGHTS = "adapter_model.safetensors"


def differences(folder: Path, expected: Mapping[str, str]) -> list[str]:
    """Differences between the expected digests and an adapter's weights on the disk."""
    with safe_open(folder / WEIGHTS, framework="numpy") as file:
        names = set(file.keys())
        faults = [f"{name} is missing" for name in sorted(expected.keys() - names)]
        faults += [f"{name} does not belong there" for name in sorted(names - expected.keys())]
        for name in sorted(names & expected.keys()):
            if hashlib.sha256(file.get_tensor(name).tobytes()).hexdigest() != expected[name]:
                faults.append(f"{name} has other values")
    return faults


if __name__ == "__main__":
    print(json.dumps(differences(Path(sys.argv[1]), json.load(sys.stdin))))
