"""TRL's SFTTrainer with PEFT as a contender of `training.py`, which starts this program once a run
(with torchrun, twice).

    python benchmarks/training_trl.py SETTINGS.json

It reads the settings (`Settings`) and writes what each rank measured next to them. The samples are
tokens already, in the order in which our steps take them, and the adapters begin with our values:
without packing, every step's loss must be ours.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":  # the repository's root, for programs started by path
    sys.path.insert(0, str(Path(__file__).parent.parent))


@dataclass(frozen=True)
class Settings:
    """What both sides have in common, and how TRL is to be run."""

    base: str
    samples: str
    """A JSON file: a list of {"input_ids": [..], "labels": [..]} (-100: no target)."""
    out: str
    """A folder, for this program alone."""
    steps: int
    ranks: int
    packed: bool
    samples_per_rank: int
    """Of one forward, when not packed."""
    rows_per_rank: int
    """Of one step, when packed; one row a forward."""
    max_length: int
    lora_rank: int
    lora_alpha: int
    learning_rate: float
    max_grad_norm: float
    seed: int


@dataclass
class Measured:
    """Of one rank."""

    step_ends: list[float]
    """Seconds since the epoch."""
    tokens: list[int]
    """Of every forward, without padding."""
    targets: list[int]
    losses: list[float]
    """Of every step, over all ranks."""
    sharded: float
    """Share of the parameters' elements that are in DTensors which this rank holds a part of."""


def run(settings: Settings) -> None:
    import datasets  # pyright: ignore[reportMissingImports]
    from peft import LoraConfig
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl.trainer.sft_config import SFTConfig  # pyright: ignore[reportMissingImports]
    from trl.trainer.sft_trainer import SFTTrainer  # pyright: ignore[reportMissingImports]

    datasets.disable_progress_bars()
    gpu = torch.cuda.is_available()
    if not gpu:
        keep_freed_memory()
    measured = Measured([], [], [], [], 0.0)

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if gpu:
                torch.cuda.synchronize()
            measured.step_ends.append(time.time())

        def on_log(
            self,
            args: Any,
            state: Any,
            control: Any,
            logs: dict[str, float] | None = None,
            **others: Any,
        ) -> None:
            if logs and "loss" in logs:
                measured.losses.append(logs["loss"])

    options = SFTConfig(
        output_dir=settings.out,
        max_steps=settings.steps,
        per_device_train_batch_size=1 if settings.packed else settings.samples_per_rank,
        gradient_accumulation_steps=settings.rows_per_rank if settings.packed else 1,
        packing=settings.packed,
        max_length=settings.max_length,
        train_sampling_strategy="random" if settings.packed else "sequential",
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=settings.max_grad_norm,
        optim="adamw_torch",
        bf16=False,
        gradient_checkpointing=False,  # TRL defaults to True
        model_init_kwargs={"dtype": "float32"},
        use_cpu=not gpu,
        ddp_backend="gloo" if settings.ranks > 1 and not gpu else None,
        fsdp=True if settings.ranks > 1 else None,  # pyright: ignore[reportArgumentType]
        seed=settings.seed,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    if settings.ranks > 1 and not gpu:
        let_accelerate_shard()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(settings.base)
    trainer = SFTTrainer(
        model=settings.base,
        args=options,
        train_dataset=datasets.Dataset.from_list(json.loads(Path(settings.samples).read_text())),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=settings.lora_rank,
            lora_alpha=settings.lora_alpha,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        ),
        callbacks=[Clock()],
    )
    begin_as_we_do(trainer.model, settings.seed)
    trainer.data_collator = counting(trainer.data_collator, measured)
    trainer.train()
    measured.sharded = sharded_share(trainer.model_wrapped)
    rank = int(os.environ.get("RANK", "0"))
    Path(settings.out, f"{rank}.json").write_text(json.dumps(asdict(measured)))


def keep_freed_memory() -> None:
    """Tell glibc's allocator what our ranks on processors tell it, which is worth a third of a step
    to anybody.
    """
    name = "workers.ranks.allocator"
    if importlib.util.find_spec(name) is not None:
        importlib.import_module(name).keep_freed_memory()


def let_accelerate_shard() -> None:
    """On CPUs accelerate takes DDP whatever it is asked for: its own FSDP2 code is behind a list of
    kinds of devices without them. Say that these processes are of such a kind, before the trainer
    asks.
    """
    from accelerate import PartialState  # pyright: ignore[reportMissingImports]
    from accelerate.utils import DistributedType  # pyright: ignore[reportMissingImports]

    state: Any = PartialState
    state._shared_state["distributed_type"] = DistributedType.MULTI_GPU


@torch.no_grad()
def begin_as_we_do(model: Any, seed: int) -> None:
    """Give the adapters the values with which our job begins."""
    from workers.base.load import initial_adapter, plain_name

    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.copy_(initial_adapter(plain_name(name), tuple(parameter.shape), seed))


def counting(collate: Any, measured: Measured) -> Any:
    """A collator that also counts a batch's tokens that are no padding, and the targets that
    something predicts.
    """

    def collate_and_count(examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = collate(examples)
        mask = batch.get("attention_mask")
        measured.tokens.append(int(mask.sum()) if mask is not None else batch["input_ids"].numel())
        measured.targets.append(int((batch["labels"][:, 1:] != -100).sum()))
        return batch

    return collate_and_count


def sharded_share(model: Any) -> float:
    from torch.distributed.tensor import DTensor

    parameters = list(model.parameters())
    sharded = [
        p
        for p in parameters
        if isinstance(p, DTensor) and 2 * p.to_local().numel() <= p.numel() + 1
    ]
    return sum(p.numel() for p in sharded) / sum(p.numel() for p in parameters)


if __name__ == "__main__":
    run(Settings(**json.loads(Path(sys.argv[1]).read_text())))
