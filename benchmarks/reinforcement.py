"""Mean reward of the sample base that learns sums, by step, and the time that it takes.

Runs deploy/examples/reinforcement.yaml with several seeds, each from the same model that was shown
some sums (sums-shown.yaml).

    python benchmarks/reinforcement.py [--seeds 3] [--no-save]

Everything goes through a real server, as a user's job does. The picture is
docs/pictures/reinforcement.png.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if __name__ == "__main__":  # the repository's root, for benchmarks started by path
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.machine import machine, save
from tests.support.service import Server, upload, wait_until

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "deploy/examples"
PICTURE = ROOT / "docs/pictures/reinforcement.png"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(
            Path(folder), ROOT / "examples/models", described=False, OMP_NUM_THREADS="2"
        )
        server.start()
        try:
            client = server.client()
            shown = trained(client, "sums-shown.yaml", seed=1)
            jobs = [
                trained(client, "reinforcement.yaml", seed=seed, model=shown["model"])
                for seed in range(options.seeds)
            ]
        finally:
            server.stop()
    for job in jobs:
        print({name: job[name] for name in ("first", "last", "seconds")})
    if not options.no_save:
        save("reinforcement", {**machine(), "shown_seconds": shown["seconds"], "jobs": jobs})
        draw(jobs)


def trained(
    client: Any,
    spec: str,
    *,
    seed: int,
    model: str | None = None,
    limit: float = 300.0,
    **options: Any,
) -> dict[str, Any]:
    """Run an example to its end, which comes within `limit` seconds: the job's id, the tuned
    model's name, seconds from the creation, and rewards by step. `options`: of the create body, in
    place of the example's.
    """
    body = yaml.safe_load((EXAMPLES / spec).read_text())
    files = {
        name: upload(client, (EXAMPLES / body[name]).resolve())
        for name in ("training_file", "validation_file")
        if name in body
    }
    begun = time.time()
    body |= {**files, "seed": seed, "model": model or body["model"], **options}
    job = client.post("/fine_tuning/jobs", body=body, cast_to=object)
    done = wait_until(client, job["id"], "succeeded", seconds=limit)
    seconds = time.time() - begun
    events = list(client.fine_tuning.jobs.list_events(job["id"], limit=100))
    points = {
        event.data["step"]: event.data for event in reversed(events) if event.type == "metrics"
    }
    rewards = {
        name: {step: point[name] for step, point in points.items() if name in point}
        for name in ("train_mean_reward", "valid_mean_reward")
    }
    train = list(rewards["train_mean_reward"].values())
    ends = {"first": train[0], "last": train[-1]} if train else {}
    return {
        "id": done.id,
        "model": done.fine_tuned_model,
        "seed": seed,
        "seconds": round(seconds, 1),
        **ends,
        **rewards,
    }


def draw(jobs: list[dict[str, Any]]) -> None:
    """Draw the rewards of all jobs into one picture."""
    figure = Figure(figsize=(7.2, 3.4), dpi=150)
    axes = figure.subplots()
    for place, job in enumerate(jobs):
        steps = job["train_mean_reward"]
        axes.plot(list(steps), list(steps.values()), color=f"C{place}", label=f"seed {job['seed']}")
    axes.set(xlabel="optimizer step", ylabel="mean reward", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    FigureCanvasAgg(figure).print_png(str(PICTURE))


if __name__ == "__main__":
    main()
