"""Merging against PEFT's own merge, and what it reports."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from ft_service.errors import SpecError
from ft_service.rundir.directory import RunDir, sha256_of
from ft_service.spec import DataFileRef
from tests.support.training.adapters import difference, logits, merged_by_peft, save_adapter
from tests.support.training.checks import published_as
from tests.support.training.composites import save_composite
from tests.support.training.models import (
    OF_EXPERTS,
    save_pairs,
    save_tiny,
    save_tiny_llama,
    save_tokenizer,
    spec_for,
)
from tests.support.training.parity import CPU
from tests.support.training.prequantized import bitsandbytes_4bit, fp8_by_blocks, fp8_by_rows
from tests.support.training.published import mxfp4_experts
from tests.support.training.rendered_here import RenderedHere
from workers.base.quantized_rows import from_int4
from workers.data.token_sets import job_samples
from workers.exports import own_template
from workers.exports.compressed_tensors import RestoredFolder, restore
from workers.quant import mxfp4
from workers.quant.served_forms import to_fp8
from workers.tasks import fidelity
from workers.tasks.end_tokens import end_tokens
from workers.tasks.fidelity import _validation, merged_model
from workers.tasks.merge import merge


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("base") / "base")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.mlp.down_proj": 32}},
        {"use_dora": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
    ids=["plain", "rslora", "patterns", "dora", "modules_to_save"],
)
def test_the_merged_weights_are_those_of_peft_rounded_once(
    base: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    adapter = save_adapter(base, tmp_path / "adapter", **options)
    merge(base, adapter, tmp_path / "out", to="bf16")
    ours = load_file(tmp_path / "out/model.safetensors")
    exact = merged_by_peft(base, adapter).state_dict()
    assert ours.keys() == exact.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == torch.bfloat16
        # One rounding to 8 bits of mantissa; sums in another order may fall to the other side of a
        # tie.
        assert torch.allclose(tensor.float(), exact[name], rtol=2**-8, atol=1e-6), name
        equal = (tensor == exact[name].bfloat16()).float().mean()
        assert equal > 0.999, name


def test_plain_transformers_loads_it_and_gives_peft_s_logits(base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(base, tmp_path / "adapter")
    merge(base, adapter, tmp_path / "out", to="bf16")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    stock = merged_by_peft(base, adapter).to(torch.bfloat16).float()
    assert difference(logits(merged), logits(stock)) < 1e-3
    assert (
        difference(
            logits(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)), logits(stock)
        )
        > 0.1
    )


def test_the_chat_template_is_the_one_that_the_job_trained_with_and_its_ends_end_answers(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a base that ends texts, whose job trained on turns."""
    adapter = save_adapter(base, tmp_path / "adapter")
    folder = tmp_path / "base"
    shutil.copytree(base, folder)
    tokenizer = save_tokenizer(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 7, "top_p": 0.9}))
    merge(folder, adapter, tmp_path / "plain", to="bf16")
    for name in ("chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "plain" / name).read_bytes() == (folder / name).read_bytes()

    own = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_start|>{% endfor %}"
    (adapter / "chat_template.jinja").write_text(own)
    monkeypatch.setattr(own_template, "TemplateProcess", RenderedHere)
    merge(folder, adapter, tmp_path / "own", to="bf16")
    assert (tmp_path / "own/chat_template.jinja").read_text() == own
    ends = [7, *sorted(tokenizer.get_vocab()[name] for name in ("<|im_start|>", "<|im_end|>"))]
    assert json.loads((tmp_path / "own/generation_config.json").read_text()) == {
        "eos_token_id": ends,
        "top_p": 0.9,
    }
    assert end_tokens(adapter, folder) == ends, "what an inference server is told"


def test_of_a_base_that_ends_texts_the_ends_of_turns_end_answers(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as Qwen2.5's, whose own chat template ends turns otherwise than its tokenizer ends
    texts.
    """
    monkeypatch.setattr(own_template, "TemplateProcess", RenderedHere)
    adapter = save_adapter(base, tmp_path / "adapter")
    folder = tmp_path / "base"
    shutil.copytree(base, folder)
    tokenizer = save_tokenizer(folder)
    assert end_tokens(adapter, folder) == []
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**settings, "eos_token": "<|im_start|>"})
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    merge(folder, adapter, tmp_path / "out", to="bf16")
    ends = [7, *sorted(tokenizer.get_vocab()[name] for name in ("<|im_start|>", "<|im_end|>"))]
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == {
        "eos_token_id": ends
    }
    assert end_tokens(adapter, folder) == ends


def in_fp32(base: Path, names: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """Store tensors of a base in fp32, with values that bf16 does not hold; what they are."""
    held = load_file(base / "model.safetensors")
    generator = torch.Generator().manual_seed(2)
    for name, tensor in held.items():
        if names(name):
            held[name] = tensor.float() * (
                1 + 2**-7 * torch.rand(tensor.shape, generator=generator)
            )
    save_file(held, base / "model.safetensors", metadata={"format": "pt"})
    return held


def test_what_routers_are_biased_by_stays_in_fp32(tmp_path: Path) -> None:
    """Biases that lie closer together than bf16's values decide which experts a token gets."""
    base = save_tiny("deepseek_v3", tmp_path / "base", n_routed_experts=16, n_group=1)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    held = load_file(base / "model.safetensors")
    held[bias] = torch.linspace(8, 8.05, 16)
    held["model.layers.1.mlp.gate.weight"] = held["model.layers.1.mlp.gate.weight"].float()
    save_file(held, base / "model.safetensors", metadata={"format": "pt"})
    adapter = save_adapter(base, tmp_path / "adapter", target_modules=["o_proj"])
    merge(base, adapter, tmp_path / "out", to="bf16")
    merged = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(merged[bias], held[bias])
    assert {name for name, tensor in merged.items() if tensor.dtype != torch.bfloat16} == {
        bias,
        "model.layers.1.mlp.gate.weight",
    }
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert torch.equal(loaded.get_buffer(bias), held[bias])


@pytest.mark.parametrize("to", ["bf16", "fp8"])
def test_of_a_base_in_fp32_the_vectors_stay_so_and_all_matrices_do_not(
    tmp_path: Path, to: str
) -> None:
    base = save_tiny_llama(tmp_path / "base")
    held = in_fp32(base, lambda name: True)
    adapter = save_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    merge(base, adapter, tmp_path / "out", to=to)
    merged = load_file(tmp_path / "out/model.safetensors")
    vectors = {name for name, tensor in held.items() if tensor.ndim == 1}
    assert (
        {name for name, tensor in merged.items() if tensor.dtype == torch.float32}
        == vectors
        != set()
    )
    assert all(torch.equal(merged[name], held[name]) for name in vectors)
    assert torch.equal(merged["lm_head.weight"], held["lm_head.weight"].bfloat16())


def test_a_matrix_that_the_adapter_changes_is_in_bf16_whatever_it_was(tmp_path: Path) -> None:
    base = save_tiny_llama(tmp_path / "base")
    held = in_fp32(base, lambda name: "q_proj" in name or name == "lm_head.weight")
    adapter = save_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    merge(base, adapter, tmp_path / "out", to="bf16")
    merged = load_file(tmp_path / "out/model.safetensors")
    exact = merged_by_peft(base, adapter).state_dict()
    assert {name for name, tensor in merged.items() if tensor.dtype != torch.bfloat16} == {
        "lm_head.weight"
    }
    assert torch.equal(merged["lm_head.weight"], held["lm_head.weight"])
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.allclose(merged[name].float(), exact[name], rtol=2**-8, atol=1e-6)


def test_files_of_a_size_and_an_index(base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(base, tmp_path / "adapter")
    merge(base, adapter, tmp_path / "one", to="bf16")
    merge(base, adapter, tmp_path / "many", to="bf16", max_file_bytes=100_000)
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2
    assert all(path.stat().st_size < 110_000 for path in files)
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in files}
    whole, parts = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        for name in ("one", "many")
    )
    assert torch.equal(logits(whole), logits(parts))


def test_fp8_is_stored_by_rows_with_what_is_no_linear_of_a_layer_in_bf16(
    base: Path, tmp_path: Path
) -> None:
    adapter = save_adapter(base, tmp_path / "adapter")
    rounding = merge(base, adapter, tmp_path / "out", to="fp8")
    held = load_file(tmp_path / "out/model.safetensors")
    exact = merged_by_peft(base, adapter).state_dict()
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head", "model.embed_tokens"]
    assert {name for name, tensor in held.items() if tensor.dtype == torch.float8_e4m3fn} == {
        name for name in exact if "_proj.weight" in name
    }
    assert {held["lm_head.weight"].dtype, held["model.norm.weight"].dtype} == {torch.bfloat16}
    for name, scale in ((name, held[f"{name}_scale"]) for name in exact if "_proj.weight" in name):
        assert (scale.dtype, scale.shape) == (torch.bfloat16, (exact[name].shape[0], 1))
        assert difference(held[name].float() * scale.float(), exact[name]) < 0.04, (
            "e4m3 has 4 bits of mantissa"
        )
    assert 0.01 < rounding.report()["relative_to_weights"] < 0.04


def test_fp8_loads_in_transformers_by_compressed_tensors(base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(base, tmp_path / "adapter")
    merge(base, adapter, tmp_path / "out", to="fp8")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert difference(logits(loaded), logits(merged_by_peft(base, adapter))) < 0.1


def test_int4_is_packed_as_compressed_tensors_packs_it_and_transformers_loads_it(
    base: Path, tmp_path: Path
) -> None:
    adapter = save_adapter(base, tmp_path / "adapter")
    rounding = merge(base, adapter, tmp_path / "out", to="int4")
    held = load_file(tmp_path / "out/model.safetensors")
    exact = merged_by_peft(base, adapter)
    name = "model.layers.1.mlp.down_proj.weight"  # [64, 192]: groups of 64 fit all
    packed = held[f"{name}_packed"]
    scale = held[f"{name}_scale"]
    assert (packed.dtype, packed.shape, scale.shape) == (torch.int32, (64, 24), (64, 3))
    assert held[f"{name}_shape"].tolist() == [64, 192]
    codes = unpack_from_int32(packed, 4, torch.Size((64, 192)))
    assert torch.equal(
        from_int4(packed, scale), codes.float() * scale.float().repeat_interleave(64, dim=1)
    )
    assert difference(from_int4(packed, scale), exact.state_dict()[name]) < 0.12, (
        "4 bits, and the best scale of each group"
    )
    assert 0.05 < rounding.report()["relative_to_weights"] < 0.12
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    restore(tmp_path / "out", tmp_path / "plain")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    assert difference(logits(loaded), logits(plain)) < 1e-5, (
        "what is measured is what transformers computes"
    )
    assert difference(logits(loaded), logits(exact)) < 0.3


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SLOW = pytest.mark.slow
GROUPED_BY_64 = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}


@pytest.mark.parametrize(
    ("family", "to", "changes"),
    [
        ("qwen3_moe", "fp8", {}),
        ("ernie4_5_moe", "int4", GROUPED_BY_64),
        *(
            pytest.param(family, "fp8", {}, marks=SLOW)
            for family in ("mixtral", "olmoe", "deepseek_v3", "ernie4_5_moe", "qwen3_next")
        ),
    ],
)
def test_experts_are_stored_one_by_one_and_read_by_transformers_and_here(
    tmp_path: Path, family: str, to: str, changes: dict[str, Any]
) -> None:
    base = save_tiny(family, tmp_path / "base", original_format=True, **changes)
    targets: Any = OF_EXPERTS[family]
    adapter = save_adapter(
        base, tmp_path / "adapter", target_modules=targets, target_parameters=EXPERTS
    )
    exact_folder, out, plain = (tmp_path / name for name in ("exact", to, "plain"))
    merge(base, adapter, exact_folder, to="bf16")
    merge(base, adapter, out, to=to)
    exact = load_file(exact_folder / "model.safetensors")
    held = load_file(out / "model.safetensors")
    restored = RestoredFolder(plain, out)
    for name, values in exact.items():
        stored = values
        if f"{name}_scale" in held:
            scale = held[f"{name}_scale"]
            stored = (
                held[name].float() * scale.float()
                if to == "fp8"
                else from_int4(held[f"{name}_packed"], scale)
            )
            assert difference(stored, values.float()) < {"fp8": 0.04, "int4": 0.14}[to], name
        restored.put(name, stored)
    restored.close()
    experts = [name for name in exact if ".experts." in name]
    assert experts
    assert all(f"{name}_scale" in held for name in experts)
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    matrices = {n for n, values in exact.items() if values.ndim == 2 and n.endswith(".weight")}
    assert matrices == {
        *(f"{name}.weight" for name in ignored if f"{name}.weight" in exact),
        *(name.removesuffix("_scale") for name in held if name.endswith("_scale")),
    }
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).state_dict()
    values = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    for name, parameter in values.named_parameters():
        if name.endswith(tuple(EXPERTS)):
            apart = difference(theirs[name].float(), parameter.detach())
            assert apart <= (0 if to == "fp8" else 2**-8), name  # its products are in bf16
    if to == "fp8":  # as a report of losses reads it
        ours = merged_model(spec_for(base, precision={"compute": "fp32"}), out, CPU)
        assert difference(logits(ours), logits(values)) < 1e-5


