"""The second epoch over pictures of a camera's size: ours against TRL's SFTTrainer with PEFT.

    python benchmarks/images.py [--shapes smolvlm,qwen3-vl] [--repeats 3] [--trl FOLDER] [--no-save]

Random bases in fp32, in the shapes of two published ones, of which only the number of layers and
the vocabulary are made smaller, both by one factor: so the share of the tower in a step's
arithmetic is that of the published base. Pictures are JPEG files of 1024 x 768 pixels, through the
published processor's options. LoRA of rank 16 is on every linear layer of the text part, the tower
is frozen, AdamW has a constant rate, and each contender is one process. Both see the same samples
in the same order from the same initial adapters, and a run whose losses differ is an error. The
contenders take turns.

TRL decodes and processes the pictures of each step and asks the tower about them. Ours asks the
tower once, before the first step. The seconds of that, its bytes, and the first epochs are told
beside. `--trl`: a folder with TRL and its packages, where they are not installed
(`pip install --no-deps --target FOLDER trl datasets dill multiprocess xxhash pandas`).
"""

from __future__ import annotations

import argparse
import base64
import io
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

if __name__ == "__main__":  # the repository's root, for benchmarks started by path
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.images_trl import Measured, Settings, Turn
from benchmarks.machine import machine, save
from benchmarks.training import surroundings, watched
from ft_service.data.tokens.tokenize import load_dataset, load_tokenizer
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.directory import RunDir, sha256_of
from ft_service.rundir.documents import Start
from ft_service.rundir.events import read_segments
from ft_service.spec import DataFileRef, JobSpec
from workers.data.batches import batch_of_step
from workers.describe import describe
from workers.images.computing import FOLDER, compute_features

ROOT = Path(__file__).parent.parent
OURS = "ours"
TRL = "TRL"
SIZE = (1024, 768)
"""Width and height of the pictures, in pixels."""
EPOCHS = 2
MAX_LENGTH = 2048
LORA_RANK = 16
LORA_ALPHA = 32
LEARNING_RATE = 1e-3
MAX_GRAD_NORM = 1.0
SEED = 7
LIKE_OURS = 1e-5
"""Largest relative difference between a step's losses, which the two compute in another order."""


@dataclass(frozen=True)
class Shape:
    """A published base with fewer layers and tokens."""

    published: str
    family: str
    """Of `tests.support.image_bases`, whose tokenizer and template it gets."""
    model_type: str
    fewer: int
    """What layers and vocabulary are divided by."""
    vision: Mapping[str, Any]
    """Values of the published config, but for what is divided."""
    text: Mapping[str, Any]
    preprocessor: Mapping[str, Any]
    """Options of the published image processor, where the family's are others."""
    others: Mapping[str, Any] = field(default_factory=dict)
    pictures: int = 2
    """Of an epoch."""
    batch: int = 1
    """Pictures of a step."""


