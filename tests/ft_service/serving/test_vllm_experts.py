"""Adapters on experts in vLLM itself (tests/support/vllm_server.py says how it is found).

Its build for processors has no kernel for them: there vLLM's own code loads and stacks our export,
whose tensors must compute what the worker computes; and it serves the merged model.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Outcome, OutcomeKind
from ft_service.serving.inference_server import InferenceServer
from ft_service.serving.served_verdict import judge, read_probes
from tests.support import programs
from tests.support.training.adapters import difference, logits, save_adapter
from tests.support.training.attempts import run_attempt
from tests.support.training.models import save_chats, save_tiny, save_tokenizer, spec_for
from tests.support.vllm_server import ABSENT, VLLM, vllm_serving
from workers.tasks.fidelity import with_adapter
from workers.tasks.merge import merge
from workers.tasks.pad_ranks import pad_ranks

STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "head_dim": 32,
    "initializer_range": 0.05,
    "vocab_size": 259,
    "max_position_embeddings": 512,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 2.0,
    "original_max_position_embeddings": 256,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {**COMMON, "intermediate_size": 64},
    "qwen3_moe": {**COMMON, "moe_intermediate_size": 64},
    "gpt_oss": {
        **COMMON,
        "intermediate_size": 64,
        "rope_parameters": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0},
        "swiglu_limit": 7.0,
    },
}
"""Family → sizes that vLLM's kernels on processors have.

Their SwiGLU has the limit of the published gpt-oss.
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not VLLM or VLLM.startswith("http"), reason=ABSENT),
]


def stacked_by_vllm(base: Path, adapter: Path, out: Path) -> dict[str, Tensor]:
    program = Path(programs.__file__).with_name("vllm_experts.py")
    asked = {"model": str(base), "adapter": str(adapter), "out": str(out)}
    ended = subprocess.run(
        [VLLM, "-P", str(program)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return load_file(out)


def with_changes(base: Path, tensors: dict[str, Tensor], *, transposed: bool) -> Any:
    """The base with the changes that vLLM's tensors are, computed by transformers."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    weights = model.state_dict()

    def change(layer: str, part: str) -> Tensor:
        slices = range(sum(name.startswith(f"{layer}.{part}lora_a.") for name in tensors))
        return torch.cat(
            [
                tensors[f"{layer}.{part}lora_b.{i}"] @ tensors[f"{layer}.{part}lora_a.{i}"]
                for i in slices
            ],
            dim=-2,
        )

    def add(name: str, update: Tensor) -> None:
        assert weights[name].shape == update.shape, name
        weights[name] += update

    layers = {
        re.sub(r"\.(w\d+_)?lora_[ab]\.\d$", "", name)
        for name in tensors
        if name.startswith("model.layers.")
    }
    for layer in layers:
        place = f"model.layers.{layer.split('.')[2]}"
        if layer.endswith(".experts"):
            for stack, part in zip(STACKS, ("w13_", "w2_"), strict=True):
                update = change(layer, part)
                add(f"{place}.{stack}", update.mT if transposed else update)
        elif layer.endswith(".qkv_proj"):
            q = tensors[f"{layer}.lora_b.0"] @ tensors[f"{layer}.lora_a.0"]
            add(f"{place}.self_attn.q_proj.weight", q)
    model.load_state_dict(weights)
    return model


@pytest.mark.parametrize("family", MIXTURES)
def test_what_vllm_stacks_of_our_export_computes_what_the_worker_does(
    family: str, tmp_path: Path
) -> None:
    base = save_tiny(family, tmp_path / "base", **MIXTURES[family])
    save_tokenizer(base)
    lora: dict[str, Any] = {
        "r": 3,
        "lora_alpha": 6,
        "target_modules": ["q_proj"],
        "rank_pattern": {"q_proj": 5},
    }
    adapter = save_adapter(base, tmp_path / "adapter", target_parameters=STACKS, **lora)
    (tmp_path / "served").mkdir()
    pad_ranks(adapter, tmp_path / "served", base)
    tensors = stacked_by_vllm(base, tmp_path / "served", tmp_path / "stacked.safetensors")
    spec = spec_for(
        base,
        precision={"default": "bf16", "compute": "fp32"},
        lora={**lora, "target_parameters": STACKS},
    )
    ours = with_adapter(spec, adapter, torch.device("cpu"))
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert difference(logits(plain), logits(ours)) > 1e-2
    assert (
        difference(
            logits(with_changes(base, tensors, transposed=family == "gpt_oss")), logits(ours)
        )
        < 1e-5
    )


@pytest.mark.parametrize("family", MIXTURES)
def test_a_merged_mixture_that_vllm_serves_answers_as_the_trainer(
    family: str, tmp_path: Path
) -> None:
    base = save_tiny(family, tmp_path / "base", **MIXTURES[family])
    save_tokenizer(base)
    run = RunDir(tmp_path / "run")
    spec = spec_for(
        base,
        save_chats(tmp_path / "train.jsonl", 24),
        valid=save_chats(tmp_path / "valid.jsonl", 4),
        precision={"default": "bf16", "compute": "fp32", "compare_served": "off"},
        training={"max_steps": 12, "learning_rate": 1e-2},
        lora={"r": 4, "target_modules": ["q_proj"], "target_parameters": STACKS},
    )
    run.write("spec.json", spec)
    assert run_attempt(run, 1, 1) == Outcome(kind=OutcomeKind.SUCCEEDED)
    merge(base, run.path("adapter"), tmp_path / "merged", to="bf16")
    probes = read_probes(run)
    with vllm_serving(tmp_path, tmp_path / "merged") as url:
        server = InferenceServer(url, None)
        verdict = judge(probes, [server.logprobs("merged", probe.tokens) for probe in probes])
        server.close()
    assert verdict.verified, verdict.text
