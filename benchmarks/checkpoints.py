"""Cost of a checkpoint to training, and of a resume compared with a cold start, on two ranks.

    python benchmarks/checkpoints.py [--repeats 5] [--skip-starts]

Stall: two ranks train a sharded bf16 Llama with LoRA of rank 64 and AdamW, and save now and then,
each time in another way, in turns. The stall is what the call takes that training makes; `seconds`
is until everything is on the disk; `slower` is how many times as long a step takes meanwhile.
Starts: whole attempts of a job as `ft run` starts them, from the call to the first step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

if __name__ == "__main__":  # the repository's root, for benchmarks started by path
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.bases import Llama, write_llama
from benchmarks.machine import machine, save

LLAMA = Llama(hidden=768, intermediate=2048, layers=6, heads=12, vocabulary=8_000)
RANK = 64
TOKENS = 128
OURS = "ours, beside training"
WAITED = "ours, waited for (async_save: false)"
THREAD = "dcp.async_save, thread"
PROCESS = "dcp.async_save, process"
JOB_AT_0 = "adapters and optimizer, whole, from rank 0"
ALL_AT_0 = "full state dict, base included, from rank 0"

Way = Callable[[Path], "Future[Any] | None"]
"""Saves into a new folder; what is still to be done, or None."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--skip-starts", action="store_true")
    options = parser.parse_args()
    result: dict[str, Any] = {
        **machine(),
        "llama": vars(LLAMA),
        "lora_rank": RANK,
        "ranks": 2,
        "repeats": options.repeats,
    }
    with tempfile.TemporaryDirectory() as folder:
        write_llama(Path(folder, "base"), LLAMA)
        spawn(on_rank, (folder, options.repeats), nprocs=2)
        of_ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2)]
        result["checkpoints"] = {
            way: worst_of_ranks([of_rank[way] for of_rank in of_ranks]) for way in of_ranks[0]
        }
    if not options.skip_starts:
        with tempfile.TemporaryDirectory() as folder:
            result["starts"] = starts(Path(folder), options.repeats)
    print(result["checkpoints"], result.get("starts"), flush=True)
    save("checkpoints", result)


def worst_of_ranks(of_ranks: list[dict[str, list[float]]]) -> dict[str, float]:
    """Medians over the repeats, of whichever rank was slower each time."""
    return {
        key: round(
            statistics.median(
                max(values) for values in zip(*(of_rank[key] for of_rank in of_ranks), strict=True)
            ),
            4,
        )
        for key in of_ranks[0]
    }


def on_rank(rank: int, folder: str, repeats: int) -> None:
    torch.set_num_threads(1)
    # As below torchrun: torch's checkpoint process looks there.
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "LOCAL_RANK": str(rank),
        "RANK": str(rank),
        "WORLD_SIZE": "2",
    }
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    measured = stalls(rank, 2, Path(folder), repeats)
    Path(folder, f"{rank}.json").write_text(json.dumps(measured))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def stalls(rank: int, world: int, folder: Path, repeats: int) -> dict[str, dict[str, list[float]]]:
    """On one rank: for every way its stall, seconds, bytes and how much slower steps were, once a
    repeat.
    """
    step, ways = training(rank, world, folder)
    for _ in range(2):
        step()
    of_ways: dict[str, dict[str, list[float]]] = {way: {} for way in ways}
    for repeat in range(repeats + 1):
        for number, (way, act) in enumerate(ways.items()):
            dist.barrier()
            alone = timed(step)
            place = folder / f"{repeat}-{number}"
            measured = measure(act, place, step)
            measured["slower"] = measured.pop("step") / alone if "step" in measured else 1.0
            dist.barrier()
            measured["bytes"] = sum(
                path.stat().st_size for path in place.rglob("*") if path.is_file()
            )
            if repeat:  # the first one allocates buffers and starts processes
                for key, value in measured.items():
                    of_ways[way].setdefault(key, []).append(value)
    return of_ways


def measure(act: Way, place: Path, step: Callable[[], None]) -> dict[str, float]:
    began = time.perf_counter()
    rest = act(place)
    seconds = {"stall": time.perf_counter() - began}
    if rest is not None:
        seconds["step"] = timed(step)
        rest.result()
    seconds["seconds"] = time.perf_counter() - began
    return seconds


