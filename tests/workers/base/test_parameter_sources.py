"""Checkpoints of every layout lead to the same model: names, stacked experts, and which rows a rank
reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import Transpose, WeightConverter

from ft_service.errors import SpecError
from tests.support.ranks import often_and_slow
from tests.support.training.models import (
    FAMILIES,
    MIXED_IN_FAMILIES,
    OF_EXPERTS,
    reference,
    save_tiny,
    spec_for,
)
from tests.support.training.parity import samples, set_adapters
from workers.base import parameter_sources
from workers.base.base_tensors import Safetensors
from workers.base.load import adapters, base_tensor_name, load, own_rows
from workers.base.parameter_sources import NamedBase
from workers.base.quantized_rows import StoredBase
from workers.data.batches import collate
from workers.model import head
from workers.model.build import build
from workers.model.multimodal import causal_model
from workers.output.outcome import new_folder, write_adapter
from workers.quant.rowwise import RowQuantized
from workers.training import step

CPU = torch.device("cpu")
IDS = torch.arange(3, 27).view(2, 12)


def loaded(model: Path, **options: Any) -> nn.Module:
    """Base and adapters as the worker has them on one rank; B is not zero."""
    spec = spec_for(
        model, **{"precision": {"default": "bf16", "compute": "fp32"}, "lora": {"r": 2}, **options}
    )
    peft_model = build(spec, CPU).peft_model
    load(peft_model, model, seed=1, compute_dtype=torch.float32, device=CPU)
    set_adapters(peft_model)
    return peft_model.eval()


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def rewrite(source: Path, target: Path, tensors: dict[str, Tensor]) -> Path:
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


# Names
# ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_neox"])
def test_published_and_converted_layouts_are_one_model(family: str, tmp_path: Path) -> None:
    published = save_tiny(family, tmp_path / "published")
    converted = save_tiny(family, tmp_path / "converted", original_format=False)
    held = [set(load_file(folder / "model.safetensors")) for folder in (published, converted)]
    assert held[0] != held[1], "two layouts"
    assert torch.equal(logits(loaded(published)), logits(loaded(converted)))


@pytest.mark.parametrize("family", ["gemma", "mixtral", "gpt_neox"])
def test_a_checkpoint_without_the_prefix_of_the_base_model(family: str, tmp_path: Path) -> None:
    """As saved from XModel, with the head of XForCausalLM added, if it has one."""
    whole = save_tiny(family, tmp_path / "whole")
    prefix = "gpt_neox." if family == "gpt_neox" else "model."
    held = load_file(whole / "model.safetensors")
    assert all(name.startswith((prefix, "lm_head.", "embed_out.")) for name in held)
    bare = rewrite(
        whole,
        tmp_path / "bare",
        {name.removeprefix(prefix): tensor for name, tensor in held.items()},
    )
    assert torch.equal(logits(loaded(bare)), logits(loaded(whole)))


def test_foreign_prefixes_are_refused_by_name(tmp_path: Path) -> None:
    whole = save_tiny("gemma3_text", tmp_path / "whole")
    held = load_file(whole / "model.safetensors")
    foreign = rewrite(
        whole,
        tmp_path / "foreign",
        {f"language_model.{name}": tensor for name, tensor in held.items()},
    )
    with pytest.raises(SpecError, match=r"lack \d+ tensors .* first: model\.embed_tokens\.weight"):
        loaded(foreign)


def test_a_conversion_that_is_not_known_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_tiny("llama", tmp_path / "base")
    transposed = WeightConverter(
        "mlp.up_proj.weight", "mlp.up_proj.weight", operations=[Transpose(0, 1)]
    )
    monkeypatch.setattr(parameter_sources, "get_model_conversion_mapping", lambda _: [transposed])
    with pytest.raises(
        SpecError, match=r"model\.layers\.0\.mlp\.up_proj\.weight in a layout .* Transpose"
    ):
        loaded(model)


# Rows
# ------------------------------------------------------------------------------


class Recording(StoredBase):
    """A base that notes which rows of which tensor are read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(Safetensors(folder))
        self.read: list[tuple[str, int | None, int]] = []

    def rows(
        self, name: str, start: int, end: int, index: int | None = None, *, transposed: bool = False
    ) -> Tensor:
        assert not transposed
        self.read += [(name, index, row) for row in range(start, end)]
        return super().rows(name, start, end, index)


