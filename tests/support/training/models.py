"""Tiny random bases for tests, and an unsharded reference of stock parts: plain linears on
dequantised weights, stock PEFT.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
)

from ft_service.bases.adapter_names import MAGNITUDE
from ft_service.rundir.directory import sha256_of
from ft_service.spec import BaseModelRef, DataFileRef, JobContext, JobSpec, parse_request, resolve
from tests.support.bases import AS_IT_IS
from tests.support.training.left_out import leave_out_defaults
from workers.base.load import initial_adapter, plain_name
from workers.model.build import base_on_meta, decoder_layers, precision_map
from workers.model.lora import adapted_modules
from workers.quant.weights import QUANTIZED

VOCABULARY = 256


HIDDEN = 48
"""Not a multiple of NF4's block, and no square: Gemma's embedding scale, its root, is rounded in
bf16.
"""

COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "initializer_range": 0.1,
}
GROUPED = {"num_key_value_heads": 2}
EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
}
"""Five experts of 80 rows: neither two nor three ranks' shares end where an expert does."""

DELTA_NET = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MAMBA2 = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**GROUPED},
    "qwen2": {**GROUPED},
    "qwen3": {**GROUPED, "head_dim": 14},
    "mistral": {**GROUPED, "sliding_window": 6, "head_dim": 12},
    "gemma": {**GROUPED, "head_dim": 16, "tie_word_embeddings": True},
    "gemma2": {
        **GROUPED,
        "head_dim": 16,
        "tie_word_embeddings": True,
        "sliding_window": 6,
        "attn_logit_softcapping": 0.5,
    },
    "gemma3_text": {**GROUPED, "head_dim": 16, "tie_word_embeddings": True, "sliding_window": 6},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {
        **GROUPED,
        "sliding_window": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "gpt_neox": {"use_parallel_residual": True},
    "mixtral": {
        **GROUPED,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "intermediate_size": 40,
        "sliding_window": 6,
    },
    "qwen3_moe": {
        **GROUPED,
        **EXPERTS,
        "head_dim": 12,
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
    },
    "olmoe": {**EXPERTS, "intermediate_size": 40},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "gpt_oss": {
        **GROUPED,
        "head_dim": 16,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "swiglu_limit": 0.5,
        "sliding_window": 6,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 2.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama4_text": {
        **GROUPED,
        "head_dim": 16,
        "num_hidden_layers": 4,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "intermediate_size": 40,
        "intermediate_size_mlp": 56,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 1, 1, 0],
        "attention_chunk_size": 8,
        "attn_temperature_tuning": True,
        "floor_scale": 4,
    },
    "ernie4_5_moe": {
        **GROUPED,
        "moe_num_experts": 5,
        "moe_k": 2,
        "moe_intermediate_size": 40,
        "moe_num_shared_experts": 1,
    },
    "nemotron_h": {
        **GROUPED,
        "head_dim": 16,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "moe_shared_expert_intermediate_size": 56,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 8,
    },
    "qwen3_next": {
        **GROUPED,
        **EXPERTS,
        **DELTA_NET,
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "shared_expert_intermediate_size": 40,
    },
    "qwen3_5_text": {
        **GROUPED,
        **DELTA_NET,
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "olmo_hybrid": {**GROUPED, **DELTA_NET, "layer_types": ["linear_attention", "full_attention"]},
    "kimi_linear": {
        **EXPERTS,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "granitemoehybrid": {
        **GROUPED,
        **MAMBA2,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 40,
    },
    "falcon_h1": {
        **GROUPED,
        **MAMBA2,
        "mamba_d_ssm": 96,
        "ssm_multipliers": [0.5, 1.5, 0.7, 0.9, 1.1],
    },
    "bamba": {**GROUPED, **MAMBA2, "attn_layer_indices": [1]},
    "lfm2": {**GROUPED, "layer_types": ["conv", "full_attention"]},
    "jamba": {
        **GROUPED,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 16,
        "mamba_dt_rank": 8,
    },
    "gemma4_text": {
        **GROUPED,
        "head_dim": 16,
        "global_head_dim": 16,
        "tie_word_embeddings": True,
        "enable_moe_block": True,
        "num_experts": 5,
        "top_k_experts": 2,
        "moe_intermediate_size": 40,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCABULARY,
    },
}
"""Model type of transformers → how its tiny random model differs from COMMON."""

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
OF_EXPERTS: dict[str, list[str]] = {
    "mixtral": ATTENTION,
    "qwen3_moe": ATTENTION,
    "olmoe": ATTENTION,
    "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
    "gpt_oss": ATTENTION,
    "llama4_text": ATTENTION,
    "ernie4_5_moe": ATTENTION,
    "nemotron_h": [*ATTENTION, "in_proj"],
    "gemma4_text": ATTENTION,
    "qwen3_next": [*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj"],
    "kimi_linear": [*ATTENTION, "f_b_proj", "g_b_proj", "kv_b_proj"],
    "granitemoehybrid": [*ATTENTION, "in_proj", "out_proj"],
    "falcon_h1": [*ATTENTION, "in_proj", "gate_proj", "up_proj", "down_proj"],
    "jamba": [*ATTENTION, "in_proj", "x_proj", "out_proj"],
}
"""Family → what to adapt there, where PEFT's own "all-linear" would put adapters on experts too, or
on what it refuses.
"""

KINDS = (
    "llama",
    "mistral",
    "gemma2",
    "phi",
    "gpt_neox",
    "qwen3_moe",
    "deepseek_v3",
    "gpt_oss",
    "llama4_text",
    "nemotron_h",
    "qwen3_5_text",
    "lfm2",
)
"""Families that have every kind of layers between them: windows, soft caps and a tied head, biases,
joint projections, experts, values of another width, sinks, chunks, two kinds of recurrence, and
convolutions.
"""
OTHER_FAMILIES = FAMILIES.keys() - KINDS
"""Their tests of plan, loading and packing are slow ones; the short list of parity has them all."""

MIXED_IN_FAMILIES = {
    "default": "bf16",
    "overrides": {
        r".*(q_proj|q_b_proj|qkv_proj|query_key_value)": "fp8",
        r".*(down_proj|fc2|dense_4h_to_h|feed_forward\.w2)": "nf4",
    },
}
"""Every kind of storage in one model, by the names that the families give their layers."""


def save_tiny(family: str, folder: Path, *, original_format: bool = True, **changes: Any) -> Path:
    """A random model in bf16 safetensors, in the layout of published checkpoints or in the one of
    transformers' modules.

    Norms, biases and buffers, which start as ones and zeros, get values that show whether they are
    used.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES.get(family, {}), **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.ndim == 1:
                tensor += 0.2 * torch.randn_like(tensor)
    model.save_pretrained(folder, save_original_format=original_format)
    leave_out_defaults(folder)
    return folder


LARGER = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "pad_token_id": None,
    "initializer_range": 0.02,
}


def save_tiny_llama(folder: Path, **changes: Any) -> Path:
    """A random two-layer Llama in bf16 safetensors."""
    return save_tiny("llama", folder, **{**LARGER, **changes})


def spec_for(
    model: Path,
    data: DataFileRef | None = None,
    *,
    ranks: int = 1,
    gpus: int = 0,
    valid: DataFileRef | None = None,
    **options: Any,
) -> JobSpec:
    """A resolved spec on a base folder; `options` as in a create body. `gpus`: of a host; without
    any, what offloads is refused.
    """
    file = data or DataFileRef(name="none.jsonl", path=str(model / "none.jsonl"), sha256="0" * 64)
    distributed = {"nproc_per_node": ranks, **AS_IT_IS, **options.pop("distributed", {})}
    body = {"model": "tiny", "training_file": "file", **options, "distributed": distributed}
    return resolve(
        parse_request(body),
        JobContext(
            job_id="ftjob-test",
            organization="local",
            model=BaseModelRef(name="tiny", path=str(model)),
            training_data=file,
            validation_data=valid,
            seed=7,
            gpus=gpus,
        ),
    )


def adapter_value(name: str, shape: torch.Size | tuple[int, ...], seed: int = 3) -> torch.Tensor:
    """A small value with no zero in it: with B = 0, A would get no gradient and an error there
    could not be seen.
    """
    if MAGNITUDE in name:
        return 1 + 0.1 * initial_adapter(name.replace(MAGNITUDE, "lora_A"), (1, *shape), seed)[0]
    return 0.1 * initial_adapter(name.replace("lora_B", "lora_A"), tuple(shape), seed)


def reference_name(name: str) -> str:
    """The plain name of a trained parameter of PEFT's, which copies modules that are trained
    whole.
    """
    return plain_name(name).replace(".modules_to_save.default", "")


def reference(model: Path, spec: JobSpec, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The unsharded truth: transformers' own loading, weights replaced by their dequantised values,
    stock PEFT layers.
    """
    # Older versions of transformers take sdpa for models with soft capping, and leave the capping
    # out.
    described = AutoConfig.from_pretrained(model)
    capped = described.to_dict().get("attn_logit_softcapping")
    of_several = described.get_text_config(decoder=True) is not described
    stock = AutoModelForImageTextToText if of_several else AutoModelForCausalLM
    base = stock.from_pretrained(
        model, dtype=dtype, attn_implementation="eager" if capped else None
    )
    targets = spec.lora.target_modules
    # Without towers, whose layers overrides must not match.
    named = base_on_meta(str(model)) if of_several else base
    if of_several and targets == "all-linear":  # PEFT's own would adapt the towers too
        targets = adapted_modules(named, spec.lora, shared_experts=spec.shared_experts)
    # Which says of experts what published classes may not.
    named = named if of_several else base_on_meta(str(model))
    for name, weight_format in precision_map(named, decoder_layers(named), spec.precision).items():
        weight = _weight(base, name)
        by_outputs = weight.data.mT if _is_transposed(base, name) else weight.data
        stored = by_outputs.to(torch.bfloat16).flatten(0, -2)
        if weight_format in NUMERICS:
            numerics = NUMERICS[weight_format]
            changed = numerics.dequantize(numerics.quantize(stored), stored.shape[1], dtype).view(
                by_outputs.shape
            )
            weight.data = changed.mT.contiguous() if _is_transposed(base, name) else changed
    config = LoraConfig(
        r=spec.lora.r,
        lora_alpha=spec.lora.lora_alpha,  # pyright: ignore[reportArgumentType]
        target_modules=targets,
        target_parameters=list(spec.lora.target_parameters) or None,
        rank_pattern=dict(spec.lora.rank_pattern),
        alpha_pattern=dict(spec.lora.alpha_pattern),
        use_dora=spec.lora.use_dora,
        modules_to_save=list(spec.lora.modules_to_save) or None,
        ensure_weight_tying=bool(spec.lora.modules_to_save)
        and described.get_text_config(decoder=True).tie_word_embeddings,
        task_type="CAUSAL_LM",
    )
    peft_model = get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(adapter_value(reference_name(name), parameter.shape))
    if dtype != torch.float32:
        _multiply_adapters_in(peft_model, dtype)
    return peft_model


def _multiply_adapters_in(peft_model: nn.Module, dtype: torch.dtype) -> None:
    """Make adapters multiply as mixed precision does: fp32 masters, cast where they are used.

    PEFT would cast the input instead.
    """

    def in_dtype(linear: nn.Linear, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input.to(dtype), linear.weight.to(dtype))

    for name, module in peft_model.named_modules():
        if name.endswith((".lora_A.default", ".lora_B.default")):
            assert isinstance(module, nn.Linear)
            module.forward = functools.partial(in_dtype, module)


NUMERICS: dict[str, Any] = {name: kind.NUMERICS.module for name, kind in QUANTIZED.items()}


def _is_transposed(base: nn.Module, name: str) -> bool:
    """Whether a weight is a stack of experts [experts, in, out]."""
    parent: Any = base.get_submodule(name.rpartition(".")[0])
    return getattr(parent, "is_transposed", type(parent).__name__ == "Llama4TextExperts")


def _weight(base: nn.Module, name: str) -> nn.Parameter:
    """[rows, cols] of a linear layer, [experts, rows, cols] of stacked experts, or transposed."""
    parent, _, child = name.rpartition(".")
    member: Any = getattr(base.get_submodule(parent), child)
    return member if isinstance(member, nn.Parameter) else member.weight


LONGROPE: dict[str, Any] = {
    "original_max_position_embeddings": 16,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
        "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
        "original_max_position_embeddings": 16,
    },
}
"""Changes of a tiny Phi 3: beyond 16 tokens all of them are rotated by other frequencies."""


def save_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 259 tokens with a ChatML template."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=259, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator([""], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<pad>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return fast


CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_chat_base(folder: Path, **changes: Any) -> Path:
    """A random Llama whose 259 rows of vocabulary divide by no world size but 7, with its
    tokenizer.
    """
    save_tiny_llama(folder, vocab_size=259, max_position_embeddings=256, **changes)
    save_tokenizer(folder)
    return folder


def save_chats(path: Path, count: int) -> DataFileRef:
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"say {i}"},
                {"role": "assistant", "content": f"it is {i * 7}" + "!" * (i % 5)},
            ]
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return DataFileRef(name=path.name, path=str(path), sha256=sha256_of(path))


