"""What is learned from a teacher's probabilities, and from thumbs, on the sample base.

    python benchmarks/teachers.py [--parts student,thumbs] [--seeds 3] [--no-save]

student: a model that was shown some sums (sums-shown.yaml) learns them from rewards
(reinforcement.yaml); then the same beginner learns from that model by its own answers
(student.yaml). Their accuracies are those of answers sampled at temperature 1 to all sums.

thumbs: a model that has learned the sample task in part goes on from there with thumbs.jsonl, half
good and half bad answers, by KTO; and beside it from the good ones alone, supervised, at several
rates, of which the best counts. Accuracies are those of examples/evaluate.py on messages that are
in no file.

Everything goes through a real server, as a user's job does. The picture is
docs/pictures/teachers.png.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if __name__ == "__main__":  # the repository's root, for benchmarks started by path
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "examples")]

from benchmarks.held_out import write_messages
from benchmarks.machine import RESULTS, machine, save
from benchmarks.reinforcement import trained
from tests.support.service import Server, upload

ROOT = Path(__file__).parent.parent
DATA = ROOT / "examples/data"
BASE = ROOT / "examples/models/tiny-llama"
PICTURE = ROOT / "docs/pictures/teachers.png"
EVERY = 5
"""Steps between two measurements of a student, and of who learns from rewards four times as many."""
ANSWERS = 8
"""Sampled to each sum."""
MESSAGES = 200
BEGINNER_STEPS = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parts", default="student,thumbs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    parts = {"student": students, "thumbs": thumbs}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="ft-teachers-") as folder:
        server = Server(Path(folder), ROOT / "examples/models", OMP_NUM_THREADS="2")
        server.start()
        try:
            for name in options.parts.split(","):
                found[name] = parts[name](server.client(), Path(folder), options.seeds)
        finally:
            server.stop()
    print(json.dumps(found, indent=2))
    if options.no_save:
        return
    path = RESULTS / "teachers.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    save("teachers", {**before, "machine": machine(), **found})
    if "student" in found:
        draw(found["student"]["runs"])


def students(client: Any, home: Path, seeds: int) -> dict[str, Any]:
    """Accuracy by step, from rewards and from the teacher."""
    shown = trained(client, "sums-shown.yaml", seed=1, limit=900)["model"]
    runs = []
    for seed in range(seeds):
        kept = {"save_total_limit": 50}
        rewarded = trained(
            client,
            "reinforcement.yaml",
            seed=seed,
            model=shown,
            limit=1800,
            checkpoint={"save_steps": 4 * EVERY, **kept},
        )
        teacher = rewarded["model"]
        student = trained(
            client,
            "student.yaml",
            seed=seed,
            model=shown,
            limit=1800,
            method=taught_by(teacher),
            checkpoint={"save_steps": EVERY, **kept},
        )
        beginner = accuracy_of_sums(client, shown)
        runs.append(
            {
                "seed": seed,
                "teacher": accuracy_of_sums(client, teacher),
                "by_rewards": {0: beginner, **by_step(client, rewarded["id"])},
                "by_teacher": {0: beginner, **by_step(client, student["id"])},
                "seconds": {"rewards": rewarded["seconds"], "teacher": student["seconds"]},
            }
        )
        print(runs[-1], flush=True)
    return {"runs": runs, **verdict(runs)}


def taught_by(teacher: str) -> dict[str, Any]:
    """The example's method, with this teacher."""
    method = yaml.safe_load((ROOT / "deploy/examples/student.yaml").read_text())["method"]
    method["distillation"]["teacher"] = teacher
    return method


def by_step(client: Any, job_id: str) -> dict[int, float]:
    """Accuracy of each checkpoint."""
    points = client.fine_tuning.jobs.checkpoints.list(job_id, limit=50).data
    return {
        point.step_number: accuracy_of_sums(client, point.fine_tuned_model_checkpoint)
        for point in sorted(points, key=lambda point: point.step_number)
    }


