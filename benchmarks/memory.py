"""Planned bytes of a rank against those that it takes: anonymous memory of a process that trains on
one processor.

    python benchmarks/memory.py [--only nf4]

Every rank of a case is a process of its own: a base of 6 layers, a packed micro-batch whose every
token is a target, three steps.
What the process holds before the model is built (interpreter, libraries) is taken off. The heap's
gaps differ from run to run: of several runs the median counts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":  # the repository's root, for benchmarks started by path
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.machine import machine, save
from benchmarks.peak_memory import PeakMemory, anonymous

SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}
SMALL = 8_000
LARGE = 64_000
"""Words."""
LENGTH = 512
CASES: dict[str, dict[str, Any]] = {
    "bf16, 1,024 tokens": {"tokens": 1024},
    "bf16, 4,096 tokens": {"tokens": 4096},
    "bf16, 4,096 tokens, 64,000 words": {"tokens": 4096, "words": LARGE},
    "bf16, 4,096 tokens, full checkpointing": {"tokens": 4096, "checkpointing": "full"},
    "bf16, 4,096 tokens, two ranks": {"tokens": 4096, "ranks": 2},
    "nf4, 1,024 tokens": {"tokens": 1024, "format": "nf4"},
    "nf4, 4,096 tokens": {"tokens": 4096, "format": "nf4"},
    "nf4, 4,096 tokens, full checkpointing": {
        "tokens": 4096,
        "format": "nf4",
        "checkpointing": "full",
    },
    "nf4, 1,024 tokens, dropout": {"tokens": 1024, "format": "nf4", "dropout": 0.1},
    "fp8, 4,096 tokens, selective checkpointing": {
        "tokens": 4096,
        "format": "fp8",
        "checkpointing": "selective",
    },
    "fp8, 4,096 tokens, two ranks": {"tokens": 4096, "format": "fp8", "ranks": 2},
    "nf4, 1,024 tokens, an engine of four jobs": {"tokens": 1024, "format": "nf4", "seats": 4},
    "nf4, 1,024 tokens, an engine of four jobs, two ranks": {
        "tokens": 1024,
        "format": "nf4",
        "seats": 4,
        "ranks": 2,
    },
    "fp32 arithmetic, 1,024 tokens": {"tokens": 1024, "compute": "fp32"},
    "fp32 arithmetic, 4,096 tokens": {"tokens": 4096, "compute": "fp32"},
    "fp32 arithmetic, 1,024 tokens, 64,000 words": {
        "tokens": 1024,
        "compute": "fp32",
        "words": LARGE,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--repeats", type=int, default=3, help="runs of every case")
    parser.add_argument(
        "--save", action="store_true", help="keep the result, also if it is of some cases only"
    )
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        measure(options.case, options.rank, options.folder)
        return
    result: dict[str, Any] = {**machine(), "glibc": os.confstr("CS_GNU_LIBC_VERSION"), "cases": {}}
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            if options.only in case:
                result["cases"][case] = row = repeated(case, Path(folder), options.repeats)
                print(
                    f"{case:45} planned {row['planned_mib']:7.0f} MiB  taken "
                    f"{row['taken_mib']:7.0f}  {row['ratio']:.2f} x"
                )
    if options.save or not options.only:
        save("memory", result)


def base_of(case: str, folder: Path) -> Path:
    from tests.support.training.models import save_tiny

    words = CASES[case].get("words", SMALL)
    base = folder / f"base-{words}"
    return base if base.exists() else save_tiny("llama", base, **SHAPE, vocab_size=words)


def repeated(case: str, folder: Path, repeats: int) -> dict[str, Any]:
    """What is planned, and the median of what was taken, in MiB."""
    base_of(case, folder)
    runs = [measured(case, folder) for _ in range(repeats)]
    planned = runs[0][0] / 2**20
    taken = sorted(taken / 2**20 for _, taken in runs)
    median = statistics.median(taken)
    return {
        "planned_mib": planned,
        "taken_mib": median,
        "runs_mib": taken,
        "ratio": planned / median,
    }


def measured(case: str, folder: Path) -> tuple[int, int]:
    """Bytes planned and taken. Runs a case's ranks in processes of their own, watched from here."""
    (folder / case).unlink(missing_ok=True)  # where the ranks of the run before met
    ranks = CASES[case].get("ranks", 1)
    command = [sys.executable, __file__, "--case", case, "--folder", str(folder), "--rank"]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, str(rank)], **pipes) for rank in range(ranks)]
    planned = [int(process.stdout.readline()) for process in processes]  # pyright: ignore[reportOptionalMemberAccess]
    before = [anonymous(process.pid) for process in processes]
    watched = [PeakMemory(process.pid) for process in processes]
    with ExitStack() as watching:
        for memory in watched:
            watching.enter_context(memory)
        for process in processes:  # all at once: they wait for each other
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        for process in processes:
            process.communicate()
    assert not any(process.returncode for process in processes), "a rank has failed"
    taken = max(
        max(memory.peaks.values()) - start for memory, start in zip(watched, before, strict=True)
    )
    return planned[0], taken


