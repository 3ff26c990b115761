"""transformers' Trainer with PEFT as a contender of `images.py`, which starts this program once a
run.

    python benchmarks/images_trainer.py SETTINGS.json

It reads the settings and the samples, and writes what it measured next to them. The samples are
tokens already, in the order in which our steps take them; their pictures are those of the data
file, decoded and processed for each step, as by TRL's collator of images.
"""

from __future__ import annotations

import base64
import io
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":  # the repository's root, for programs started by path
    sys.path.insert(0, str(Path(__file__).parent.parent))

TEXT_PART = r".*\.language_model\..*\.(q|k|v|o|gate|up|down)_proj"
"""Names of the linear layers that our job's adapters are on."""


@dataclass(frozen=True)
class Settings:
    """What both sides have in common."""

    base: str
    out: str
    """A folder, for this program alone."""
    batch: int
    """Samples of a step."""
    lora_rank: int
    lora_alpha: int
    learning_rate: float
    max_grad_norm: float
    seed: int


@dataclass(frozen=True)
class Turn:
    """A sample, at its place in the order of training."""

    url: str
    """The picture, as a `data:` URL."""
    ids: list[int]
    labels: list[int]
    """-100: no target."""


@dataclass
class Measured:
    """What a run showed, by step."""

    step_ends: list[float]
    """Seconds since some moment."""
    losses: list[float]


def run(settings: Settings, turns: list[Turn]) -> Measured:
    """Train, and return what was measured."""
    from peft import LoraConfig, get_peft_model
    from transformers import (
        AutoImageProcessor,
        AutoModelForImageTextToText,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from benchmarks.training_trl import begin_as_we_do, keep_freed_memory

    keep_freed_memory()
    measured = Measured([], [])

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            measured.step_ends.append(time.perf_counter())

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

    base = AutoModelForImageTextToText.from_pretrained(settings.base, dtype=torch.float32)
    adapters = LoraConfig(
        r=settings.lora_rank, lora_alpha=settings.lora_alpha, target_modules=TEXT_PART
    )
    model = get_peft_model(base, adapters)
    begin_as_we_do(model, settings.seed)
    options = TrainingArguments(
        output_dir=settings.out,
        num_train_epochs=1,  # the turns are those of all epochs
        per_device_train_batch_size=settings.batch,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=settings.max_grad_norm,
        optim="adamw_torch",
        use_cpu=not torch.cuda.is_available(),
        seed=settings.seed,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    processor = AutoImageProcessor.from_pretrained(settings.base, backend="pil")
    collate = Collator(processor, base.config.image_token_id, base.config.text_config.pad_token_id)
    trainer: Any = Trainer(
        model=model,
        args=options,
        train_dataset=turns,  # pyright: ignore[reportArgumentType]
        data_collator=collate,
        callbacks=[Clock()],
    )
    trainer.train()
    return measured


class Collator:
    """Makes a step's batch of turns: padded texts, and pixels of pictures."""

    def __init__(self, processor: Any, image_id: int, pad_id: int) -> None:
        self.processor, self.image_id, self.pad_id = processor, image_id, pad_id

    def __call__(self, turns: list[Turn]) -> dict[str, Any]:
        from PIL import Image

        pad = torch.nn.utils.rnn.pad_sequence
        images = [
            Image.open(io.BytesIO(base64.b64decode(turn.url.partition(",")[2]))).convert("RGB")
            for turn in turns
        ]
        ids = [torch.tensor(turn.ids) for turn in turns]
        rows = pad(ids, batch_first=True, padding_value=self.pad_id)
        own = [torch.tensor(turn.labels) for turn in turns]
        return {
            **self.processor(images, return_tensors="pt"),
            "input_ids": rows,
            "mm_token_type_ids": (rows == self.image_id).long(),
            "attention_mask": pad([torch.ones_like(row) for row in ids], batch_first=True),
            "labels": pad(own, batch_first=True, padding_value=-100),
        }


if __name__ == "__main__":
    document = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    settings = Settings(**document["settings"])
    measured = run(settings, [Turn(**turn) for turn in document["turns"]])
    text = json.dumps(asdict(measured))
    Path(settings.out, "measured.json").write_text(text, encoding="utf-8")