def accuracy_of_sums(client: Any, model: str) -> float:
    """Share of sampled answers that are right."""
    lines = [json.loads(line) for line in (DATA / "sums.jsonl").read_text().splitlines()]
    right = asked = 0
    for line in lines:
        answers = client.chat.completions.create(
            model=model, messages=line["messages"], n=ANSWERS, temperature=1, max_tokens=4, seed=1
        )
        texts = [(choice.message.content or "").strip() for choice in answers.choices]
        right += texts.count(line["answer"])
        asked += len(texts)
    return right / asked


def verdict(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Steps until a student is within 2 points of its teacher, and the steps that rewards took."""

    def first(points: dict[int, float], wanted: float) -> int | None:
        return next((step for step, value in points.items() if value >= wanted), None)

    taken = [first(run["by_teacher"], run["teacher"] - 0.02) for run in runs]
    rewards = [first(run["by_rewards"], run["teacher"] - 0.02) for run in runs]
    return {"steps_of_students": taken, "steps_of_rewards": rewards}


def thumbs(client: Any, home: Path, seeds: int) -> dict[str, Any]:
    """Accuracies after thumbs, and after the good ones alone."""
    messages = home / "messages.jsonl"
    write_messages(messages, MESSAGES)
    good = home / "good.jsonl"
    lines = [json.loads(line) for line in (DATA / "thumbs.jsonl").read_text().splitlines()]
    kept = [{"messages": line["messages"]} for line in lines if line["label"]]
    good.write_text("".join(json.dumps(line) + "\n" for line in kept))
    plain = {"lr_scheduler_type": "constant", "packing": False, "batch_size": 8}
    beginner = trained(
        client,
        "quickstart.yaml",
        seed=7,
        limit=1800,
        training={**plain, "max_steps": BEGINNER_STEPS, "learning_rate": 3e-3},
    )
    found: dict[str, Any] = {
        "answers": len(lines),
        "good": len(kept),
        "beginner": accuracy(home, beginner["id"], messages),
        "kto": {},
        "good_alone": {},
    }
    for rate in (1e-4, 3e-4, 1e-3):
        job = trained(
            client,
            "kto.yaml",
            seed=7,
            model=beginner["model"],
            limit=1800,
            method={"type": "kto"},
            training={**plain, "n_epochs": 4, "learning_rate": rate, "batch_size": 16},
        )
        found["kto"][f"{rate:g}"] = accuracy(home, job["id"], messages)
        job = trained(
            client,
            "quickstart.yaml",
            seed=7,
            model=beginner["model"],
            limit=1800,
            training_file=upload(client, good),
            training={**plain, "n_epochs": 4, "learning_rate": rate},
        )
        found["good_alone"][f"{rate:g}"] = accuracy(home, job["id"], messages)
        print(found, flush=True)
    return found


def accuracy(home: Path, job_id: str, messages: Path) -> float:
    """Share of messages that are answered exactly."""
    command = [sys.executable, str(ROOT / "examples/evaluate.py"), "--json", "--model", str(BASE)]
    command += ["--data", str(messages), "--adapter", str(home / "runs" / job_id / "adapter")]
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(json.loads(done.stdout)["accuracy"])


def draw(runs: list[dict[str, Any]]) -> None:
    """Draw accuracies by step into one picture."""
    figure = Figure(figsize=(7.2, 3.4), dpi=150)
    axes = figure.subplots()
    styles = {"by_teacher": ("-", "from the teacher"), "by_rewards": ("--", "from rewards")}
    for place, run in enumerate(runs):
        for name, (style, label) in styles.items():
            steps = list(run[name])
            axes.plot(
                steps,
                list(run[name].values()),
                style,
                color=f"C{place}",
                label=label if place == 0 else None,
            )
    axes.set(xlabel="optimizer step", ylabel="sums answered rightly", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    FigureCanvasAgg(figure).print_png(str(PICTURE))


if __name__ == "__main__":
    main()