@pytest.mark.parametrize("original_format", [True, False])
def test_a_rank_reads_the_rows_of_experts_that_it_owns_and_no_others(
    original_format: bool, tmp_path: Path
) -> None:
    folder = save_tiny("olmoe", tmp_path / "base", original_format=original_format)
    model = build(spec_for(folder, precision={"default": "nf4"}), CPU).peft_model
    stock = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        .model.layers[1]
        .mlp.experts
    )
    for projection, whole in (("gate_up_proj", stock.gate_up_proj), ("down_proj", stock.down_proj)):
        name = f"model.layers.1.mlp.experts.{projection}.weight"
        read = []
        for rank in range(3):
            checkpoint = Recording(folder)
            found = NamedBase(model, checkpoint, base_tensor_name)
            start, end = own_rows(found.shape(name)[0], rank, 3)
            assert torch.equal(
                found.rows(name, start, end), whole.detach().flatten(0, 1)[start:end]
            )
            assert len(checkpoint.read) == end - start > 0
            read += checkpoint.read
        assert len(set(read)) == len(read) == whole.shape[0] * whole.shape[1]
        assert NamedBase(model, Recording(folder), base_tensor_name).rows(name, 5, 5).shape == (
            0,
            whole.shape[2],
        )


def test_experts_are_stored_in_their_formats_and_routers_are_not(tmp_path: Path) -> None:
    model = loaded(
        save_tiny("mixtral", tmp_path / "base"), precision={**MIXED_IN_FAMILIES, "compute": "fp32"}
    )
    block: Any = model.get_submodule("base_model.model.model.layers.0.mlp")
    assert type(block.gate.weight.data) is Tensor
    assert type(block.experts.gate_up_proj.weight.data) is Tensor
    assert block.experts.gate_up_proj.weight.shape == (5 * 80, 48)
    assert isinstance(block.experts.down_proj.weight.data, RowQuantized)
    assert block.experts.down_proj.weight.codes.shape == (5 * 48, 32), (
        "40 columns, padded to a block of 64"
    )


def test_backward_through_experts_keeps_no_dequantised_weight(tmp_path: Path) -> None:
    model = loaded(
        save_tiny("mixtral", tmp_path / "base"), precision={"default": "nf4", "compute": "fp32"}
    )
    expert = 80 * 48
    stack = 5 * 80 * 48
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(input_ids=IDS[:, :7]).logits.sum().backward()
    floats = {tensor.numel() for tensor in kept if tensor.is_floating_point()}
    assert not floats & {expert, stack, 40 * 48, 5 * 40 * 48}
    assert 5 * 80 * 32 in {tensor.numel() for tensor in kept if tensor.dtype == torch.uint8}, (
        "the codes of all experts"
    )


def test_experts_compile_into_one_graph_that_keeps_no_dequantised_weight_either(
    tmp_path: Path,
) -> None:
    """Which experts are met is only known when the graph runs: the loop over them is inside an
    opaque operator.
    """
    model = loaded(
        save_tiny("mixtral", tmp_path / "base"), precision={"default": "nf4", "compute": "fp32"}
    )
    experts = model.get_submodule("base_model.model.model.layers.0.mlp.experts")
    x = torch.randn(9, 48, requires_grad=True)
    chosen = torch.tensor([[0, 3], [4, 3], [1, 0]] * 3)
    shares = torch.rand(9, 2)
    truth = experts(x, chosen, shares)
    (expected,) = torch.autograd.grad(truth.square().sum(), x)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)(x, chosen, shares)
    torch.testing.assert_close(compiled, truth)
    torch.testing.assert_close(torch.autograd.grad(compiled.square().sum(), x), (expected,))
    assert max(tensor.numel() for tensor in kept if tensor.is_floating_point()) < 40 * 48, (
        "activations and row maxima only"
    )


# What the model computes
# ------------------------------------------------------------------------------


PADDED = {"llama", "gemma2", "gpt_oss", "nemotron_h", "lfm2"}
"""Attention over all, with a window, with experts behind it; a state; a convolution."""


