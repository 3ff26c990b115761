"""Bytes and seconds of steps by the length of their one sample: ours against TRL's SFTTrainer with
PEFT, both with what they have for long samples.

    python benchmarks/long.py [--lengths 512,2048,8192] [--steps 3] [--trl FOLDER] [--no-save]

The same random Llama, with layers of Llama-3.1-8B's proportions, in fp32, the same tokens, every
one a target, LoRA of rank 16 on every linear layer, the same initial adapters, AdamW. Ours with
every layer computed again (`full`), with feed-forwards by tiles (`tiled`) and with layers' inputs
in the host's memory (`offload`); TRL with gradient checkpointing, its default, and with
`activation_offloading` on top. Every run has a process of its own, and every step's loss must be
the same.

Bytes are those of tensors, block by block from PyTorch's allocator, in a forward and backward
besides those that were there before. This processor stands for the device, and copies of the host
lie where that allocator does not see them, on both sides. Tiles are of 256 tokens here instead of
8,192, as lengths are shorter. `--trl`: a folder with TRL and its packages, where they are not
installed (`pip install --no-deps --target FOLDER trl datasets dill multiprocess xxhash pandas`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":  # the repository's root, for benchmarks started by path
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.bases import Llama
from benchmarks.chats import write_base
from benchmarks.long_trl import Measured, Settings, measured_step
from benchmarks.machine import machine, save

ROOT = Path(__file__).parent.parent
LLAMA = Llama(hidden=128, intermediate=448, layers=12, heads=4, groups=1, vocabulary=512)
"""Few words: a chunk of logits does not grow with length, and would hide what does."""
TILE_ROWS = 256
BLOCK_BYTES = 2**18
SEED = 7
LEARNING_RATE = 1e-3
LIKE_OURS = 1e-5
"""Largest relative difference of a step's loss: the same sums in another order."""
CONTENDERS = {
    "ours, full": "full",
    "ours, tiled": "tiled",
    "ours, offload": "offload",
    "TRL, checkpointing": "checkpointing",
    "TRL, offloading": "offloading",
}
SECONDS = 3600


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", default="512,2048,8192", help="tokens of a sample")
    parser.add_argument("--steps", type=int, default=3, help="of every run")
    parser.add_argument("--only", default="", help="contenders whose name contains this")
    parser.add_argument("--trl", metavar="FOLDER", help="with TRL, where it is not installed")
    parser.add_argument("--no-save", action="store_true", help="print the results only")
    parser.add_argument("--ours", metavar="SETTINGS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ours:
        settings = Settings(**json.loads(Path(options.ours).read_text(encoding="utf-8")))
        text = json.dumps(asdict(ours(settings)))
        Path(settings.out, "measured.json").write_text(text, encoding="utf-8")
        return
    lengths = [int(length) for length in options.lengths.split(",")]
    result: dict[str, Any] = {
        **machine(),
        "llama": vars(LLAMA),
        "tile_rows": TILE_ROWS,
        "steps": options.steps,
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "lengths": {},
    }
    with tempfile.TemporaryDirectory(prefix="ft-bench-") as folder:
        base = Path(folder) / "base"
        write_base(base, LLAMA)
        for length in lengths:
            names = [name for name in CONTENDERS if options.only in name]
            found = compared(Path(folder), base, length, options, names)
            result["lengths"][str(length)] = found
    if not options.no_save:
        save("long", result)


def compared(
    folder: Path, base: Path, length: int, options: Any, names: list[str]
) -> dict[str, Any]:
    """What each contender needs for samples of one length."""
    found: dict[str, Any] = {}
    losses: list[float] = []
    for name in names:
        out = folder / f"{length} {name}"
        out.mkdir()
        own = run(settings_of(base, out, length, options.steps, CONTENDERS[name]), options.trl)
        losses = losses or own.losses
        apart = max(abs(a - b) / b for a, b in zip(own.losses, losses, strict=True))
        if apart > LIKE_OURS:
            raise RuntimeError(f"{name}: losses {own.losses} differ by {apart:.1e} from {losses}")
        found[name] = {
            "peak_mib": round(own.peak / 2**20, 1),
            "host_mib": round(own.host / 2**20, 1),
            "bytes_per_token": round(own.peak / length),
            "seconds": round(statistics.median(own.seconds[1:-1] or own.seconds), 2),
            "all_seconds": [round(seconds, 2) for seconds in own.seconds],
            "losses": own.losses,
            "program": own.program,
        }
        print(
            f"{length:7,} tokens  {name:20} {found[name]['peak_mib']:8.1f} MiB, "
            f"{found[name]['host_mib']:7.1f} of the host, {found[name]['seconds']:7.2f} s a step",
            flush=True,
        )
    return found


def settings_of(base: Path, out: Path, length: int, steps: int, mode: str) -> Settings:
    generator = torch.Generator().manual_seed(SEED)
    # Ids below are those of special tokens.
    drawn = torch.randint(8, LLAMA.vocabulary, (steps, length), generator=generator)
    return Settings(
        mode=mode,
        base=str(base),
        samples=drawn.tolist(),
        out=str(out),
        lora_rank=16,
        lora_alpha=32,
        learning_rate=LEARNING_RATE,
        max_grad_norm=1.0,
        seed=SEED,
        threads=int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))),
        vocabulary=LLAMA.vocabulary,
    )


