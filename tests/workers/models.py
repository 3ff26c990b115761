"""Tiny random bases for tests, and an unsharded reference of stock parts: plain linears on dequantised weights, stock PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from ft_service.rundir import sha256_of
from ft_service.spec import BaseModelRef, DataFileRef, JobSpec, parse_request, resolve
from workers.model.build import decoder_layers, precision_map
from workers.model.load import initial_adapter, plain_name
from workers.quant import fp8, nf4

VOCABULARY = 256


def save_tiny_llama(folder: Path, **changes: Any) -> Path:
    """A random two-layer Llama in bf16 safetensors."""
    values: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    config = LlamaConfig(**{**values, **changes})
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def spec_for(
    model: Path, data: DataFileRef | None = None, *, ranks: int = 1, valid: DataFileRef | None = None, **options: Any
) -> JobSpec:
    """A resolved spec on a base folder; `options` as in a create body."""
    file = data or DataFileRef(name="none.jsonl", path=str(model / "none.jsonl"), sha256="0" * 64)
    distributed = {"nproc_per_node": ranks, **options.pop("distributed", {})}
    body = {"model": "tiny", "training_file": "file", **options, "distributed": distributed}
    return resolve(
        parse_request(body),
        job_id="ftjob-test",
        organization="local",
        model=BaseModelRef(name="tiny", path=str(model)),
        training_data=file,
        validation_data=valid,
        seed=7,
        gpus=0,
    )


def adapter_value(name: str, shape: torch.Size | tuple[int, ...], seed: int = 3) -> torch.Tensor:
    """A small value with no zero in it: with B = 0, A would get no gradient and an error there could not be seen."""
    return 0.1 * initial_adapter(name.replace("lora_B", "lora_A"), tuple(shape), seed)


def reference(model: Path, spec: JobSpec, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The unsharded truth: transformers' own loading, weights replaced by their dequantised values, stock PEFT layers."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    for name, weight_format in precision_map(base, decoder_layers(base), spec.precision).items():
        linear: Any = base.get_submodule(name)
        stored = linear.weight.data.to(torch.bfloat16)
        if weight_format == "nf4":
            linear.weight.data = nf4.dequantize(nf4.quantize(stored), stored.shape[1], dtype)
        elif weight_format == "fp8":
            linear.weight.data = fp8.dequantize(fp8.quantize(stored), stored.shape[1], dtype)
    config = LoraConfig(r=spec.lora.r, lora_alpha=spec.lora.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    peft_model = get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(adapter_value(plain_name(name), parameter.shape))
    return peft_model


def save_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 259 tokens with a ChatML template."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(vocab_size=259, initial_alphabet=alphabet, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([""], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<pad>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return fast


CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_chat_base(folder: Path, **changes: Any) -> Path:
    """A random Llama whose 259 rows of vocabulary divide by no world size but 7, with its tokenizer."""
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
