"""Adapters on experts against PEFT's own on parameters: loss, gradients, the adapter reloaded and
merged.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn

from ft_service.errors import SpecError
from ft_service.plan.weight_storage import adapters_of
from ft_service.rundir.verify import shape_faults
from ft_service.spec import JobSpec
from tests.support.bases import describe
from tests.support.ranks import run_on_ranks
from tests.support.training.causal_types import OF_SEVERAL
from tests.support.training.checks import REREAD_BY_PEFT, published_model
from tests.support.training.composites import save_composite
from tests.support.training.models import save_tiny, spec_for
from tests.support.training.parity import (
    CPU,
    Step,
    assert_parity,
    reference_steps,
    set_adapters,
    train_steps,
)
from workers.base.load import adapters, load
from workers.layers.segments import CURRENT
from workers.model.build import build
from workers.output.outcome import new_folder, write_adapter
from workers.tasks.merge import merge

IDS = torch.arange(3, 27).view(2, 12)
STACKS = {
    "mixtral": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "gpt_oss": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "llama4_text": ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"],
    "nemotron_h": ["mixer.experts.up_proj", "mixer.experts.down_proj"],
}
"""Biased, transposed, scaled at their input (PEFT takes these for the others), without a gate."""
DENSE = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


def options_for(family: str) -> dict[str, Any]:
    lora = {"r": 3, "target_modules": ["q_proj"], "target_parameters": STACKS[family]}
    training = {"per_device_train_batch_size": 2}
    return {"precision": {"default": "nf4", "compute": "fp32"}, "lora": lora, "training": training}


def train_all(rank: int, world: int, specs: dict[str, JobSpec]) -> dict[str, list[Step]]:
    return {family: train_steps(rank, world, spec) for family, spec in specs.items()}


@pytest.mark.slow
def test_experts_train_as_by_peft(tmp_path: Path) -> None:
    """Two steps on one rank and on two, on a quantised base."""
    folders = {family: save_tiny(family, tmp_path / family) for family in STACKS}
    truth = {}
    for world in (1, 2):
        specs = {
            family: spec_for(folder, ranks=world, **options_for(family))
            for family, folder in folders.items()
        }
        truth = truth or {
            family: reference_steps(folders[family], spec) for family, spec in specs.items()
        }
        for found in run_on_ranks(train_all, world, specs):
            for family, steps in found.items():
                assert any("experts" in name for name in steps[0].grads), family
                assert_parity(steps, truth[family], loss=2e-6)


def loaded(folder: Path, lora: dict[str, Any]) -> Any:
    """Base and adapters as the worker has them on one rank; B is not zero."""
    model = build(
        spec_for(folder, precision={"default": "bf16", "compute": "fp32"}, lora=lora), CPU
    ).peft_model
    load(model, folder, seed=1, compute_dtype=torch.float32, device=CPU)
    set_adapters(model)
    return model.eval()


def save_adapter(model: Any, base: Path, folder: Path) -> dict[str, Tensor]:
    tensors = {
        name.replace(".default.", "."): p.detach().contiguous() for name, p in adapters(model)
    }
    with REREAD_BY_PEFT, new_folder(folder) as made:
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        write_adapter(made, shapes, tensors.items(), model.peft_config["default"], spec_for(base))
    return tensors


def logits(model: nn.Module) -> Tensor:
    CURRENT.use(None)
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.filterwarnings(
    "ignore:The following rank_pattern keys"
)  # of PEFT, which follows them all the same
@pytest.mark.parametrize(
    ("family", "lora"),
    [
        (
            "qwen3_moe",
            {"target_modules": ["q_proj", *DENSE], "target_parameters": STACKS["mixtral"]},
        ),
        pytest.param(
            "mixtral",
            {
                "target_modules": ["v_proj"],
                "target_parameters": ["layers.1.mlp.experts.down_proj"],
                "use_rslora": True,
            },
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "gpt_oss",
            {
                "target_modules": ["q_proj"],
                "target_parameters": STACKS["gpt_oss"],
                "rank_pattern": {"down_proj": 2},
            },
            marks=pytest.mark.slow,
        ),
        (
            "llama4_text",
            {
                "target_modules": ["shared_expert.up_proj"],
                "target_parameters": STACKS["llama4_text"][:1],
            },
        ),
        pytest.param(  # whose files stack them the other way round than its class
            "qwen3_vl_moe",
            {"target_modules": ["q_proj"], "target_parameters": STACKS["mixtral"]},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_adapter_on_experts_is_reloaded_by_peft_and_merged(
    family: str, lora: dict[str, Any], tmp_path: Path
) -> None:
    base = tmp_path / "base"
    (save_composite if family in OF_SEVERAL else save_tiny)(family, base)
    model = loaded(base, {"r": 3, **lora})
    tensors = save_adapter(model, base, tmp_path / "adapter")
    plain = published_model(base).eval()
    before = logits(plain)
    stock = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    assert {n for n, _ in stock.named_parameters() if "lora_" in n} == {
        name for name, _ in adapters(model)
    }
    torch.testing.assert_close(logits(stock), logits(model), rtol=1e-5, atol=1e-5)
    assert (logits(stock) - before).abs().max() > 1e-2
    assert shape_faults(tmp_path / "adapter", None) == []
    merge(base, tmp_path / "adapter", tmp_path / "merged", to="bf16")
    merged = logits(published_model(tmp_path / "merged").eval())
    change = logits(stock) - before
    assert (merged - logits(stock)).norm() < 0.2 * change.norm(), "rounded to bf16"
    planned = adapters_of(describe(base), spec_for(base, lora={"r": 3, **lora}))
    assert sum(adapter.numel for adapter in planned) == sum(
        tensor.numel() for tensor in tensors.values()
    )


@pytest.mark.parametrize(
    ("lora", "param", "words"),
    [
        (
            {"target_parameters": ["mlp.experts.w1"]},
            "lora.target_parameters",
            "matches no stack of experts",
        ),
        ({"target_parameters": ["q_proj.weight"]}, "lora.target_parameters", "lora.target_modules"),
        (
            {"target_parameters": STACKS["mixtral"], "lora_dropout": 0.1},
            "lora.lora_dropout",
            "no dropout",
        ),
        ({"target_modules": DENSE, "lora_dropout": 0.1}, "lora.lora_dropout", "no dropout"),
        ({"target_modules": ["down_proj"]}, "lora.target_modules", "named with what they lie in"),
    ],
)
def test_what_cannot_be_adapted_is_refused_by_plan_and_worker(
    lora: dict[str, Any], param: str, words: str, tmp_path: Path
) -> None:
    base = save_tiny("qwen3_moe", tmp_path / "base")
    spec = spec_for(base, lora=lora)
    for look in (lambda: adapters_of(describe(base), spec), lambda: build(spec, CPU)):
        with pytest.raises(SpecError, match=words) as refused:
            look()
        assert refused.value.param == param
