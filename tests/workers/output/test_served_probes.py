"""Probes are what plain transformers and PEFT think of the samples, with the adapter and
without.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ft_service.data.tokens.sample import Tokens
from ft_service.rundir.evaluations import MOST_PROBES, MOST_TOKENS
from tests.support.training.models import adapter_value, reference, save_tiny, spec_for
from workers.base.load import adapters, load
from workers.model.build import build
from workers.output.served_probes import measure

STACKS = {
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}


@pytest.mark.parametrize(("family", "targets"), [("llama", {}), ("qwen3_moe", STACKS)])
def test_probes_are_those_of_plain_peft(
    family: str, targets: dict[str, Any], tmp_path: Path
) -> None:
    base = save_tiny(family, tmp_path)
    spec = spec_for(base, lora={"r": 4, "lora_alpha": 64, **targets}, precision={"compute": "fp32"})
    built = build(spec, torch.device("cpu"))
    load(built.peft_model, base, seed=7, compute_dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in adapters(built.peft_model):
            parameter.copy_(adapter_value(name, parameter.shape))
    lengths = (5, 100, 1, 9, 12, 7)
    samples = [Tokens(np.arange(1, n + 1, dtype=np.int32), np.ones(n, dtype=bool)) for n in lengths]
    probes = measure(built.peft_model, samples, torch.device("cpu"))
    assert [len(probe.tokens) for probe in probes] == [5, MOST_TOKENS, 9]
    assert len(samples[:MOST_PROBES]) > len(probes), "one has nothing to predict"
    model: Any = reference(base, spec)
    for probe in probes:
        ids = torch.tensor([probe.tokens])
        with torch.inference_mode():
            tuned = model(ids).logits[0, :-1].log_softmax(dim=-1).gather(1, ids[0, 1:, None])[:, 0]
            with model.disable_adapter():
                plain = (
                    model(ids).logits[0, :-1].log_softmax(dim=-1).gather(1, ids[0, 1:, None])[:, 0]
                )
        assert probe.tuned == pytest.approx(tuned.tolist(), abs=1e-4)
        assert probe.base == pytest.approx(plain.tolist(), abs=1e-4)
        assert probe.tuned != pytest.approx(probe.base, abs=1e-2)


def test_a_model_that_has_diverged_leaves_no_probe_that_nobody_can_read(tmp_path: Path) -> None:
    """What is no number is null in JSON, and a document with it was unreadable as a whole."""
    base = save_tiny("llama", tmp_path)
    spec = spec_for(base, lora={"r": 4}, precision={"compute": "fp32"})
    built = build(spec, torch.device("cpu"))
    load(built.peft_model, base, seed=7, compute_dtype=torch.float32, device=torch.device("cpu"))
    samples = [Tokens(np.arange(1, 6, dtype=np.int32), np.ones(5, dtype=bool))]
    assert len(measure(built.peft_model, samples, torch.device("cpu"))) == 1
    with torch.no_grad():
        for _, parameter in adapters(built.peft_model):
            parameter.fill_(float("nan"))
    assert measure(built.peft_model, samples, torch.device("cpu")) == []