def measure(case: str, rank: int, folder: Path) -> None:
    """In the case's process: print the planned bytes, wait for a line, and train."""
    from ft_service.plan.job import plan_job
    from ft_service.plan.machines import host_cpu
    from tests.support.training.models import spec_for
    from workers.attempt.prepared_model import construct
    from workers.base.load import adapters
    from workers.data.batches import make_batch
    from workers.describe import describe
    from workers.job.training_state import JobState
    from workers.ranks.allocator import keep_freed_memory
    from workers.ranks.sharding import make_mesh
    from workers.training.step import forward_backward

    it = CASES[case]
    ranks = it.get("ranks", 1)
    torch.set_num_threads(max(1, 2 // ranks))
    keep_freed_memory()
    spec = spec_for(
        base_of(case, folder),
        ranks=ranks,
        precision={"default": it.get("format", "bf16"), "compute": it.get("compute", "bf16")},
        training={
            "batch_size": ranks * it["tokens"] // LENGTH,
            "max_length": LENGTH,
            "tokens_per_micro_batch": it["tokens"],
        },
        lora={"r": 16, "lora_dropout": it.get("dropout", 0.0)},
        distributed={"activation_checkpointing": it.get("checkpointing", "none")},
    )
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/{case}", rank=rank, world_size=ranks
    )
    torch.ones(64, 64).matmul(torch.ones(64, 64))  # what the libraries set up at their first use
    seats = it.get("seats", 0)
    print(planned_bytes(plan_job(describe(spec.model.path), spec, host_cpu()), seats), flush=True)
    sys.stdin.readline()
    mesh = make_mesh("cpu", ranks, 1)
    device = torch.device("cpu")
    if seats:
        train_in_engine(spec, mesh, rows_of(it["tokens"] // LENGTH), seats)
        os._exit(0)
    built = construct(spec, mesh, device, print)
    built.peft_model.train()
    job = JobState(dict(adapters(built.peft_model)), spec.training)
    data = rows_of(it["tokens"] // LENGTH)
    keys = list(range(len(data))) if spec.lora.lora_dropout else None
    for _ in range(3):
        forward_backward(
            built.peft_model,
            [make_batch(data, device, keys)],
            ranks * len(data) * (LENGTH - 1),
            ranks,
        )
        job.update(1e-4, 1.0)
    os._exit(0)


def planned_bytes(plan: Any, seats: int) -> int:
    """Bytes of a rank of the job alone, or of an engine with so many of it, all of which compute in
    one round.
    """
    if not seats:
        return plan.rank.total
    seat = plan.seat
    return plan.memory - seat.room + seats * (seat.held + seat.batch - seat.passing) + seat.passing


def train_in_engine(spec: Any, mesh: Any, data: list[Any], seats: int) -> None:
    """Three steps of so many equal jobs on one base."""
    from tests.support.training.lanes import whole_adapters
    from workers.data.batches import make_batch
    from workers.engine.lanes import Lane
    from workers.engine.resident_base import load_resident_base
    from workers.engine.seat import Seat
    from workers.job.training_state import JobState
    from workers.ranks.runtime import COMPUTE_DTYPE
    from workers.training.step import cross_entropies

    device = torch.device("cpu")
    world = mesh.size()
    base = load_resident_base(spec, mesh, device).model
    taken = []
    for _ in range(seats):
        model, first = whole_adapters(spec)
        seat = Seat(model, base, mesh, first, COMPUTE_DTYPE[spec.precision.compute])
        taken.append((seat, JobState(seat.masters, spec.training, seat.gather)))
    for _ in range(3):
        batch = make_batch(data, device, None)
        scale = 1 / (len(data) * (LENGTH - 1))
        forwards = [partial(cross_entropies, seat.model, batch, scale) for seat, _ in taken]
        base.backward(
            [loss for loss, _ in base.run([Lane(seat.linears) for seat, _ in taken], forwards)]
        )
        for seat, job in taken:
            seat.add_gradients()
            seat.reduce_gradients(world)
            job.update(1e-4, 1.0)


def rows_of(count: int) -> list[Any]:
    from ft_service.data.tokens.sample import Tokens

    drawn = (
        torch.randint(0, SMALL, (count, LENGTH), generator=torch.Generator().manual_seed(0))
        .int()
        .numpy()
    )
    return [Tokens(ids, ids >= 0) for ids in drawn]


if __name__ == "__main__":
    main()
