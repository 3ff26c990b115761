"""Time and memory to get a bf16 base into NF4: this project's loading against transformers +
bitsandbytes, on one machine.

    python benchmarks/load.py [--megabytes 1000] [--repeats 3]

A random Llama is written once. Every measurement is a fresh process that imports first and then
loads on one rank; contenders take turns, so that a change of the machine's load meets all of them.
Time is that of building and loading; memory is the peak growth of anonymous memory (host) while
loading, and of allocated memory (GPU) where there is one. All of it is in the page cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

if __name__ == "__main__":  # the repository's root, for tests and benchmarks started by path
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.bases import Llama, write_llama
from benchmarks.machine import machine, save

HIDDEN = 2048
WIDTH = 5632
HEADS = 16
VOCABULARY = 32_000
CONTENDERS = ("ours, first job", "ours, from the cache", "transformers + bitsandbytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1000, help="size of the base in bf16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--measure", nargs=3, metavar=("CONTENDER", "BASE", "CACHE"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(*options.measure)))
        return
    result = machine()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "base")
        result["base_bytes"] = write_llama(base, of_size(options.megabytes))
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
        for repeat in range(options.repeats):
            cache = Path(folder, f"cache-{repeat}")
            for name in CONTENDERS:
                runs[name].append(in_fresh_process(name, base, cache))
                print(f"{name}: {runs[name][-1]}", flush=True)
    result["median"] = {
        name: {key: statistics.median(r[key] for r in of_contender) for key in of_contender[0]}
        for name, of_contender in runs.items()
    }
    result["runs"] = runs
    save("load", result)


def of_size(megabytes: int) -> Llama:
    """A Llama of about this size in bf16."""
    of_a_layer = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * WIDTH
    layers = max(1, round((megabytes * 1e6 / 2 - 2 * VOCABULARY * HIDDEN) / of_a_layer))
    return Llama(HIDDEN, WIDTH, layers, HEADS, VOCABULARY)


def in_fresh_process(contender: str, base: Path, cache: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", contender, str(base), str(cache)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(contender: str, base: str, cache: str) -> dict[str, float]:
    """In this process, whose imports are done before the clock starts."""
    load = load_with_transformers(base) if contender == CONTENDERS[2] else load_ours(base, cache)
    with Peak() as peak:
        start = time.perf_counter()
        load()
        seconds = time.perf_counter() - start
    costs = {"seconds": round(seconds, 2), "host_growth_mb": round(peak.growth / 1e6)}
    if torch.cuda.is_available():
        costs["gpu_peak_mb"] = round(torch.cuda.max_memory_allocated() / 1e6)
    return costs


def device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def load_ours(base: str, cache: str) -> Callable[[], object]:
    from ft_service.bases.cache_folder import Cache
    from tests.support.training.models import spec_for
    from workers.base.load import load
    from workers.model.build import build

    spec = spec_for(Path(base), precision={"default": "nf4"}, lora={"r": 1})

    def run() -> object:
        model = build(spec, device()).peft_model
        load(
            model,
            base,
            seed=0,
            compute_dtype=torch.bfloat16,
            device=device(),
            cache=Cache(Path(cache)),
        )
        return model

    return run


def load_with_transformers(base: str) -> Callable[[], object]:
    import bitsandbytes
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    assert bitsandbytes
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )

    def run() -> object:
        return AutoModelForCausalLM.from_pretrained(
            base, quantization_config=settings, dtype=torch.bfloat16, device_map={"": str(device())}
        )

    return run


class Peak:
    """The most that this process's anonymous memory grows while it is entered."""

    def __enter__(self) -> Peak:
        self._before = self._peak = _anonymous()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def growth(self) -> int:
        return self._peak - self._before

    def _watch(self) -> None:
        while not self._done.wait(0.05):
            self._peak = max(self._peak, _anonymous())


def _anonymous() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


if __name__ == "__main__":
    main()