def timed(step: Callable[[], None]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def training(rank: int, world: int, folder: Path) -> tuple[Callable[[], None], dict[str, Way]]:
    """One optimizer step, and the ways to save what it changes."""
    from ft_service.data.tokens.sample import Tokens
    from tests.support.training.models import spec_for
    from tests.support.training.parity import CPU
    from workers.attempt.prepared_model import construct
    from workers.base.load import adapters
    from workers.data.batches import collate
    from workers.job.training_state import JobState
    from workers.ranks.sharding import make_mesh
    from workers.training.step import forward_backward

    spec = spec_for(folder / "base", ranks=world, precision={"default": "bf16"}, lora={"r": RANK})
    built = construct(spec, make_mesh("cpu", world, "auto"), CPU, print)
    job = JobState(dict(adapters(built.peft_model)), spec.training)
    ids = (
        torch.randint(0, LLAMA.vocabulary, (TOKENS,), generator=torch.Generator().manual_seed(rank))
        .int()
        .numpy()
    )
    batch = collate([Tokens(ids, ids >= 0)], CPU)

    def step() -> None:
        forward_backward(built.peft_model, [batch], world * (TOKENS - 1), world)
        job.update(1e-4, 1.0)

    return step, ways_to_save(built.peft_model, job, spec)


def ways_to_save(model: torch.nn.Module, job: Any, spec: Any) -> dict[str, Way]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

    from ft_service.rundir.directory import RunDir
    from workers.output import checkpoint

    group = cast("dist.ProcessGroup", dist.new_group(backend="gloo"))
    stager = checkpoint.Stager()

    def write(snapshot: checkpoint.Snapshot, place: Path) -> None:
        checkpoint.write(snapshot, RunDir(place), 1, group, lambda: None)

    def ours(place: Path) -> Future[Any]:
        snapshot = stager.snapshot(job, spec)
        done = Future[None]()
        threading.Thread(target=lambda: done.set_result(write(snapshot, place))).start()
        return done

    def waited(place: Path) -> None:
        write(stager.snapshot(job, spec), place)

    def by_torch(kind: AsyncCheckpointerType) -> Way:
        def act(place: Path) -> Future[Any]:
            done = async_save(
                job.tensors(),
                checkpoint_id=place,
                process_group=group,
                async_checkpointer_type=kind,
            )
            assert isinstance(done, Future)
            return done

        return act

    def job_at_0(place: Path) -> None:
        whole = {name: tensor.full_tensor() for name, tensor in job.tensors().items()}
        save_at_0(whole, place)

    def all_at_0(place: Path) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        moments = {
            name: tensor.full_tensor()
            for name, tensor in job.tensors().items()
            if name.startswith("exp_")
        }
        save_at_0({**get_model_state_dict(model, options=options), **moments}, place)

    return {
        OURS: ours,
        WAITED: waited,
        THREAD: by_torch(AsyncCheckpointerType.THREAD),
        PROCESS: by_torch(AsyncCheckpointerType.PROCESS),
        JOB_AT_0: job_at_0,
        ALL_AT_0: all_at_0,
    }


def save_at_0(tensors: dict[str, Any], place: Path) -> None:
    """Called by all ranks together, which wait for rank 0."""
    if dist.get_rank() == 0:
        place.mkdir(parents=True)
        with (place / "state.pt").open("wb") as file:
            torch.save(tensors, file)
            file.flush()
            os.fsync(file.fileno())
    dist.barrier()


def starts(folder: Path, repeats: int) -> dict[str, float]:
    """Seconds from the call to the end of the first step, medians: of a job's first attempt (its
    base read and quantised, then from the cache), and of the attempt that resumes it.
    """
    from tests.support.training.models import save_tokenizer

    base = folder / "base"
    write_llama(base, LLAMA)
    save_tokenizer(base)
    seconds: dict[str, list[float]] = {"cold": [], "base from the cache": [], "resume": []}
    for repeat in range(repeats):
        os.environ["FT_CACHE"] = str(folder / f"cache-{repeat}")
        seconds["cold"].append(first_step(folder, f"{repeat}-cold"))
        seconds["base from the cache"].append(first_step(folder, f"{repeat}-cached"))
        seconds["resume"].append(first_step(folder, f"{repeat}-cached"))
        print({name: values[-1] for name, values in seconds.items()}, flush=True)
    return {name: round(statistics.median(values), 2) for name, values in seconds.items()}


def first_step(folder: Path, run: str) -> float:
    """Start the next attempt, and stop it behind its first step."""
    from ft_service.local.run import run_local
    from tests.support.training.models import save_chats, spec_for

    spec = spec_for(
        folder / "base",
        save_chats(folder / "train.jsonl", 64),
        ranks=2,
        precision={"default": "nf4"},
        training={"max_steps": 1000},
        lora={"r": RANK},
    )
    stop = threading.Event()
    began = time.monotonic()
    reached = []

    def on_event(event: Any) -> None:
        if event.kind == "metrics":
            reached.append(time.monotonic() - began)
            stop.set()

    ended = run_local(spec, folder / run, on_event, stop)
    assert ended.reason == "stopped", ended.message
    return round(reached[0], 2)


if __name__ == "__main__":
    main()
