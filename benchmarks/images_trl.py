"""TRL's SFTTrainer with PEFT as a contender of `images.py`, which starts this program once a run.

    python benchmarks/images_trl.py SETTINGS.json

It reads the settings and the turns, and writes what it measured next to them. TRL gets the chats
with their pictures as a data set of prompts, completions and images: its collator decodes and
processes the pictures of each step, and the published class looks at them in each forward. Chats
are in the order in which our steps take them, and the adapters begin with our values, so that every
step's loss must be ours.
"""

from __future__ import annotations

import base64
import json
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

if __name__ == "__main__":  # the repository's root, for programs started by path
    sys.path.insert(0, str(Path(__file__).parent.parent))

TEXT_PART = r".*\.(language_model|text_model)\..*\.(q|k|v|o|gate|up|down)_proj"
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
    """A chat of one question about one picture, at its place in the order of training."""

    picture: str
    """A JPEG file, in base64."""
    question: str
    answer: str

    def row(self) -> dict[str, Any]:
        """As TRL takes it."""
        return {
            "images": [{"bytes": base64.b64decode(self.picture), "path": None}],
            "prompt": [{"role": "user", "content": self.question}],
            "completion": [{"role": "assistant", "content": self.answer}],
        }


@dataclass
class Measured:
    """What a run showed, by step."""

    step_ends: list[float]
    """Seconds since some moment."""
    losses: list[float]
    program: str
    """Its name and version."""


def run(settings: Settings, turns: list[Turn]) -> Measured:
    """Train, and return what was measured."""
    import datasets  # pyright: ignore[reportMissingImports]
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl.trainer.sft_config import SFTConfig  # pyright: ignore[reportMissingImports]
    from trl.trainer.sft_trainer import SFTTrainer  # pyright: ignore[reportMissingImports]

    from benchmarks.training_trl import begin_as_we_do, keep_freed_memory
    from ft_service.data.tokens.image_processor import ImageProcessor

    datasets.disable_progress_bars()
    keep_freed_memory()
    measured = Measured([], [], f"TRL {version('trl')}")

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

    options = SFTConfig(
        output_dir=settings.out,
        num_train_epochs=1,  # the turns are those of all epochs
        per_device_train_batch_size=settings.batch,
        train_sampling_strategy="sequential",
        max_length=None,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=settings.max_grad_norm,
        optim="adamw_torch",
        bf16=False,
        gradient_checkpointing=False,  # TRL defaults to True
        model_init_kwargs={"dtype": "float32"},
        use_cpu=not torch.cuda.is_available(),
        seed=settings.seed,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    rows = datasets.Dataset.from_list([turn.row() for turn in turns])
    # The published class on Pillow, as our side has it: torchvision would make other pixels.
    processor = ImageProcessor.of(settings.base).published
    processor.chat_template = processor.tokenizer.chat_template
    if getattr(processor, "video_processor", False) is None:  # asked for these by any chat
        processor.video_processor = SimpleNamespace(num_frames=None, fps=None)
    trainer = SFTTrainer(
        model=settings.base,
        args=options,
        train_dataset=rows.cast_column("images", datasets.List(datasets.Image())),
        processing_class=processor,
        peft_config=LoraConfig(
            r=settings.lora_rank,
            lora_alpha=settings.lora_alpha,
            target_modules=TEXT_PART,
            task_type="CAUSAL_LM",
        ),
        callbacks=[Clock()],
    )
    collate = trainer.data_collator
    [newline] = processor.tokenizer.encode("\n", add_special_tokens=False)

    def with_our_targets(examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Templates write a line's end behind a turn's, which ours does not learn."""
        batch = collate(examples)
        batch["labels"][batch["labels"] == newline] = -100
        return batch

    trainer.data_collator = with_our_targets
    begin_as_we_do(trainer.model, settings.seed)
    trainer.train()
    return measured


if __name__ == "__main__":
    document = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    settings = Settings(**document["settings"])
    measured = run(settings, [Turn(**turn) for turn in document["turns"]])
    text = json.dumps(asdict(measured))
    Path(settings.out, "measured.json").write_text(text, encoding="utf-8")
