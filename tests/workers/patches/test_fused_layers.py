"""Which parts of transformers' models fused kernels compute, and that a model with them computes
what it did.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.training.causal_types import small_values
from tests.support.triton_programs import run_with_triton
from workers.layers.fused import Form
from workers.patches import fused_layers
from workers.patches.fused_layers import fuse, gated_of, norm_of

TRAINS = """
import sys
import torch
from unittest.mock import patch
from tests.support.triton_programs import correct_casts
from tests.workers.patches.test_fused_layers import model_of
from workers.layers import fused, fused_kernels
from workers.patches.fused_layers import fuse
correct_casts(by_way_of_fp16=False)

for kind in sys.argv[1:]:
    torch.manual_seed(0)
    model = model_of(kind, "cpu").bfloat16()
    model.requires_grad_(False)
    ids = torch.randint(0, 200, (2, 9))
    inputs = model.get_input_embeddings()(ids).requires_grad_()
    results = []
    with patch.object(fused.KERNEL, "on", lambda device: fused_kernels if fusing else None):
        for fusing in (False, True):
            if fusing:
                fuse(model)
            logits = model(inputs_embeds=inputs).logits
            (grad,) = torch.autograd.grad(logits.float().logsumexp(-1).sum(), inputs)
            results.append((logits, grad))
    for stock, found in zip(*results):
        far = float((found - stock).float().norm() / stock.float().norm())
        assert far < 4e-3, (kind, far)
"""


def model_of(kind: str, device: str) -> Any:
    config = AutoConfig.for_model(
        kind, **small_values(kind, AutoConfig.for_model(kind).to_dict(), 256)
    )
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("kind", "norms", "gates", "rotations"),
    [
        ("llama", 5, 2, 1),
        ("qwen3", 9, 2, 1),
        ("gemma3_text", 13, 0, 1),
        ("olmo2", 9, 2, 1),
        ("gpt_oss", 5, 0, 0),
        ("cohere2", 0, 2, 0),
    ],
)
def test_parts_are_known_by_what_they_compute(
    kind: str, norms: int, gates: int, rotations: int
) -> None:
    """gemma3's feed-forward has another activation; gpt_oss turns half the angles; cohere2's norms
    are layer norms.
    """
    model = model_of(kind, "meta")
    found = fuse(model)
    assert (found.norms, found.gates, found.rotations) == (norms, gates, rotations)


def test_a_norm_that_computes_something_else_is_left_alone() -> None:
    class Norm(nn.Module):
        def __init__(self, act: Any, eps: float = 1e-6) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64, device="meta"))
            self.eps = eps
            self.act = act

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(self, x)

    def rms(self: Any, x: torch.Tensor, width: int = 64) -> torch.Tensor:
        own = x.unflatten(-1, (-1, width)).float()
        own = own * torch.rsqrt(own.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * own.flatten(-2).to(x.dtype)

    assert norm_of(Norm(rms)) == (1e-6, Form.ROUNDED)
    assert norm_of(Norm(rms, 1e-5)) == (1e-5, Form.ROUNDED)
    assert norm_of(Norm(lambda self, x: rms(self, x, 32))) is None, "of groups of channels"
    assert norm_of(Norm(lambda self, x: rms(self, x) * 1.01)) is None
    assert norm_of(Norm(lambda self, x: rms(self, x - x.mean(-1, keepdim=True)))) is None
    assert norm_of(nn.LayerNorm(64, device="meta")) is None


def test_a_feed_forward_is_known_whatever_its_layers_are_called() -> None:
    class Gated(nn.Module):
        def __init__(self, act: Any) -> None:
            super().__init__()
            self.w1, self.w2, self.w3 = (
                nn.Linear(*size, device="meta") for size in ((16, 48), (48, 16), (16, 48))
            )
            self.act = act

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.w2(self.act(self.w1(x)) * self.w3(x))

    assert gated_of(Gated(nn.functional.silu)) == ("w1", "w3", "w2")
    assert gated_of(Gated(nn.functional.gelu)) is None
    assert gated_of(Gated(lambda x: nn.functional.silu(x.clamp(max=2)))) is None


def test_a_processor_computes_with_the_models_own_operations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of("llama", "cpu")
    ids = torch.arange(12).view(1, 12)
    before = model(ids).logits
    fuse(model)
    monkeypatch.setattr(fused_layers.fused.FusedNorm, "apply", None)
    assert torch.equal(model(ids).logits, before)


def test_models_with_the_kernels_compute_what_they_did(tmp_path: Path) -> None:
    run_with_triton(TRAINS, tmp_path, "llama", "qwen3", "gemma3_text", TRITON_INTERPRET="1")
