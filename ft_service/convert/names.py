"""What the usual options of other tools are called here: docs/from-other-tools.md, made from the rules of `ft convert`.

`python -m ft_service.convert.names` prints the page; a test holds the page to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ft_service.convert.rules import NotSupported, Source, Taken, Verdict, verdict_on
from ft_service.convert.transformers import TABLE

_TRAINING: Mapping[str, Any] = {
    "num_train_epochs": 3,
    "max_steps": 500,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 2e-4,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.03,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "optim": "adamw_8bit",
    "bf16": True,
    "gradient_checkpointing": True,
    "eval_strategy": "steps",
    "eval_steps": 50,
    "save_steps": 50,
    "save_total_limit": 3,
    "seed": 7,
    "report_to": "wandb",
}
"""Of Transformers' TrainingArguments, as trainers on top of it are used."""

TOOLS: Mapping[str, Mapping[str, Any]] = {
    "TRL": {
        "model_name_or_path": "Qwen/Qwen3-8B",
        "torch_dtype": "bfloat16",
        "attn_implementation": "flash_attention_2",
        "dataset_name": "org/data",
        "use_peft": True,
        "lora_r": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.05,
        "lora_target_modules": "all-linear",
        "lora_modules_to_save": ["lm_head"],
        "use_rslora": True,
        "use_dora": True,
        "load_in_4bit": True,
        "load_in_8bit": True,
        "bnb_4bit_quant_type": "nf4",
        "max_length": 2048,
        "packing": True,
        "padding_free": True,
        "assistant_only_loss": True,
        **_TRAINING,
    },
    "Axolotl": {
        "base_model": "Qwen/Qwen3-8B",
        "adapter": "qlora",
        "lora_r": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.05,
        "lora_target_modules": ["q_proj", "v_proj"],
        "lora_target_linear": True,
        "peft_use_rslora": True,
        "load_in_4bit": True,
        "load_in_8bit": True,
        "datasets": [{"path": "data.jsonl"}],
        "chat_template": "tokenizer_default",
        "val_set_size": 0.05,
        "train_on_inputs": False,
        "sequence_len": 2048,
        "sample_packing": True,
        "num_epochs": 3,
        "max_steps": 500,
        "micro_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 2e-4,
        "lr_scheduler": "cosine",
        "warmup_ratio": 0.03,
        "optimizer": "adamw_torch_fused",
        "weight_decay": 0.01,
        "gradient_checkpointing": True,
        "flash_attention": True,
        "evals_per_epoch": 1,
        "eval_steps": 50,
        "saves_per_epoch": 1,
        "save_steps": 50,
        "save_total_limit": 3,
        "seed": 7,
        "wandb_project": "mine",
    },
    "LLaMA-Factory": {
        "model_name_or_path": "Qwen/Qwen3-8B",
        "stage": "sft",
        "finetuning_type": "lora",
        "lora_rank": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.05,
        "lora_target": "all",
        "additional_target": "lm_head",
        "use_rslora": True,
        "use_dora": True,
        "quantization_bit": 4,
        "quantization_method": "bnb",
        "double_quantization": True,
        "dataset": "mine",
        "template": "qwen3",
        "cutoff_len": 2048,
        "max_samples": 1000,
        "packing": True,
        "neat_packing": True,
        "train_on_prompt": False,
        "val_size": 0.05,
        "plot_loss": True,
        "overwrite_output_dir": True,
        **_TRAINING,
    },
    "Unsloth": {
        "model_name": "unsloth/Qwen3-8B",
        "max_seq_length": 2048,
        "dtype": "bfloat16",
        "load_in_4bit": True,
        "load_in_8bit": True,
        "full_finetuning": True,
        "r": 16,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "lora_alpha": 16,
        "lora_dropout": 0,
        "bias": "none",
        "use_gradient_checkpointing": "unsloth",
        "random_state": 7,
        "use_rslora": True,
        "loftq_config": None,
        **_TRAINING,
    },
}
"""Tool → its usual options, each with a value as an example."""

_HEAD = """\
# From TRL, Axolotl, LLaMA-Factory and Unsloth

`ft convert FILE` turns a configuration of TRL, Axolotl, LLaMA-Factory, Accelerate, DeepSpeed or Transformers into a SPEC,
says of every option what became of it, and exits with 1 where the result may differ without one. These tables are made from
its rules, with a value as an example; they hold the usual options, and the command knows more. Unsloth is set up in Python:
its arguments are `from_pretrained`'s, `get_peft_model`'s and the trainer's configuration. `ft submit` and `ft run` know
these names too: who writes `lora.rank` is told that it is `lora.r` here.

What is the same for all of them:

- **Data** are [chat lines](jobs.md#data). The base's own chat template renders them, and the assistant's messages are
  learned.
- **A step** is defined by `training.batch_size`: samples over all ranks. What another tool calls micro-batch, times
  accumulation, times processes, is that number. How many go through the model at once is chosen by memory.
- **Packing** is on, and no sample sees another: results are those of padded samples.
"""


def page() -> str:
    """The page, as Markdown."""
    parts = [_HEAD]
    for tool, options in TOOLS.items():
        rows = "\n".join(f"| `{name}: {_shown(value)}` | {text} |" for name, value, text in _rows(options))
        parts.append(f"## {tool}\n\n| {tool} | here |\n| --- | --- |\n{rows}\n")
    return "\n".join(parts)


def _rows(options: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    for name, value in options.items():
        alone = {name: value} if name != "gradient_accumulation_steps" else {name: value, "per_device_train_batch_size": 4}
        yield name, value, _text(verdict_on(TABLE, Source(alone), name))


def _text(verdict: Verdict) -> str:
    if isinstance(verdict, Taken):
        return ", ".join(f"`{name}: {_shown(value)}`" for name, value in verdict.options.items())
    return f"{'**no**: ' if isinstance(verdict, NotSupported) else 'not needed: '}{verdict.reason}"


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    print(page(), end="")