def run(settings: Settings, trl: str | None) -> Measured:
    """Run a contender in a process of its own."""
    folder = Path(settings.out)
    (folder / "settings.json").write_text(json.dumps(asdict(settings)), encoding="utf-8")
    is_ours = settings.mode not in ("checkpointing", "offloading")
    program = ["long.py", "--ours"] if is_ours else ["long_trl.py"]
    path = [str(ROOT), *([] if trl is None or is_ours else [trl])]
    environment = {
        **os.environ,
        "FT_CACHE": "",
        "PYTHONPATH": os.pathsep.join(path),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, str(ROOT / "benchmarks" / program[0]), *program[1:]]
    command.append(str(folder / "settings.json"))
    with (folder / "log").open("wb") as log:
        done = subprocess.run(
            command, env=environment, stdout=log, stderr=log, timeout=SECONDS, check=False
        )
    if done.returncode:
        said = (folder / "log").read_text(encoding="utf-8", errors="replace")
        raise RuntimeError(f"{settings.mode} ended with {done.returncode}:\n{said[-3000:]}")
    return Measured(**json.loads((folder / "measured.json").read_text(encoding="utf-8")))


def ours(settings: Settings) -> Measured:
    """Train with our worker's own steps, and return what was measured."""
    from ft_service.data.tokens.sample import Tokens
    from tests.support.training.late_copies import on_small_scale
    from tests.support.training.models import spec_for
    from workers.attempt.prepared_model import construct
    from workers.base.load import adapters
    from workers.data.batches import make_batch
    from workers.job.training_state import JobState
    from workers.ranks.allocator import keep_freed_memory
    from workers.ranks.sharding import make_mesh
    from workers.training.packing import settle_attention
    from workers.training.step import Sums, forward_backward

    keep_freed_memory()
    torch.set_num_threads(settings.threads)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{settings.out}/met", rank=0, world_size=1
    )
    steps = len(settings.samples)
    length = len(settings.samples[0])
    spec = spec_for(
        Path(settings.base),
        precision={"default": "bf16", "compute": "fp32"},
        training={"batch_size": 1, "max_length": length, "tokens_per_micro_batch": length},
        lora={"r": settings.lora_rank, "lora_alpha": settings.lora_alpha},
        distributed={"activation_checkpointing": "full"},
    )
    # `offload` is refused where there is no GPU: given to the model, past the spec's checks.
    changed = {"activation_checkpointing": settings.mode}
    distributed = spec.distributed.model_copy(update=changed)
    spec = spec.model_copy(update={"distributed": distributed})
    device = torch.device("cpu")
    measured = Measured("ours")
    with on_small_scale(TILE_ROWS, BLOCK_BYTES) as copies:
        model = construct(spec, make_mesh("cpu", 1, 1), device, print).peft_model
        model.train()
        settle_attention(model, device, torch.float32)
        job = JobState(dict(adapters(model)), spec.training)
        for ids in settings.samples:
            tokens = torch.tensor(ids, dtype=torch.int32).numpy()
            sample = Tokens(tokens, tokens >= 0)
            targets = sample.target_count
            sums = measured_step(
                measured,
                steps,
                lambda sample=sample, targets=targets: forward_backward(
                    model, [make_batch([sample], device)], targets, 1
                ),
            )
            measured.losses.append(Sums.read(sums, targets).loss / targets)
            job.update(settings.learning_rate, settings.max_grad_norm)
    measured.host = sum(block.nbytes for block in copies.blocks)
    torch.distributed.destroy_process_group()
    return measured


if __name__ == "__main__":
    main()
