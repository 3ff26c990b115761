"""gpt-oss as it is published, its experts in MXFP4: what transformers makes of it, bit by bit, and
of its adapter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.utils.quantization_config import Mxfp4Config

from ft_service.errors import SpecError
from tests.support.bases import describe
from tests.support.training.adapters import save_adapter
from tests.support.training.checks import REREAD_BY_PEFT
from tests.support.training.models import spec_for
from tests.support.training.parity import set_adapters
from tests.support.training.published import save_published
from workers.base.base_tensors import Safetensors
from workers.base.load import adapters, load, own_rows
from workers.base.parameter_sources import NamedBase
from workers.base.quantized_rows import StoredBase
from workers.layers.segments import CURRENT
from workers.model.build import build
from workers.output.outcome import new_folder, write_adapter
from workers.quant import mxfp4
from workers.tasks.merge import merge
from workers.training.packing import settle_attention

CPU = torch.device("cpu")
IDS = torch.arange(3, 27).view(2, 12)
STACKS = ("gate_up_proj", "down_proj")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_published("gpt-oss", tmp_path_factory.mktemp("gpt_oss") / "base")


def loaded(base: Path, default: str = "bf16") -> Any:
    """Base and adapters as the worker has them on one rank, and what loading said; B is not
    zero.
    """
    options = {
        "precision": {"default": default, "compute": "fp32"},
        "lora": {"r": 2, "target_modules": "all-linear"},
    }
    built = build(spec_for(base, **options), CPU)
    told = load(built.peft_model, base, seed=1, compute_dtype=torch.float32, device=CPU)
    set_adapters(built.peft_model)
    return built.peft_model.eval(), told


def published(base: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        base,
        dtype=torch.float32,
        quantization_config=Mxfp4Config(dequantize=True),
        attn_implementation="eager",
    )


def logits(model: nn.Module) -> Tensor:
    CURRENT.use(None)
    with torch.no_grad():
        return model(input_ids=IDS).logits


def test_every_code_and_every_power_of_two_is_what_transformers_makes_of_it() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(255, -1, -1).contiguous()
    powers = torch.arange(255, dtype=torch.uint8).view(255, 1).expand(-1, 16).contiguous()
    theirs = convert_moe_packed_tensors(codes.unsqueeze(0), powers.unsqueeze(0))[0].mT
    ours = mxfp4.dequantize(mxfp4.MXFP4Parts(codes.flatten(1), powers), 512, torch.bfloat16)
    assert torch.equal(ours.view(torch.int16), theirs.contiguous().view(torch.int16))


def test_a_rank_reads_the_rows_of_experts_that_it_owns(base: Path) -> None:
    model = build(
        spec_for(base, precision={"default": "nf4"}, lora={"target_modules": "all-linear"}), CPU
    ).peft_model
    stock: Any = published(base).get_submodule("model.layers.1.mlp.experts")
    with Safetensors(base) as files:
        named = NamedBase(
            model, StoredBase.open(files, base), lambda n: n.removeprefix("base_model.model.")
        )
        for stack in STACKS:
            name = f"model.layers.1.mlp.experts.{stack}.weight"
            whole = getattr(stock, stack).mT.flatten(0, 1)
            assert named.shape(name) == tuple(whole.shape)
            before = files.bytes_read
            parts = [
                named.rows(name, *own_rows(whole.shape[0], rank, 3)).float() for rank in range(3)
            ]
            assert torch.equal(torch.cat(parts), whole)
            assert files.bytes_read - before == whole.numel() // 2 + whole.numel() // 32, (
                "each byte once"
            )


@pytest.mark.parametrize("default", ["bf16", "as_published", "nf4"])
def test_the_published_model_and_its_adapter_compute_as_in_transformers(
    default: str, base: Path, tmp_path: Path
) -> None:
    model, told = loaded(base, default)
    tensors = {
        name.replace(".default.", "."): p.detach().contiguous() for name, p in adapters(model)
    }
    with REREAD_BY_PEFT, new_folder(tmp_path / "adapter") as made:
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        write_adapter(made, shapes, tensors.items(), model.peft_config["default"], spec_for(base))
    plain = published(base)
    before = logits(plain)
    stock = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    words = " ".join(text for _, text in told.messages())
    assert (logits(stock) - before).abs().max() > 1e-2
    if default != "nf4":
        assert "4 weights of the base came as MXFP4 and are kept exactly." in words
        torch.testing.assert_close(logits(model), logits(stock), rtol=1e-5, atol=1e-5)
    else:
        assert "4 weights of the base came as MXFP4 and are stored as the job says" in words


def test_an_adapter_is_merged_into_the_values_of_the_published_experts(
    base: Path, tmp_path: Path
) -> None:
    adapter = save_adapter(
        base, tmp_path / "adapter", target_modules=["q_proj"], model=published(base)
    )
    merge(base, adapter, tmp_path / "out", to="bf16")
    merged = load_file(tmp_path / "out/model.safetensors")
    exact = PeftModel.from_pretrained(published(base), str(adapter)).merge_and_unload().state_dict()
    assert merged.keys() == exact.keys()
    for name, tensor in merged.items():
        assert torch.equal(tensor, exact[name].bfloat16()) or "q_proj" in name, name
        assert torch.allclose(tensor.float(), exact[name], rtol=2**-8, atol=1e-6), name
    assert (
        AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
        .config.to_dict()
        .get("quantization_config")
        is None
    )


def test_samples_with_sinks_and_windows_are_packed(base: Path) -> None:
    assert settle_attention(loaded(base)[0], CPU, torch.float32) is None


def test_the_plan_counts_what_the_worker_loads(base: Path) -> None:
    described = describe(base)
    model = loaded(base)[0]
    frozen = {
        n.replace(".base_layer.", "."): p
        for n, p in model.get_base_model().named_parameters()
        if not p.requires_grad
    }
    assert {w.name: w.shape for w in described.weights} == {
        name: tuple(p.shape) for name, p in frozen.items()
    }
    stacks = {f"model.layers.{layer}.mlp.experts.{stack}" for layer in range(2) for stack in STACKS}
    assert described.held == dict.fromkeys(stacks, "mxfp4")


def test_blocks_and_scales_that_do_not_belong_together_are_refused(
    base: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((base / "config.json").read_bytes())
    tensors = load_file(base / "model.safetensors")
    tensors["model.layers.0.mlp.experts.down_proj_scales"] = torch.zeros(
        5, 64, 3, dtype=torch.uint8
    )
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for read in (lambda: loaded(tmp_path), lambda: describe(tmp_path)):
        with pytest.raises(
            SpecError, match=r"layers\.0\.mlp\.experts\.down_proj is quantised .*MXFP4"
        ):
            read()