def save_labelled(path: Path, count: int, *, bad: int = 2) -> DataFileRef:
    """Chats with labels, of which every `bad`-th is a bad answer; prompts of several lengths."""
    lines: list[dict[str, Any]] = []
    for i in range(count):
        good = i % bad > 0
        words = f"it is {i * 7}" + "!" * (i % 5) if good else f"no {i}" + "?" * (3 * i % 7)
        turns = (("user", "say " + "so " * (i % 4) + str(i)), ("assistant", words))
        messages = [{"role": role, "content": content} for role, content in turns]
        lines.append({"messages": messages, "label": good})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return DataFileRef(name=path.name, path=str(path), sha256=sha256_of(path))


def save_pairs(path: Path, count: int) -> DataFileRef:
    """Preference pairs as OpenAI writes them. The preferred answer is the shorter one by turns."""
    lines: list[dict[str, Any]] = []
    for i in range(count):
        ask = f"say {i}"
        good = f"it is {i * 7}" + "!" * (i % 5)
        bad = f"no {i}" + "?" * (3 * i % 7)
        outputs = {"preferred_output": good, "non_preferred_output": bad}
        answers = {
            name: [{"role": "assistant", "content": words}] for name, words in outputs.items()
        }
        lines.append({"input": {"messages": [{"role": "user", "content": ask}]}, **answers})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return DataFileRef(name=path.name, path=str(path), sha256=sha256_of(path))
