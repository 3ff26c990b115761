"""What is learned from a teacher's probabilities, and from thumbs, on the sample base.

    python benchmarks/teachers.py [--parts student,thumbs] [--seeds 3] [--no-save]

student: a model that was shown some sums (sums-shown.yaml) learns from one that knows them, by its
own answers (student.yaml). Its steps are compared with those of the same beginner that learned from
rewards, as reinforcement.py has measured them. Accuracies are those of answers sampled at
temperature 1 to all sums, as rewards are.

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
EVERY = 3
"""Steps between two measurements of a student."""
POINTS = 0.02
"""So much less than its teacher's is a student's accuracy, at most."""
TEACHER_EPOCHS = 12
ANSWERS = 8
"""Sampled to each sum."""
AT_ONCE = 4
MESSAGES = 200
BEGINNER_STEPS = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parts", default="student,thumbs")
    parser.add_argument("--seeds", type=int, default=3, help="of students")
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    parts = {"student": students, "thumbs": thumbs}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="ft-teachers-") as folder:
        server = Server(Path(folder), ROOT / "examples/models")
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
        draw(found["student"])


def students(client: Any, home: Path, seeds: int) -> dict[str, Any]:
    """Accuracy of students by step, beside the rewards of reinforcement.py's jobs."""
    shown = trained(client, "sums-shown.yaml", seed=1, limit=1800)["model"]
    right = home / "right.jsonl"
    write_right_answers(right)
    teacher = trained(
        client,
        "sums-shown.yaml",
        seed=1,
        model=shown,
        limit=1800,
        training_file=upload(client, right),
        training={"n_epochs": TEACHER_EPOCHS, "learning_rate": 1e-3, "max_length": 64},
    )
    beginner = accuracy_of_sums(client, shown)
    known = accuracy_of_sums(client, teacher["model"])
    print({"beginner": beginner, "teacher": known}, flush=True)
    runs = []
    for seed in range(seeds):
        student = trained(
            client,
            "student.yaml",
            seed=seed,
            model=shown,
            limit=1800,
            method=taught_by(teacher["model"]),
            checkpoint={"save_steps": EVERY, "save_total_limit": 50},
        )
        points = {0: beginner, **by_step(client, student["id"])}
        runs.append({"seed": seed, "accuracy": points, "seconds": student["seconds"]})
        print(runs[-1], flush=True)
    rewards = json.loads((RESULTS / "reinforcement.json").read_text())["jobs"]
    by_rewards = [
        {int(step): value for step, value in job["train_mean_reward"].items()} for job in rewards
    ]
    wanted = known - POINTS
    return {
        "beginner": beginner,
        "teacher": known,
        "wanted": wanted,
        "runs": runs,
        "steps_of_students": [first(run["accuracy"], wanted) for run in runs],
        "steps_of_rewards": [first(points, wanted) for points in by_rewards],
    }


def write_right_answers(path: Path) -> None:
    """The sums, each with its answer."""
    lines = [json.loads(line) for line in (DATA / "sums.jsonl").read_text().splitlines()]
    chats = [
        {"messages": [*line["messages"], {"role": "assistant", "content": line["answer"]}]}
        for line in lines
    ]
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))


def first(points: dict[int, float], wanted: float) -> int | None:
    """The first step with so high a value; None: none has it."""
    return next((step for step, value in points.items() if value >= wanted), None)


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
        for seed in range(ANSWERS // AT_ONCE):
            answers = client.chat.completions.create(
                model=model,
                messages=line["messages"],
                n=AT_ONCE,
                temperature=1,
                max_tokens=4,
                seed=seed,
            )
            texts = [(choice.message.content or "").strip() for choice in answers.choices]
            right += texts.count(line["answer"])
            asked += len(texts)
    return right / asked


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
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(json.loads(done.stdout)["accuracy"])


def draw(found: dict[str, Any]) -> None:
    """Draw accuracies by step into one picture, beside the rewards of reinforcement.py."""
    figure = Figure(figsize=(7.2, 3.4), dpi=150)
    axes = figure.subplots()
    for place, run in enumerate(found["runs"]):
        label = "from a teacher" if place == 0 else None
        points = run["accuracy"]
        axes.plot(list(points), list(points.values()), color="C0", label=label)
    rewards = json.loads((RESULTS / "reinforcement.json").read_text())["jobs"]
    for place, job in enumerate(rewards):
        label = "from rewards" if place == 0 else None
        points = {int(step): value for step, value in job["train_mean_reward"].items()}
        axes.plot(list(points), list(points.values()), "--", color="C1", label=label)
    axes.axhline(found["teacher"], color="0.6", linewidth=0.8)
    axes.set(xlabel="optimizer step", ylabel="sums answered rightly", ylim=(0, 1.05))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    FigureCanvasAgg(figure).print_png(str(PICTURE))


if __name__ == "__main__":
    main()
