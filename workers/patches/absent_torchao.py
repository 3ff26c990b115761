"""A process without torchao, whether it is installed or not. No job uses it.

transformers and PEFT import it where they find it, which takes two seconds, prints errors about its
own libraries, and asks the GPU for its capability, which initialises CUDA.

Replaces: `torchao` in `sys.modules`, by None.
Written for: transformers 5.23, peft 0.21, torchao 0.18
Fails when upstream changes: tests/workers/patches/test_absent_torchao.py
"""

from __future__ import annotations

import sys


def keep_torchao_out() -> None:
    """Make this process one without torchao; before transformers is imported."""
    if "torchao" not in sys.modules:
        sys.modules["torchao"] = None  # type: ignore[assignment]  # what Python takes for "not to be found"
