"""A small tower in place of Gemma 3n's for images, which is built by a package that tests do without."""

from __future__ import annotations

from torch import nn
from transformers import AutoModel, Gemma3nVisionConfig, PreTrainedModel
from transformers.utils import is_timm_available


class StandIn(PreTrainedModel):
    """As large as tests need it."""

    config_class = Gemma3nVisionConfig

    def __init__(self, config: Gemma3nVisionConfig) -> None:
        super().__init__(config)
        self.q_proj = nn.Linear(4, 4)
        self.post_init()


def put_stand_in() -> None:
    """Let transformers build it, unless the package is there."""
    if not is_timm_available():
        AutoModel.register(Gemma3nVisionConfig, StandIn, exist_ok=True)