@pytest.mark.parametrize("family", often_and_slow(FAMILIES, FAMILIES.keys() - PADDED))
def test_padding_at_the_end_changes_nothing(family: str, tmp_path: Path) -> None:
    """Without a mask: attention is causal, with and without a sliding window, and experts see one
    token at a time.
    """
    model = loaded(
        save_tiny(family, tmp_path / "base"),
        lora={"r": 2, "target_modules": OF_EXPERTS.get(family, "all-linear")},
    )
    data = samples(4, longest=20)
    together = step.evaluate(model, [collate(data, CPU)], 1)
    alone = step.evaluate(model, [collate([sample], CPU) for sample in data], 1)
    assert together.tolist() == pytest.approx(alone.tolist(), rel=1e-6)


def test_a_family_whose_head_is_not_known_has_whole_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(save_tiny("llama", tmp_path / "base"))
    batch = collate(samples(3), CPU)
    expected = step.evaluate(model, [batch], 1)
    assert head.works_in_chunks(causal_model(model))
    head.set_works_in_chunks(causal_model(model), False)
    monkeypatch.delattr(head, "chunk_rows")
    found = step.evaluate(model, [batch], 1)
    assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-6)


def test_dropout_of_the_base_is_off(tmp_path: Path) -> None:
    """It draws from the rank's own generator: no resume could repeat it."""
    noise: dict[str, Any] = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attention_dropout": 0.5}
    model = loaded(save_tiny("phi", tmp_path / "phi", **noise)).train()
    assert torch.equal(logits(model), logits(model))
    model = loaded(save_tiny("mixtral", tmp_path / "mixtral", router_jitter_noise=0.5)).train()
    assert torch.equal(logits(model), logits(model))


# Adapters
# ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        (
            "phi3",
            {
                "target_modules": ["qkv_proj", "gate_up_proj"],
                "rank_pattern": {r"1\.mlp\.gate_.*": 5},
            },
        ),
        (
            "gpt_neox",
            {
                "target_modules": r".*(query_key_value|dense)",
                "alpha_pattern": {"attention.dense": 3},
            },
        ),
        (
            "qwen3_moe",
            {"target_modules": "all-linear", "rank_pattern": {"layers.0.*": 3}, "use_rslora": True},
        ),
    ],
)
def test_an_adapter_on_fused_layers_loads_in_stock_peft(
    family: str, lora: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_tiny(family, tmp_path / "base")
    options: dict[str, Any] = {"lora": {"r": 2, **lora}}
    model = loaded(folder, **options)
    tensors = {
        name.replace(".default.", "."): p.detach().contiguous() for name, p in adapters(model)
    }
    assert isinstance(model, PeftModel)
    with new_folder(tmp_path / "adapter") as made:
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        write_adapter(
            made, shapes, tensors.items(), model.peft_config["default"], spec_for(folder, **options)
        )
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", "pt") as written:
        ranks = {
            written.get_slice(name).get_shape()[0]
            for name in written.keys()  # noqa: SIM118
            if "lora_A" in name
        }
    assert len(ranks) == 1 + ("rank_pattern" in lora)
    stock = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tmp_path / "adapter"
    )
    torch.testing.assert_close(logits(stock.eval()), logits(model), rtol=1e-5, atol=1e-5)
    with stock.disable_adapter():
        assert not torch.allclose(logits(stock), logits(model), atol=1e-2)


def test_patterns_of_ranks_mean_what_they_mean_in_peft(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "base")
    spec = spec_for(
        folder,
        precision={"compute": "fp32"},
        lora={
            "r": 2,
            "rank_pattern": {"q_proj": 4, r"layers\.1\..*_proj": 3},
            "alpha_pattern": {"mlp.*": 5},
        },
    )
    model = build(spec, CPU).peft_model
    load(model, folder, seed=1, compute_dtype=torch.float32, device=CPU)
    set_adapters(model)
    truth = reference(folder, spec)
    assert {n: p.shape for n, p in adapters(model)} == {
        n: p.shape for n, p in truth.named_parameters() if p.requires_grad
    }
    torch.testing.assert_close(logits(model.eval()), logits(truth.eval()), rtol=1e-5, atol=1e-5)