def test_experts_in_stacks_are_refused(tmp_path: Path) -> None:
    base = save_tiny("gpt_oss", tmp_path / "base", original_format=True)
    adapter = save_adapter(base, tmp_path / "adapter", target_modules=OF_EXPERTS["gpt_oss"])
    with pytest.raises(SpecError, match="holds its experts in stacks") as refused:
        merge(base, adapter, tmp_path / "out", to="fp8")
    assert refused.value.param == "to"


def test_a_base_published_in_mxfp4_is_merged_back_to_what_it_was(tmp_path: Path) -> None:
    """gpt-oss: stacks whose experts change are rounded once, and others keep every byte."""
    wide = {"hidden_size": 64, "intermediate_size": 64}
    base = save_tiny("gpt_oss", tmp_path / "base", original_format=True, **wide)
    mxfp4_experts(base)
    targets: Any = OF_EXPERTS["gpt_oss"]
    only_one = ["mlp.experts.down_proj"]
    adapter = save_adapter(
        base, tmp_path / "adapter", target_modules=targets, target_parameters=only_one
    )
    merge(base, adapter, tmp_path / "out", to="mxfp4")
    before, after = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "out"))
    assert {name: tensor.shape for name, tensor in after.items()} == {
        name: tensor.shape for name, tensor in before.items()
    }
    configs = [
        json.loads((folder / "config.json").read_text())["quantization_config"]
        for folder in (base, tmp_path / "out")
    ]
    assert configs[0] == configs[1]
    experts = {name for name in after if name.endswith(("_blocks", "_scales"))}
    moved = {name for name in experts if not torch.equal(before[name], after[name])}
    assert moved == {name for name in experts if ".down_proj_" in name}
    exact = merged_by_peft(base, adapter).state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    read = theirs.state_dict()
    for name in (name for name in exact if name.endswith("experts.down_proj")):
        wanted = torch.stack(
            [
                mxfp4.dequantize(mxfp4.quantize(own.mT.contiguous()), own.shape[0], torch.float32)
                for own in exact[name].float()
            ]
        ).mT
        assert torch.equal(read[name].float(), wanted)
        assert 0.01 < difference(wanted, exact[name].float()) < 0.15
    plain = tmp_path / "again"
    merge(base, save_adapter(base, tmp_path / "other", target_modules=targets), plain, to="mxfp4")
    kept = load_file(plain / "model.safetensors")
    assert all(torch.equal(before[name], kept[name]) for name in experts)
    ours = merged_model(spec_for(base, precision={"compute": "fp32"}), tmp_path / "out", CPU)
    assert difference(logits(ours), logits(theirs)) < 0.02


