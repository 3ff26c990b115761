"""A model's head replaced for the forwards of a step: what is made of the hidden states is then in
place of `logits`.

A class that caps its logits does so to what its head returns, unless its config says that there is
no cap.

Replaces: the forward of a head, and `final_logit_softcapping` of the config, while it is entered.
Written for: transformers 5.23
Fails when upstream changes: tests/workers/patches/test_head_forward.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from transformers import PreTrainedConfig

from workers.patches.forward import replace_forward, restore_forward
from workers.patches.unchecked_config import set_unchecked

CAP = "final_logit_softcapping"


@contextmanager
def head_replaced(
    head: nn.Module, config: PreTrainedConfig, by: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """While it is entered, a head's forward is `by`, which caps what the class would have capped.

    `config`: of the decoder.
    """
    cap = getattr(config, CAP, None)
    replace_forward(head, by)
    if cap is not None:
        set_unchecked(config, CAP, None)
    try:
        yield
    finally:
        restore_forward(head)
        if cap is not None:
            set_unchecked(config, CAP, cap)
