"""The functions of transformers' modeling modules that are replaced: by these names, with these
arguments, called by name.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.training.models import save_tiny
from workers.layers.segments import CURRENT
from workers.patches import segment_mixers

HOMES = {
    "causal_conv1d_fn": "mamba2",
    "torch_chunk_gated_delta_rule": "qwen3_next",
    "chunk_kimi_delta_attention": "kimi_linear",
    "mamba2_chunk_scan": "mamba2",
    "mamba_selective_scan": "mamba",
    "mamba2_split_conv1d_scan_combined": "mamba2",
    "mamba_inner_fn": "mamba",
}
"""Function → a type whose modeling module has it."""


def function(name: str) -> Any:
    kind = HOMES[name]
    found = getattr(importlib.import_module(f"transformers.models.{kind}.modeling_{kind}"), name)
    return getattr(found, "_stock", found)


@pytest.mark.parametrize("name", [*segment_mixers.MIXERS, *segment_mixers.FUSED])
def test_modeling_modules_have_the_function(name: str) -> None:
    assert callable(function(name))


@pytest.mark.parametrize(
    "name", [name for name, mixer in segment_mixers.MIXERS.items() if mixer.argument]
)
def test_it_takes_what_tells_a_kernel_of_segments(name: str) -> None:
    parameters = inspect.signature(function(name)).parameters
    any_name = any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )
    assert any_name or segment_mixers.MIXERS[name].argument in parameters


@pytest.mark.parametrize("family", ["qwen3_next", "bamba"])
def test_layers_look_the_function_up_in_their_module_at_each_call(
    family: str, tmp_path: Path
) -> None:
    """Packed samples are then computed as they are apart; with the functions as they were, they are
    not.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(
        save_tiny(family, tmp_path / "base"), dtype=torch.float32
    ).eval()
    kept = {
        module: dict(vars(module))
        for module in {inspect.getmodule(type(part)) for part in model.modules()}
    }
    layer: Any = next(
        part for part in model.modules() if type(part).__name__.endswith(("GatedDeltaNet", "Mixer"))
    )
    hidden = torch.randn(
        1, 12, model.config.hidden_size, generator=torch.Generator().manual_seed(0)
    )
    try:
        segment_mixers.use_segments(model)
        with torch.no_grad():
            apart = torch.cat([layer(own) for own in hidden.split([5, 7], dim=1)], dim=1)
            CURRENT.use(torch.tensor([0, 5, 12], dtype=torch.int32))
            packed = layer(hidden)
            CURRENT.use(None)
            through = layer(hidden)
    finally:
        CURRENT.use(None)
        for module, names in kept.items():
            for name in (*segment_mixers.MIXERS, *segment_mixers.FUSED):
                if name in names:
                    setattr(module, name, names[name])
    torch.testing.assert_close(packed, apart, rtol=1e-5, atol=1e-6)
    assert (through - apart)[:, 5:].abs().max() > 1e-4
