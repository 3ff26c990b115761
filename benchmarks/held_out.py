"""Held-out accuracy of the sample task: by storage format over several seeds, and by method.

    python benchmarks/held_out.py [--seeds 7,8,9] [--formats bf16,fp8,nf4,mixed] [--steps 150] [--limit N] [--no-save]

Every run is `ft run` on the sample base with the data in examples/data, as the quickstart trains it; what it has learned is
scored by examples/evaluate.py on examples/data/heldout.jsonl, by transformers and PEFT alone in fp32: what is counted is the
adapter, not the base's rounding. `mixed` is NF4 with the down projections in bf16. By method: the base, supervised training,
and direct preference optimisation on pairs that goes on from it, all on NF4 and each seed. A job takes about a minute on two
idle cores, and all of it, 15 jobs, some twenty minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

if __name__ == "__main__":  # the repository's root, for benchmarks started by path
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.machine import machine, save
from ft_service.rundir.directory import RunDir
from ft_service.rundir.evaluations import SERVED, Served
from ft_service.spec import JobSpec

ROOT = Path(__file__).parent.parent
DATA = ROOT / "examples/data"
BASE = ROOT / "examples/models/tiny-llama"
FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {"default": "bf16"},
    "fp8": {"default": "fp8"},
    "nf4": {"default": "nf4"},
    "mixed": {"default": "nf4", "overrides": {r".*\.down_proj": "bf16"}},
}
POINTS = 2.0
"""Between the means of two formats, in points of accuracy: more, and the program says so."""
SUPERVISED, PREFERENCES = "supervised", "supervised, then preferences"
SECONDS = 1800


@dataclass(frozen=True)
class Row:
    """One job."""

    method: str
    format: str
    seed: int
    accuracy: float
    """Share of the held-out messages that are answered exactly."""
    valid_loss: float | None
    served: dict[str, float] | None
    """Validation loss by where the adapter is served (Served.loss)."""
    seconds: float


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", default="7,8,9")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--steps", type=int, default=150, help="of supervised training")
    parser.add_argument("--limit", type=int, help="only the first N held-out messages")
    parser.add_argument("--no-save", action="store_true")
    given = parser.parse_args()
    seeds, formats = [int(seed) for seed in given.seeds.split(",")], given.formats.split(",")
    where = machine()
    base = accuracy(None, given.limit)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="ft-held-out-") as home:
        for seed in seeds:
            for name in formats:
                row, run = job(Path(home), supervised(name, seed, given.steps), (SUPERVISED, name, seed), given.limit)
                rows.append(row)
                if name == "nf4":
                    rows.append(job(Path(home), preferences(run, seed), (PREFERENCES, name, seed), given.limit)[0])
    result = {"machine": where, "steps": given.steps, "base": base, **tables(rows, base), "runs": [asdict(row) for row in rows]}
    print(json.dumps({key: result[key] for key in ("base", "by_format", "by_method", "spread_points", "within")}, indent=2))
    if not given.no_save:
        save("held_out", result)


def supervised(name: str, seed: int, steps: int) -> dict[str, Any]:
    """The quickstart's SPEC in another format and with another seed."""
    spec = yaml.safe_load((ROOT / "deploy/examples/quickstart.yaml").read_text())
    files = {"training_file": str(DATA / "train.jsonl"), "validation_file": str(DATA / "validation.jsonl")}
    own = {"precision": FORMATS[name], "training": {**spec["training"], "max_steps": steps}, "model": str(BASE)}
    return {**spec, **files, **own, "seed": seed}


def preferences(parent: JobSpec, seed: int) -> dict[str, Any]:
    """The example's SPEC on pairs, on from a tuned model."""
    spec = yaml.safe_load((ROOT / "deploy/examples/preferences.yaml").read_text())
    files = {"training_file": "preferences.jsonl", "validation_file": "preferences-validation.jsonl"}
    spec |= {key: str(DATA / name) for key, name in files.items()}
    # A step that suits a model that has learned the task: the example's is for one that has not.
    spec["method"]["dpo"]["hyperparameters"] |= {"learning_rate_multiplier": 20}
    return {**spec, "model": parent.tuned_name, "seed": seed}


def job(home: Path, body: dict[str, Any], named: tuple[str, str, int], limit: int | None) -> tuple[Row, JobSpec]:
    """Run one to its end, and score it."""
    before = set(home.glob("runs/*"))
    path = home / "spec.yaml"
    path.write_text(yaml.safe_dump(body))
    began = time.monotonic()
    command = [sys.executable, "-m", "ft_service.cli", "run", str(path)]
    environment = {**os.environ, "FT_HOME": str(home), "FT_MODELS": str(BASE.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode:
        raise SystemExit(f"{named} has failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    seconds = time.monotonic() - began
    (folder,) = set(home.glob("runs/*")) - before
    run = RunDir(folder)
    spec, served = run.read("spec.json", JobSpec), run.read(SERVED, Served)
    assert spec is not None
    result = json.loads(run.get("result.json") or b"{}")
    found = accuracy(run.path("adapter"), limit)
    row = Row(*named, found, result.get("valid_loss"), served.loss if served else None, round(seconds, 1))
    print(f"{row.method}, {row.format}, seed {row.seed}: {row.accuracy:.1%} in {row.seconds:.0f} s", flush=True)
    return row, spec


def accuracy(adapter: Path | None, limit: int | None) -> float:
    """Of the base, or with an adapter, on the held-out messages."""
    command = [sys.executable, str(ROOT / "examples/evaluate.py"), "--json", "--model", str(BASE)]
    command += ["--data", str(DATA / "heldout.jsonl")]
    command += ["--adapter", str(adapter)] if adapter else []
    command += ["--limit", str(limit)] if limit else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    return float(json.loads(done.stdout)["accuracy"])


def tables(rows: list[Row], base: float) -> dict[str, Any]:
    """Means over the seeds, by format and by method, and whether the formats lie within POINTS of each other."""
    by_format = _means([row for row in rows if row.method == SUPERVISED], lambda row: row.format)
    by_method = {"base": base, **_means([row for row in rows if row.format == "nf4"], lambda row: row.method)}
    spread = 100 * (max(by_format.values()) - min(by_format.values()))
    return {"by_format": by_format, "by_method": by_method, "spread_points": round(spread, 2), "within": spread <= POINTS}


def _means(rows: list[Row], key: Any) -> dict[str, float]:
    return {name: statistics.mean(row.accuracy for row in rows if key(row) == name) for name in dict.fromkeys(map(key, rows))}


if __name__ == "__main__":
    main()