SHAPES = {
    "smolvlm": Shape(
        published="HuggingFaceTB/SmolVLM-256M-Instruct",
        family="smolvlm",
        model_type="smolvlm",
        fewer=6,
        vision={
            **{"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12},
            **{"num_hidden_layers": 12 // 6, "patch_size": 16, "image_size": 512},
        },
        text={
            **{"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536},
            **{"num_hidden_layers": 30 // 6, "num_attention_heads": 9, "num_key_value_heads": 3},
            **{"head_dim": 64, "vocab_size": 49_280 // 6, "tie_word_embeddings": True},
        },
        preprocessor={
            "size": {"longest_edge": 2048},
            "max_image_size": {"longest_edge": 512},
        },
        others={"scale_factor": 4},
    ),
    "qwen3-vl": Shape(
        published="Qwen/Qwen3-VL-2B-Instruct",
        family="qwen 3 vl",
        model_type="qwen3_vl",
        fewer=8,
        vision={
            **{"hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "depth": 24 // 8},
            **{"patch_size": 16, "out_hidden_size": 2048, "deepstack_visual_indexes": [0, 1, 2]},
        },
        text={
            **{"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28 // 8 + 1},
            **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
            **{"vocab_size": 151_936 // 8, "tie_word_embeddings": True},
        },
        preprocessor={"size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}},
    ),
}
"""Two ends of what is published: a base of which the tower computes most, and one of which the text
part does.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="smolvlm", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--trl", metavar="FOLDER", help="with TRL, where it is not installed")
    parser.add_argument("--no-save", action="store_true", help="print the results only")
    options = parser.parse_args()
    result: dict[str, Any] = {**machine(), "repeats": options.repeats, "picture": list(SIZE)}
    for name in options.shapes.split(","):
        with tempfile.TemporaryDirectory(prefix="ft-bench-") as folder:
            result[name] = Bench(Path(folder), SHAPES[name], options.trl).compare(options.repeats)
        print(json.dumps({name: result[name]}, indent=2), flush=True)
    if not options.no_save:
        save("images", result)


class Bench:
    """Runs on one base."""

    def __init__(self, folder: Path, shape: Shape, trl: str | None) -> None:
        """`trl`: a folder with TRL, where it is not installed."""
        self.folder = folder
        self.shape = shape
        self.trl_folder = trl
        self.base = folder / "base"
        self.weights = save_base(self.base, shape)
        self.turns = [turn_of(number) for number in range(shape.pictures)]
        lines = [json.dumps(line_of(turn)) for turn in self.turns]
        file = folder / "photos.jsonl"
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        self.file = DataFileRef(name=file.name, path=str(file), sha256=sha256_of(file))
        steps = EPOCHS * shape.pictures // shape.batch
        self.order = [
            number
            for step in range(steps)
            for number in batch_of_step(step, shape.pictures, shape.batch, SEED)
        ]
        self.described = describe(str(self.base))
        self.runs = 0

    def compare(self, repeats: int) -> dict[str, Any]:
        """Runs in turns, and their medians."""
        runs: dict[str, list[Measured]] = {OURS: [], TRL: []}
        size, seconds = self.features()
        for repeat in range(repeats):
            runs[OURS].append(self.ours())
            runs[TRL].append(self.trl())
            losses = zip(runs[TRL][-1].losses, runs[OURS][-1].losses, strict=True)
            apart = max(abs(his - own) / own for his, own in losses)
            if apart > LIKE_OURS:
                raise SystemExit(
                    f"the losses differ by up to {apart:.1e}: {runs[TRL][-1].losses} and "
                    f"{runs[OURS][-1].losses}"
                )
            for name, done in runs.items():
                first, second = self._epochs(done[-1])
                print(
                    f"{repeat + 1}/{repeats}: {name:5} {first:6.2f} s {second:6.2f} s", flush=True
                )
        table = {name: self._summary(done) for name, done in runs.items()}
        ratio = table[TRL]["second_epoch_seconds"] / table[OURS]["second_epoch_seconds"]
        return {
            "shape": self.shape.published,
            "layers_and_vocabulary_divided_by": self.shape.fewer,
            **self.weights,
            "pictures": self.shape.pictures,
            "bytes_of_features": size,
            "seconds_of_features": round(seconds, 2),
            **table,
            "ours_times_its_speed": round(ratio, 2),
        }

    def _summary(self, runs: list[Measured]) -> dict[str, Any]:
        firsts, seconds = zip(*(self._epochs(run) for run in runs), strict=True)
        return {
            "program": runs[0].program,
            "second_epoch_seconds": round(statistics.median(seconds), 3),
            "all_second_epochs": [round(own, 3) for own in seconds],
            "first_epoch_seconds_after_its_first_step": round(statistics.median(firsts), 3),
            "first_loss": round(runs[0].losses[0], 6),
            "last_loss": round(runs[0].losses[-1], 6),
        }

    def _epochs(self, run: Measured) -> tuple[float, float]:
        """Seconds of both epochs, of the first from the end of its first step."""
        half = len(run.step_ends) // 2
        first, middle, last = (run.step_ends[step] for step in (0, half - 1, -1))
        return middle - first, last - middle

    def features(self) -> tuple[int, float]:
        """Bytes and seconds of what the tower makes of all pictures."""
        run = RunDir(self._next_folder())
        samples = load_dataset(load_tokenizer(str(self.base)), self.file, MAX_LENGTH)
        began = time.perf_counter()
        count = compute_features(
            run, str(self.base), self.described, [samples], torch.device("cpu"), "fp32"
        )
        seconds = time.perf_counter() - began
        assert count == self.shape.pictures, "a picture is in two lines"
        return sum(file.stat().st_size for file in run.path(FOLDER).rglob("*.safetensors")), seconds

    def ours(self) -> Measured:
        run = RunDir(self._next_folder())
        run.write("spec.json", self.spec())
        Attempt(run, 1).write_start(self.start)
        command = [sys.executable, "-m", "ft_service.supervisor", str(run.root), "1"]
        watched(command, surroundings(self.start), run.root / "supervisor.log", 1)
        rows = [
            event
            for segment in read_segments(run, 1)
            for event in segment.events
            if event.kind == "metrics"
        ]
        losses = [row.metrics.train_loss or 0.0 for row in rows if row.metrics]
        ends = itertools.accumulate(row.metrics.step_seconds or 0.0 for row in rows if row.metrics)
        if len(losses) * self.shape.batch != len(self.order):
            raise RuntimeError(f"our run ended after {len(losses)} steps; see outcome.json")
        return Measured(list(ends), losses, "this project")

    def trl(self) -> Measured:
        folder = self._next_folder()
        settings = Settings(
            base=str(self.base),
            out=str(folder),
            batch=self.shape.batch,
            lora_rank=LORA_RANK,
            lora_alpha=LORA_ALPHA,
            learning_rate=LEARNING_RATE,
            max_grad_norm=MAX_GRAD_NORM,
            seed=SEED,
        )
        turns = [asdict(self.turns[number]) for number in self.order]
        written = json.dumps({"settings": asdict(settings), "turns": turns})
        (folder / "settings.json").write_text(written, encoding="utf-8")
        program = ROOT / "benchmarks/images_trl.py"
        command = [sys.executable, str(program), str(folder / "settings.json")]
        environment = surroundings(self.start)
        if self.trl_folder:
            environment["PYTHONPATH"] += os.pathsep + self.trl_folder
        watched(command, environment, folder / "trl.log", 1)
        found = json.loads((folder / "measured.json").read_text(encoding="utf-8"))
        return Measured(**found)

    def spec(self) -> JobSpec:
        from tests.support.training.models import spec_for

        return spec_for(
            self.base,
            self.file,
            training={
                "batch_size": self.shape.batch,
                "n_epochs": EPOCHS,
                "max_length": MAX_LENGTH,
                "learning_rate": LEARNING_RATE,
                "lr_scheduler_type": "constant",
                "warmup_ratio": 0.0,
                "max_grad_norm": MAX_GRAD_NORM,
            },
            lora={"r": LORA_RANK, "lora_alpha": LORA_ALPHA},
            precision={"default": "bf16", "compute": "fp32"},
            checkpoint={"save_steps": 10_000},  # the last step's is not counted
        )

    @property
    def start(self) -> Start:
        return Start(job_id="ftjob-test", attempt=1, world_size=1, generation=1, checkpoint=None)

    def _next_folder(self) -> Path:
        self.runs += 1
        folder = self.folder / f"{self.runs}"
        folder.mkdir()
        return folder


def save_base(folder: Path, shape: Shape) -> dict[str, int]:
    """A random base of a shape, in bf16, with a tokenizer of bytes; returns its weights: those of
    the text part without the embeddings, and the others but for these.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

    from tests.support.image_bases import FAMILIES, save_image_base

    own = FAMILIES[shape.family]
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    specials = (*own.specials, *(tiles if "<global-img>" in own.specials else ()))
    preprocessor = {**own.preprocessor, **shape.preprocessor}
    processor = dict(own.processor)
    if "image_seq_len" in processor:
        patches = shape.vision["image_size"] // shape.vision["patch_size"]
        processor["image_seq_len"] = (patches // shape.others["scale_factor"]) ** 2
    specials = tuple(dict.fromkeys(specials))
    save_image_base(
        folder,
        replace(own, specials=specials, preprocessor=preprocessor, processor=processor),
    )
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    known = AutoConfig.for_model(shape.model_type).to_dict()
    named = {
        "image_token_id": own.image_token,
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    ids = {
        key: tokenizer.convert_tokens_to_ids(token) for key, token in named.items() if key in known
    }
    config = AutoConfig.for_model(
        shape.model_type,
        vision_config=dict(shape.vision),
        text_config={**shape.text, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0},
        tie_word_embeddings=shape.text["tie_word_embeddings"],
        **shape.others,
        **ids,
    )
    torch.manual_seed(SEED)
    model: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    inner = model.model
    text = inner.language_model if hasattr(inner, "language_model") else inner.text_model
    in_text = sum(own.numel() for own in text.parameters())
    embedding = model.get_input_embeddings().weight.numel()
    tower = sum(own.numel() for own in inner.parameters()) - in_text
    return {"tower_weights": tower, "text_weights_without_embedding": in_text - embedding}


def turn_of(number: int) -> Turn:
    """A chat about a picture of its own."""
    return Turn(
        picture=base64.b64encode(photo(number)).decode(),
        question=f"What is to be seen in photo {number}, and where?",
        answer=f"Clouds of {number + 2} colours over a field of noise, seen at noon.",
    )


def line_of(turn: Turn) -> dict[str, Any]:
    """The chat as a line of OpenAI's form."""
    url = f"data:image/jpeg;base64,{turn.picture}"
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": turn.question},
    ]
    messages = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": turn.answer},
    ]
    return {"messages": messages}


def photo(seed: int) -> bytes:
    """A picture with large and small forms, as JPEG."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (6, 8, 3), dtype=np.uint8)
    clouds = np.asarray(Image.fromarray(coarse).resize(SIZE, Image.Resampling.BICUBIC), float)
    fine = generator.normal(0, 12, (SIZE[1], SIZE[0], 3))
    file = io.BytesIO()
    Image.fromarray(np.clip(clouds + fine, 0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


if __name__ == "__main__":
    main()