def test_a_layer_that_no_group_of_int4_divides_is_refused(tmp_path: Path) -> None:
    narrow = save_tiny_llama(tmp_path / "narrow", hidden_size=48)
    adapter = save_adapter(narrow, tmp_path / "adapter")
    with pytest.raises(SpecError, match="has a layer of 48: merge to fp8 or bf16"):
        merge(narrow, adapter, tmp_path / "out", to="int4")


def test_an_adapter_of_another_base_is_refused_and_leaves_nothing(
    base: Path, tmp_path: Path
) -> None:
    adapter = save_adapter(base, tmp_path / "adapter")
    for changes, message in (
        ({"num_hidden_layers": 1}, "does not hold, the first"),
        ({"hidden_size": 32}, "of shape"),
    ):
        other = save_tiny_llama(tmp_path / "other", **changes)
        with pytest.raises(SpecError, match=message):
            merge(other, adapter, tmp_path / "out", to="bf16")
        assert not list(tmp_path.glob("out*"))


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize(
    ("options", "changed", "left"),
    [
        ({"modules_to_save": ["lm_head"]}, "lm_head.weight", "model.embed_tokens.weight"),
        ({"modules_to_save": ["embed_tokens"]}, "model.embed_tokens.weight", "lm_head.weight"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head.weight", "model.embed_tokens.weight"),
    ],
    ids=["head replaced", "embedding replaced", "head adapted"],
)
def test_an_adapter_that_parts_a_tied_head_from_its_embedding_is_refused(
    tmp_path: Path, options: dict[str, Any], changed: str, left: str
) -> None:
    """PEFT trains one of them alone, unless it is told to keep the tie: then it merges as
    before.
    """
    tied = save_tiny_llama(tmp_path / "tied", tie_word_embeddings=True)
    options = {"target_modules": ["q_proj"], **options}
    adapter = save_adapter(tied, tmp_path / "adapter", save_embedding_layers=False, **options)
    with pytest.raises(SpecError) as refused:
        merge(tied, adapter, tmp_path / "out", to="bf16")
    assert refused.value.param == "base"
    assert f"changes {changed} apart from {left}" in str(refused.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_an_adapter_of_peft_that_keeps_a_tie_is_merged(tmp_path: Path, name: str) -> None:
    tied = save_tiny_llama(tmp_path / "tied", tie_word_embeddings=True)
    options: dict[str, Any] = {
        "target_modules": ["q_proj"],
        "modules_to_save": [name],
        "ensure_weight_tying": True,
    }
    adapter = save_adapter(tied, tmp_path / "adapter", **options)
    merge(tied, adapter, tmp_path / "out", to="bf16")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    stock = merged_by_peft(tied, adapter).to(torch.bfloat16).float()
    assert difference(logits(merged), logits(stock)) < 1e-3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dora", [False, True])
def test_a_layer_whose_rows_the_files_hold_in_two_tensors_is_merged_piece_by_piece(
    tmp_path: Path, dora: bool
) -> None:
    """MiniMax M3, whose class has one layer where its files have a gate and another."""
    base = tmp_path / "base"
    assert save_composite("minimax_m3_vl", base)
    published = published_as(AutoConfig.from_pretrained(base))
    options: dict[str, Any] = {
        "target_modules": ["mlp.gate_up_proj", "shared_experts.gate_up_proj"],
        "use_dora": dora,
    }
    adapter = save_adapter(
        base,
        tmp_path / "adapter",
        model=published.from_pretrained(base, dtype=torch.float32),
        **options,
    )
    merge(base, adapter, tmp_path / "out", to="bf16")
    held = {name for file in base.glob("*.safetensors") for name in load_file(file)}
    assert {
        name for file in (tmp_path / "out").glob("*.safetensors") for name in load_file(file)
    } == held
    assert any(name.endswith("shared_experts.gate_proj.weight") for name in held)
    plain, merged = (
        published.from_pretrained(folder, dtype=torch.float32)
        for folder in (base, tmp_path / "out")
    )
    before = {n: t.clone() for n, t in plain.state_dict().items()}
    ours = merged.state_dict()
    exact = PeftModel.from_pretrained(plain, str(adapter)).merge_and_unload().state_dict()
    changed = [name for name in exact if name.endswith("gate_up_proj.weight")]
    assert len(changed) == 2
    for name in changed:
        assert (
            difference(ours[name], exact[name]) < 2**-8 < difference(before[name], exact[name])
        ), name


@pytest.mark.filterwarnings("ignore")
def test_experts_whose_gate_and_other_rows_are_stacks_of_their_own_are_merged(
    tmp_path: Path,
) -> None:
    """Step 3.7."""
    base = tmp_path / "base"
    assert save_composite("step3p7", base)
    published = published_as(AutoConfig.from_pretrained(base))
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    options: dict[str, Any] = {"target_modules": ["o_proj"], "target_parameters": stacks}
    adapter = save_adapter(
        base,
        tmp_path / "adapter",
        model=published.from_pretrained(base, dtype=torch.float32),
        **options,
    )
    merge(base, adapter, tmp_path / "out", to="bf16")
    held = load_file(tmp_path / "out/model.safetensors")
    assert {
        tuple(held[name].shape)
        for name in held
        if name.endswith(("moe.gate_proj.weight", "moe.up_proj.weight"))
    } == {(4, 32, 48)}
    plain, merged = (
        published.from_pretrained(folder, dtype=torch.float32)
        for folder in (base, tmp_path / "out")
    )
    before = {n: t.clone() for n, t in plain.state_dict().items()}
    ours = merged.state_dict()
    exact = PeftModel.from_pretrained(plain, str(adapter)).merge_and_unload().state_dict()
    for name in (name for name in exact if name.endswith(tuple(stacks))):
        assert (
            difference(ours[name], exact[name]) < 2**-8 < difference(before[name], exact[name])
        ), name


MEASURED = """
import re, sys, threading
from pathlib import Path
import torch
from workers.tasks.fidelity import _validation, merged_model
from workers.tasks.merge import merge
def own_memory():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
before, peak, done = own_memory(), 0, threading.Event()
def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, own_memory())
thread = threading.Thread(target=watch)
thread.start()
merge(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), to=sys.argv[4], max_file_bytes=10**8)
done.set()
thread.join()
print(peak - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("to", ["bf16", "fp8"])
def test_memory_does_not_grow_with_the_model(tmp_path: Path, to: str) -> None:
    """A base of 700 MB. Pages of mapped files are the kernel's to take back, not counted; others
    are given back late on a busy machine, where 400 MB were seen instead of 300.
    """
    base = save_tiny_llama(
        tmp_path / "base",
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=3,
        vocab_size=50_000,
    )
    assert sum(path.stat().st_size for path in base.glob("*.safetensors")) > 700 * 10**6
    adapter = save_adapter(base, tmp_path / "adapter")
    arguments = [str(base), str(adapter), str(tmp_path / "out"), to]
    ended = subprocess.run(
        [sys.executable, "-c", MEASURED, *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    assert int(ended.stdout.split()[-1]) < 450 * 10**6


BLOCKS = {"hidden_size": 160, "intermediate_size": 288}


@pytest.mark.parametrize(
    ("quantise", "changes"),
    [(fp8_by_rows, {}), (bitsandbytes_4bit, {}), (fp8_by_blocks, BLOCKS)],
    ids=["rows", "nf4", "blocks"],
)
def test_a_base_that_is_stored_quantised_is_merged_by_the_values_that_it_stands_for(
    tmp_path: Path, quantise: Callable[[Path], dict[str, torch.Tensor]], changes: dict[str, int]
) -> None:
    base = save_tiny_llama(tmp_path / "plain", **changes)
    adapter = save_adapter(base, tmp_path / "adapter")
    values = quantise(save_tiny_llama(tmp_path / "base", **changes))
    merge(tmp_path / "base", adapter, tmp_path / "out", to="bf16")
    merged = load_file(tmp_path / "out/model.safetensors")
    plain = load_file(base / "model.safetensors")
    exact = merged_by_peft(base, adapter).state_dict()
    assert merged.keys() == plain.keys()
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    for name, tensor in merged.items():
        change = exact[name] - plain[name].float()
        assert difference(tensor, values.get(name, plain[name]).float() + change) < 2**-8, name


def test_a_base_by_blocks_is_merged_to_fp8_by_rows_from_its_exact_values(tmp_path: Path) -> None:
    values = fp8_by_blocks(save_tiny_llama(tmp_path / "base", **BLOCKS))
    base = save_tiny_llama(tmp_path / "plain", **BLOCKS)
    adapter = save_adapter(base, tmp_path / "adapter")
    exact = merged_by_peft(base, adapter).state_dict()
    plain = load_file(base / "model.safetensors")
    merge(tmp_path / "base", adapter, tmp_path / "out", to="fp8")
    merged = load_file(tmp_path / "out/model.safetensors")
    for name, value in values.items():
        wanted = value + exact[name] - plain[name].float()
        codes = merged[name]
        scale = merged[f"{name}_scale"]
        once, its_scale, _ = to_fp8(wanted)
        rounding = difference(once.float() * its_scale.float(), wanted)
        assert scale.shape == (len(wanted), 1)
        assert difference(codes.float() * scale.float(), wanted) < 1.01 * rounding < 0.03, name


def test_of_pairs_the_preferred_answers_are_measured(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path)
    pairs: dict[str, Any] = {"method": {"type": "dpo"}}
    files = save_pairs(tmp_path / "train.jsonl", 8), save_pairs(tmp_path / "valid.jsonl", 5)
    for spec in (
        spec_for(tmp_path, files[0], valid=files[1], **pairs),
        spec_for(tmp_path, files[0], validation_split=0.5, **pairs),
    ):
        samples, reason = _validation(spec, 3)
        assert reason is None
        answers = [str(tokenizer.decode(sample.ids[sample.targets])) for sample in samples]
        assert len(answers) == 3
        assert all(answer.startswith("it is ") for answer in answers), (
            "not the other ones, which begin with no"
        )


def test_documents_are_measured_in_the_windows_that_the_job_validated_with(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    path = tmp_path / "documents.jsonl"
    path.write_text(
        "".join(json.dumps({"text": f"{word} " * 40}) + "\n" for word in ("here", "there"))
    )
    file = DataFileRef(name=path.name, path=str(path), sha256=sha256_of(path))
    spec = spec_for(tmp_path, file, valid=file, training={"max_length": 16})
    samples, reason = _validation(spec, 100)
    assert reason is None
    run = RunDir(tmp_path / "run")
    _, validated = job_samples(run, spec)
    assert len(samples) == len(validated) > 4
    assert all(
        np.array_equal(own.ids, other.ids) for own, other in zip(samples, validated, strict=True)
    )


def test_losses_for_which_there_is_no_memory_cost_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merging takes little, whatever the model: the process would be killed for its report."""
    base = save_tiny_llama(tmp_path / "base")
    needed = (
        1.1 * 2 * sum(tensor.numel() for tensor in load_file(base / "model.safetensors").values())
    )
    monkeypatch.setattr(fidelity, "_validation", lambda spec, samples: ([], None))
    monkeypatch.setattr(fidelity, "available_memory", lambda: int(needed) - 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    spec = spec_for(base, precision={"compute": "bf16"})
    report = fidelity.measure(spec, base, tmp_path / "none", base, 2)
    assert report["validation_loss"] is None
    assert re.fullmatch(
        r"they need [\d.]+ KiB of memory, and [\d.]+ KiB are free", report["reason"]
    )


def test_losses_for_which_a_gpus_memory_is_too_small_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as beside a job that started meanwhile: what was merged stays, with the reason."""
    base = save_tiny_llama(tmp_path / "base")
    monkeypatch.setattr(fidelity, "_validation", lambda spec, samples: ([], None))
    monkeypatch.setattr(fidelity, "with_adapter", Mock(side_effect=torch.OutOfMemoryError))
    report = fidelity.measure(spec_for(base), base, tmp_path / "none", base, 2)
    assert report["validation_loss"] is None
    assert report["reason"].startswith("the memory of the GPU did not suffice")
