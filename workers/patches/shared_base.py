"""The base of a PEFT model, replaced by one that several models share.

Replaces: the call and `get_base_model` of one `peft.PeftModel`.
Written for: peft 0.21
Fails when upstream changes: tests/workers/patches/test_shared_base.py
"""

from __future__ import annotations

from peft import PeftModel
from torch import nn

from workers.patches.module_call import replace_call


def replace_base(model: PeftModel, base: nn.Module) -> None:
    """Let a call of the model be one of `base`, which is also what it names as its base."""
    replace_call(model, base.__call__)
    vars(model)["get_base_model"] = lambda: base
